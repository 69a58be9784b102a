"""Gradients that are sums over the keys of a query, of the query itself, and all those of the prior."""

from typing import no_type_check

import triton
import triton.language as tl

from .fold_sums import (
    add_path_sums,
    add_windows,
    load_polynomials,
    no_path_sums,
    row_sums,
    store_lag_sums,
    store_moments,
    store_three,
)
from .fold_tiles import fold_scores, fold_tile, folded_blocks, of_fold_rows
from .pairs import LN2, diagonal_sums, gradient_product, pair_gradients, product
from .prior import (
    SMALL,
    load_path,
    load_scalars,
    path_gradients,
    path_prior,
    riccati_sum_gradient,
    table_prior,
    variance_gradients,
)
from .states import load_columns, load_rows


@triton.jit
@no_type_check
def query_gradient_kernel(
    query, key, value, query_norm, key_norm, value_norm,  # the frame
    grad_out, log_sum, log_sum_rest, delta, delta_rest,  # of each row
    grad_query, grad_path, grad_scalars, partial, grad_bits,  # results
    tables, key_path, query_path, key_bias, scalars,  # the prior
    key_order, query_order, key_groups, query_groups, ranges,  # who sees whom
    fold_key, fold_value, fold_rows_of_lags, fold_columns, fold_bits, fold_terms,  # folds
    nearest, fold_blocks, polynomials_of_rows, distances, grad_rows, grad_edges, fold_scales_of_rows, fold_scales,
    heads, queries, keys, lags, row_blocks, path_batched, order_batched,  # sizes
    first_block, launched_blocks, first_window, windows,  # of this launch
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCORE: tl.constexpr, CAUSAL: tl.constexpr, GATE: tl.constexpr, UNIFORM: tl.constexpr, RICCATI: tl.constexpr,
    GROUPS: tl.constexpr, RANGES: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, PRIOR: tl.constexpr,
    PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """One program for each block of queries of a head, of the blocks from `first_block` on.

    Each program adds up the gradients of lags or keys in its own part of `partial`, and the host sums the programs in a
    fixed order.

    Lag tables `(programs, 3, windows, COLUMNS)`: the diagonals of a tile fall into two or three neighbouring windows of
    COLUMNS lags, and those of the next tile into windows one further down. So a program completes one window with each
    tile and writes each of its windows once. Folded tiles have stored sums of single lags there before.

    Paths at the keys `(programs, 2 or 4, keys)` in float64: of M, u, and with the Riccati prior C and the key's bias.
    They must come from the same tiles as the sums of the queries, or the two would not cancel: see `path_gradients`. So
    they are not summed beside the gradients of the keys.
    """
    block = first_block + launched_blocks - 1 - tl.program_id(0) % launched_blocks
    pair = (tl.program_id(0) // launched_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    channels = tl.arange(0, CHANNELS)
    value_channels = tl.arange(0, VALUE_CHANNELS)
    query_index = pair * queries + rows
    q, d_out, q_norm, row_log_sum, row_log_sum_rest, row_delta = load_rows(
        query, query_norm, grad_out, log_sum, log_sum_rest, delta, query_index, in_rows, channels, value_channels,
        CHANNELS=CHANNELS, VALUE_CHANNELS=VALUE_CHANNELS,
    )  # fmt: skip
    row_delta_rest = tl.load(delta_rest + query_index, mask=in_rows, other=0.0)[:, None]
    of_head = load_scalars(scalars, head, heads, UNIFORM=UNIFORM)
    coefficient, inverse_freedom, eta2, floor, gamma2, bias_factor = of_head
    offset = keys - queries
    path_pair = batch * heads * path_batched + head
    if not UNIFORM:
        at_queries = load_path(query_path, path_pair, queries, rows[:, None], in_rows[:, None], RICCATI=RICCATI)
        row_order = tl.load(query_order + batch * order_batched * queries + rows, mask=in_rows, other=-1)[:, None]
    if GROUPS:
        row_groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)[:, None]

    first, last = 0, tl.cdiv(keys, COLUMNS)
    if RANGES:
        first = tl.load(ranges + (batch * row_blocks + block) * 2)
        last = tl.load(ranges + (batch * row_blocks + block) * 2 + 1)
    elif CAUSAL:
        last = tl.minimum(last, tl.cdiv(offset + (block + 1) * ROWS, COLUMNS))
    d_query = tl.zeros([ROWS, CHANNELS], tl.float32)
    residuals = tl.zeros([ROWS], tl.float32)
    if PRIOR:
        coefficients = tl.zeros([ROWS], tl.float32)
        if UNIFORM:
            none = tl.zeros([COLUMNS], tl.float32)
            ahead_decay, ahead_bias, ahead_weight = none, none, none
            behind_decay, behind_bias, behind_weight = none, none, none
            program = partial + tl.program_id(0).to(tl.int64) * 3 * windows * COLUMNS + tl.arange(0, COLUMNS)
            highest = (block + 1) * (ROWS // COLUMNS) - 1 - first_window  # the window that a tile 0 completes
        else:
            key_parts = 4 if RICCATI else 2
            program = partial + tl.program_id(0).to(tl.int64) * key_parts * keys
            none = tl.zeros([ROWS], tl.float32)
            inverse_freedoms, etas, floors, gammas, bias_factors = none, none, none, none, none
            none = tl.zeros([ROWS], tl.float64)
            d_decay_sum, d_variance, d_riccati_sum = none, none, none
    if FOLD > 0:
        tl.static_assert(ROWS == FOLD)
        places = tl.arange(0, FOLD)
        q_norms = tl.reshape(q_norm, [ROWS])
        row_deltas = tl.reshape(row_delta + row_delta_rest, [ROWS])
        folded = folded_blocks(
            nearest, fold_blocks, pair, batch, block, row_blocks, offset, FOLD=FOLD, GROUPS=GROUPS, UNIFORM=UNIFORM
        )
        of_log_sum = tl.reshape(row_log_sum + row_log_sum_rest, [ROWS])
        of_rows = of_fold_rows(
            rows, in_rows, q_norms, block, offset, queries, fold_rows_of_lags, fold_terms, query_path, path_pair,
            of_head, FOLD=FOLD, PARTS=PARTS, UNIFORM=UNIFORM, RICCATI=RICCATI,
        )  # fmt: skip
        row_scale, scale, unit = 1.0, 1.0, 1.0
        if d_out.dtype == tl.float16:
            row_scale = tl.load(fold_scales_of_rows + query_index, mask=in_rows, other=1.0)
            scale = tl.load(fold_scales + head)
            unit = 1.0 / row_scale  # of gradients of scores
        if PRIOR and UNIFORM:
            functions = tl.trans(of_rows[1]).to(d_out.dtype)
            polynomials = load_polynomials(polynomials_of_rows, unit, PARTS=PARTS, ROWS=ROWS)
            moments = grad_bits + tl.program_id(0).to(tl.int64) * distances * (PARTS // 2) * (PARTS // 2 + 1)
            in_program = partial + tl.program_id(0).to(tl.int64) * 3 * windows * COLUMNS - first_window * COLUMNS
            in_program -= offset
        elif PRIOR:
            edges = grad_edges + tl.program_id(0).to(tl.int64) * (keys // FOLD) * 3
            path_sums = no_path_sums(ROWS=ROWS)
        for tile in range(0, folded):
            numbers = fold_tile(
                of_rows, tile, tables, key_path, fold_rows_of_lags, fold_bits, head, heads, lags, keys, path_pair,
                of_head, FOLD=FOLD, PARTS=PARTS, UNIFORM=UNIFORM, RICCATI=RICCATI, FAST_LOG=FAST_LOG,
            )  # fmt: skip
            decay, of_row, of_dot, inverse_gain, bias, _ = numbers
            key_index = pair * keys + tile * FOLD + places
            k = tl.load(fold_key + key_index[:, None] * CHANNELS + channels[None, :])
            v = tl.load(fold_value + key_index[:, None] * VALUE_CHANNELS + value_channels[None, :])
            column = tl.load(fold_columns + key_index)
            dot = product(q, tl.trans(k), PRECISION=PRECISION)
            grad_attention = product(d_out, tl.trans(v), PRECISION=PRECISION)
            z, evidence, of_effective, of_variance = fold_scores(
                dot, column, of_rows, numbers, bias - of_log_sum, of_head,
                UNIFORM=UNIFORM, RICCATI=RICCATI, PRECISION=PRECISION, FAST_LOG=FAST_LOG,
            )  # fmt: skip
            attention = tl.exp2(z)
            of_value, of_sum = decay * row_scale, row_deltas * row_scale
            grad_score = attention * (of_value[:, None] * grad_attention - of_sum[:, None])
            grad_gain = tl.exp2(-evidence) * grad_score  # times -c / G(m): the gradient of G + r
            grad_dot = grad_gain * (-coefficient * scale * of_dot)[:, None]
            d_query += product(grad_dot.to(k.dtype), k, PRECISION=PRECISION)
            gains = tl.sum(grad_gain, 1)
            residuals -= coefficient * inverse_gain * gains
            if PRIOR:
                sums = row_sums(attention, grad_score, grad_gain, gains, column, of_sum, of_row, coefficient)
            if PRIOR and UNIFORM:
                coefficients -= tl.sum(grad_score * evidence, 1) * LN2
                store_lag_sums(
                    in_program + of_rows[0] - tile * FOLD, windows * COLUMNS, sums, numbers, coefficient, unit, in_rows
                )
                moment = moments + (block - tile + offset // FOLD) * (PARTS // 2) * (PARTS // 2 + 1)
                store_moments(moment, grad_score, functions, polynomials, PRECISION=PRECISION)
            elif PRIOR:
                coefficients += tl.sum(grad_score * (of_effective - evidence), 1) * LN2
                path_sums = add_path_sums(
                    path_sums, edges + tile * 3, grad_score, grad_gain, of_effective, of_variance, sums, numbers,
                    of_rows[0][0], of_head, unit, RICCATI=RICCATI,
                )  # fmt: skip
        if d_out.dtype == tl.float16:
            d_query *= (unit / scale)[:, None]
            residuals *= unit
            if PRIOR:
                coefficients *= unit
        first = tl.maximum(first, folded * (FOLD // COLUMNS))
        if PRIOR and UNIFORM:
            tl.debug_barrier()  # the windows below add to what other threads have stored
    for tile in range(first, last):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = columns < keys
        key_index = pair * keys + columns
        k, v, k_norm = load_columns(
            key, value, key_norm, key_index, in_columns, channels, value_channels,
            CHANNELS=CHANNELS, VALUE_CHANNELS=VALUE_CHANNELS,
        )  # fmt: skip
        dot = product(q, tl.trans(k), PRECISION=PRECISION)
        grad_attention = product(d_out, tl.trans(v), PRECISION=PRECISION)

        visible = in_rows[:, None] & in_columns[None, :]
        if GROUPS:
            column_groups = tl.load(key_groups + batch * keys + columns, mask=in_columns, other=-1)[None, :]
            visible &= (row_groups == column_groups) & (column_groups >= 0)
        if UNIFORM:
            lag = offset + tl.minimum(rows, queries - 1)[:, None] - columns[None, :]
            if CAUSAL and not GROUPS:  # keys after the last query are later than it, and absent rows are not stored
                visible = lag >= 0
            elif CAUSAL:
                visible &= lag >= 0
            decay, bias, weight = table_prior(tables, head, heads, lags, lag, visible, CAUSAL=CAUSAL)
        else:
            column_order = tl.load(key_order + batch * order_batched * keys + columns, mask=in_columns, other=0)
            later = row_order >= column_order[None, :]
            if CAUSAL:
                visible &= later
            at_keys = load_path(key_path, path_pair, keys, columns[None, :], in_columns[None, :], RICCATI=RICCATI)
            column_bias = 0.0
            if RICCATI:
                column_bias = tl.load(key_bias + path_pair * keys + columns, mask=in_columns, other=0.0)[None, :]
            decay, bias, weight, complement, variance, effective_variance = path_prior(
                at_queries, at_keys, later, column_bias, inverse_freedom, eta2, floor, gamma2, bias_factor,
                SCORE=SCORE, GATE=GATE, RICCATI=RICCATI, CAUSAL=CAUSAL, FAST_LOG=FAST_LOG,
            )  # fmt: skip

        _, grad_dot, grad_residual, grad_decay, grad_bias, grad_weight, grad_coefficient = pair_gradients(
            dot, grad_attention, q_norm, k_norm, decay, bias, weight, coefficient, row_log_sum, row_log_sum_rest,
            row_delta, row_delta_rest, visible, SCORE=SCORE, FAST_LOG=FAST_LOG,
        )  # fmt: skip
        d_query += gradient_product(grad_dot, k, PRECISION=PRECISION)
        residuals += tl.sum(grad_residual, 1)
        if PRIOR:
            coefficients += tl.sum(grad_coefficient, 1)
            if UNIFORM:
                window = program + (highest - tile) * COLUMNS
                of_decay, ahead_decay, behind_decay = diagonal_sums(
                    grad_decay, ahead_decay, behind_decay, ROWS=ROWS, COLUMNS=COLUMNS
                )
                of_bias, ahead_bias, behind_bias = diagonal_sums(
                    grad_bias, ahead_bias, behind_bias, ROWS=ROWS, COLUMNS=COLUMNS
                )
                of_weight, ahead_weight, behind_weight = diagonal_sums(
                    grad_weight, ahead_weight, behind_weight, ROWS=ROWS, COLUMNS=COLUMNS
                )
                add_windows(window, windows * COLUMNS, of_decay, of_bias, of_weight, FOLD=FOLD)
            else:
                grad_variance, grad_gamma, grad_inverse_freedom, grad_bias_factor = variance_gradients(
                    grad_bias,
                    grad_weight,
                    weight,
                    variance,
                    effective_variance,
                    bias_factor,
                    SCORE=SCORE,
                    GATE=GATE,
                    RICCATI=RICCATI,
                    FAST_LOG=FAST_LOG,
                )
                inverse_freedoms += tl.sum(grad_inverse_freedom, 1)
                etas += tl.sum(grad_variance * decay * decay, 1)
                floors += tl.sum(grad_variance, 1)
                gammas += tl.sum(grad_gamma, 1)
                bias_factors += tl.sum(grad_bias_factor, 1)
                to_decay_sum, to_variance, to_key_variance = path_gradients(
                    grad_decay, grad_variance, decay, complement, at_queries, at_keys, later, eta2
                )
                d_decay_sum += tl.sum(to_decay_sum, 1)
                d_variance += tl.sum(to_variance, 1)
                tl.store(program + columns, -tl.sum(to_decay_sum, 0), mask=in_columns)
                tl.store(program + keys + columns, tl.sum(to_key_variance, 0), mask=in_columns)
                if RICCATI:
                    to_riccati_sum = riccati_sum_gradient(grad_bias, at_queries, at_keys)
                    d_riccati_sum += tl.sum(to_riccati_sum, 1)
                    tl.store(program + 2 * keys + columns, -tl.sum(to_riccati_sum, 0), mask=in_columns)
                    tl.store(program + 3 * keys + columns, tl.sum(grad_bias.to(tl.float64), 0), mask=in_columns)

    d_query += 2.0 * residuals[:, None] * q.to(tl.float32)
    index = query_index[:, None] * CHANNELS + channels[None, :]
    tl.store(grad_query + index, d_query.to(grad_query.dtype.element_ty), mask=in_rows[:, None])
    if PRIOR:
        scalar_index = grad_scalars + pair * (1 if UNIFORM else 6) * queries + rows
        tl.store(scalar_index, coefficients, mask=in_rows)
        if UNIFORM:  # the windows after the last tile; of a causal head they may lie wholly before lag 0
            window = program + (highest - last) * COLUMNS
            if highest - last >= 0:
                add_windows(window, windows * COLUMNS, ahead_decay, ahead_bias, ahead_weight, FOLD=FOLD)
            if ROWS > COLUMNS and highest - last >= 1:
                add_windows(window - COLUMNS, windows * COLUMNS, behind_decay, behind_bias, behind_weight, FOLD=FOLD)
        else:
            if FOLD > 0:
                inverse_freedoms += path_sums[3] * unit
                floors += path_sums[1] * (unit * SMALL)
                gammas += path_sums[4] * (unit * SMALL)
                bias_factors += path_sums[5] * unit
                store_three(
                    grad_rows + pair * 3 * queries + rows, queries, path_sums[0] * unit, path_sums[1] * unit,
                    path_sums[2] * unit, in_rows,
                )  # fmt: skip
            tl.store(scalar_index + queries, inverse_freedoms / inverse_freedom, mask=in_rows)
            store_three(scalar_index + 2 * queries, queries, etas, floors, gammas, in_rows)
            tl.store(scalar_index + 5 * queries, bias_factors, mask=in_rows)
            path_index = grad_path + pair * 3 * queries + rows
            store_three(path_index, queries, d_decay_sum, d_variance, d_riccati_sum, in_rows)
