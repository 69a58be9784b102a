"""Sums over the programs of a kernel: PyTorch's would first write a copy of all parts in float64."""

import torch
from torch import Tensor

_ROWS, _BLOCK = 16, 128


def sum_of_programs(parts: Tensor) -> Tensor:
    """`(batch, heads, programs, ...)`, contiguous, summed over batch and programs: `(heads, ...)` in float64."""
    from .kernels.sums import sum_kernel

    batch, heads, programs, *rest = parts.shape
    sums = parts.new_empty(heads, *rest, dtype=torch.float64)
    length = sums[0].numel()
    blocks = -(-length // _BLOCK)
    with torch.cuda.device_of(parts):
        sum_kernel[(heads * blocks,)](
            parts, sums, batch, heads, programs, length, blocks, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=8
        )
    return sums
