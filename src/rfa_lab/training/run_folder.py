"""The run folder. Training writes it; evaluation and reports read it.

run.json         specification, versions, commit, data, progress, and the measured result
metrics.jsonl    a line for each logged step
tensorboard/     the same for TensorBoard
tokenizer/       as transformers saves it
checkpoints/     the newest two, each of them whole
model/           the trained model, as transformers saves it

The last three folders hold `digests.json` too, with the sha256 of each file. Nothing is read that could run code: only
JSON, safetensors, and tensors and numbers of PyTorch (`weights_only`).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typing_extensions import TypedDict

import rfa.version
from rfa.checks import check_fields
from rfa.files import held, whole_name, write_text_whole
from rfa.models import RFAForCausalLM
from rfa.models.saved_files import (
    checkpoints_in,
    missing_files,
    quiet_transformers,
    read_all,
    read_model,
    read_tokenizer,
)

from .spec import TrainingSpec

_LOCK = ".lock"
FORMAT = 1
_CONFIG = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Versions = dict[str, str | int | None]


class RunData(TypedDict):
    """The text of a run. Tokens are those of each split."""

    corpus: str
    split: NotRequired[str]
    fingerprint: str
    test_fingerprint: str
    tokens: NotRequired[dict[str, Count]]


class RunOutcome(TypedDict):
    """What a finished run measured. A run that took no time has no speed."""

    valid_loss: float
    valid_perplexity: float
    tokens: Count
    tokens_per_second: Annotated[float, Field(ge=0)] | None
    parameters: Count


class RunRecord(TypedDict):
    """The content of run.json."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]
    format: int
    spec: dict[str, Any]
    config: dict[str, Any]
    data: RunData
    environment: Versions
    processes: NotRequired[Annotated[int, Field(ge=1)]]
    finished: bool
    steps: Count
    result: NotRequired[RunOutcome]
    resumed: NotRequired[list[Versions]]


def check_record(record: Any) -> None:
    """Raise `ValueError` that names the first field that is missing or has a value of another kind."""
    check_fields(TypeAdapter(RunRecord), record)
    if record["finished"] and "result" not in record:
        raise ValueError("result: got none, expected that of a finished run")
    TrainingSpec.from_dict(record["spec"])
    json.dumps(record, ensure_ascii=False).encode()  # raises for half of a surrogate pair, which UTF-8 cannot hold


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; None if there is none at all. Raises `ValueError` if each of them lacks a file."""
    found = checkpoints_in(folder)
    whole = [path for path in found if not missing_files(path)]
    if found and not whole:
        lost = ", ".join(missing_files(found[-1]))
        raise ValueError(f"run: {found[-1]} is damaged, it lacks {lost}, and there is no whole one before it")
    return whole[-1] if whole else None


def check_checkpoint(checkpoint: Path, model: PreTrainedModel) -> None:
    """Raise `ValueError` if a file of a checkpoint cannot be read or does not fit the model."""
    hint = "delete it to go on from the one before"
    _load(f"run: {checkpoint} is damaged, {hint}: it", lambda: read_all(checkpoint, model))


class RunFolder:
    """A run on disk.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.tokenizer = self.path / "tokenizer"

    def check_free(self, overwrite: bool = False) -> None:
        """Raise `ValueError` if the folder exists and is not empty, unless it is a run and `overwrite` is given."""
        if not self.path.exists():
            return
        own = {_LOCK, *(path.name for path in self._own_paths())}
        begun = self.path.is_dir() and not self.record.exists()
        if begun and all(whole_name(path) in own for path in self.path.iterdir()):
            return  # empty, or left by a process that was killed before its run began
        if not self._is_run():
            raise ValueError(f"out: {self.path} exists and is no run folder, expected a new or an empty folder")
        if not overwrite:
            raise ValueError(f"out: run folder {self.path} exists, expected a new one, --resume or --overwrite")

    def _own_paths(self) -> tuple[Path, ...]:
        """All paths that a run writes. The record comes last, because a folder without a record is no run."""
        return self.metrics, self.tensorboard, self.checkpoints, self.model, self.tokenizer, self.record

    def owns(self, path: Path) -> bool:
        """Whether a path is a file or folder of the run, or lies in such a folder."""
        return any(path.resolve().is_relative_to(own.resolve()) for own in self._own_paths())

    def clear(self) -> None:
        """Delete all that a run writes. Other files in the folder stay, and so do the targets of links."""
        own = {path.name for path in self._own_paths()}
        unfinished = [path for path in self.path.glob(".*") if path.name not in own and whole_name(path) in own]
        for path in (*unfinished, *self._own_paths()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing to the run. Raises `ValueError` if another process holds the lock."""
        lock = self.path / _LOCK
        with held(lock) as mine:
            if not mine:
                raise ValueError(f"out: {self.path} is in use by another process, expected one at a time")
            try:
                yield
            finally:
                with suppress(OSError):
                    lock.unlink()

    def _is_run(self) -> bool:
        try:
            return {"format", "spec"} <= json.loads(self.record.read_text(encoding="utf-8")).keys()
        except (OSError, ValueError, AttributeError):
            return False

    def read(self) -> dict[str, Any]:
        """The contents of run.json. Raises `ValueError` for no run, a damaged one, or one of another format."""
        if not self.record.is_file():
            raise ValueError(f"run: {self.path} holds no run.json, expected a folder made by `rfa train`")
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
            written = record["format"]
            if written == FORMAT:
                check_record(record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"run: {self.record} is damaged ({error}), expected the run.json of `rfa train`"
            ) from error
        if written != FORMAT:
            expected = f"{FORMAT}, that of rfa {rfa.version.__version__}"
            raise ValueError(f"run: {self.path} has format {written}, expected {expected}")
        return record

    def write(self, record: dict[str, Any]) -> None:
        """Replace run.json, whole."""
        write_text_whole(self.record, json.dumps({"format": FORMAT, **record}, indent=2) + "\n")

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint, as `newest_checkpoint`."""
        return newest_checkpoint(self.checkpoints)

    def weights(self) -> Path:
        """The folder of the trained model, or else of the newest checkpoint. Raises `ValueError` if there is none."""
        finished = self.read()["finished"]
        found = self.model if finished and self.model.is_dir() else None if finished else self.latest_checkpoint()
        if found is None:
            said = "is finished and its model is gone" if finished else "holds no model yet"
            raise ValueError(f"run: {self.path} {said}, expected one (a recipe keeps models with keep_models: true)")
        return found

    def load_model(self, source: Path | None = None) -> RFAForCausalLM:
        """The model of `source`, by default of `weights`. Raises `ValueError` for none, or for damaged files."""
        source = source or self.weights()
        return _load(f"run: the model in {source}", lambda: read_model(source, RFAForCausalLM))

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The run's tokenizer.

        Raises:
            ValueError: if its files are damaged.
        """
        if not self.tokenizer.is_dir():
            raise ValueError(f"run: {self.path} holds no tokenizer, expected a run folder of `rfa train`")
        return _load(f"run: the tokenizer in {self.tokenizer}", lambda: read_tokenizer(self.tokenizer))


def _load(what: str, load: Callable[[], Any]) -> Any:
    try:
        with quiet_transformers():
            return load()
    except Exception as error:  # the libraries raise many types, from OSError to SafetensorError
        first, _, _ = str(error).partition("\n")
        raise ValueError(f"{what} cannot be read ({type(error).__name__}: {first})") from error
