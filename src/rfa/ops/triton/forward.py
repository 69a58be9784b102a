"""The forward pass on the host."""

import torch
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import batched, block_ranges, choices, orders, prior_arguments, to_frame, turned, whole_ranges
from .blocks import forward_blocks


def forward(call: KernelInputs) -> tuple[Tensor, Tensor]:
    """Estimates `(batch, heads, queries, value channels)` and `log2 sum_j 2^z`, -inf for rows that see no key."""
    from .kernels.forward import forward_kernel

    query, value = call.query, call.value
    batch, heads, queries, channels = query.shape
    keys, value_channels = value.shape[2:]
    shape = (batch, heads, queries, value_channels)
    if call.empty:
        return query.new_zeros(shape), query.new_full(shape[:3], -torch.inf, dtype=torch.float64)
    blocks = forward_blocks(max(channels, value_channels), query.dtype, call.tables is not None)
    order, frame = orders(call), to_frame(call)
    ranges = block_ranges(order, queries, keys, blocks.rows, blocks.columns)
    row_ranges = None if ranges is None else whole_ranges(ranges[0], batch)
    turn = call.rotate_values and call.query_cos is not None
    out = query.new_empty(shape, dtype=torch.float32 if turn else query.dtype)
    log_sum = query.new_empty(shape[:3], dtype=torch.float64)
    row_blocks = -(-queries // blocks.rows)
    with torch.cuda.device_of(query):
        forward_kernel[(row_blocks * batch * heads,)](
            *frame,
            out,
            log_sum,
            *prior_arguments(call),
            *order[:4],
            row_ranges,
            heads,
            queries,
            keys,
            call.lags,
            row_blocks,
            *batched(call, order),
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            **choices(call, order, row_ranges),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    if turn:
        out, _ = turned(out, call.query_cos, call.query_sin, None, inverse=False, dtype=query.dtype)
    return out, log_sum
