"""New states into a cache by one call of C++; the same by PyTorch takes fifteen operators a layer and token."""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from .library import Strided, run_kernel

State = Float[Tensor, "batch heads length channels"]
States = tuple[State, State, State]  # query, key and value

_PARALLEL = 2**15  # numbers of states, from which threads share them


class EnterProblem(ctypes.Structure):
    """See kernels/enter.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "channels", "turn_values", "threads")),
        *((name, Strided) for name in ("query", "key", "value", "new_query", "keys", "values", "cos", "sin", "norms")),
    )


def enter(
    states: States,
    phases: tuple[Float[Tensor, "b heads length modes"], Float[Tensor, "b heads length modes"]],
    room: tuple[Tensor, Tensor, Tensor],
    turn_values: bool,
) -> Float[Tensor, "batch heads length channels"]:
    """Turn states by `exp(-i omega t)`, and write keys, values and `|k|^2` where they stay.

    Args:
        states: query, key and value in float32 whose channels are contiguous.
        phases: cosine and sine at the tokens, in float32.
        room: for keys, values `(batch, heads, length, channels)` and norms `(batch, heads, length)`; written.
        turn_values: whether values are turned too.

    Returns:
        The query in the frame.
    """
    turned = torch.empty_like(states[0])
    threads = torch.get_num_threads() if turned.numel() >= _PARALLEL else 1
    run_kernel("enter", enter_problem(states, phases, turned, room, turn_values, threads))
    return turned


def enter_problem(
    states: States,
    phases: tuple[Tensor, Tensor],
    turned: Tensor,
    room: tuple[Tensor, Tensor, Tensor],
    turn_values: bool,
    threads: int,
) -> EnterProblem:
    """The arguments of `enter` for C++; the query goes to `turned`."""
    keys, values, norms = room
    tensors = (*states, turned, keys, values, *phases, norms.unsqueeze(-1))
    return EnterProblem(*states[0].shape, turn_values, threads, *map(Strided.of, tensors))
