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
    IEEE,
    LN2,
    MOST_NORM,
    NONE,
    PAIRS,
    SUMS,
    TABLES,
    TERMS,
    WAVES,
    counted,
    lag_numbers,
    load_states,
    log2,
    product,
    tiles_of_rows,
    turn_and_store,
)


@triton.jit
@no_type_check
def pair_numbers(
    dot, through, number, of_rows, of_keys, tile, scalars, tables, bits, terms, length,
    ROWS_AT: tl.constexpr, WAY: tl.constexpr, GROUPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`w = A / g`, g, log2 g, `x = w (e dout.v' - delta)` and e. Where rows lie along axis 1, w and x come times e."""
    positions, q_norm, delta, total, row_groups = of_rows
    columns, key_groups = of_keys
    power, least = scalars[0], scalars[1]
    e, gain, z = lag_numbers(positions, columns, tile, q_norm, tables, length, ROWS_AT=ROWS_AT, WAY=WAY)
    if WAY == FULL:
        z = tl.expand_dims(z - total, 1 - ROWS_AT)
        at_bits = bits + (positions - (tile * FOLD + (FOLD - 1)))[:, None] * (2 * TERMS)
        coefficients = tl.load(at_bits + tl.arange(0, 2 * TERMS)[None, :])
    else:
        z = z - tl.expand_dims(total, 1 - ROWS_AT)
    g = e * tl.fma(e, tl.expand_dims(number, ROWS_AT), dot) + gain
    if WAY != FULL:
        g = tl.maximum(g, least)
    logarithm = log2(g, FAST=FAST)
    if WAY == FULL and ROWS_AT == 0:
        z = tl.fma(logarithm, -(power + 1.0), product(coefficients, terms, FAST=FAST)) + z
    else:
        z = z - (power + 1.0) * logarithm
        if WAY == FULL:  # the product of T begins with the rest: one addition less, but it waits for it
            z = product(terms, tl.trans(coefficients), FAST=FAST, start=z)
        else:
            z = tl.where(counted(positions, columns, row_groups, key_groups, ROWS_AT=ROWS_AT, GROUPS=GROUPS), z, NONE)
    w = tl.exp2(z)
    if WAY != FULL and ROWS_AT == 1:
        w = w * e
    return w, g, logarithm, w * (e * through - tl.expand_dims(delta, 1 - ROWS_AT)), e


@triton.jit
@no_type_check
def load_scalars(numbers, heads, head, largest, blocks, SCALED: tl.constexpr):
    """c, the least `nu d Sigma~`, and a power of two by which s is multiplied, with its exponent.

    It brings the largest number of dout near 2^6: float16 has few numbers below 2^-14.
    """
    least = tl.load(numbers + 2 * heads + head)
    score_scale, exponent = 1.0, 0.0
    if SCALED:
        block, most = tl.arange(0, FOLD), tl.zeros([FOLD], tl.float32)
        for start in range(0, blocks, FOLD):
            found = tl.load(largest + start + block, mask=start + block < blocks, other=0.0)
            most = tl.maximum(most, found)
        exponent = tl.minimum(6.0 - tl.ceil(tl.log2(tl.maximum(tl.max(most, 0), 1e-30))), 60.0)
        score_scale = tl.exp2(exponent)
    return tl.load(numbers + heads + head), least, score_scale, exponent


@triton.jit
@no_type_check
def state_product(x, states, start, FAST: tl.constexpr):
    """`start + x states`; x is `s / g`, of any size, which float16 cannot hold."""
    if states.dtype == tl.float16:
        return product(x, states.to(tl.float32), FAST=FAST, start=start)
    else:
        return product(x.to(states.dtype), states, FAST=FAST, start=start)


@triton.jit
@no_type_check
def add_rows(
    sums, start, k, v, number, of_keys, at_rows, query_groups, first_block, tables, bits, terms, scalars, queries,
    offset, tile, length,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WAY: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sums over rows for a tile of keys, with those of one more block of rows."""
    of_key, of_value, of_number = sums
    query, gradient, query_norm, delta, total = at_rows
    rows = start + tl.arange(0, ROWS)
    q, do = load_states(query, rows, CHANNELS=CHANNELS), load_states(gradient, rows, CHANNELS=WIDTH)
    dot = product(k, tl.trans(q), FAST=FAST)
    through = product(v, tl.trans(do), FAST=FAST)
    groups = rows
    if GROUPS:
        groups = tl.load(query_groups + rows, mask=rows < queries, other=-2)
    row_total = tl.load(total + rows)
    if FIRST:
        row_total = tl.where(tl.load(first_block + start // FOLD) <= tile, row_total, float("inf"))
    of_rows = offset + rows, tl.load(query_norm + rows), tl.load(delta + rows), row_total, groups
    w, g, _, x, e = pair_numbers(
        dot, through, number, of_rows, of_keys, tile, scalars, tables, bits, terms, length,
        ROWS_AT=1, WAY=WAY, GROUPS=GROUPS, FAST=FAST,
    )  # fmt: skip
    of_value = product((w * g).to(do.dtype), do, FAST=FAST, start=of_value)
    of_key = state_product(x, q, of_key, FAST=FAST)
    return of_key, of_value, of_number + tl.sum(x * e, 1)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def key_kernel(
    query, query_norm, key, value, key_number, gradient, delta, total, tables, bits, terms, numbers, folds,
    key_groups, query_groups, first_block, cos, sin, factors,
    key_gradient, value_gradient, sums,
    heads, queries, keys, row_length, key_length, length, blocks, row_blocks, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr,
    TURN: tl.constexpr, TURN_VALUES: tl.constexpr, FOLDS: tl.constexpr, PRIOR: tl.constexpr,
    STAGES: tl.constexpr, EDGE_STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and its values; with PRIOR also `sum x e^2 phi(n)` and `sum x e^2 E(n)^2`."""
    block = tl.program_id(0) % blocks
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    n = tl.arange(0, FOLD)
    columns = block * FOLD + n
    in_columns = columns < keys
    padded = pair * key_length + columns
    k, v = load_states(key, padded, CHANNELS=CHANNELS), load_states(value, padded, CHANNELS=WIDTH)
    number = tl.load(key_number + padded)
    scalars = tl.load(numbers + heads + head), tl.load(numbers + 2 * heads + head)
    of_key = columns, columns
    if GROUPS:
        of_key = columns, tl.load(key_groups + batch * keys + columns, mask=in_columns, other=-1)
        query_groups += batch * queries
    first_row = pair * row_length
    at_rows = (
        query + first_row * CHANNELS, gradient + first_row * WIDTH, query_norm + first_row, delta + first_row,
        total + first_row,
    )  # fmt: skip
    tables += head * TABLES * length
    bits += head * length * (2 * TERMS)
    of_terms = tl.load(terms + tl.arange(0, 2 * TERMS)[None, :] * FOLD + n[:, None])
    offset = keys - queries
    if FOLDS:  # a whole number of tiles, as the compiler must know
        offset = offset // FOLD * FOLD
    first, last = tl.maximum(block * FOLD - offset, 0) // ROWS, tl.cdiv(queries, ROWS)
    if FIRST:  # up to the last block of rows that visits this tile
        first_block += pair * row_blocks
        end, row_block = tl.zeros([FOLD], tl.int32), tl.arange(0, FOLD)
        for start in range(0, row_blocks, FOLD):
            found = tl.load(first_block + start + row_block, mask=start + row_block < row_blocks, other=blocks)
            end = tl.where(found <= block, start + row_block + 1, end)
        last = tl.minimum(tl.max(end, 0) * (FOLD // ROWS), last)
    state = (
        tl.zeros([FOLD, CHANNELS], tl.float32), tl.zeros([FOLD, WIDTH], tl.float32), tl.zeros([FOLD], tl.float32),
    )  # fmt: skip
    RATIO: tl.constexpr = ROWS // HALF
    in_pairs = first
    if FOLDS:
        folded = tl.load(folds + head) != 0
        in_pairs, start = tl.where(folded, last, first), tl.where(folded, first, last)
        full = last
        if not GROUPS:
            full = tl.maximum(tl.minimum(tl.cdiv(tl.maximum((block + 1) * FOLD - 1 - offset, 0), ROWS), last), start)
            full = tl.where(tl.max(number, 0) <= scalars[1] * MOST_NORM, full, last)
        for i in tl.range(start * RATIO, full * RATIO, num_stages=EDGE_STAGES):
            state = add_rows(
                state, i * HALF, k, v, number, of_key, at_rows, query_groups, first_block, tables, bits, of_terms,
                scalars, queries, offset, block, length,
                CHANNELS=CHANNELS, WIDTH=WIDTH, ROWS=HALF, WAY=EDGE, GROUPS=GROUPS, FIRST=FIRST, FAST=FAST,
            )  # fmt: skip
        for i in tl.range(full, last, num_stages=STAGES):
            state = add_rows(
                state, i * ROWS, k, v, number, of_key, at_rows, query_groups, first_block, tables, bits, of_terms,
                scalars, queries, offset, block, length,
                CHANNELS=CHANNELS, WIDTH=WIDTH, ROWS=ROWS, WAY=FULL, GROUPS=GROUPS, FIRST=FIRST, FAST=FAST,
            )  # fmt: skip
    for i in tl.range(in_pairs * RATIO, last * RATIO, num_stages=1):
        state = add_rows(
            state, i * HALF, k, v, number, of_key, at_rows, query_groups, first_block, tables, bits, of_terms, scalars,
            queries, offset, block, length,
            CHANNELS=CHANNELS, WIDTH=WIDTH, ROWS=HALF, WAY=PAIRS, GROUPS=GROUPS, FIRST=FIRST, FAST=FAST,
        )  # fmt: skip
    of_key, of_value, of_number = state
    # `b = |k'|^2 / 4`: k' has the gradient of the product with the queries, and through b
    of_key = -scalars[0] * (of_key + (0.5 * of_number)[:, None] * k.to(tl.float32))
    place = factors + head * 3 * FOLD + n
    factor = tl.load(place)[:, None]
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    at_key = pair * keys + columns
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
    state, sums, part, q, do, of_rows, of_keys, key_groups, terms, of_prior, scalars, keys, length,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WAY: tl.constexpr, GROUPS: tl.constexpr,
    PRIOR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sums over keys for a block of rows, with those of one more tile. w, x and s come times the scale of s."""
    of_query, of_norm, of_power, of_phi, of_lag = state
    key, value, key_number, tables, bits = of_keys
    power, least, _, _ = scalars
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    tile = part // (FOLD // COLUMNS)
    k, v = load_states(key, columns, CHANNELS=CHANNELS), load_states(value, columns, CHANNELS=WIDTH)
    dot = product(q, tl.trans(k), FAST=FAST)
    through = product(do, tl.trans(v), FAST=FAST)
    of_columns = columns
    if GROUPS:
        of_columns = tl.load(key_groups + columns, mask=columns < keys, other=-1)
    _, g, logarithm, x, e = pair_numbers(
        dot, through, tl.load(key_number + columns), of_rows, (columns, of_columns), tile, scalars, tables, bits,
        terms, length, ROWS_AT=0, WAY=WAY, GROUPS=GROUPS, FAST=FAST,
    )  # fmt: skip
    of_tile = tl.sum(x, 1)
    of_query = state_product(x * e, k, of_query, FAST=FAST)
    if PRIOR:
        s, positions = x * g, of_rows[0]
        scores = tl.sum(s, 1)
        of_power += tl.sum(s * logarithm, 1) - tl.log2(least) * scores
        if WAY == PAIRS:
            pair_effects, kind = of_prior, tl.arange(0, FUNCTIONALS)
            lag = tl.maximum(positions[:, None] - columns[None, :], 0)
            for each in range(FUNCTIONALS):
                at = pair_effects + each * length + lag
                effect = s * LN2 * tl.load(at) - power * x * tl.load(at + length * FUNCTIONALS)
                effect = tl.sum(tl.sum(effect, 1), 0) * (1.0 / (4 * TERMS * TERMS))
                sums += tl.where(kind == each, effect, 0.0)[:, None, None]
        else:
            place = positions - tile * FOLD
            rounded = s.to(q.dtype)
            if WAY == FULL:
                high, rest, step = of_prior
                of_phi += of_tile * tl.load(tables + 2 * length + place)
                of_lag += (place - (FOLD - 1)) * scores
                sums = product(rounded, high, FAST=FAST, start=sums * step[None, :])
                sums = product(rounded, rest, FAST=FAST, start=sums)
            else:
                functions, polynomials, effects, distance = of_prior
                of_phi += of_tile * tl.load(tables + 2 * length + tl.maximum(place, 0))
                kind, term = tl.arange(0, FUNCTIONALS), tl.arange(0, 2 * TERMS)
                at_place = part * COLUMNS % FOLD + tl.arange(0, COLUMNS)
                of_place = tl.load(functions + at_place[:, None] * (2 * TERMS) + term[None, :])
                rest = (s - rounded.to(tl.float32)).to(of_place.dtype)  # parameters' effects cancel over near lags
                moments = product(rest, of_place, FAST=FAST, start=product(rounded, of_place, FAST=FAST))
                moments = product(polynomials, moments, FAST=FAST, PRECISION=IEEE)
                at = kind[:, None, None] * (TERMS * TERMS) + (term % TERMS)[None, :, None] * TERMS
                at += effects + (distance - tile) * (FUNCTIONALS * TERMS * TERMS) + (term % TERMS)[None, None, :]
                sums += (tl.load(at) * LN2) * moments[None, :, :]
    return (of_query, of_norm + of_tile, of_power, of_phi, of_lag), sums


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def query_kernel(
    query, query_norm, key, value, key_number, gradient, delta, total, tables, bits, terms, numbers, folds,
    key_groups, query_groups, first_block, largest, cos, sin, waves, wave_rates, functions, polynomials, effects,
    pair_effects, query_gradient, sums,
    heads, queries, keys, row_length, key_length, length, row_blocks, distances, phase_batch, phase_head,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr,
    TURN: tl.constexpr, FOLDS: tl.constexpr, PRIOR: tl.constexpr, STAGES: tl.constexpr, EDGE_STAGES: tl.constexpr,
    FAST: tl.constexpr,
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
    if FOLDS:  # a whole number of tiles, as the compiler must know
        offset = offset // FOLD * FOLD
    positions = offset + rows
    padded = pair * row_length + rows
    q, do = load_states(query, padded, CHANNELS=CHANNELS), load_states(gradient, padded, CHANNELS=WIDTH)
    q_norm = tl.load(query_norm + padded)
    SCALED: tl.constexpr = query.dtype.element_ty == tl.float16
    scalars = load_scalars(
        numbers, heads, head, largest + pair * (row_length // 64), row_length // 64, SCALED=SCALED
    )  # fmt: skip
    groups = positions
    if GROUPS:
        groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)
        key_groups += batch * keys
    score_scale = scalars[2]
    of_rows = positions, q_norm, tl.load(delta + padded), tl.load(total + padded) - scalars[3], groups
    tables += head * TABLES * length
    key, value = key + pair * key_length * CHANNELS, value + pair * key_length * WIDTH
    of_keys = key, value, key_number + pair * key_length, tables, bits + head * length * (2 * TERMS)
    term, wave, n = tl.arange(0, 2 * TERMS), tl.arange(0, WAVES), tl.arange(0, FOLD)
    terms = tl.load(terms + term[:, None] * FOLD + n[None, :])
    first, full, in_pairs, last = tiles_of_rows(
        block, offset, keys, first_block, pair * row_blocks + block, q_norm, scalars[1], folds + head,
        ROWS=ROWS, GROUPS=GROUPS, FIRST=FIRST, FOLDS=FOLDS,
    )  # fmt: skip
    none = tl.zeros([ROWS], tl.float32)
    state = tl.zeros([ROWS, CHANNELS], tl.float32), none, none, none, none
    at_sums = sums
    of_waves, in_tiles, of_pairs = 0.0, 0.0, pair_effects
    if PRIOR:
        at_sums = sums + (pair * row_blocks + block) * SUMS
        of_pairs = pair_effects + head * 2 * FUNCTIONALS * length
        in_tiles = tl.zeros([FUNCTIONALS, 2 * TERMS, 2 * TERMS], tl.float32)
    if FOLDS:
        full_prior, edge_prior = (0, 0, 0), (0, 0, 0, 0)
        if PRIOR:
            at_wave = waves + n[:, None] * (2 * WAVES) + wave[None, :]
            full_prior = tl.load(at_wave), tl.load(at_wave + WAVES), tl.load(wave_rates + wave)
            edge_prior = (
                functions, tl.load(polynomials + term[:, None] * ROWS + tl.arange(0, ROWS)[None, :]),
                effects + head * distances * (FUNCTIONALS * TERMS * TERMS), (offset + block * ROWS) // FOLD,
            )  # fmt: skip
            of_waves = tl.zeros([ROWS, WAVES], tl.float32)
        for part in tl.range(first, full, num_stages=STAGES):
            state, of_waves = add_keys(
                state, of_waves, part, q, do, of_rows, of_keys, key_groups, terms, full_prior, scalars, keys, length,
                CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=FOLD, WAY=FULL, GROUPS=GROUPS, PRIOR=PRIOR, FAST=FAST,
            )  # fmt: skip
        if PRIOR:  # at the last tile's edge, and from there at lag 0
            m = positions - (full * FOLD - 1)
            of_waves = of_waves * tl.exp2(tl.load(wave_rates + WAVES + wave)[None, :] * m[:, None])
            tl.store(at_sums + wave, tl.sum(of_waves, 0) / score_scale)
        for part in tl.range(full * 2, in_pairs * 2, num_stages=EDGE_STAGES):
            state, in_tiles = add_keys(
                state, in_tiles, part, q, do, of_rows, of_keys, key_groups, terms, edge_prior, scalars, keys, length,
                CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=HALF, WAY=EDGE, GROUPS=GROUPS, PRIOR=PRIOR, FAST=FAST,
            )  # fmt: skip
    for part in tl.range(in_pairs * 2, last * 2, num_stages=1):
        state, in_tiles = add_keys(
            state, in_tiles, part, q, do, of_rows, of_keys, key_groups, terms, of_pairs, scalars, keys, length,
            CHANNELS=CHANNELS, WIDTH=WIDTH, COLUMNS=HALF, WAY=PAIRS, GROUPS=GROUPS, PRIOR=PRIOR, FAST=FAST,
        )  # fmt: skip
    of_query, of_norm, of_power, of_phi, of_lag = state
    of_query = (-scalars[0] / score_scale) * (of_query + (2.0 * of_norm)[:, None] * q.to(tl.float32))
    if TURN:
        cos += batch * phase_batch + head * phase_head
        sin += batch * phase_batch + head * phase_head
    at_row = pair * queries + rows
    turn_and_store(of_query, query_gradient, at_row, rows, in_rows, cos, sin, WIDTH=CHANNELS, TURN=TURN)
    if PRIOR:
        at_sums += WAVES
        tl.store(at_sums + tl.arange(0, FUNCTIONALS), tl.sum(tl.sum(in_tiles, 2), 1) / score_scale)
        tl.store(at_sums + FUNCTIONALS, tl.sum(of_power, 0) / score_scale)
        tl.store(at_sums + FUNCTIONALS + 1, tl.sum(of_norm, 0) / score_scale)
        tl.store(at_sums + FUNCTIONALS + 2, tl.sum(of_phi, 0) / score_scale)
        tl.store(at_sums + FUNCTIONALS + 3, tl.sum(of_lag, 0) / score_scale)
