"""New states into a cache by one call of C++; the same by PyTorch takes fifteen operators a layer and token."""

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .library import Strided, run_kernel

State = Float[Tensor, "batch heads length channels"]
States = tuple[State, State, State]  # query, key and value
Factors = Float[Tensor, "b heads length channels"]
Turns = tuple[Factors, Factors]  # cosine, twice side by side, and negative sine beside sine: `rfa.nn.phases.Turns`

_PARALLEL = 2**15  # numbers of states, from which threads share them


class EnterProblem(ctypes.Structure):
    """See kernels/enter.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "channels", "turn_values", "threads")),
        *((name, Strided) for name in ("query", "key", "value", "new_query", "keys", "values", "norms", "cos", "sin")),
    )


def enter(
    states: States, turns: Turns, room: Sequence[Tensor], turn_values: bool
) -> Float[Tensor, "batch heads length channels"]:
    """Turn states by `exp(-i omega t)`, and write keys, values and `|k|^2` where they stay.

    Args:
        states: query, key and value in float32 whose channels are contiguous.
        turns: factors of the channels at the tokens, in float32.
        room: for keys, values `(batch, heads, length, channels)` and norms `(batch, heads, length)`; written.
        turn_values: whether values are turned too.

    Returns:
        The query in the frame.
    """
    turned = torch.empty_like(states[0])
    threads = torch.get_num_threads() if turned.numel() >= _PARALLEL else 1
    written = (Strided(x.data_ptr(), *x.stride()[:3]) for x in (*states, turned, *room))
    run_kernel("enter", EnterProblem(*turned.shape, turn_values, threads, *written, *map(Strided.of, turns)))
    return turned
