"""The forward kernel: one program for a block of rows of a head."""

from typing import no_type_check

import triton
import triton.language as tl

from .tiles import (
    COUNTS,
    EDGE,
    FOLD,
    FULL,
    HALF,
    MOST_NORM,
    NEAREST,
    NONE,
    PAIRS,
    TABLES,
    TERMS,
    lags_of,
    log2,
    product,
    row_numbers,
)


@triton.jit
@no_type_check
def add_tile(
    state, part, q, q_norm, positions, groups, key, value, key_number, key_groups, tables, bits, terms, scalars,
    keys, length, step,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WAY: tl.constexpr, CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr, EXPONENTIAL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The highest score, the sum of weights and the estimate at the tile's edge, with the keys of one more tile."""
    highest, total, estimate = state
    power, least = scalars
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    channel, width = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    at_key = key + columns[:, None] * CHANNELS + channel[None, :]
    at_value = value + columns[:, None] * WIDTH + width[None, :]
    k, number = tl.load(at_key), tl.load(key_number + columns)
    dot = product(q, tl.trans(k), FAST=FAST)
    m = positions - (part * COLUMNS // FOLD * FOLD + (FOLD - 1))
    if WAY == PAIRS:
        lag = lags_of(positions[:, None], columns[None, :], CAUSAL=CAUSAL)
        e, variance, z = row_numbers(lag, tables, length)
        gain = q_norm[:, None] + variance
    else:
        if WAY == EDGE:
            m = tl.maximum(m, NEAREST)
        e, variance, bias = row_numbers(m, tables, length)
        e, gain = e[:, None], (q_norm + variance)[:, None]
        if WAY == FULL:
            coefficients = tl.load(bits + m[:, None] * (2 * TERMS) + tl.arange(0, 2 * TERMS)[None, :])
            z = product(coefficients, terms, FAST=FAST)
        else:
            lag = lags_of(positions[:, None], columns[None, :], CAUSAL=CAUSAL)
            z = tl.load(tables + length + (FOLD - 1) + lag)
    g = e * tl.fma(e, number[None, :], dot) + gain
    if EXPONENTIAL:  # r / (nu d Sigma~), with T = -beta log2 Sigma
        z = z - power * tl.maximum(g / variance - 1.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        if WAY != FULL:
            g = tl.maximum(g, least, propagate_nan=tl.PropagateNan.ALL)  # below by rounding alone
        logarithm = log2(g, FAST=FAST)
        z = tl.fma(logarithm, -power, z)  # not a sum: Triton would begin the product of T with it, and so wait for it
    if WAY != FULL:
        seen = (columns < keys)[None, :]
        if CAUSAL:
            seen = seen & (positions[:, None] >= columns[None, :])
        if GROUPS:
            of_keys = tl.load(key_groups + columns, mask=columns < keys, other=-1)
            seen = seen & (groups[:, None] == of_keys[None, :])
        z = tl.where(seen, z, NONE)
    best = tl.max(z, 1)
    if WAY == FULL:
        best += bias
    higher = tl.maximum(highest, tl.ceil(best))  # whole: each rescaling is then a power of two
    start = higher - bias if WAY == FULL else higher
    weight = tl.exp2(z - start[:, None])
    if WAY != FULL:
        weight = tl.where(seen, weight, 0.0)  # a row that sees no key yet
    rescale = tl.exp2(highest - higher)
    v = tl.load(at_value)
    total = total * rescale[:, None]
    if WAY == PAIRS:
        total += tl.sum(weight, 1)[:, None]
        estimate = estimate * rescale[:, None]
        if FAST and v.dtype != tl.float32:  # rounded weights times e would not be those that the gradients see
            estimate += tl.dot(weight * e, v.to(tl.float32), input_precision="tf32")
        else:
            estimate += product(weight * e, v.to(tl.float32), FAST=FAST)
    else:  # the sum is that of the rounded weights: those of the estimate then sum to 1
        weight = weight.to(v.dtype)
        estimate = estimate * (rescale * step)[:, None]
        if FAST:
            total = tl.dot(weight, tl.full([COLUMNS, 16], 1.0, v.dtype), total)
            estimate = tl.dot(weight, v, estimate)
        else:
            total += tl.sum(weight.to(tl.float32), 1)[:, None]
            estimate += product(weight, v, FAST=FAST)
    return higher, total, estimate


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def forward_kernel(
    query, query_norm, key, value, key_number, tables, bits, terms, numbers, folds,
    key_groups, query_groups, first_block, cos, sin,
    out, low, log_sum,
    heads, queries, keys, row_length, key_length, length, row_blocks, first_stride, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr, EXPONENTIAL: tl.constexpr, TURN: tl.constexpr, LOW: tl.constexpr, FOLDS: tl.constexpr,
    STAGES: tl.constexpr, EDGE_STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The estimate, what its rounding leaves out, and `log2 sum_j 2^z`.

    `numbers` are `(3, heads)`: `-mu` in bits, c, and the least `nu d Sigma~`.
    """
    block = row_blocks - 1 - tl.program_id(0) % row_blocks  # the longest first
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    offset = keys - queries
    positions = offset + rows
    channel, width = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    at_row = pair * queries + rows
    padded = pair * row_length + rows
    q = tl.load(query + padded[:, None] * CHANNELS + channel[None, :])
    q_norm = tl.load(query_norm + padded)
    least = tl.load(numbers + 2 * heads + head)
    scalars = tl.load(numbers + heads + head), least
    groups = positions
    if GROUPS:
        groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)
        key_groups += batch * keys
    key += pair * key_length * CHANNELS
    value += pair * key_length * WIDTH
    key_number += pair * key_length
    tables += head * TABLES * length
    bits += head * length * (2 * TERMS)
    term, n = tl.arange(0, 2 * TERMS), tl.arange(0, FOLD)
    of_keys = tl.load(terms + term[:, None] * FOLD + n[None, :])
    first, last = 0, tl.cdiv(keys, FOLD)
    if CAUSAL:
        last = tl.minimum(last, tl.cdiv(offset + (block + 1) * ROWS, FOLD))
    if FIRST:
        first = tl.load(first_block + (batch * first_stride + head) * row_blocks + block)
    highest = tl.full([ROWS], NONE, tl.float32)
    total, estimate = tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    in_pairs = first
    if FOLDS:
        folded = tl.load(folds + head) != 0
        in_pairs, end = tl.where(folded, last, first), tl.where(folded, last, first)
        full = first
        if not GROUPS:
            full = tl.maximum(tl.minimum((offset + block * ROWS + 1) // FOLD, last), first)
            full = tl.where(folded & (tl.max(q_norm, 0) <= least * MOST_NORM), full, first)
        step = tl.exp2(tl.load(numbers + head) * FOLD)
        for part in tl.range(first, full, num_stages=STAGES):
            highest, total, estimate = add_tile(
                (highest, total, estimate), part, q, q_norm, positions, groups, key, value, key_number, key_groups,
                tables, bits, of_keys, scalars, keys, length, step,
                CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=FOLD, WAY=FULL, CAUSAL=CAUSAL, GROUPS=GROUPS,
                EXPONENTIAL=EXPONENTIAL, FAST=FAST,
            )  # fmt: skip
        for part in tl.range(full * 2, end * 2, num_stages=EDGE_STAGES):
            highest, total, estimate = add_tile(
                (highest, total, estimate), part, q, q_norm, positions, groups, key, value, key_number, key_groups,
                tables, bits, of_keys, scalars, keys, length, tl.where(part % 2 == 0, step, 1.0),
                CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=HALF, WAY=EDGE, CAUSAL=CAUSAL, GROUPS=GROUPS,
                EXPONENTIAL=EXPONENTIAL, FAST=FAST,
            )  # fmt: skip
        e = tl.load(tables + 3 * length + (FOLD - 1) + tl.maximum(positions - (last * FOLD - 1), NEAREST))
        estimate = estimate * tl.where(folded, e, 1.0)[:, None]
    for part in tl.range(in_pairs * 2, last * 2, num_stages=1):
        highest, total, estimate = add_tile(
            (highest, total, estimate), part, q, q_norm, positions, groups, key, value, key_number, key_groups,
            tables, bits, of_keys, scalars, keys, length, 1.0,
            CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=HALF, WAY=PAIRS, CAUSAL=CAUSAL, GROUPS=GROUPS,
            EXPONENTIAL=EXPONENTIAL, FAST=FAST,
        )  # fmt: skip
    total = tl.sum(total, 1) * (1.0 / 16)
    some = total != 0.0  # NaN too
    total = tl.where(some, total, 1.0)
    estimate = estimate / total[:, None]
    tl.store(log_sum + at_row, tl.where(some, highest + tl.log2(total), float("-inf")), mask=in_rows)
    if TURN:
        mode = tl.arange(0, WIDTH // 2)
        real, imaginary = tl.split(tl.permute(tl.reshape(estimate, [ROWS, 2, WIDTH // 2]), (0, 2, 1)))
        phase = batch * phase_batch + head * phase_head + rows[:, None] * (WIDTH // 2) + mode[None, :]
        c = tl.load(cos + phase, mask=in_rows[:, None], other=0.0)
        s = tl.load(sin + phase, mask=in_rows[:, None], other=0.0)
        first_half, second_half = c * real - s * imaginary, s * real + c * imaginary
        index = at_row[:, None] * WIDTH + mode[None, :]
        store_rounded(out + index, low + index, first_half, in_rows, LOW=LOW)
        store_rounded(out + index + WIDTH // 2, low + index + WIDTH // 2, second_half, in_rows, LOW=LOW)
    else:
        index = at_row[:, None] * WIDTH + width[None, :]
        store_rounded(out + index, low + index, estimate, in_rows, LOW=LOW)


@triton.jit
@no_type_check
def store_rounded(out, low, estimate, in_rows, LOW: tl.constexpr):
    """The rounded estimate and, for the backward pass, the rest: a rounded `<dout, out>` would not sum dS to 0."""
    rounded = estimate.to(out.dtype.element_ty)
    tl.store(out, rounded, mask=in_rows[:, None])
    if LOW:
        tl.store(low, (estimate - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=in_rows[:, None])
