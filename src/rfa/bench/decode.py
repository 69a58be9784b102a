"""Decoding: one token after many cached ones, compared with the same step of scaled dot-product attention."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import rotate
from rfa.nn import FilterCache

from .bound import bound_fields, decoding_work
from .measurement import TOLERANCES, Setting, StateShape, Tick, compare, compare_with_tolerances, in_turns
from .operator import OperatorProblem, call_operator

_ROOM = 64  # free positions behind the cached tokens of the dot product


@dataclass(frozen=True)
class DecodingCase:
    """One decoding step after `shape.length` cached tokens. Projections are the same in both and are left out."""

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
        problem = OperatorProblem(self.shape._replace(length=self.shape.length + 1), self.preset, setting)
        filtered = filter_step(problem)
        exact = copy.deepcopy(problem.layer).double()
        last, key, value = (state.double() for state in problem.states)
        expected = call_operator(exact, [last[:, :, -1:], key, value], "reference")
        line = {
            "benchmark": "decode",
            "pass": "one token",
            "preset": self.preset,
            **self.shape._asdict(),
            **setting.fields(),
            "backend": setting.resolved((self.shape.channels,)),
            "check": compare_with_tolerances(
                {"estimate": ([(filtered(), expected)], TOLERANCES[setting.torch_dtype].estimate)}
            ),
        }
        if not line["check"]["passed"]:
            yield line
            return
        contestants = {"rfa": filtered, "sdpa": dot_product_step(problem)}
        seconds = in_turns(contestants, setting.repeats, setting.device, tick)
        works = {
            "rfa": decoding_work(self.shape, problem.logarithm, problem.grad.itemsize),
            "peer": decoding_work(self.shape, False, problem.grad.itemsize),
        }
        yield {**line, **compare(seconds, "sdpa"), **bound_fields(works, setting)}


def filter_step(problem: OperatorProblem) -> Callable[[], Tensor]:
    """A closure that decodes a problem's last token with all others in a decoder's cache, and then removes it again.

    Its time includes the layer's dynamics, the rotations of the new states and of the estimate, and the write to the
    cache.
    """
    layer, device = problem.layer, torch.device(problem.setting.device)
    layer.backend = problem.setting.backend
    batch, _, length, _ = problem.shape
    frequency, cache = layer.dynamics()["frequency"], FilterCache()
    cached_layer = cache.layer(0)
    times = cache.locate(batch, length - 1, device, None, None, None).query_times
    query, key, value = (state.detach()[:, :, -1:] for state in problem.states)
    cached = []
    for state, turns in zip(problem.states[1:], (True, layer.rotate_values), strict=True):
        earlier = state.detach()[:, :, :-1]
        cached.append(rotate(earlier.float(), frequency, times, inverse=True).to(state.dtype) if turns else earlier)
    cached_layer.update(cached[0], cached[1])

    def step() -> Tensor:
        positions = cache.locate(batch, 1, device, None, None, None)
        estimate = layer.estimate_with_cache(query, key, value, cached_layer, positions=positions)
        cached_layer.crop(-1)
        return estimate

    return step


def dot_product_step(problem: OperatorProblem) -> Callable[[], Tensor]:
    """A closure of the same step for SDPA: write key and value into a cache with room for them, then attend to it."""
    query, *new = (state.detach()[:, :, -1:] for state in problem.states)
    length = problem.shape.length
    cached = []
    for state in problem.states[1:]:
        room = state.new_zeros(*problem.shape[:2], length + _ROOM, problem.shape.channels)
        room[:, :, :length] = state.detach()
        cached.append(room)

    def step() -> Tensor:
        for room, state in zip(cached, new, strict=True):
            room[:, :, length - 1 : length] = state
        keys, values = (room[:, :, :length] for room in cached)
        return F.scaled_dot_product_attention(query, keys, values)

    return step
