"""New states into a cache by one call of C++; the same by PyTorch takes fifteen operators a layer and token."""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from .library import Strided, run_kernel

_PARALLEL = 2**15  # numbers of states, from which threads share them


class EnterProblem(ctypes.Structure):
    """See kernels/enter.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "channels", "turn_values", "threads")),
        *((name, Strided) for name in ("query", "key", "value", "new_query", "keys", "values", "cos", "sin", "norms")),
    )


def enter(
    query: Float[Tensor, "batch heads length channels"],
    key: Float[Tensor, "batch heads length channels"],
    value: Float[Tensor, "batch heads length channels"],
    phases: tuple[Float[Tensor, "b heads length modes"], Float[Tensor, "b heads length modes"]],
    room: tuple[Tensor, Tensor, Tensor],
    turn_values: bool,
) -> Float[Tensor, "batch heads length channels"]:
    """Turn states by `exp(-i omega t)`, and write keys, values and `|k|^2` where they stay.

    Args:
        query, key, value: states in float32 whose channels are contiguous.
        phases: cosine and sine at the tokens, in float32.
        room: for keys, values `(batch, heads, length, channels)` and norms `(batch, heads, length)`; written.
        turn_values: whether values are turned too.

    Returns:
        The query in the frame.
    """
    turned, threads = torch.empty_like(query), torch.get_num_threads()
    keys, values, norms = room
    states = (Strided.of(state) for state in (query, key, value, turned, keys, values, *phases, norms.unsqueeze(-1)))
    threads = threads if query.numel() >= _PARALLEL else 1
    run_kernel("enter", EnterProblem(*query.shape, turn_values, threads, *states))
    return turned
