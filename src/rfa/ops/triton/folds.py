"""Lags that are split at the edges of blocks of keys: for uniform causal times, half precision, Student-t weights.

The formulas are in `kernels/folds.py`. A kernel takes a tile of pairs by them where the lag tables of the head allow
it, and pair by pair where they do not. This file finds out which tiles these are, and carries the gradients of the
parts back to the tables.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernel import KernelInputs
from ..prior import UNIT

Array = npt.NDArray[Any]

FOLD = 64  # keys of a block
TERMS = 8  # of the expansion of T within a block
MOST_POWER = 24.0  # a larger c multiplies the rounding of the gradients of the tables
MOST_BITS = 1000.0  # of a coefficient of T
LEAST_FACTOR = 2.0**-12  # of a key at the start of a block: float16 keeps eleven digits of it
LEAST_GAIN = 2.0**-14  # of G over |q|^2: a residual may be negative by rounding, but never as far as -G
NEVER = 2**30  # no lag is as long


class Folds(NamedTuple):
    """What the kernels read of a call's folds.

    Fields:
        rows: `1 / G` and `-2 E / G` of each lag, `(heads, 2, lags)` float32.
        columns: `-(|k'|^2 + C) / 2`, `(batch, heads, keys)` float32.
        bits: the coefficients u of T, high and low parts, `(heads, lags - FOLD + 1, 2 TERMS)` float16.
        terms: their functions of a key's place in its block, `(2 TERMS, FOLD)` float16.
        factors: F of a key's state by its place, `(heads, FOLD)` float32.
        nearest: the shortest lag from a row to the edge of a block that folds, `(batch, heads)` int32.
        blocks: how many blocks may fold, `(batch,)` int32: those of present keys where padding stands at the end. None
            without groups. Packed sequences, and padding elsewhere, do not fold.
    """

    rows: Tensor
    columns: Tensor
    bits: Tensor
    terms: Tensor
    factors: Tensor
    nearest: Tensor
    blocks: Tensor | None


@cache
def _functions() -> tuple[Array, Array, Array]:
    """The functions `(TERMS, FOLD)` of a key's distance n to the edge, which are 0 at 0, as float16 holds them; the
    matrix that fits them; Legendre's polynomials `(TERMS, FOLD)` of a row's place in its block.
    """
    distance = np.arange(FOLD)
    polynomials = np.polynomial.legendre.legvander(2.0 * distance / (FOLD - 1) - 1.0, TERMS - 1).T
    functions = (distance / FOLD * polynomials).astype(np.float16).astype(np.float64)
    return functions, np.linalg.pinv(functions.T), polynomials


def _spread(rows: int) -> Array:
    """What a moment `(TERMS, TERMS)` of a tile of so many rows adds to T at its lags, from the nearest row's on."""
    _, fit, polynomials = _functions()
    fit_rows = np.linalg.pinv(polynomials[:, :rows].T, rcond=1e-6)
    spread = np.zeros((TERMS, TERMS, 2 * FOLD - 1))
    for row in range(rows):
        spread[:, :, row : row + FOLD] += fit_rows[:, row, None, None] * fit
        spread[:, :, row] -= fit_rows[:, row, None] * fit.sum(-1)
    return spread.reshape(TERMS * TERMS, -1)


_constants: dict[tuple[str, torch.device], Tensor] = {}


def _constant(name: str, device: torch.device, make: Callable[[], Array]) -> Tensor:
    """A constant on a device, copied once: a graph of CUDA calls cannot copy from the host."""
    if (name, device) not in _constants:
        constant = torch.from_numpy(make()).to(device)
        if type(constant) is not Tensor:  # of a tracer
            return constant
        _constants[name, device] = constant
    return _constants[name, device]


def may_fold(inputs: KernelInputs) -> bool:
    """Whether a call has blocks to fold, as far as the host can tell without reading a tensor."""
    return (
        inputs.tables is not None
        and inputs.causal
        and inputs.score_kind == "student_t"
        and inputs.query.dtype != torch.float32
        and inputs.key.shape[2] >= 2 * FOLD
    )


def key_factors(inputs: KernelInputs) -> Tensor | None:
    """`Folds.factors`; 1 in heads that do not fold. None for a call that does not."""
    if not may_fold(inputs) or inputs.tables is None:
        return None
    decay = inputs.tables[0, :, :FOLD]
    factors = decay / decay[:, :1]
    return torch.where(factors[:, -1:] >= LEAST_FACTOR, factors, 1.0).flip(-1).contiguous()


