"""What the gradient kernels read of each row: its incoming gradient, its log sum and the terms of its scores."""

from typing import NamedTuple

import torch
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .arguments import Orders, batched, choices, forward_blocks, row_ranges
from .fold_numbers import Folds, fold_arguments, fold_choices
from .frame import LINEAR_ROWS, Frame, turned


class Incoming(NamedTuple):
    """For each row: the gradient of the estimate in the frame; `log2 sum_j 2^z` and the terms that gradients of scores
    subtract, each as two float32.
    """

    grad_out: Tensor
    log_sum: Tensor
    log_sum_rest: Tensor
    delta: Tensor
    delta_rest: Tensor


def incoming_of(inputs: KernelInputs, grad_out: Tensor, grad_log_sum: Tensor, out: Tensor, log_sum: Tensor) -> Incoming:
    """What arrives at each row, with `<dout, out>` from the rounded estimate; see `sharpen`."""
    from .kernels.frame import delta_kernel

    batch, heads, queries, channels = out.shape
    high, rest, delta, delta_rest = (torch.empty_like(log_sum, dtype=torch.float32) for _ in range(4))
    blocks = -(-queries // LINEAR_ROWS)
    with torch.cuda.device_of(out):
        delta_kernel[(blocks * batch * heads,)](
            grad_out,
            out,
            grad_log_sum.to(torch.float32).contiguous(),
            log_sum,
            high,
            rest,
            delta,
            delta_rest,
            *grad_out.stride(),
            heads,
            queries,
            blocks,
            CHANNELS=channels,
            BLOCK=LINEAR_ROWS,
        )
    cos, sin = (inputs.query_cos, inputs.query_sin) if inputs.rotate_values else (None, None)
    grad_out, norm = turned(grad_out, cos, sin, inverse=True, dtype=inputs.query.dtype)
    high = torch.where(norm.isnan() & (high < torch.inf), norm, high)  # beyond float16's range once it is turned
    return Incoming(grad_out, high, rest, delta, delta_rest)


def sharpen(
    inputs: KernelInputs,
    order: Orders,
    frame: Frame,
    folds: Folds | None,
    prior: tuple[Tensor | None, ...],
    incoming: Incoming,
    log_sum: Tensor,
) -> None:
    """Rewrite what `incoming` holds of rows that need more digits."""
    from .kernels.sharp import sharpen_kernel

    batch, heads, queries, _ = inputs.query.shape
    keys = inputs.key.shape[2]
    blocks = forward_blocks(inputs)
    ranges = row_ranges(inputs, order, blocks)
    row_blocks = -(-queries // blocks.rows)
    sharpen_kernel[(row_blocks * batch * heads,)](
        *frame,
        *incoming,
        log_sum,
        *prior,
        *order[:4],
        ranges,
        *fold_arguments(folds),
        heads,
        queries,
        keys,
        inputs.lags,
        row_blocks,
        *batched(inputs, order),
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        **choices(inputs, order, ranges),
        **fold_choices(folds),
        EVERY=inputs.query.dtype != torch.float32,
        **blocks.options,
    )
