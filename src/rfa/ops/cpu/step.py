"""One token of a decoder by one call of C++: Python and PyTorch's operators would take longer than its attention."""

import ctypes

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..prior import DecodingCache
from .enter import EnterProblem, States, enter_problem
from .library import SCORE_KINDS, Strided, run_kernel
from .operator import KEY_BLOCK


class StepProblem(ctypes.Structure):
    """See kernels/step.h."""

    _fields_ = (
        ("enter", EnterProblem),
        *((name, ctypes.c_int64) for name in ("keys", "score_kind", "lags")),
        *((name, Strided) for name in ("cached_keys", "cached_values", "cached_norms")),
        *((name, ctypes.c_void_p) for name in ("tables", "scalars")),
    )


def step(
    states: States,
    phases: tuple[Float[Tensor, "b heads 1 modes"], Float[Tensor, "b heads 1 modes"]],
    room: tuple[Tensor, Tensor, Tensor],
    cached: tuple[Tensor, Tensor, Tensor],
    prior: DecodingCache,
    score_kind: str,
    turn_values: bool,
) -> Float[Tensor, "batch heads 1 channels"]:
    """`enter`, the operator for the last of uniform times, and the estimate's way out of the frame.

    Args:
        states: query, key and value of the token, as for `enter`.
        phases, room: as for `enter`.
        cached: all keys, values and norms, of which `room` is the last.
        prior: with tables for so many lags.
        score_kind: "student_t" or "exponential".
        turn_values: whether values and the estimate are turned.
    """
    query, (keys, values, norms), tables = states[0], cached, prior.tables
    assert tables is not None
    if prior.mirrored is None:
        prior.mirrored = F.pad(tables.tables.flip(-1), (0, KEY_BLOCK))
    batch, heads, _, channels = query.shape
    out = query.new_empty(batch, 1, heads, channels).transpose(1, 2)  # as the heads of one projection
    threads = torch.get_num_threads()
    problem = StepProblem(
        enter_problem(states, phases, out, room, turn_values, threads),
        keys.shape[2],
        SCORE_KINDS.index(score_kind),
        prior.mirrored.shape[-1],
        Strided.of(keys),
        Strided.of(values),
        Strided.of(norms.unsqueeze(2)),
        prior.mirrored.data_ptr(),
        tables.coefficient.data_ptr(),
    )
    run_kernel("step", problem)
    return out
