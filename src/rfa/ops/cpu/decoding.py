"""New tokens of a decoder in C++: into the cache, and their estimates from it."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.ops.prior import DecodingCache

from .operator import KEY_BLOCK, NUMBERS, SCORE_KINDS, Strided, run_kernel

TokenStates = tuple[
    Float[Tensor, "batch heads length channels"],
    Float[Tensor, "batch heads length channels"],
    Float[Tensor, "batch heads length channels"],
]  # query, key and value
Factors = tuple[Float[Tensor, "b heads length channels"], Float[Tensor, "b heads length channels"]]  # see `enter`

_PARALLEL = 2**15  # numbers of states, from which threads share them
_SIZES = ("batch", "heads", "keys", "channels", "score_kind", "turn_values", "threads", "lags", "number")
_OF_TOKEN = ("query", "key", "value", "out", "cos", "sin")  # what differs from one token to the next
_STATES = ("query", "key", "value", "out", "keys_of_cache", "values_of_cache", "norms_of_cache", "cos", "sin")
_SIZES_OF_ENTER = ("batch", "heads", "length", "channels", "turn_values", "threads", "number")


class EnterProblem(ctypes.Structure):
    """See kernels/enter.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES_OF_ENTER),
        *((name, Strided) for name in ("query", "key", "value", "new_query", "keys", "values", "norms", "cos", "sin")),
    )


class TokenProblem(ctypes.Structure):
    """See kernels/token.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, Strided) for name in _STATES),
        *((name, ctypes.c_void_p) for name in ("tables", "coefficient", "tail", "uncertified")),
    )


class TokenCall(NamedTuple):
    """The last call of `decode_token`. The next one with the same layout changes its fields `of_token` only.

    It takes time to fill a whole structure. No tensor is kept, so a cache that changes frees its memory at once. The
    layout leaves out what cannot change while a cache holds tokens, and an emptied one has another `DecodingCache`: the
    dtype, which `FilterLayer.check_fit` holds fast; the layer's options; and the factors' shape and strides, as they
    are views of the tables that `TurnTable` makes, all alike.
    """

    layout: tuple[Any, ...]
    problem: TokenProblem
    of_token: list[Strided]


def enter(
    states: TokenStates, factors: Factors, room: Sequence[Float[Tensor, "batch heads length ..."]], turn_values: bool
) -> Float[Tensor, "batch heads length channels"]:
    """Turn states by `exp(-i omega t)`, write keys, values and `|k|^2` where they stay; return the query in the frame.

    Args:
        states: query, key and value of one dtype, float32 or half, whose channels are contiguous.
        factors: of the channels at the tokens, in float32: the cosine twice side by side, and the negative sine beside
            the sine (`rfa.nn.cache_layer.Turns`).
        room: for keys, values and norms `(batch, heads, length)`, in float32; written.
        turn_values: whether values are turned too.
    """
    dtype = states[0].dtype
    turned = torch.empty_like(states[0], dtype=torch.float32)
    threads = torch.get_num_threads() if turned.numel() >= _PARALLEL else 1
    written = map(Strided.of_storage, (*states, turned, *room))
    sizes = *turned.shape, turn_values, threads, NUMBERS.index(dtype)
    run_kernel("enter", EnterProblem(*sizes, *written, *map(Strided.of, factors)))
    return turned if dtype is torch.float32 else turned.to(dtype)


def decode_token(
    states: TokenStates,
    factors: Factors,
    storages: Sequence[Float[Tensor, "batch heads room ..."]],
    keys: int,
    decoding: DecodingCache,
    score_kind: str,
    turn_values: bool,
) -> Float[Tensor, "batch heads 1 channels"]:
    """`enter` for one token, the operator for the last of uniform times, and the estimate's way out of the frame.

    The token's key, value and norm are written into the storages, which have spare room. `keys` counts the new one;
    `decoding` has tables for so many lags, and gets the mirrored tables and this call. With a tail the token reads no
    keys that cannot count.
    """
    tables = decoding.tables
    assert tables is not None
    if decoding.mirrored is None:
        decoding.mirrored = F.pad(tables.tables.flip(-1), (0, KEY_BLOCK))
    query, key, value = states
    cos, sin = factors
    batch, heads, _, channels = query.shape
    dtype, threads = query.dtype, torch.get_num_threads()
    out = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    fixed = (*storages, decoding.mirrored, tables.coefficient)  # a tensor may move, as by `share_memory_`
    tail, uncertified = (0 if x is None else x.data_ptr() for x in (decoding.tail, decoding.uncertified))
    layout = (
        *(query.shape, decoding.mirrored.shape, threads),
        *[x.stride() for x in (*states, *storages)],
        *[x.data_ptr() for x in fixed],
        *(tail, uncertified),
    )
    last = decoding.last_call
    if last is not None and last.layout == layout:
        problem = last.problem
        for field, tensor in zip(last.of_token, (query, key, value, out, cos, sin), strict=True):
            field.data = tensor.data_ptr()
        problem.keys = keys
    else:
        problem = TokenProblem(
            *(batch, heads, keys, channels, SCORE_KINDS.index(score_kind), turn_values, threads),
            *(decoding.mirrored.shape[-1], NUMBERS.index(dtype)),
            *map(Strided.of_storage, (*states, out, *storages)),
            *map(Strided.of, factors),
            decoding.mirrored.data_ptr(),
            tables.coefficient.data_ptr(),
            tail,
            uncertified,
        )
        decoding.last_call = TokenCall(layout, problem, [getattr(problem, name) for name in _OF_TOKEN])
    run_kernel("token", problem)
    return out if dtype is torch.float32 else out.to(dtype)
