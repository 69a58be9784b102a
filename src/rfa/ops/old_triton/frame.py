"""States in the common frame, in which rotations are the same for all pairs, and gradients out of it."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

LINEAR_ROWS = 64  # of a program of the linear kernels


class Frame(NamedTuple):
    """Queries, keys and values in the common frame, contiguous, and their squared norms.

    That of a poisoned state is NaN, or 0 for gradients on folds.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_norm: Tensor
    key_norm: Tensor
    value_norm: Tensor


class FoldedStates(NamedTuple):
    """`F k` and `F v` in the common frame, and `-(|F k|^2 + C) / 2`, `(batch, heads, keys)` float32."""

    key: Tensor
    value: Tensor
    columns: Tensor


def to_frame(inputs: KernelInputs) -> Frame:
    """The states as the kernels read them.

    They are rotated in a pass of their own. Within the kernels this would read eight bytes of phases for every two
    bytes of a half-precision state, in each tile instead of once.
    """
    return _to_frame(inputs, False, None, None)[0]


def to_frame_and_folds(
    inputs: KernelInputs, factors: Tensor, constants: Tensor, *, known: bool
) -> tuple[Frame, FoldedStates]:
    """The same, and keys and values times `factors`.

    Args:
        inputs: of the kernels.
        known: norms of poisoned states are 0 instead of NaN.
        factors: F, `(heads, block)` by the places of keys in blocks, or `(b, heads, keys)`.
        constants: C, in the same shape.
    """
    frame, folded = _to_frame(inputs, known, factors, constants)
    assert folded is not None
    return frame, folded


def _to_frame(
    inputs: KernelInputs, known: bool, factors: Tensor | None, constants: Tensor | None
) -> tuple[Frame, FoldedStates | None]:
    into = partial(_turned, inverse=True, known=known)
    cos, sin = (inputs.key_cos, inputs.key_sin) if inputs.rotate_values else (None, None)
    query, query_norm, *_ = into(inputs.query, inputs.query_cos, inputs.query_sin)
    key, key_norm, folded_key, columns = into(
        inputs.key, inputs.key_cos, inputs.key_sin, inputs.key_groups, factors=factors, constants=constants
    )
    value, value_norm, folded_value, _ = into(inputs.value, cos, sin, inputs.key_groups, factors=factors)
    frame = Frame(query, key, value, query_norm, key_norm, value_norm)
    if folded_key is None or folded_value is None or columns is None:
        return frame, None
    return frame, FoldedStates(folded_key, folded_value, columns)


def turned(
    states: Tensor, cos: Tensor | None, sin: Tensor | None, *, inverse: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """States rotated into the frame (`inverse`) or out of it, contiguous; into it, squared norms too.

    On the way into the frame poisoned states become zero, and their norm is NaN.
    """
    target, norm, *_ = _turned(states, cos, sin, inverse=inverse, dtype=dtype)
    return target, norm


def _turned(
    states: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    groups: Tensor | None = None,
    *,
    inverse: bool,
    dtype: torch.dtype | None = None,
    known: bool = False,
    factors: Tensor | None = None,
    constants: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`turned`; with `factors` states times these, and with `constants` the columns of these states."""
    from .kernels.frame import frame_kernel

    batch, heads, length, channels = states.shape
    target = states.new_empty(states.shape, dtype=dtype or states.dtype)
    norm = states.new_empty(states.shape[:3], dtype=torch.float32)
    folded = None if factors is None else torch.empty_like(target)
    columns = None if constants is None else torch.empty_like(norm)
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
            folded,
            columns,
            factors,
            constants,
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
            GROUPS=groups is not None,
            FOLDED=factors is not None,
            KNOWN=known,
        )
    return target, norm, folded, columns


def gradient_of(states: Tensor, cos: Tensor | None) -> Tensor:
    """Room for a gradient in the frame: float32 where it is still to be turned."""
    dtype = states.dtype if cos is None else torch.float32
    return torch.empty(states.shape, dtype=dtype, device=states.device)


def out_of_frame(gradient: Tensor, states: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """A gradient turned out of the frame, in the dtype of its states."""
    if cos is None:
        return gradient
    return turned(gradient, cos, sin, inverse=False, dtype=states.dtype)[0]
