"""The setting of a benchmark, the correctness check against float64, and the timing of contestants in turns."""

import math
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rfa.checks import check_range, require
from rfa.ops import choose_backend
from rfa.ops.backends import BACKENDS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = 2**31 - 1  # of counts
THREADS = "OMP_NUM_THREADS"  # read once, when PyTorch is loaded


class StateShape(NamedTuple):
    """The shape of queries, keys and values: `(batch, heads, length, channels)`."""

    batch: int
    heads: int
    length: int
    channels: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))


@dataclass(frozen=True)
class Setting:
    """The setting of a benchmark.

    Threads are not part of it. They are those of the process, as a user has it: OMP_NUM_THREADS before its start, or
    PyTorch's own choice. `torch.set_num_threads` would also change how MKL divides its work, and make the peer slower.

    Args:
        device: "cpu" or "cuda".
        dtype: of the states. For a training step it is autocast's dtype; float32 means no autocast.
        backend: of the operator. A named backend runs or raises.
        repeats: number of rounds. Every contestant has one turn in each round.

    Raises:
        ValueError: for an unknown value, or one that cannot run on this machine.
    """

    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "auto"
    repeats: int = 7

    def __post_init__(self):
        require(self.device in ("cpu", "cuda"), "device", self.device, "'cpu' or 'cuda'")
        require(self.device == "cpu" or torch.cuda.is_available(), "device", self.device, "'cpu': there is no CUDA")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check_range("repeats", self.repeats, 1, LARGEST)
        names = ("auto", *BACKENDS)
        require(self.backend in names, "backend", self.backend, f"one of {', '.join(names)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of PyTorch."""
        return DTYPES[self.dtype]

    def resolved(self, channels: tuple[int, ...]) -> str:
        """The backend for these numbers of channels. Raises `ValueError` or `RuntimeError` if none runs."""
        return choose_backend(self.backend, self.device, self.torch_dtype, channels)

    def fields(self) -> dict[str, Any]:
        """The fields of the setting in a line of results."""
        threads = {"threads": torch.get_num_threads(), "threads_from": THREADS if THREADS in os.environ else "PyTorch"}
        return {"device": self.device, "dtype": self.dtype, **threads, "repeats": self.repeats}


class Tolerance(NamedTuple):
    """Upper bounds of relative errors: the norm of the error over the norm of the expected value."""

    estimate: float
    states: float  # gradients of states; sums over keys, which cancel more in longer sequences
    parameters: float  # gradients of parameters; sums over all pairs


# Half precisions round states, weights and the estimate to 11 bits (float16) or 8 bits (bfloat16).
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-3, 1e-3),
    torch.float16: Tolerance(2e-3, 5e-3, 5e-2),
    torch.bfloat16: Tolerance(2e-2, 4e-2, 2e-1),
}

ActualAndExpected = Sequence[tuple[Tensor, Tensor]]


def compare_with_tolerances(groups: Mapping[str, tuple[ActualAndExpected, float]]) -> dict[str, Any]:
    """The largest relative error of each group of `(actual, expected)`, and whether all are within their tolerances.

    An error that is not finite does not pass. It is returned as None, because JSON cannot contain it.
    """
    errors = {name: [relative_error(*pair) for pair in pairs] for name, (pairs, _) in groups.items()}
    tolerances = {name: tolerance for name, (_, tolerance) in groups.items()}
    return {
        "passed": all(error <= tolerances[name] for name, each in errors.items() for error in each),
        "tolerances": tolerances,
        "errors": {name: max(each) if all(map(math.isfinite, each)) else None for name, each in errors.items()},
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in float64; the absolute error if all expected values are zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)


TURN = 0.1  # seconds, the shortest turn; a short call is repeated within a turn
Tick = Callable[[], None]


def in_turns(
    contestants: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu", tick: Tick = lambda: None
) -> dict[str, list[float]]:
    """Seconds of a call of each contestant, in each round.

    All run in one process, after a warm-up. Every second round has the opposite order, so that neither a drift of the
    machine nor the cache content of the one before favours a contestant. On CUDA the device's own clock is used.
    """
    calls = {name: _calls_per_turn(contestant, device) for name, contestant in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in contestants if repeat % 2 == 0 else reversed(list(contestants)):
            seconds[name].append(_seconds_per_call(contestants[name], calls[name], device))
        tick()
    return seconds


class Case(ABC):
    """Something to measure. It is timed only where its check has passed."""

    benchmark: ClassVar[str]  # its name in a line of results
    setting: Setting

    @property
    @abstractmethod
    def title(self) -> str:
        """For the progress bar."""

    @property
    def rounds(self) -> int:
        """How often `lines` ticks, unless the check fails."""
        return self.setting.repeats

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """The fields of every line: the preset, sizes, the setting, the backend."""

    def prepared(self) -> Any:
        """What the check and the measurement share."""
        return None

    @abstractmethod
    def check(self, shared: Any) -> dict[str, Any]:
        """Compare with float64, as `compare_with_tolerances` returns it."""

    @abstractmethod
    def measured(self, shared: Any, tick: Tick) -> Iterator[dict[str, Any]]:
        """The further fields of each line, by measurement."""

    def lines(self, tick: Tick) -> Iterator[dict[str, Any]]:
        """Check, then measure; `tick` is called after each round. One line says that a check failed."""
        shared = self.prepared()
        line = {"benchmark": self.benchmark, **self.described(), "check": self.check(shared)}
        parts = self.measured(shared, tick) if line["check"]["passed"] else [{}]
        for part in parts:
            yield {**line, **part}


def compare(seconds: Mapping[str, Sequence[float]], peer: str, ours: str = "rfa") -> dict[str, Any]:
    """The fields of a line of results: the ratio of each round, a summary of the ratios, and the times."""
    ratios = [mine / theirs for mine, theirs in zip(seconds[ours], seconds[peer], strict=True)]
    return {
        "peer": peer,
        "ratio": summary(ratios),
        "ratios": ratios,
        "seconds": {"rfa": list(seconds[ours]), "peer": list(seconds[peer])},
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, minimum and maximum."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    low, median, high = quartiles
    return {"median": median, "q1": low, "q3": high, "low": min(values), "high": max(values)}


def _calls_per_turn(contestant: Callable[[], object], device: str) -> int:
    """Warm up, and return the number of calls in a turn."""
    seconds = _seconds_per_call(contestant, 1, device)
    if seconds < 1 or device == "cuda":  # the first call may have compiled something
        seconds = _seconds_per_call(contestant, 1, device)
    return max(1, math.ceil(TURN / max(seconds, 1e-6)))


def _seconds_per_call(contestant: Callable[[], object], calls: int, device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            contestant()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / calls
    began = time.perf_counter()
    for _ in range(calls):
        contestant()
    return (time.perf_counter() - began) / calls
