"""States in the common frame, in which rotations are the same for all pairs, and gradients out of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernel import KernelInputs

LINEAR_ROWS = 64  # of a program of the linear kernels


class Frame(NamedTuple):
    """Queries, keys and values in the common frame, contiguous, and their squared norms; NaN for a poisoned state."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_norm: Tensor
    key_norm: Tensor
    value_norm: Tensor


def to_frame(inputs: KernelInputs) -> Frame:
    """The states as the kernels read them.

    They are rotated in a pass of their own. Within the kernels this would read eight bytes of phases for every two
    bytes of a half-precision state, in each tile instead of once.
    """
    query, query_norm = turned(inputs.query, inputs.query_cos, inputs.query_sin, None, inverse=True)
    key, key_norm = turned(inputs.key, inputs.key_cos, inputs.key_sin, inputs.key_groups, inverse=True)
    cos, sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    value, value_norm = turned(inputs.value, cos, sin, inputs.key_groups, inverse=True)
    return Frame(query, key, value, query_norm, key_norm, value_norm)


def turned(
    states: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    groups: Tensor | None,
    *,
    inverse: bool,
    dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States rotated into the frame (`inverse`) or out of it, contiguous, and squared norms.

    Absent states become zero. On the way into the frame poisoned states do too, and their norm is NaN. `factors`
    multiply the states: `(heads, block)` by their places in blocks, or `(b, heads, length)`.
    """
    from .kernels.frame import frame_kernel

    batch, heads, length, channels = states.shape
    target = states.new_empty(states.shape, dtype=dtype or states.dtype)
    norm = states.new_empty(states.shape[:3], dtype=torch.float32)
    if groups is not None:
        groups = groups.expand(batch, -1).contiguous()
    phase: Any = (0, 0, 0, 0)
    if cos is not None and sin is not None:
        cos, sin = cos.expand(batch, heads, -1, -1), sin.expand(batch, heads, -1, -1)
        sin = sin if sin.stride() == cos.stride() else sin.contiguous()
        cos = cos if sin.stride() == cos.stride() else cos.contiguous()
        phase = cos.stride()
    period = length if factors is None else factors.shape[-1]
    per_batch = factors is not None and factors.dim() == 3 and factors.shape[0] > 1
    blocks = -(-length // LINEAR_ROWS)
    with torch.cuda.device_of(states):
        frame_kernel[(blocks * batch * heads,)](
            states,
            target,
            norm,
            cos,
            sin,
            groups,
            factors,
            *states.stride(),
            *phase,
            heads * period * per_batch,
            period,
            heads,
            length,
            blocks,
            MODES=channels // 2,
            BLOCK=LINEAR_ROWS,
            ROTATE=cos is not None,
            INVERSE=inverse,
            NORM=inverse,
            GROUPS=groups is not None,
            FOLDED=factors is not None,
        )
    return target, norm


def gradient_of(states: Tensor, cos: Tensor | None) -> Tensor:
    """Room for a gradient in the frame: float32 where it is still to be turned."""
    dtype = states.dtype if cos is None else torch.float32
    return torch.empty(states.shape, dtype=dtype, device=states.device)


def out_of_frame(gradient: Tensor, states: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """A gradient turned out of the frame, in the dtype of its states."""
    if cos is None:
        return gradient
    return turned(gradient, cos, sin, None, inverse=False, dtype=states.dtype)[0]
