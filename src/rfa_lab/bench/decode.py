"""Decoding: tokens one by one after many cached ones, compared with the same steps of scaled dot-product attention."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import rotate
from rfa.nn import FilterCache
from rfa.nn.cache_layer import AHEAD, TurnTable

from .bound import bound_fields, decoding_work
from .measurement import TOLERANCES, Setting, StateShape, Tick, compare, compare_with_tolerances, in_turns
from .operator import OperatorProblem, call_operator

RUN = AHEAD  # tokens of a call: as many as a cache makes phases for at a time, so that each call makes them once


@dataclass(frozen=True)
class DecodingCase:
    """The time of a token among the `RUN` tokens that follow `shape.length` cached ones, one after the other.

    Projections are the same in both and are left out. The bound is that of the token in the middle.
    """

    shape: StateShape
    preset: str
    setting: Setting

    @property
    def title(self) -> str:
        """For the progress bar."""
        return f"decode {self.shape}"

    @property
    def rounds(self) -> int:
        """How often `lines` ticks."""
        return self.setting.repeats

    @torch.no_grad()
    def lines(self, tick: Tick) -> Iterator[dict[str, Any]]:
        """Check, then measure."""
        setting = self.setting
        problem = OperatorProblem(self.shape._replace(length=self.shape.length + RUN), self.preset, setting)
        filtered = filter_run(problem)
        exact = copy.deepcopy(problem.layer).double()
        query, key, value = (state.double() for state in problem.states)
        ends = torch.tensor([0, RUN - 1], device=setting.device)  # of all tokens, the reference would need much memory
        places = self.shape.length + ends
        expected = call_operator(exact, [query[:, :, places], key, value], "reference", query_times=places)
        found = torch.cat(filtered(), dim=2)[:, :, ends]
        line = {
            "benchmark": "decode",
            "pass": "one token",
            "preset": self.preset,
            **self.shape._asdict(),
            **setting.fields(),
            "backend": setting.resolved((self.shape.channels,)),
            "check": compare_with_tolerances(
                {"estimate": ([(found, expected)], TOLERANCES[setting.torch_dtype].estimate)}
            ),
        }
        if not line["check"]["passed"]:
            yield line
            return
        contestants = {"rfa": filtered, "sdpa": dot_product_run(problem)}
        runs = in_turns(contestants, setting.repeats, setting.device, tick)
        seconds = {name: [run / RUN for run in each] for name, each in runs.items()}
        middle = self.shape._replace(length=self.shape.length + RUN // 2)
        works = {
            "rfa": decoding_work(middle, problem.logarithm, problem.grad.itemsize),
            "peer": decoding_work(middle, False, problem.grad.itemsize),
        }
        yield {**line, **compare(seconds, "sdpa"), **bound_fields(works, setting)}


def filter_run(problem: OperatorProblem) -> Callable[[], list[Tensor]]:
    """A closure that decodes a problem's last `RUN` tokens with all others in a cache, and removes them again.

    Its time includes the phases of these tokens, the rotations of the new states and of the estimates, and the writes
    to the cache. It does not include what a decoder makes once for a whole text: the layer's dynamics, and tables of
    the prior, which serve twice as many tokens.
    """
    layer, device = problem.layer, torch.device(problem.setting.device)
    layer.backend = problem.setting.backend
    batch, earlier = problem.shape.batch, problem.shape.length - RUN
    frequency, cache = layer.dynamics()["frequency"], FilterCache()
    cached_layer = cache.layer(0)
    times = cache.locate(batch, earlier, device, None, None, None).query_times
    cached = []
    for state, turns in zip(problem.states[1:], (True, layer.rotate_values), strict=True):
        first = state.detach()[:, :, :earlier]
        cached.append(rotate(first.float(), frequency, times, inverse=True).to(state.dtype) if turns else first)
    cached_layer.update(cached[0], cached[1])
    tokens = _tokens(problem)

    def run() -> list[Tensor]:
        cached_layer.turns = TurnTable()  # those of the last call, whose tokens had the same places
        estimates = []
        for query, key, value in tokens:
            positions = cache.locate(batch, 1, device, None, None, None)
            estimates.append(layer.estimate_with_cache(query, key, value, cached_layer, positions=positions))
        cached_layer.crop(-RUN)
        return estimates

    return run


def dot_product_run(problem: OperatorProblem) -> Callable[[], list[Tensor]]:
    """A closure of the same steps for SDPA: write key and value into a cache with room for them, then attend to it."""
    first = problem.shape.length - RUN + 1
    cached = [state.detach().clone() for state in problem.states[1:]]
    tokens = _tokens(problem)

    def run() -> list[Tensor]:
        estimates = []
        for length, (query, *new) in enumerate(tokens, first):
            for room, state in zip(cached, new, strict=True):
                room[:, :, length - 1 : length] = state
            keys, values = (room[:, :, :length] for room in cached)
            estimates.append(F.scaled_dot_product_attention(query, keys, values))
        return estimates

    return run


def _tokens(problem: OperatorProblem) -> list[tuple[Tensor, ...]]:
    """Query, key and value of each of the last `RUN` tokens."""
    parts = (state.detach()[:, :, -RUN:].split(1, dim=2) for state in problem.states)
    return list(zip(*parts, strict=True))
