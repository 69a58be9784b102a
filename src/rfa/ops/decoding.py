"""Which compiled code serves the new tokens of a decoder. Caches ask here, as the operators ask `backends.py`.

It stands alone because its functions write into a cache, which no backend of the operators does.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import missing
from .kernel import HALF_AND_SINGLE
from .transforms import readable, transformed
from .weights import recording


class CompiledDecoding(NamedTuple):
    """What compiled code does with new tokens; see `rfa.ops.cpu.decoding`.

    Fields:
        enter: turns states and writes them into the cache.
        decode_token: does so for one token at uniform times, and estimates it from all of the cache.
    """

    enter: Callable[..., Tensor]
    decode_token: Callable[..., Tensor]


@functools.cache
def _on_cpu() -> CompiledDecoding:
    from .cpu.decoding import decode_token, enter

    return CompiledDecoding(enter, decode_token)


def compiled_decoding(backend: str, *states: Tensor) -> CompiledDecoding | None:
    """The functions for these states: on a CPU, of one dtype, without gradients. None where PyTorch's operators serve.

    A program that is recorded needs those operators: it would not hold what compiled code writes.
    """
    if backend not in ("auto", "cpu") or torch.is_grad_enabled():
        return None
    dtype = states[0].dtype
    if dtype not in HALF_AND_SINGLE:
        return None
    for x in states:
        if type(x) is not Tensor or x.dtype is not dtype or not x.is_cpu or x.stride(-1) != 1:
            return None
    if transformed() or recording() or not readable():  # no wrapped tensors: these are plain ones
        return None
    return None if missing("cpu") is not None else _on_cpu()
