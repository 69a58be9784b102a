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
from .operator import ALL_KEYS, OperatorProblem, StatesCase, call_operator

RUN = AHEAD  # tokens of a call: as many as a cache makes phases for at a time, so that each call makes them once
_PIECE = 8192  # tokens that enter a cache at once


@dataclass(frozen=True)
class DecodingCase(StatesCase):
    """The time of a token among the `RUN` tokens that follow `shape.length` cached ones, one after the other.

    Projections are the same in both and are left out. The bound is that of the token in the middle.
    """

    benchmark = "decode"

    def prepared(self) -> Any:
        """The states, with those of the run, and the filter's run of tokens."""
        problem = self.problem(self.shape._replace(length=self.shape.length + RUN))
        return problem, FilterRun(problem)

    def described(self) -> dict[str, Any]:
        """The fields of every line."""
        return {"pass": "one token", **super().described()}

    @torch.no_grad()
    def check(self, shared: Any) -> dict[str, Any]:
        """Compare the first and the last token with float64; of all, the reference would need much memory."""
        problem, filtered = shared
        exact = copy.deepcopy(problem.layer).double()
        dynamics = exact.dynamics()
        ends = torch.tensor([0, RUN - 1], device=self.setting.device)
        places = self.shape.length + ends
        query, key, value = problem.states
        each = []
        for head in range(self.shape.heads):  # of all at once, float64 would need several times the caches' memory
            one = slice(head, head + 1)
            states = [state[:, one].double() for state in (query[:, :, places], key, value)]
            of_head = {name: values[one] for name, values in dynamics.items()}
            each.append(call_operator(exact, states, "reference", query_times=places, **of_head))
        expected = torch.cat(each, dim=1)
        found = torch.cat(filtered(), dim=2)[:, :, ends]
        tolerance = TOLERANCES[self.setting.torch_dtype].estimate
        return compare_with_tolerances({"estimate": ([(found, expected)], tolerance)})

    @torch.no_grad()
    def measured(self, shared: Any, tick: Tick) -> Iterator[dict[str, Any]]:
        """Seconds of a token, and the bound."""
        setting, (problem, filtered) = self.setting, shared
        contestants = {"rfa": filtered, "sdpa": dot_product_run(problem)}
        if self.certified:
            contestants[ALL_KEYS] = FilterRun(problem.with_all_keys())
        runs = in_turns(contestants, setting.repeats, setting.device, tick)
        seconds = {name: [run / RUN for run in each] for name, each in runs.items()}
        middle = self.shape._replace(length=self.shape.length + RUN // 2)
        works = {
            "rfa": decoding_work(middle, problem.logarithm, problem.grad.itemsize),
            "peer": decoding_work(middle, False, problem.grad.itemsize),
        }
        if not self.certified:
            yield {**compare(seconds, "sdpa"), **bound_fields(works, setting)}
            return
        held = {name: run.cache_bytes() for name, run in contestants.items() if isinstance(run, FilterRun)}
        dot_products = sum(state.nbytes for state in problem.states[1:])
        for name in ("sdpa", ALL_KEYS):
            peer_held = held.get(name, dot_products)
            held_by = {"cache_bytes": {"rfa": held["rfa"], "peer": peer_held}}
            yield {**compare(seconds, name), **held_by, "uncertified": filtered.cache.uncertified}


class FilterRun:
    """Decodes a problem's last `RUN` tokens with all others in a cache, and removes them again.

    Its time includes the phases of these tokens, the rotations of the new states and of the estimates, and the writes
    to the cache. It does not include what a decoder makes once for a whole text: the layer's dynamics, and tables of
    the prior, which serve twice as many tokens. Only the first call drops keys that can count for no head.
    """

    @torch.no_grad()
    def __init__(self, problem: OperatorProblem):
        self.layer, self.device = problem.layer, torch.device(problem.setting.device)
        self.layer.backend = problem.setting.backend
        self.batch, earlier = problem.shape.batch, problem.shape.length - RUN
        self.cache = FilterCache(certified=problem.certified)
        frequency, turned = self.layer.dynamics()["frequency"], (True, self.layer.rotate_values)
        for start in range(0, earlier, _PIECE):
            end = min(start + _PIECE, earlier)
            times = self.cache.locate(self.batch, end - start, self.device, None, None, None).query_times
            entering = [state.detach()[:, :, start:end] for state in problem.states[1:]]
            self.cache.layer(0).update(
                *(
                    rotate(state.float(), frequency, times, inverse=True).to(state.dtype) if turns else state
                    for state, turns in zip(entering, turned, strict=True)
                )
            )
        self.tokens = _tokens(problem)

    def __call__(self) -> list[Tensor]:
        """The estimates of the run."""
        held = self.cache.layer(0)
        held.turns = TurnTable()  # those of the last call, whose tokens had the same places
        estimates = []
        for query, key, value in self.tokens:
            positions = self.cache.locate(self.batch, 1, self.device, None, None, None)
            estimates.append(self.layer.estimate_with_cache(query, key, value, held, positions=positions))
        held.crop(-RUN)
        return estimates

    def cache_bytes(self) -> int:
        """Of the keys, the values and the norms that the cache holds."""
        held = self.cache.layer(0)
        return sum(state.nbytes for state in (held.keys, held.values, held.key_norms) if state is not None)


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
