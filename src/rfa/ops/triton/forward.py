"""The forward pass on the host, and the block sizes of all kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernel import KernelInputs
from .arguments import batched, block_ranges, choices, orders, prior_arguments, to_frame, turned, whole_ranges


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of prefetch in its loop.

    Each kernel, head size and precision has one choice, which is not searched at run time. The arithmetic of pairs is
    the bottleneck, not memory: a pair holds a dozen float32 values in the forward kernel and some thirty in the
    gradients. The sizes are the largest whose values and accumulators ptxas keeps in the registers of an H100 or H200
    with almost no spilling. Two stages of prefetch are enough. In float32 the products are exact ("ieee"; TF32 would
    cost three digits). They do not run on tensor cores and hold both factors in registers, hence narrower tiles. The
    sizes follow from what the compiler says for sm_90. They were not measured.
    """

    rows: int
    columns: int
    warps: int
    stages: int


def forward_blocks(channels: int, dtype: torch.dtype, uniform: bool) -> Blocks:
    """Of the forward kernel; `channels` is the larger of a key's and a value's."""
    if dtype == torch.float32:
        return Blocks(32 if channels > 64 else 64, 32, 8, 1)
    return Blocks(64, 64 if uniform else 32, 8 if channels > 64 else 4, 2)


def query_blocks(channels: int, dtype: torch.dtype, uniform: bool) -> Blocks:
    """Of the kernel of sums over keys; as many rows as columns, or twice as many: see `diagonal_sums`."""
    if dtype == torch.float32:
        return Blocks(32, 32, 8, 1)
    return Blocks(64, 32, 8 if channels > 64 else 4, 2)


def key_blocks(channels: int, dtype: torch.dtype, uniform: bool) -> Blocks:
    """Of the kernel of sums over queries."""
    if dtype == torch.float32:
        return Blocks(32, 32, 8, 1)
    return Blocks(32, 64, 8 if channels > 64 else 4, 2)


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
