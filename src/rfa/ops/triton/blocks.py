"""Block sizes: one choice for each kernel, head size and precision, made once instead of searched at run time.

Pair arithmetic, not memory, is the bottleneck: a pair holds a dozen float32 values in the forward kernel and some
thirty in the gradients. The sizes are the largest whose values and accumulators ptxas keeps in the registers of an
H100 or H200 without spilling to speak of; two stages of prefetch are enough. In float32 the products are exact ("ieee",
TF32 would cost three digits): they do not run on tensor cores and hold both factors in registers, hence narrower tiles.
They were chosen from what the compiler says for sm_90, not by measurement.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of prefetch in its loop."""

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