def folds_of(inputs: KernelInputs, factors: Tensor, query_norm: Tensor, key_norm: Tensor) -> Folds:
    """The coefficients of T, and from which lag on each head folds.

    A lag m folds if E, G and T of the lags m to `m + FOLD - 1` are what the formulas make of them, for all lags from m
    on. No tensor is read on the host.
    """
    assert inputs.tables is not None
    device = inputs.tables.device
    functions = _constant("functions", device, lambda: _functions()[0])
    fit = _constant("fit", device, lambda: _functions()[1])
    decay, bias, weight = inputs.tables.double()
    power, gain = inputs.scalars[0].double()[:, None], _gain(weight)
    evidence = bias + power * gain.log2()  # T
    windows = [x.unfold(-1, FOLD, 1) for x in (decay, gain, evidence)]
    at_edge = [x[..., 0] for x in windows]
    change = windows[2] - at_edge[2][..., None]
    coefficients = change @ fit.T
    high = coefficients.half()
    low = (coefficients - high.double()).half()
    fitted = (high.double() + low.double()) @ functions
    factor = factors.flip(-1).double()
    constant = _constants_of_keys(decay, gain)
    split_decay = at_edge[0][..., None] * factor[:, None]
    split_gain = at_edge[1][..., None] + at_edge[0].square()[..., None] * constant[:, None]
    good = (fitted - change).abs() <= 2.0**-12
    good &= (split_decay - windows[0]).abs() <= 2.0**-14 * windows[0] + 2.0**-60
    good &= (split_gain - windows[1]).abs() * (1.0 + power[..., None]) <= 2.0**-12 * windows[1]
    good = good.all(-1) & (coefficients.abs() <= MOST_BITS).all(-1)
    lags = torch.arange(1, good.shape[-1] + 1, device=good.device)
    nearest = torch.where(good, 0, lags).amax(-1)
    least = gain[:, : inputs.key.shape[2]].amin(-1)
    greatest = gain[:, : inputs.key.shape[2]].amax(-1)
    mild = (power[:, 0] <= MOST_POWER) & (least >= 2.0**-40) & (greatest <= 2.0**40)
    largest = torch.nan_to_num(query_norm, nan=0.0).amax(-1)
    mild = mild & (largest * LEAST_GAIN <= least)
    nearest = torch.where(mild, nearest, NEVER).to(torch.int32).contiguous()
    bits = torch.stack([high, low], dim=-2).flatten(-2).contiguous()
    terms = functions.flip(-1).half().repeat(2, 1).contiguous()  # a key's place counts from the start of its block
    rows = torch.stack([1.0 / gain, -2.0 * decay / gain], dim=1).float()
    keys = key_norm.shape[-1]
    at_keys = constant.flip(-1).float().repeat(1, -(-keys // FOLD))[:, :keys]
    return Folds(rows, -0.5 * (key_norm + at_keys), bits, terms, factors, nearest, _blocks_of_present_keys(inputs))


def _blocks_of_present_keys(inputs: KernelInputs) -> Tensor | None:
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
    whole = value_norm[..., : value_norm.shape[-1] // FOLD * FOLD]
    return whole.unflatten(-1, (-1, FOLD)).isnan().sum(-1).cumsum(-1).to(torch.int32)


def _gain(weight: Tensor) -> Tensor:
    """G; finite where w is 0, in heads that do not fold."""
    return 1.0 / (UNIT * weight.clamp(min=2.0**-120))


def _constants_of_keys(decay: Tensor, gain: Tensor) -> Tensor:
    """C of the distances 0 to FOLD - 1, `(heads, FOLD)`."""
    start = torch.where(decay[:, :1] > 0.0, decay[:, :1], 1.0)
    return (gain[:, :FOLD] - gain[:, :1]) / start.square()


def distances(queries: int, keys: int) -> int:
    """The number of distances between a block of queries and a block of keys before it."""
    return -(-queries // FOLD) + (keys - queries) // FOLD


def row_polynomials(device: torch.device) -> Tensor:
    """Functions `(TERMS, FOLD)` of a row's place in its block: by them gradients of u are summed over rows."""
    return _constant("rows", device, lambda: _functions()[2].astype(np.float32))


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
    decay, _, weight = inputs.tables.double()
    power, gain = inputs.scalars[0].double(), _gain(weight)
    factor, constant = folds.factors.flip(-1).double(), _constants_of_keys(decay, gain)
    start = torch.where(decay[:, :1] > 0.0, decay[:, :1], 1.0)
    result = torch.zeros_like(inputs.tables, dtype=torch.float64)

    to_factor, to_constant = (_by_distance(x) for x in (gradients.factor, gradients.constant))
    result[0, :, :FOLD] += to_factor / start
    result[0, :, 0] -= ((to_factor * factor).sum(-1) + 2.0 * (to_constant * constant).sum(-1)) / start[:, 0]
    to_gain = torch.zeros_like(gain)
    to_gain[:, :FOLD] += to_constant / start**2
    to_gain[:, 0] -= to_constant.sum(-1) / start[:, 0] ** 2

    evidence = _evidence_gradient(gradients.moments, inputs)
    result[1] += evidence
    to_gain += evidence * power[:, None] / (gain * math.log(2.0))
    result[2] -= to_gain * UNIT * gain.square()
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
    whole, ragged = (
        _constant(f"spread {rows}", moments.device, partial(_spread, rows)) for rows in (FOLD, queries % FOLD or FOLD)
    )
    moments = moments.flatten(-2)
    tiles = torch.cat([moments[:, :-1] @ whole, moments[:, -1:] @ ragged], dim=1)  # (heads, distances, 127)
    offset = inputs.key.shape[2] - queries
    first = offset % FOLD - (FOLD - 1)  # the lag of the nearest row of distance 0 to its edge
    count = tiles.shape[1]
    lags = torch.zeros(tiles.shape[0], (count + 2) * FOLD, dtype=torch.float64, device=tiles.device)
    for part in (0, 1):
        piece = F.pad(tiles[..., part * FOLD : (part + 1) * FOLD], (0, part))
        lags[:, part * FOLD : (part + count) * FOLD] += piece.flatten(1)
    lags = lags[:, -first:] if first <= 0 else F.pad(lags, (first, 0))
    lags = lags[:, : inputs.lags]
    return F.pad(lags, (0, inputs.lags - lags.shape[-1]))
