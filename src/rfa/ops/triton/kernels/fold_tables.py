"""What folded tiles read of the lag tables: the coefficients of T, and which lags fold. See `folds.py`."""

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
    bits,
    rows,
    failed,
    heads,
    lags,
    keys,
    blocks,
    FOLD: tl.constexpr,
    TERMS: tl.constexpr,
    MOST_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for FOLD lags m of a head, each with the lags `m + n` of a block of keys.

    `functions` and `fit` are `(2 TERMS, FOLD)`, zeros from TERMS on: a product takes at least 16 numbers.
    `failed` gets the longest lag of the program that does not fold, plus 1, or 0.
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

    factor = tl.load(factors + head * FOLD + (FOLD - 1 - n))
    gain, edge_gain = 1.0 / (weight * UNIT), 1.0 / (edge_weight * UNIT)
    first_gains = 1.0 / (tl.maximum(tl.load(weight_table + n), SMALLEST) * UNIT)
    ratio = edge_decay / tl.where(start > 0.0, start, 1.0)
    split = edge_gain[:, None] + (ratio * ratio)[:, None] * (first_gains - 1.0 / (start_weight * UNIT))[None, :]
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
