"""TensorBoard's scalars, beside the run's own record."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Board:
    """Scalars for TensorBoard.

    Where they cannot be written (a full disk) they are given up with one warning: `metrics.jsonl` is the record.

    Args:
        folder: of the event files.
        purge_step: hide what an earlier, stopped process wrote from this step on.
    """

    def __init__(self, folder: Path, purge_step: int):
        self._writer: SummaryWriter | None = None
        self._excepthook = threading.excepthook
        threading.excepthook = self._quiet_writer
        with self._forgiving():
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Write numbers by name."""
        if self._writer is not None:
            with self._forgiving():
                for name, value in scalars.items():
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is pending."""
        if self._writer is not None:
            with self._forgiving():
                self._writer.close()
        threading.excepthook = self._excepthook

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            logging.getLogger(__name__).warning(
                "TensorBoard's files cannot be written (%s); metrics.jsonl goes on", error
            )

    def _quiet_writer(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread hands its error on to the next call; it need not print it as well."""
        if type(args.thread).__name__ != "_AsyncWriterThread":
            self._excepthook(args)
