"""Where and how a benchmark runs, and the sizes of what it runs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rfa.nn.checks import check_range, require
from rfa.ops import choose_backend
from rfa.ops.backends import BACKENDS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = 2**31 - 1  # of what is counted


class Shape(NamedTuple):
    """Of queries, keys and values."""

    batch: int
    heads: int
    length: int
    channels: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))


@dataclass(frozen=True)
class Setting:
    """Where and how.

    Args:
        device: "cpu" or "cuda".
        dtype: of the states; for a training step, of autocast unless it is float32.
        backend: the operator's; a name runs or raises.
        threads: of PyTorch and the kernels; None leaves them as they are.
        repeats: rounds, in each of which every contestant has a turn.

    Raises:
        ValueError: for a value that is unknown, or cannot run here.
    """

    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "auto"
    threads: int | None = None
    repeats: int = 7

    def __post_init__(self):
        require(self.device in ("cpu", "cuda"), "device", self.device, "'cpu' or 'cuda'")
        require(self.device == "cpu" or torch.cuda.is_available(), "device", self.device, "'cpu': there is no CUDA")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check_range("threads", 1 if self.threads is None else self.threads, 1, LARGEST)
        check_range("repeats", self.repeats, 1, LARGEST)
        names = ("auto", *BACKENDS)
        require(self.backend in names, "backend", self.backend, f"one of {', '.join(names)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch's."""
        return DTYPES[self.dtype]

    def resolved(self, channels: tuple[int, ...]) -> str:
        """The backend that runs for heads of these sizes.

        Raises:
            ValueError: if it is named and does not serve them; RuntimeError if its kernels cannot be compiled here.
        """
        return choose_backend(self.backend, self.device, self.torch_dtype, channels)

    def fields(self) -> dict[str, Any]:
        """What a line of results says of the setting."""
        threads = self.threads or torch.get_num_threads()
        return {"device": self.device, "dtype": self.dtype, "threads": threads, "repeats": self.repeats}
