"""The gradients of the lag tables, from sums over pairs of each signed lag and over folded tiles, and these sums."""

from typing import no_type_check

import triton
import triton.language as tl

from .fold_tables import SMALLEST
from .pairs import LN2, UNIT


@triton.jit
@no_type_check
def sum_kernel(
    parts, sums, batch, heads, programs, length, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`parts` `(batch, heads, programs, length)` added up to `(heads, length)` in float64, BLOCK numbers of a head."""
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float64)
    for start in range(0, batch * programs, ROWS):
        row = start + tl.arange(0, ROWS)
        place = ((row // programs) * heads + head) * programs + row % programs
        inside = (row < batch * programs)[:, None] & (column < length)[None, :]
        total += tl.load(parts + place[:, None] * length + column[None, :], mask=inside, other=0.0).to(tl.float64)
    tl.store(sums + head * length + column, tl.sum(total, 0), mask=column < length)


@triton.jit
@no_type_check
def spread_moments(moments, spread, last_spread, tile, place, tiles, FOLD: tl.constexpr, TERMS: tl.constexpr):
    """The gradients of T at some lags by one tile each: its moments, times what each adds at the lag's place in it.

    `moments` `(tiles, TERMS, TERMS + 1)`: the last column is the low part of the first. `last_spread` is that of the
    last tile, whose block of queries may be ragged.
    """
    moment = tl.arange(0, TERMS * TERMS)
    row, function = moment // TERMS, moment % TERMS
    inside = (tile >= 0) & (tile < tiles) & (place < 2 * FOLD - 1)
    index = (tile * TERMS * (TERMS + 1))[:, None] + (row * (TERMS + 1) + function)[None, :]
    sums = tl.load(moments + index, mask=inside[:, None], other=0.0)
    low = inside[:, None] & (function == 0)[None, :]
    sums += tl.load(moments + index + TERMS, mask=low, other=0.0)
    where = (moment * (2 * FOLD - 1))[None, :] + place[:, None]
    last = tile == tiles - 1
    parts = tl.load(spread + where, mask=(inside & (tile != tiles - 1))[:, None], other=0.0)
    parts += tl.load(last_spread + where, mask=(inside & last)[:, None], other=0.0)
    return tl.sum(sums * parts, 1)


@triton.jit
@no_type_check
def of_both_signs(sums, ahead, after, behind, before):
    """The sums of lags and of those with the other sign, where there are such."""
    return tl.load(sums + ahead, mask=after, other=0.0) + tl.load(sums + behind, mask=before, other=0.0)


@triton.jit
@no_type_check
def lag_gradients_kernel(
    sums, tables, scalars, moments, spread, last_spread, of_keys, fold_factors,
    gradient, of_power,  # results
    heads, lags, keys, length, first_lag, first_row, tiles, blocks,
    FOLD: tl.constexpr, TERMS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """One program for FOLD lags of a head.

    `sums` `(heads, 3, length)` float64 of the lags from `first_lag` on; `of_keys` `(2, heads, FOLD)` float64: those of
    F and C at each place in a block. The gradients of E, b and w at the edges of folded tiles are among `sums`.

    With `f` and `g` the functions of keys and rows, u is linear in the lags' T, and moments are sums over pairs of the
    score's gradient times `g_a(row) f_p(key)`. So each moment is spread over the lags of its tile. A lag belongs to two
    tiles. `first_row` is the lag of the nearest row of the first tile to its edge.
    """
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    lag = block * FOLD + tl.arange(0, FOLD)
    inside = lag < keys
    ahead, behind = lag - first_lag, -first_lag - lag
    after = inside & (ahead < length)
    before = inside & (lag > 0) & (behind >= 0)
    of_head = sums + head * 3 * length
    of_decay = of_both_signs(of_head, ahead, after, behind, before)
    of_bias = of_both_signs(of_head + length, ahead, after, behind, before)
    of_weight = of_both_signs(of_head + 2 * length, ahead, after, behind, before)
    if FOLDED:
        weights = tables + (head + 2 * heads) * lags
        weight = tl.maximum(tl.load(weights + lag, mask=inside, other=1.0), SMALLEST)
        gain = 1.0 / (UNIT * weight.to(tl.float64))
        place = lag - first_row
        tile, place = place // FOLD, place % FOLD
        evidence = spread_moments(
            moments + head * tiles * TERMS * (TERMS + 1), spread, last_spread, tile, place, tiles,
            FOLD=FOLD, TERMS=TERMS,
        )  # fmt: skip
        evidence += spread_moments(
            moments + head * tiles * TERMS * (TERMS + 1), spread, last_spread, tile - 1, place + FOLD, tiles,
            FOLD=FOLD, TERMS=TERMS,
        )  # fmt: skip
        evidence = tl.where(inside, evidence, 0.0)
        of_gain = evidence * tl.load(scalars + head).to(tl.float64) / (gain * LN2)
        of_bias += evidence
        tl.store(of_power + tl.program_id(0), tl.sum(evidence * tl.log2(gain), 0))
        if block == 0:  # of F and C
            by_place = head * FOLD + FOLD - 1 - lag
            to_factor, to_constant = tl.load(of_keys + by_place), tl.load(of_keys + heads * FOLD + by_place)
            factor = tl.load(fold_factors + by_place).to(tl.float64)
            start = tl.load(tables + head * lags).to(tl.float64)
            start = tl.where(start > 0.0, start, 1.0)
            first_gain = 1.0 / (UNIT * tl.maximum(tl.load(weights), SMALLEST).to(tl.float64))
            constant = (gain - first_gain) / (start * start)
            through_start = tl.sum(to_factor * factor, 0) + 2.0 * tl.sum(to_constant * constant, 0)
            of_decay += (to_factor - tl.where(lag == 0, through_start, 0.0)) / start
            through_first = tl.where(lag == 0, tl.sum(to_constant, 0), 0.0)
            of_gain += (to_constant - through_first) / (start * start)
        of_weight -= of_gain * UNIT * gain * gain
    result = gradient + head * lags + lag
    tl.store(result, of_decay.to(tl.float32), mask=lag < lags)
    tl.store(result + heads * lags, of_bias.to(tl.float32), mask=lag < lags)
    tl.store(result + 2 * heads * lags, of_weight.to(tl.float32), mask=lag < lags)
