"""Where a benchmark runs, its correctness check against float64, and contestants timed in turns."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfa.nn.checks import check_range, require
from rfa.ops import choose_backend
from rfa.ops.backends import BACKENDS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = 2**31 - 1  # of what is counted


class StateShape(NamedTuple):
    """The shape of queries, keys and values."""

    batch: int
    heads: int
    length: int
    channels: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))


@dataclass(frozen=True)
class Setting:
    """Where and how a benchmark runs.

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


class Tolerance(NamedTuple):
    """Upper bounds of an error's norm over the norm of the expected value."""

    estimate: float
    states: float  # gradients, sums over keys that cancel the more the longer the sequence
    parameters: float  # gradients, sums over all pairs


# Half precisions round states, weights and the estimate to 11 or 8 bits.
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-3, 1e-3),
    torch.float16: Tolerance(2e-3, 5e-3, 5e-2),
    torch.bfloat16: Tolerance(2e-2, 4e-2, 2e-1),
}

ActualAndExpected = Sequence[tuple[Tensor, Tensor]]


def compare_with_tolerances(groups: Mapping[str, tuple[ActualAndExpected, float]]) -> dict[str, Any]:
    """The largest relative error of each group of `(actual, expected)`, and whether all are within their tolerances.

    An error that is not a finite number is None, because JSON cannot write it, and does not pass.
    """
    errors = {name: [relative_error(*pair) for pair in pairs] for name, (pairs, _) in groups.items()}
    tolerances = {name: tolerance for name, (_, tolerance) in groups.items()}
    return {
        "passed": all(error <= tolerances[name] for name, each in errors.items() for error in each),
        "tolerances": tolerances,
        "errors": {name: max(each) if all(map(math.isfinite, each)) else None for name, each in errors.items()},
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|`, in float64; the plain error where nothing but zeros is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)


TURN = 0.1  # seconds that a turn takes at least: a short call is made many times
Tick = Callable[[], None]


def in_turns(
    contestants: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu", tick: Tick = lambda: None
) -> dict[str, list[float]]:
    """Seconds that a call takes each contestant, in each round.

    All run in one process, after a warm-up; every other round has them in the opposite order, so that neither a
    drift of the machine nor the predecessor's caches favour one. On CUDA the device's own clock counts.
    """
    calls = {name: _calls(contestant, device) for name, contestant in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in contestants if repeat % 2 == 0 else reversed(list(contestants)):
            seconds[name].append(_turn(contestants[name], calls[name], device))
        tick()
    return seconds


def compare(seconds: Mapping[str, Sequence[float]], peer: str, ours: str = "rfa") -> dict[str, Any]:
    """The fields of a line: the ratio of each round, their summary, and the times that they are of."""
    ratios = [mine / theirs for mine, theirs in zip(seconds[ours], seconds[peer], strict=True)]
    return {
        "peer": peer,
        "ratio": summary(ratios),
        "ratios": ratios,
        "seconds": {"rfa": list(seconds[ours]), "peer": list(seconds[peer])},
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and ends."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    low, median, high = quartiles
    return {"median": median, "q1": low, "q3": high, "low": min(values), "high": max(values)}


def _calls(contestant: Callable[[], object], device: str) -> int:
    """Warm up, and say how many calls make a turn."""
    seconds = _turn(contestant, 1, device)
    if seconds < 1 or device == "cuda":  # the first call may have compiled something
        seconds = _turn(contestant, 1, device)
    return max(1, math.ceil(TURN / max(seconds, 1e-6)))


def _turn(contestant: Callable[[], object], calls: int, device: str) -> float:
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
