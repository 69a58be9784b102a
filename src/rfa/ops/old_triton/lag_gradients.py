"""The gradients of the lag tables, from sums over pairs of each lag and over folded tiles."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.ops.kernel import KernelInputs

from .fold_constants import FOLD, TERMS, constant
from .fold_numbers import Folds

_SUMMED_ROWS, _SUMMED_BLOCK = 16, 128  # of a program


def distances(queries: int, keys: int) -> int:
    """The number of distances between a block of queries and a block of keys before it."""
    return -(-queries // FOLD) + (keys - queries) // FOLD


class LagSums(NamedTuple):
    """Sums of the query kernel over pairs, of all programs and batches.

    Fields:
        lags: of E, b and w at the signed lags from `first_lag <= 0` on, `(heads, 3, lags)` float64.
        first_lag: of these.
        power: of c for each row, `(batch, heads, 1, queries)` float32.
        moments: of the scores' gradients over folded tiles, `(heads, distances, TERMS, TERMS + 1)` float64. The last
            column is the low part of the first. None without folds.
    """

    lags: Tensor
    first_lag: int
    power: Tensor
    moments: Tensor | None


def lag_gradients(
    inputs: KernelInputs, folds: Folds | None, sums: LagSums, of_keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of the tables `(3, heads, lags)` and of c `(1, heads)`.

    Args:
        inputs: of the kernels.
        folds: of the call.
        sums: of the query kernel.
        of_keys: of the key kernel, of F and C at each key: `(2, batch, heads, keys)` float32. None without folds.
    """
    from .kernels.lag_gradients import lag_gradients_kernel

    assert inputs.tables is not None
    _, heads, lags = inputs.tables.shape
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    device, blocks, offset = sums.lags.device, -(-lags // FOLD), keys - queries
    gradient = torch.empty(3, heads, lags, dtype=torch.float32, device=device)
    of_power = None if folds is None else sums.lags.new_empty(heads, blocks)
    spreads: tuple[Tensor | None, ...] = (None, None)
    if of_keys is not None:
        of_keys = F.pad(of_keys, (0, -keys % FOLD)).unflatten(-1, (-1, FOLD)).sum((1, 3), dtype=torch.float64)
        spreads = (constant("spread", device, FOLD), constant("spread", device, queries % FOLD or FOLD))
    with torch.cuda.device_of(gradient):
        lag_gradients_kernel[(heads * blocks,)](
            sums.lags,
            inputs.tables.contiguous(),
            inputs.scalars[0].float().contiguous(),
            sums.moments,
            *spreads,
            of_keys,
            None if folds is None else folds.factors,
            gradient,
            of_power,
            heads,
            lags,
            keys,
            sums.lags.shape[-1],
            sums.first_lag,
            offset % FOLD - (FOLD - 1),
            distances(queries, keys),
            blocks,
            FOLD=FOLD,
            TERMS=TERMS,
            FOLDED=folds is not None,
        )
    power = sums.power.sum((0, 2, 3), dtype=torch.float64)
    if of_power is not None:
        power = power + of_power.sum(1)
    return gradient, power[None].to(inputs.scalars.dtype)


def sum_of_programs(parts: Tensor) -> Tensor:
    """`(batch, heads, programs, ...)`, contiguous, summed over batch and programs: `(heads, ...)` in float64.

    PyTorch's sum would first write a copy of all parts in float64.
    """
    from .kernels.lag_gradients import sum_kernel

    batch, heads, programs, *rest = parts.shape
    sums = parts.new_empty(heads, *rest, dtype=torch.float64)
    length = sums[0].numel()
    blocks = -(-length // _SUMMED_BLOCK)
    with torch.cuda.device_of(parts):
        sum_kernel[(heads * blocks,)](
            parts, sums, batch, heads, programs, length, blocks, ROWS=_SUMMED_ROWS, BLOCK=_SUMMED_BLOCK, num_warps=8
        )
    return sums
