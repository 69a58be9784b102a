"""Lags that are split at the edges of blocks: for causal times, half precision, Student-t weights.

A kernel takes a tile of pairs by these formulas where the numbers of the head allow it, and pair by pair where they do
not. `table_folds.py` makes the numbers for uniform times, and `path_folds.py` for others.
"""

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .arguments import Orders
from .fold_constants import FOLD
from .fold_numbers import Folds
from .frame import Frame, to_frame
from .path_folds import path_folds
from .table_folds import table_folds


def may_fold(inputs: KernelInputs) -> bool:
    """Whether a call has blocks to fold, as far as the host can tell without reading a tensor."""
    return (
        inputs.causal
        and inputs.score_kind == "student_t"
        and (inputs.tables is not None or inputs.gate)
        and inputs.query.dtype != torch.float32
        and min(inputs.query.shape[2], inputs.key.shape[2]) >= 2 * FOLD  # a few queries would not pay for it
    )


def frame_and_folds(inputs: KernelInputs, order: Orders, *, gradients: bool = False) -> tuple[Frame, Folds | None]:
    """The states as the kernels read them, and the folds of the call if it has any. No tensor is read on the host.

    With folds, kernels of `gradients` need no norm that is NaN: a poisoned row's log sum is, and that of a row that
    sees a poisoned key. Such norms are 0.
    """
    if not may_fold(inputs):
        return to_frame(inputs), None
    present = blocks_of_present_keys(inputs)
    if order.key_order is None:
        return table_folds(inputs, present, known=gradients)
    return path_folds(inputs, order, present, known=gradients)


def blocks_of_present_keys(inputs: KernelInputs) -> Tensor | None:
    """See `Folds.blocks`."""
    groups, query_groups = inputs.key_groups, inputs.query_groups
    if groups is None or query_groups is None:
        return None
    group, count = groups.amax(1, keepdim=True), (groups >= 0).sum(1)
    alone = (query_groups == group).all(1)
    first = torch.arange(groups.shape[1], device=groups.device) < count[:, None]
    ends = (groups == torch.where(first, group, groups.clamp(max=-1))).all(1)
    batch = inputs.query.shape[0]
    return torch.where(alone & ends, count // FOLD, 0).to(torch.int32).expand(batch).contiguous()


def poisoned_before(value_norm: Tensor) -> Tensor:
    """How many values up to the end of each whole block hold NaN or infinity, `(batch, heads, blocks)` int32."""
    from .kernels.fold_tables import poisoned_kernel

    batch, heads, keys = value_norm.shape
    blocks = keys // FOLD
    poisoned = value_norm.new_empty(batch, heads, blocks, dtype=torch.int32)
    with torch.cuda.device_of(value_norm):
        poisoned_kernel[(batch * heads,)](value_norm, poisoned, keys, blocks, FOLD=FOLD, BLOCKS=16)
    return poisoned
