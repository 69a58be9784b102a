"""The backward kernels: the gradient of keys and values, the gradient of queries.

With A the weight of a pair, `s = A (e dout.v' - delta)` is the gradient of its score in nats and `x = s / g` that of
`-log g`. A log sum of +inf marks a row that takes no part: its weights are 0.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .tiles import (
    COUNTS,
    EDGE,
    FOLD,
    FULL,
    FUNCTIONALS,
    HALF,
    LN2,
    MOST_NORM,
    NEAREST,
    NONE,
    PAIRS,
    SUMS,
    TABLES,
    TERMS,
    WAVES,
    lags_of,
    log2,
    product,
    row_numbers,
)


@triton.jit
@no_type_check
def turn_and_store(states, target, at_row, rows, in_rows, cos, sin, WIDTH: tl.constexpr, TURN: tl.constexpr):
    """Store states, turned by the phases of their rows or as they are."""
    size: tl.constexpr = states.shape[0]
    if TURN:
        mode = tl.arange(0, WIDTH // 2)
        real, imaginary = tl.split(tl.permute(tl.reshape(states, [size, 2, WIDTH // 2]), (0, 2, 1)))
        phase = rows[:, None] * (WIDTH // 2) + mode[None, :]
        c = tl.load(cos + phase, mask=in_rows[:, None], other=0.0)
        s = tl.load(sin + phase, mask=in_rows[:, None], other=0.0)
        index = target + at_row[:, None] * WIDTH + mode[None, :]
        tl.store(index, (c * real - s * imaginary).to(target.dtype.element_ty), mask=in_rows[:, None])
        tl.store(index + WIDTH // 2, (s * real + c * imaginary).to(target.dtype.element_ty), mask=in_rows[:, None])
    else:
        index = target + at_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(index, states.to(target.dtype.element_ty), mask=in_rows[:, None])


@triton.jit
@no_type_check
def pair_numbers(
    dot, gradient, number, gain, e, base, left, right, delta, power, least, variance, seen,
    WAY: tl.constexpr, TRANSPOSED: tl.constexpr, EXPONENTIAL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`w = A / g`, g, its logarithm and `x = w (e dout.v' - delta)`.

    All broadcast to the tile. `base` is T less the log sum, without `left @ right` where the tile is FULL.
    """
    g = e * tl.fma(e, number, dot) + gain
    if EXPONENTIAL:
        logarithm = tl.maximum(g / variance - 1.0, 0.0)
        z = base - power * logarithm
        g = variance + tl.zeros_like(g)
    else:
        if WAY != FULL:
            g = tl.maximum(g, least)
        logarithm = log2(g, FAST=FAST)
        if WAY == FULL and TRANSPOSED:  # the product of T begins with the rest: one addition less, but it waits for it
            z = base - (power + 1.0) * logarithm
            if FAST:
                z = tl.dot(left, right, z)
            else:
                z += product(left, right, FAST=FAST)
        elif WAY == FULL:
            z = tl.fma(logarithm, -(power + 1.0), product(left, right, FAST=FAST)) + base
        else:
            z = base - (power + 1.0) * logarithm
    if WAY != FULL:
        z = tl.where(seen, z, NONE)
    w = tl.exp2(z)
    if EXPONENTIAL:
        w = w / g
    return w, g, logarithm, w * (e * gradient - delta)


@triton.jit
@no_type_check
def scale_of(largest, blocks, SCALED: tl.constexpr):
    """The power of two that brings the largest number of dout near 2^6: float16 has few numbers below 2^-14."""
    scale = 1.0
    if SCALED:
        block, most = tl.arange(0, FOLD), tl.zeros([FOLD], tl.float32)
        for start in range(0, blocks, FOLD):
            found = tl.load(largest + start + block, mask=start + block < blocks, other=0.0)
            most = tl.maximum(most, found)
        exponent = 6.0 - tl.ceil(tl.log2(tl.maximum(tl.max(most, 0), 1e-30)))
        scale = tl.exp2(tl.minimum(exponent, 60.0))
    return scale


