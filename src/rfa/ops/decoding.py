"""Compiled code for what a decoder does with new states, where a backend has it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import missing
from .transforms import transformed
from .weights import recording


class CompiledDecoding(NamedTuple):
    """How new states go into a cache.

    Fields:
        enter: turns states and writes them into the cache; see `rfa.ops.cpu.enter`.
        step: does so for one token at uniform times, and estimates it from all of the cache; see `rfa.ops.cpu.step`.
    """

    enter: Callable[..., Tensor]
    step: Callable[..., Tensor]


@functools.cache
def _on_cpu() -> CompiledDecoding:
    from .cpu.enter import enter
    from .cpu.step import step

    return CompiledDecoding(enter, step)


def compiled_decoding(backend: str, *states: Tensor) -> CompiledDecoding | None:
    """The functions for these states: in float32 on a CPU, without gradients. None where PyTorch's operators serve."""
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed() or recording())
    if not plain or backend not in ("auto", "cpu"):
        return None
    for x in states:
        if type(x) is not Tensor or x.dtype is not torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return None
    return None if missing("cpu") is not None else _on_cpu()
