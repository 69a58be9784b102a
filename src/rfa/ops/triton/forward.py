"""The forward kernel, and the one that certifies what it may leave out: a program for a block of rows of a head."""

from typing import no_type_check

import triton
import triton.language as tl

from .tiles import (
    COUNTS,
    EDGE,
    FOLD,
    FULL,
    HALF,
    NONE,
    PAIRS,
    TABLES,
    TERMS,
    counted,
    lag_numbers,
    load_states,
    log2,
    product,
    tiles_of_rows,
    turn_and_store,
)

ROUNDING = tl.constexpr(2.0**-16)  # of g beside its terms, at most; and of a log sum, in bits


@triton.jit
@no_type_check
def add_tile(
    state, part, of_rows, of_keys, key_groups, terms, scalars, keys, length, step,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WAY: tl.constexpr, GROUPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The highest score, the sum of weights and the estimate at the tile's edge, with the keys of one more tile."""
    highest, total, estimate = state
    q, q_norm, positions, groups = of_rows
    key, value, key_number, tables, bits = of_keys
    power, least = scalars
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    tile = part // (FOLD // COLUMNS)
    k, number = load_states(key, columns, CHANNELS=CHANNELS), tl.load(key_number + columns)
    dot = product(q, tl.trans(k), FAST=FAST)
    e, gain, z = lag_numbers(positions, columns, tile, q_norm, tables, length, ROWS_AT=0, WAY=WAY)
    bias = 0.0
    if WAY == FULL:
        bias = z
        at_bits = bits + (positions - (tile * FOLD + (FOLD - 1)))[:, None] * (2 * TERMS)
        z = product(tl.load(at_bits + tl.arange(0, 2 * TERMS)[None, :]), terms, FAST=FAST)
    g = e * tl.fma(e, number[None, :], dot) + gain
    if WAY != FULL:
        g = tl.maximum(g, least, propagate_nan=tl.PropagateNan.ALL)  # below by rounding alone
    logarithm = log2(g, FAST=FAST)
    z = tl.fma(logarithm, -power, z)  # not a sum: Triton would begin the product of T with it, and so wait for it
    if WAY != FULL:
        of_columns = columns
        if GROUPS:
            of_columns = tl.load(key_groups + columns, mask=columns < keys, other=-1)
        z = tl.where(counted(positions, columns, groups, of_columns, ROWS_AT=0, GROUPS=GROUPS), z, NONE)
    higher = tl.maximum(highest, tl.ceil(tl.max(z, 1) + bias))  # whole: each rescaling is then a power of two
    weight = tl.exp2(z - (higher - bias)[:, None])
    rescale = tl.exp2(highest - higher)
    v = load_states(value, columns, CHANNELS=WIDTH)
    total, estimate = total * rescale[:, None], estimate * (rescale * step)[:, None]
    if WAY == PAIRS:
        total += tl.sum(weight, 1)[:, None]
        # not in half precision: rounded weights times e would not be those that the gradients see
        estimate = product(weight * e, v.to(tl.float32), FAST=FAST, start=estimate)
    else:  # the sum is that of the rounded weights: those of the estimate then sum to 1
        weight = weight.to(v.dtype)
        total = product(weight, tl.full([COLUMNS, 16], 1.0, v.dtype), FAST=FAST, start=total)
        estimate = product(weight, v, FAST=FAST, start=estimate)
    return higher, total, estimate


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def forward_kernel(
    query, query_norm, key, value, key_number, tables, bits, terms, numbers, folds,
    key_groups, query_groups, first_block, cos, sin,
    out, low, log_sum,
    heads, queries, keys, row_length, key_length, length, row_blocks, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr,
    TURN: tl.constexpr, LOW: tl.constexpr, FOLDS: tl.constexpr, STAGES: tl.constexpr, EDGE_STAGES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The estimate, what its rounding leaves out, and `log2 sum_j 2^z`.

    `numbers` are `(5, heads)`: `-mu` in bits, c, the least `nu d Sigma~`, and two of `windows_kernel`.
    """
    block = row_blocks - 1 - tl.program_id(0) % row_blocks  # the longest first
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    offset = keys - queries
    if FOLDS:  # a whole number of tiles, as the compiler must know
        offset = offset // FOLD * FOLD
    positions = offset + rows
    padded = pair * row_length + rows
    q, q_norm = load_states(query, padded, CHANNELS=CHANNELS), tl.load(query_norm + padded)
    scalars = tl.load(numbers + heads + head), tl.load(numbers + 2 * heads + head)
    groups = positions
    if GROUPS:
        groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)
        key_groups += batch * keys
    tables += head * TABLES * length
    key, value = key + pair * key_length * CHANNELS, value + pair * key_length * WIDTH
    of_rows = q, q_norm, positions, groups
    of_keys = key, value, key_number + pair * key_length, tables, bits + head * length * (2 * TERMS)
    terms = tl.load(terms + tl.arange(0, 2 * TERMS)[:, None] * FOLD + tl.arange(0, FOLD)[None, :])
    first, full, in_pairs, last = tiles_of_rows(
        block, offset, keys, first_block, pair * row_blocks + block, q_norm, scalars[1], folds + head,
        ROWS=ROWS, GROUPS=GROUPS, FIRST=FIRST, FOLDS=FOLDS,
    )  # fmt: skip
    # above a score of no weight
    state = tl.full([ROWS], NONE / 8, tl.float32), tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    if FOLDS:
        step = tl.exp2(tl.load(numbers + head) * FOLD)
        for part in tl.range(first, full, num_stages=STAGES):
            state = add_tile(
                state, part, of_rows, of_keys, key_groups, terms, scalars, keys, length, step,
                CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=FOLD, WAY=FULL, GROUPS=GROUPS, FAST=FAST,
            )  # fmt: skip
        for part in tl.range(full * 2, in_pairs * 2, num_stages=EDGE_STAGES):
            state = add_tile(
                state, part, of_rows, of_keys, key_groups, terms, scalars, keys, length,
                tl.where(part % 2 == 0, step, 1.0),
                CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=HALF, WAY=EDGE, GROUPS=GROUPS, FAST=FAST,
            )  # fmt: skip
        e = tl.load(tables + 3 * length + tl.maximum(positions - (last - 1) * FOLD, 0))
        state = state[0], state[1], state[2] * tl.where(in_pairs == last, e, 1.0)[:, None]
    for part in tl.range(in_pairs * 2, last * 2, num_stages=1):
        state = add_tile(
            state, part, of_rows, of_keys, key_groups, terms, scalars, keys, length, 1.0,
            CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=HALF, WAY=PAIRS, GROUPS=GROUPS, FAST=FAST,
        )  # fmt: skip
    highest, total, estimate = state
    total = tl.sum(total, 1) * (1.0 / 16)
    some = total != 0.0  # NaN too
    total = tl.where(some, total, 1.0)
    at_row = pair * queries + rows
    tl.store(log_sum + at_row, tl.where(some, highest + tl.log2(total), float("-inf")), mask=in_rows)
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    estimate = estimate / total[:, None]
    low = low if LOW else None
    turn_and_store(estimate, out, at_row, rows, in_rows, cos, sin, WIDTH=WIDTH, TURN=TURN, low=low)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def windows_kernel(
    query, query_norm, key, key_number, tables, numbers, folds, first_block,
    heads, queries, keys, row_length, key_length, length, row_blocks, log_eps,
    CHANNELS: tl.constexpr, FOLDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The first tile that a block of rows visits: all keys before it weigh at most eps in each of its rows.

    All keys at lag m and beyond together weigh at most `2^(most - slope m)`, whatever they hold. The sum of a row is at
    least that of the keys of its last two tiles, which are always visited.
    """
    block = tl.program_id(0) % row_blocks
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    head = pair % heads
    rows = block * FOLD + tl.arange(0, FOLD)
    offset = keys - queries
    positions = offset + rows
    padded = pair * row_length + rows
    q, q_norm = load_states(query, padded, CHANNELS=CHANNELS), tl.load(query_norm + padded)
    last = tl.minimum(tl.cdiv(keys, FOLD), tl.cdiv(offset + (block + 1) * FOLD, FOLD))
    start = tl.maximum(last - 2, 0)
    tables += head * TABLES * length
    folded = False
    if FOLDS:
        folded = tl.load(folds + head) != 0
    power, least = tl.load(numbers + heads + head), tl.load(numbers + 2 * heads + head)
    highest, total = tl.full([FOLD], NONE / 8, tl.float32), tl.zeros([FOLD], tl.float32)
    for part in tl.range(start * 2, last * 2, num_stages=1):
        columns = part * HALF + tl.arange(0, HALF)
        at_key = pair * key_length + columns
        dot = product(q, tl.trans(load_states(key, at_key, CHANNELS=CHANNELS)), FAST=FAST)
        number = tl.load(key_number + at_key)[None, :]
        lag = (FOLD - 1) + tl.maximum(positions[:, None] - columns[None, :], 0)
        place = tl.where(folded, tl.maximum(positions - part // 2 * FOLD, 0)[:, None], lag)
        e, gain = tl.load(tables + 3 * length + place), q_norm[:, None] + tl.load(tables + place)
        # however it is rounded, g is not below what it should be, and the sum not above
        g = e * tl.fma(e, number, dot) + gain + ROUNDING * (q_norm[:, None] + e * e * tl.abs(number))
        g = tl.maximum(g, least, propagate_nan=tl.PropagateNan.ALL)
        z = tl.load(tables + length + lag) - power * log2(g, FAST=FAST)
        z = tl.where(counted(positions, columns, rows, columns, ROWS_AT=0, GROUPS=False), z, NONE)
        higher = tl.maximum(highest, tl.max(z, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(z - higher[:, None]), 1)
        highest = higher
    log_sum = highest + tl.log2(total) - ROUNDING
    slope, most = tl.load(numbers + 3 * heads + head), tl.load(numbers + 4 * heads + head)
    beyond = (most - log_eps - log_sum) / slope  # NaN or infinite where nothing may be left out
    earliest = tl.where(beyond < positions, positions - beyond, 0.0)
    earliest = tl.min(tl.where(rows < queries, earliest, start * (1.0 * FOLD)), 0)
    tl.store(first_block + pair * row_blocks + block, tl.minimum((earliest * (1.0 / FOLD)).to(tl.int32), start))
