"""The gradients of the lag tables from the sums of folded tiles."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernel import KernelInputs
from ..prior import UNIT
from .fold_constants import FOLD, constant
from .fold_numbers import Folds
from .table_folds import constants_of_keys, gains


def distances(queries: int, keys: int) -> int:
    """The number of distances between a block of queries and a block of keys before it."""
    return -(-queries // FOLD) + (keys - queries) // FOLD


class FoldGradients(NamedTuple):
    """Sums over the folded tiles of all programs and batches, in float64.

    Fields:
        moments: of the scores' gradients, `(heads, distances, TERMS, TERMS)`.
        factor, constant: `(heads, keys)`, of F and C at each key.
    """

    moments: Tensor
    factor: Tensor
    constant: Tensor


def fold_gradients(inputs: KernelInputs, folds: Folds, gradients: FoldGradients) -> tuple[Tensor, Tensor]:
    """What folded tiles add to the gradients of the tables `(3, heads, lags)` and of c `(heads,)`, in float64.

    The gradients of E, b and w at the lags of the edges themselves are among the sums of lags already.
    """
    assert inputs.tables is not None
    tables = inputs.tables[..., : inputs.key.shape[2]]
    decay, power, gain = tables[0].double(), inputs.scalars[0].double(), gains(tables[2])
    factor, constants = folds.factors.flip(-1).double(), constants_of_keys(tables)
    start = torch.where(decay[:, :1] > 0.0, decay[:, :1], 1.0)
    result = torch.zeros_like(tables, dtype=torch.float64)

    to_factor, to_constant = (_by_distance(x) for x in (gradients.factor, gradients.constant))
    result[0, :, :FOLD] += to_factor / start
    result[0, :, 0] -= ((to_factor * factor).sum(-1) + 2.0 * (to_constant * constants).sum(-1)) / start[:, 0]
    to_gain = torch.zeros_like(gain)
    to_gain[:, :FOLD] += to_constant / start**2
    to_gain[:, 0] -= to_constant.sum(-1) / start[:, 0] ** 2

    evidence = _evidence_gradient(gradients.moments, inputs)
    result[1] += evidence
    to_gain += evidence * power[:, None] / (gain * math.log(2.0))
    result[2] -= to_gain * UNIT * gain.square()
    result = F.pad(result, (0, inputs.lags - result.shape[-1]))
    return result, (evidence * gain.log2()).sum(-1)


def _by_distance(x: Tensor) -> Tensor:
    """Sums `(heads, keys)` over the blocks, `(heads, FOLD)`, by the distance to the edge."""
    return F.pad(x, (0, -x.shape[-1] % FOLD)).unflatten(-1, (-1, FOLD)).sum(1).flip(-1)


def _evidence_gradient(moments: Tensor, inputs: KernelInputs) -> Tensor:
    """The gradient of T at each lag, `(heads, lags)`, less what its values at the edges have.

    With `f` and `g` the functions of keys and rows, u is linear in the lags' T, and moments are sums over pairs of the
    score's gradient times `g_a(row) f_p(key)`. So each moment is spread over the lags of its tile. Only the last block
    of queries is at the greatest distance.
    """
    queries = inputs.query.shape[2]
    whole, ragged = (constant("spread", moments.device, rows) for rows in (FOLD, queries % FOLD or FOLD))
    moments = moments.flatten(-2)
    tiles = torch.cat([moments[:, :-1] @ whole, moments[:, -1:] @ ragged], dim=1)  # (heads, distances, 127)
    offset = inputs.key.shape[2] - queries
    first = offset % FOLD - (FOLD - 1)  # the lag of the nearest row of distance 0 to its edge
    count = tiles.shape[1]
    lags = torch.zeros(tiles.shape[0], (count + 2) * FOLD, dtype=torch.float64, device=tiles.device)
    for part in (0, 1):
        piece = F.pad(tiles[..., part * FOLD : (part + 1) * FOLD], (0, part))
        lags[:, part * FOLD : (part + count) * FOLD] += piece.flatten(1)
    lags = lags[:, -first:][:, : inputs.key.shape[2]]
    return F.pad(lags, (0, inputs.key.shape[2] - lags.shape[-1]))
