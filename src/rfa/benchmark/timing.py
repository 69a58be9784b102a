"""Contestants timed in turns, and what their ratios say."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

TURN = 0.1  # seconds that a turn takes at least: a short call is made many times
Tick = Callable[[], None]


def in_turns(
    contestants: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu", tick: Tick = lambda: None
) -> dict[str, list[float]]:
    """Seconds a call takes each contestant, in each of so many rounds.

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
