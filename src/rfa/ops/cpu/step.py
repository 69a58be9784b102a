"""One token of a decoder by one call of C++: Python and PyTorch's operators would take longer than its attention."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..prior import DecodingCache
from .enter import States, Turns
from .library import SCORE_KINDS, Strided, run_kernel
from .operator import KEY_BLOCK

_SIZES = ("batch", "heads", "keys", "channels", "score_kind", "turn_values", "threads", "lags")
_STATES = ("query", "key", "value", "out", "keys_of_cache", "values_of_cache", "norms_of_cache", "cos", "sin")


class StepProblem(ctypes.Structure):
    """See kernels/step.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, Strided) for name in _STATES),
        *((name, ctypes.c_void_p) for name in ("tables", "coefficient")),
    )


def step(
    states: States,
    turns: Turns,
    cache: Sequence[Float[Tensor, "batch heads room ..."]],
    keys: int,
    prior: DecodingCache,
    score_kind: str,
    turn_values: bool,
) -> Float[Tensor, "batch heads 1 channels"]:
    """What `enter` does, the operator for the last of uniform times, and the estimate's way out of the frame.

    Args:
        states: query, key and value of one token, as for `enter`.
        turns: as for `enter`.
        cache: keys, values and norms of the keys with their spare room; the new ones are written.
        keys: number of keys, the new one included.
        prior: with tables for so many lags.
        score_kind: "student_t" or "exponential".
        turn_values: whether values and the estimate are turned.
    """
    tables = prior.tables
    assert tables is not None
    if prior.mirrored is None:
        prior.mirrored = F.pad(tables.tables.flip(-1), (0, KEY_BLOCK))
    batch, heads, _, channels = states[0].shape
    out = states[0].new_empty(batch, 1, heads, channels).transpose(1, 2)  # as the heads of one projection
    sizes = batch, heads, keys, channels, SCORE_KINDS.index(score_kind), turn_values, torch.get_num_threads()
    problem = StepProblem(
        *sizes,
        prior.mirrored.shape[-1],
        *(Strided(x.data_ptr(), *x.stride()[:3]) for x in (*states, out, *cache)),
        *map(Strided.of, turns),
        prior.mirrored.data_ptr(),
        tables.coefficient.data_ptr(),
    )
    run_kernel("step", problem)
    return out