@triton.jit
@no_type_check
def add_rows(
    sums, start, k, v, number, columns, groups, query, query_norm, gradient, delta, total, query_groups,
    tables, bits, of_keys, scalars, queries, keys, offset, edge, length,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WAY: tl.constexpr, CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr, EXPONENTIAL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sums over rows for a tile of keys, with those of one more block of rows."""
    of_key, of_value, of_number = sums
    power, least, scale, _ = scalars
    rows = start + tl.arange(0, ROWS)
    channel, width = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    q = tl.load(query + rows[:, None] * CHANNELS + channel[None, :])
    do = tl.load(gradient + rows[:, None] * WIDTH + width[None, :])
    q_norm, row_delta, row_total = tl.load(query_norm + rows), tl.load(delta + rows), tl.load(total + rows)
    positions = offset + rows
    dot = product(k, tl.trans(q), FAST=FAST)
    through = product(v, tl.trans(do), FAST=FAST)
    m = positions - edge
    coefficients, seen, variance = of_keys, True, q_norm
    if WAY == PAIRS:
        lag = lags_of(positions[None, :], columns[:, None], CAUSAL=CAUSAL)
        e, variance, base = row_numbers(lag, tables, length)
        gain = q_norm[None, :] + variance
        base = base - row_total[None, :]
    else:
        if WAY == EDGE:
            m = tl.maximum(m, NEAREST)
        at = tables + (FOLD - 1) + m
        e, gain = tl.load(at + 3 * length)[None, :], (q_norm + tl.load(at))[None, :]
        if WAY == FULL:  # w and x then come times e
            coefficients = tl.load(bits + m[:, None] * (2 * TERMS) + tl.arange(0, 2 * TERMS)[None, :])
            base = (tl.load(at + 4 * length) - row_total)[None, :]
        else:
            lag = lags_of(positions[None, :], columns[:, None], CAUSAL=CAUSAL)
            base = tl.load(tables + length + (FOLD - 1) + lag) - row_total[None, :]
    if WAY != FULL:
        seen = (columns < keys)[:, None]
        if CAUSAL:
            seen = seen & (positions[None, :] >= columns[:, None])
        if GROUPS:
            of_rows = tl.load(query_groups + rows, mask=rows < queries, other=-2)
            seen = seen & (of_rows[None, :] == groups[:, None])
    w, g, _, x = pair_numbers(
        dot, through, number, gain, e, base, of_keys, tl.trans(coefficients), row_delta[None, :], power, least,
        variance, seen, WAY=WAY, TRANSPOSED=True, EXPONENTIAL=EXPONENTIAL, FAST=FAST,
    )  # fmt: skip
    weight = w * g
    if WAY != FULL:
        weight = weight * e
        x = x * e
    if FAST:
        of_value = tl.dot(weight.to(do.dtype), do, of_value, input_precision="ieee")
        of_key = tl.dot((x * scale).to(q.dtype), q, of_key, input_precision="ieee")
    else:
        of_value += product(weight.to(do.dtype), do, FAST=FAST)
        of_key += product((x * scale).to(q.dtype), q, FAST=FAST)
    return of_key, of_value, of_number + tl.sum(x * e, 1)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def key_kernel(
    query, query_norm, key, value, key_number, gradient, delta, total, largest, tables, bits, terms, numbers, folds,
    key_groups, query_groups, first_block, cos, sin, factors,
    key_gradient, value_gradient, sums,
    heads, queries, keys, row_length, key_length, length, blocks, row_blocks, first_stride, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr, EXPONENTIAL: tl.constexpr, TURN: tl.constexpr, TURN_VALUES: tl.constexpr, FOLDS: tl.constexpr,
    PRIOR: tl.constexpr, STAGES: tl.constexpr, EDGE_STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and its values; with PRIOR also `sum x e^2 phi(n)` and `sum x e^2 E(n)^2`."""
    block = tl.program_id(0) % blocks
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    columns = block * FOLD + tl.arange(0, FOLD)
    in_columns = columns < keys
    channel, width = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    at_key = pair * keys + columns
    padded = pair * key_length + columns
    k = tl.load(key + padded[:, None] * CHANNELS + channel[None, :])
    v = tl.load(value + padded[:, None] * WIDTH + width[None, :])
    number = tl.load(key_number + padded)[:, None]
    least = tl.load(numbers + 2 * heads + head)
    SCALED: tl.constexpr = query.dtype.element_ty == tl.float16
    score_scale = scale_of(largest + pair * (row_length // 64), row_length // 64, SCALED=SCALED)
    scale = score_scale
    if SCALED:
        scale *= tl.exp2(tl.floor(tl.log2(least)))  # x is s over g, which is at least as large
    scalars = tl.load(numbers + heads + head), least, scale, score_scale
    query += pair * row_length * CHANNELS
    gradient += pair * row_length * WIDTH
    query_norm += pair * row_length
    delta += pair * row_length
    total += pair * row_length
    tables += head * TABLES * length
    bits += head * length * (2 * TERMS)
    groups = columns
    if GROUPS:
        groups = tl.load(key_groups + batch * keys + columns, mask=in_columns, other=-1)
        query_groups += batch * queries
    term, n = tl.arange(0, 2 * TERMS), tl.arange(0, FOLD)
    of_keys = tl.load(terms + term[None, :] * FOLD + n[:, None])
    offset, edge = keys - queries, block * FOLD + FOLD - 1
    first, last = 0, tl.cdiv(queries, ROWS)
    if CAUSAL:
        first = tl.maximum(block * FOLD - offset, 0) // ROWS
    if FIRST:  # the blocks of rows that begin no later visit this tile: first tiles never fall
        count, row_block = tl.zeros([FOLD], tl.int32), tl.arange(0, FOLD)
        for start in range(0, row_blocks, FOLD):
            at = first_block + (batch * first_stride + head) * row_blocks + start + row_block
            found = tl.load(at, mask=start + row_block < row_blocks, other=blocks)
            count += (found <= block).to(tl.int32)
        last = tl.minimum(tl.sum(count, 0) * (64 // ROWS), last)
    of_key = tl.zeros([FOLD, CHANNELS], tl.float32)
    of_value = tl.zeros([FOLD, WIDTH], tl.float32)
    of_number = tl.zeros([FOLD], tl.float32)
    RATIO: tl.constexpr = ROWS // HALF
    in_pairs = first
    if FOLDS:
        folded = tl.load(folds + head) != 0
        in_pairs, start = tl.where(folded, last, first), tl.where(folded, first, last)
        full = last
        if not GROUPS:
            full = tl.maximum(tl.minimum(tl.cdiv(tl.maximum(edge - offset, 0), ROWS), last), start)
            full = tl.where(tl.max(tl.max(number, 1), 0) <= least * MOST_NORM, full, last)
        for i in tl.range(start * RATIO, full * RATIO, num_stages=EDGE_STAGES):
            of_key, of_value, of_number = add_rows(
                (of_key, of_value, of_number), i * HALF, k, v, number, columns, groups, query, query_norm, gradient,
                delta, total, query_groups, tables, bits, of_keys, scalars, queries, keys, offset, edge, length,
                CHANNELS=CHANNELS, WIDTH=WIDTH, ROWS=HALF, WAY=EDGE, CAUSAL=CAUSAL, GROUPS=GROUPS,
                EXPONENTIAL=EXPONENTIAL, FAST=FAST,
            )  # fmt: skip
        for i in tl.range(full, last, num_stages=STAGES):
            of_key, of_value, of_number = add_rows(
                (of_key, of_value, of_number), i * ROWS, k, v, number, columns, groups, query, query_norm, gradient,
                delta, total, query_groups, tables, bits, of_keys, scalars, queries, keys, offset, edge, length,
                CHANNELS=CHANNELS, WIDTH=WIDTH, ROWS=ROWS, WAY=FULL, CAUSAL=CAUSAL, GROUPS=GROUPS,
                EXPONENTIAL=EXPONENTIAL, FAST=FAST,
            )  # fmt: skip
    for i in tl.range(in_pairs * RATIO, last * RATIO, num_stages=1):
        of_key, of_value, of_number = add_rows(
            (of_key, of_value, of_number), i * HALF, k, v, number, columns, groups, query, query_norm, gradient, delta,
            total, query_groups, tables, bits, of_keys, scalars, queries, keys, offset, edge, length,
            CHANNELS=CHANNELS, WIDTH=WIDTH, ROWS=HALF, WAY=PAIRS, CAUSAL=CAUSAL, GROUPS=GROUPS,
            EXPONENTIAL=EXPONENTIAL, FAST=FAST,
        )  # fmt: skip
    power = scalars[0] * -LN2 if EXPONENTIAL else -scalars[0]
    # `b = |k'|^2 / 4`: k' has the gradient of the product with the queries, and through b
    of_key = power * (of_key / scale + (0.5 * of_number)[:, None] * k.to(tl.float32))
    place = factors + head * 3 * FOLD + n
    factor = tl.load(place)[:, None]
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    turn_and_store(-2.0 * factor * of_key, key_gradient, at_key, columns, in_columns, cos, sin,
                   WIDTH=CHANNELS, TURN=TURN)  # fmt: skip
    turn_and_store(factor * of_value, value_gradient, at_key, columns, in_columns, cos, sin,
                   WIDTH=WIDTH, TURN=TURN_VALUES)  # fmt: skip
    if PRIOR:
        at = sums + (pair * blocks + block) * 2
        tl.store(at, tl.sum(of_number * tl.load(place + FOLD), 0))
        tl.store(at + 1, tl.sum(of_number * tl.load(place + 2 * FOLD), 0))


@triton.jit
@no_type_check
def add_keys(
    state, part, q, q_norm, do, row_delta, row_total, positions, groups, key, value, key_number, key_groups, tables,
    bits, terms, of_keys, waves, high, rest, step, functions, polynomials, effects, pair_effects, scalars, keys,
    length, distance, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WAY: tl.constexpr,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, EXPONENTIAL: tl.constexpr, PRIOR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sums over keys for a block of rows, with those of one more tile."""
    of_query, of_norm, of_power, of_phi, of_lag, of_prior = state
    power, least, scale, score_scale = scalars
    reference = tl.log2(least)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    tile = part * COLUMNS // FOLD
    channel, width = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    at_key = key + columns[:, None] * CHANNELS + channel[None, :]
    at_value = value + columns[:, None] * WIDTH + width[None, :]
    k, v, number = tl.load(at_key), tl.load(at_value), tl.load(key_number + columns)[None, :]
    if WAY == FULL and COLUMNS != FOLD:
        place = part * COLUMNS % FOLD + tl.arange(0, COLUMNS)
        of_keys = tl.load(terms + tl.arange(0, 2 * TERMS)[:, None] * FOLD + place[None, :])
        if PRIOR:
            at_wave = waves + place[:, None] * (2 * WAVES) + tl.arange(0, WAVES)[None, :]
            high, rest = tl.load(at_wave), tl.load(at_wave + WAVES)
            step = tl.where(part % 2 == 0, step, 1.0)
    dot = product(q, tl.trans(k), FAST=FAST)
    through = product(do, tl.trans(v), FAST=FAST)
    m = positions - (tile * FOLD + (FOLD - 1))
    lag, coefficients, seen = 0, of_keys, True
    if WAY != FULL:
        lag = lags_of(positions[:, None], columns[None, :], CAUSAL=CAUSAL)
    if WAY == PAIRS:
        e, variance, base = row_numbers(lag, tables, length)
        gain = q_norm[:, None] + variance
        base = base - row_total[:, None]
    else:
        if WAY == EDGE:
            m = tl.maximum(m, NEAREST)
        e, variance, bias = row_numbers(m, tables, length)
        e, gain = e[:, None], (q_norm + variance)[:, None]
        if WAY == FULL:
            coefficients = tl.load(bits + m[:, None] * (2 * TERMS) + tl.arange(0, 2 * TERMS)[None, :])
            base = (bias - row_total)[:, None]
        else:
            base = tl.load(tables + length + (FOLD - 1) + lag) - row_total[:, None]
    if WAY != FULL:
        seen = (columns < keys)[None, :]
        if CAUSAL:
            seen = seen & (positions[:, None] >= columns[None, :])
        if GROUPS:
            of_columns = tl.load(key_groups + columns, mask=columns < keys, other=-1)
            seen = seen & (groups[:, None] == of_columns[None, :])
    _, g, logarithm, x = pair_numbers(
        dot, through, number, gain, e, base, coefficients, of_keys, row_delta[:, None], power, least, variance, seen,
        WAY=WAY, TRANSPOSED=False, EXPONENTIAL=EXPONENTIAL, FAST=FAST,
    )  # fmt: skip
    in_tile = tl.sum(x, 1)
    if FAST:
        of_query = tl.dot((x * scale * e).to(k.dtype), k, of_query, input_precision="ieee")
    else:
        of_query += product((x * scale * e).to(k.dtype), k, FAST=FAST)
    if PRIOR:
        s = x * g
        kind = tl.arange(0, FUNCTIONALS)
        scores = tl.sum(s, 1)
        of_power += tl.sum(s * logarithm, 1)
        if not EXPONENTIAL:
            of_power -= reference * scores
        if WAY == PAIRS:
            through_gain = power * LN2 * x * logarithm if EXPONENTIAL else -power * x
            for each in range(FUNCTIONALS):
                at = pair_effects + each * length + lag
                effect = s * LN2 * tl.load(at) + through_gain * tl.load(at + length * FUNCTIONALS)
                effect = tl.sum(tl.sum(effect, 1), 0) * (1.0 / (4 * TERMS * TERMS))
                of_prior += tl.where(kind == each, effect, 0.0)[:, None, None]
        else:
            of_phi += in_tile * tl.load(tables + 2 * length + (FOLD - 1) + m)
            if WAY == FULL:
                of_lag += m * scores
                of_prior = of_prior * step[None, :]
                rounded = (s * score_scale).to(high.dtype)
                if FAST:
                    of_prior = tl.dot(rounded, high, of_prior)
                    of_prior = tl.dot(rounded, rest, of_prior)
                else:
                    of_prior += product(rounded, high, FAST=FAST) + product(rounded, rest, FAST=FAST)
        if WAY == EDGE:
            place = part * COLUMNS % FOLD + tl.arange(0, COLUMNS)
            of_place = tl.load(functions + place[:, None] * (2 * TERMS) + tl.arange(0, 2 * TERMS)[None, :])
            moments = product((s * score_scale).to(of_place.dtype), of_place, FAST=FAST)
            if FAST:
                moments = tl.dot(polynomials, moments, input_precision="tf32")
            else:
                moments = product(polynomials, moments, FAST=FAST)
            term = tl.arange(0, 2 * TERMS) % TERMS
            at = (kind[:, None, None] * TERMS + term[None, :, None]) * TERMS + term[None, None, :]
            of_tile = tl.load(effects + (distance - tile) * (FUNCTIONALS * TERMS * TERMS) + at)
            of_prior += (of_tile * LN2 / score_scale) * moments[None, :, :]
    return of_query, of_norm + in_tile, of_power, of_phi, of_lag, of_prior


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def query_kernel(
    query, query_norm, key, value, key_number, gradient, delta, total, largest, tables, bits, terms, numbers, folds,
    key_groups, query_groups, first_block, cos, sin, waves, wave_rates, functions, polynomials, effects, pair_effects,
    query_gradient, sums,
    heads, queries, keys, row_length, key_length, length, row_blocks, distances, first_stride, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr, FIRST: tl.constexpr, EXPONENTIAL: tl.constexpr, TURN: tl.constexpr, FOLDS: tl.constexpr,
    PRIOR: tl.constexpr,
    STAGES: tl.constexpr, EDGE_STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries; with PRIOR also what the parameters' are made from.

    `functions` `(FOLD, 2 TERMS)`, high and low parts, and `polynomials` `(2 TERMS, ROWS)` make moments of a tile of s,
    of which `effects` make the change of `sum s T` by each parameter. Tiles at one distance share them.
    """
    block = row_blocks - 1 - tl.program_id(0) % row_blocks
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    offset = keys - queries
    positions = offset + rows
    channel, width = tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    at_row, padded = pair * queries + rows, pair * row_length + rows
    q = tl.load(query + padded[:, None] * CHANNELS + channel[None, :])
    do = tl.load(gradient + padded[:, None] * WIDTH + width[None, :])
    q_norm, row_delta, row_total = tl.load(query_norm + padded), tl.load(delta + padded), tl.load(total + padded)
    least = tl.load(numbers + 2 * heads + head)
    SCALED: tl.constexpr = query.dtype.element_ty == tl.float16
    score_scale = scale_of(largest + pair * (row_length // 64), row_length // 64, SCALED=SCALED)
    scale = score_scale
    if SCALED:
        scale *= tl.exp2(tl.floor(tl.log2(least)))  # x is s over g, which is at least as large
    scalars = tl.load(numbers + heads + head), least, scale, score_scale
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
    distance, of_places, high, rest, step = 0, of_keys, of_keys, of_keys, of_keys
    wave = tl.arange(0, WAVES)
    if PRIOR:
        pair_effects += head * 2 * FUNCTIONALS * length
        if FOLDS:
            distance = (offset + block * ROWS) // FOLD
            of_places = tl.load(polynomials + term[:, None] * ROWS + tl.arange(0, ROWS)[None, :])
            effects += head * distances * (FUNCTIONALS * TERMS * TERMS)
            at_wave = waves + n[:, None] * (2 * WAVES) + wave[None, :]
            high, rest = tl.load(at_wave), tl.load(at_wave + WAVES)
            step = tl.load(wave_rates + wave)
    first, last = 0, tl.cdiv(keys, FOLD)
    if CAUSAL:
        last = tl.minimum(last, tl.cdiv(offset + (block + 1) * ROWS, FOLD))
    if FIRST:
        first = tl.load(first_block + (batch * first_stride + head) * row_blocks + block)
    at_sums = sums
    if PRIOR:
        at_sums = sums + (pair * row_blocks + block) * SUMS
    of_query = tl.zeros([ROWS, CHANNELS], tl.float32)
    of_norm, of_power = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    of_phi, of_lag = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    in_pairs, end, full = first, first, first
    if FOLDS:
        folded = tl.load(folds + head) != 0
        in_pairs, end = tl.where(folded, last, first), tl.where(folded, last, first)
        if not GROUPS:
            full = tl.maximum(tl.minimum((offset + block * ROWS + 1) // FOLD, last), first)
            full = tl.where(folded & (tl.max(q_norm, 0) <= least * MOST_NORM), full, first)
        of_waves = 0.0
        if PRIOR:
            of_waves = tl.zeros([ROWS, WAVES], tl.float32)
        PARTS: tl.constexpr = FOLD // COLUMNS
        for part in tl.range(first * PARTS, full * PARTS, num_stages=STAGES):
            of_query, of_norm, of_power, of_phi, of_lag, of_waves = add_keys(
                (of_query, of_norm, of_power, of_phi, of_lag, of_waves), part, q, q_norm, do, row_delta, row_total,
                positions, groups, key, value, key_number, key_groups, tables, bits, terms, of_keys, waves, high, rest,
                step, functions, of_places, effects, pair_effects, scalars, keys, length, distance, CHANNELS=CHANNELS,
                WIDTH=WIDTH, COLUMNS=COLUMNS, WAY=FULL, CAUSAL=CAUSAL, GROUPS=GROUPS, EXPONENTIAL=EXPONENTIAL,
                PRIOR=PRIOR, FAST=FAST,
            )  # fmt: skip
        if PRIOR:  # at the last tile's edge, and from there at lag 0
            m = positions - (full * FOLD - 1)
            of_waves = of_waves * tl.exp2(tl.load(wave_rates + WAVES + wave)[None, :] * m[:, None])
            tl.store(at_sums + wave, tl.sum(of_waves, 0) / score_scale)
    of_prior = 0.0
    if PRIOR:
        of_prior = tl.zeros([FUNCTIONALS, 2 * TERMS, 2 * TERMS], tl.float32)
    if FOLDS:
        for part in tl.range(full * 2, end * 2, num_stages=EDGE_STAGES):
            of_query, of_norm, of_power, of_phi, of_lag, of_prior = add_keys(
                (of_query, of_norm, of_power, of_phi, of_lag, of_prior), part, q, q_norm, do, row_delta, row_total,
                positions, groups, key, value, key_number, key_groups, tables, bits, terms, of_keys, waves, high, rest,
                step, functions, of_places, effects, pair_effects, scalars, keys, length, distance, CHANNELS=CHANNELS,
                WIDTH=WIDTH, COLUMNS=HALF, WAY=EDGE, CAUSAL=CAUSAL, GROUPS=GROUPS, EXPONENTIAL=EXPONENTIAL,
                PRIOR=PRIOR, FAST=FAST,
            )  # fmt: skip
    for part in tl.range(in_pairs * 2, last * 2, num_stages=1):
        of_query, of_norm, of_power, of_phi, of_lag, of_prior = add_keys(
            (of_query, of_norm, of_power, of_phi, of_lag, of_prior), part, q, q_norm, do, row_delta, row_total,
            positions, groups, key, value, key_number, key_groups, tables, bits, terms, of_keys, waves, high, rest,
            step, functions, of_places, effects, pair_effects, scalars, keys, length, distance, CHANNELS=CHANNELS,
            WIDTH=WIDTH, COLUMNS=HALF, WAY=PAIRS, CAUSAL=CAUSAL, GROUPS=GROUPS, EXPONENTIAL=EXPONENTIAL, PRIOR=PRIOR,
            FAST=FAST,
        )  # fmt: skip
    power = scalars[0] * -LN2 if EXPONENTIAL else -scalars[0]
    of_query = power * (of_query / scale + (2.0 * of_norm)[:, None] * q.to(tl.float32))
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    turn_and_store(of_query, query_gradient, at_row, rows, in_rows, cos, sin, WIDTH=CHANNELS, TURN=TURN)
    if PRIOR:
        at_sums += WAVES
        tl.store(at_sums + tl.arange(0, FUNCTIONALS), tl.sum(tl.sum(of_prior, 2), 1))
        tl.store(at_sums + FUNCTIONALS, tl.sum(of_power, 0))
        tl.store(at_sums + FUNCTIONALS + 1, tl.sum(of_norm, 0))
        tl.store(at_sums + FUNCTIONALS + 2, tl.sum(of_phi, 0))
        tl.store(at_sums + FUNCTIONALS + 3, tl.sum(of_lag, 0))
