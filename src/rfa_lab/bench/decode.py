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
from .measurement import TOLERANCES, Tick, compare, compare_with_tolerances, in_turns
from .operator import OperatorProblem, StatesCase, call_operator

RUN = AHEAD  # tokens of a call: as many as a cache makes phases for at a time, so that each call makes them once


@dataclass(frozen=True)
class DecodingCase(StatesCase):
    """The time of a token among the `RUN` tokens that follow `shape.length` cached ones, one after the other.

    Projections are the same in both and are left out. The bound is that of the token in the middle.
    """

    benchmark = "decode"

    def prepared(self) -> Any:
        """The states, with those of the run, and the run of the filter."""
        problem = OperatorProblem(self.shape._replace(length=self.shape.length + RUN), self.preset, self.setting)
        return problem, filter_run(problem)

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        return {"pass": "one token", **super().described()}

    @torch.no_grad()
    def check(self, shared: Any) -> dict[str, Any]:
        """Compare the first and the last token with float64; of all, the reference would need much memory."""
        problem, filtered = shared
        exact = copy.deepcopy(problem.layer).double()
        query, key, value = (state.double() for state in problem.states)
        ends = torch.tensor([0, RUN - 1], device=self.setting.device)
        places = self.shape.length + ends
        expected = call_operator(exact, [query[:, :, places], key, value], "reference", query_times=places)
        found = torch.cat(filtered(), dim=2)[:, :, ends]
        tolerance = TOLERANCES[self.setting.torch_dtype].estimate
        return compare_with_tolerances({"estimate": ([(found, expected)], tolerance)})

    @torch.no_grad()
    def measured(self, shared: Any, tick: Tick) -> Iterator[dict[str, Any]]:
        """Seconds of a token, and the bound."""
        setting, (problem, filtered) = self.setting, shared
        contestants = {"rfa": filtered, "sdpa": dot_product_run(problem)}
        runs = in_turns(contestants, setting.repeats, setting.device, tick)
        seconds = {name: [run / RUN for run in each] for name, each in runs.items()}
        middle = self.shape._replace(length=self.shape.length + RUN // 2)
        works = {
            "rfa": decoding_work(middle, problem.logarithm, problem.grad.itemsize),
            "peer": decoding_work(middle, False, problem.grad.itemsize),
        }
        yield {**compare(seconds, "sdpa"), **bound_fields(works, setting)}


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
