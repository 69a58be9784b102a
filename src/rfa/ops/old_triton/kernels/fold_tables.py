"""What folded tiles read of the lag tables: F and C, the coefficients of T, and which lags fold. See `folds.py`."""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import UNIT, product

SMALLEST = tl.constexpr(2.0**-120)  # of w / UNIT; a smaller one does not fold


@triton.jit
@no_type_check
def fold_tables_kernel(
    tables,
    scalars,
    functions,
    fit,
    factors,
    constants,
    bits,
    rows,
    failed,
    heads,
    lags,
    keys,
    blocks,
    FOLD: tl.constexpr,
    TERMS: tl.constexpr,
    LEAST_FACTOR: tl.constexpr,
    MOST_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for FOLD lags m of a head, each with the lags `m + n` of a block of keys.

    `functions` and `fit` are `(2 TERMS, FOLD)`, zeros from TERMS on: a product takes at least 16 numbers.
    `failed` gets the longest lag of the program that does not fold, plus 1, or 0.
    The first program of a head stores F and C by a key's place in its block. F is 1 where it would be too small.
    """
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    m = block * FOLD + tl.arange(0, FOLD)
    n = tl.arange(0, FOLD)
    term = tl.arange(0, 2 * TERMS)
    lag = tl.minimum(m[:, None] + n[None, :], keys - 1)
    at_edge = tl.minimum(m, keys - 1)
    decay_table, bias_table, weight_table = (
        tables + head * lags,
        tables + (head + heads) * lags,
        tables + (head + 2 * heads) * lags,
    )
    decay, bias = tl.load(decay_table + lag), tl.load(bias_table + lag)
    weight = tl.maximum(tl.load(weight_table + lag), SMALLEST)
    edge_decay, edge_bias = tl.load(decay_table + at_edge), tl.load(bias_table + at_edge)
    edge_weight = tl.maximum(tl.load(weight_table + at_edge), SMALLEST)
    start, start_weight = tl.load(decay_table), tl.maximum(tl.load(weight_table), SMALLEST)
    power = tl.load(scalars + head)

    of_lag = term[:, None] * FOLD + n[None, :]
    change = (bias - edge_bias[:, None]) - power * tl.log2(weight / edge_weight[:, None])
    coefficients = product(change, tl.trans(tl.load(fit + of_lag)), PRECISION=PRECISION)
    high = coefficients.to(tl.float16)
    low = (coefficients - high.to(tl.float32)).to(tl.float16)
    fitted = product(high.to(tl.float32) + low.to(tl.float32), tl.load(functions + of_lag), PRECISION=PRECISION)

    first_weights = tl.maximum(tl.load(weight_table + n), SMALLEST)
    divisor = tl.where(start > 0.0, start, 1.0)
    factor = tl.load(decay_table + n) / divisor
    factor = tl.where((start > 0.0) & (tl.load(decay_table + FOLD - 1) / divisor >= LEAST_FACTOR), factor, 1.0)
    if block == 0:
        place = head * FOLD + (FOLD - 1 - n)
        tl.store(factors + place, factor)
        gains, first_gain = 1.0 / (first_weights.to(tl.float64) * UNIT), 1.0 / (start_weight.to(tl.float64) * UNIT)
        square = divisor.to(tl.float64) * divisor.to(tl.float64)
        tl.store(constants + place, ((gains - first_gain) / square).to(tl.float32))

    gain, edge_gain = 1.0 / (weight * UNIT), 1.0 / (edge_weight * UNIT)
    ratio = edge_decay / divisor
    split = edge_gain[:, None] + (ratio * ratio)[:, None] * (1.0 / (first_weights * UNIT) - 1.0 / (start_weight * UNIT))
    good = tl.abs(fitted - change) <= 0.000244140625  # 2^-12 of a bit
    good &= tl.abs(edge_decay[:, None] * factor[None, :] - decay) <= decay * 6.103515625e-05 + 8.673617379884035e-19
    good &= tl.abs(split - gain) * (1.0 + power) <= gain * 0.000244140625
    most = tl.max(tl.abs(coefficients), 1)
    bad = (tl.min(good.to(tl.int32), 1) == 0) | (most > MOST_BITS) | (most != most)
    inside = m < keys - FOLD + 1
    tl.store(failed + tl.program_id(0), tl.max(tl.where(bad & inside, m + 1, 0), 0))

    kept = inside[:, None] & (term < TERMS)[None, :]
    index = (head * (keys - FOLD + 1) + m)[:, None] * (2 * TERMS) + term[None, :]
    tl.store(bits + index, high, mask=kept)
    tl.store(bits + index + TERMS, low, mask=kept)
    row = rows + head * 2 * keys + m
    tl.store(row, edge_weight * UNIT, mask=m < keys)
    tl.store(row + keys, -2.0 * edge_decay * (edge_weight * UNIT), mask=m < keys)


@triton.jit
@no_type_check
def largest_norm(norms, length, BLOCK: tl.constexpr):
    """Of the states that are not poisoned."""
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        norm = tl.load(norms + place, mask=place < length, other=0.0)
        largest = tl.maximum(largest, tl.where(norm == norm, norm, 0.0))
    return tl.max(largest, 0)


@triton.jit
@no_type_check
def nearest_kernel(
    tables,
    scalars,
    failed,
    query_norm,
    nearest,
    least_gain,
    heads,
    lags,
    queries,
    keys,
    blocks,
    BLOCK: tl.constexpr,
    MOST_POWER: tl.constexpr,
    LEAST_GAIN: tl.constexpr,
    LEAST_RESIDUAL: tl.constexpr,
    NEVER: tl.constexpr,
):
    """The shortest lag of each batch and head that folds, or NEVER; and the least G of the lags of a head that fold."""
    pair = tl.program_id(0).to(tl.int64)
    head = pair % heads
    place = tl.arange(0, BLOCK)
    longest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, blocks, BLOCK):
        found = tl.load(failed + head * blocks + start + place, mask=start + place < blocks, other=0)
        longest = tl.maximum(longest, found)
    first = tl.max(longest, 0)

    weights = tables + (head + 2 * heads) * lags
    most, fewest = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], float("inf"), tl.float32)
    unknown = tl.zeros([BLOCK], tl.int32)
    for start in range(0, keys, BLOCK):
        lag = start + place
        weight = tl.load(weights + lag, mask=lag < keys, other=float("inf"))
        fewest = tl.minimum(fewest, weight)
        most = tl.maximum(most, tl.where((lag >= first) & (lag < keys), weight, 0.0))
        unknown = tl.maximum(unknown, (weight != weight).to(tl.int32))

    least, greatest = 1.0 / (tl.max(most, 0) * UNIT), 1.0 / (tl.min(fewest, 0) * UNIT)
    norm = largest_norm(query_norm + pair * queries, queries, BLOCK=BLOCK)
    good = (tl.load(scalars + head) <= MOST_POWER) & (tl.max(unknown, 0) == 0)
    good &= (least >= 9.094947017729282e-13) & (greatest <= 1099511627776.0)  # 2^-40 and 2^40
    good &= (norm * LEAST_GAIN <= least) & (norm >= LEAST_RESIDUAL / (tl.load(weights) * UNIT))
    tl.store(nearest + pair, tl.where(good, first, NEVER))
    if pair < heads:
        tl.store(least_gain + head, least)


@triton.jit
@no_type_check
def poisoned_kernel(value_norm, poisoned, keys, blocks, FOLD: tl.constexpr, BLOCKS: tl.constexpr):
    """How many values up to the end of each whole block have a norm of NaN."""
    pair = tl.program_id(0).to(tl.int64)
    before = 0
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        index = block[:, None] * FOLD + tl.arange(0, FOLD)[None, :]
        norm = tl.load(value_norm + pair * keys + index, mask=(block < blocks)[:, None], other=0.0)
        count = tl.sum((norm != norm).to(tl.int32), 1)
        tl.store(poisoned + pair * blocks + block, before + tl.cumsum(count, 0), mask=block < blocks)
        before += tl.sum(count, 0)
