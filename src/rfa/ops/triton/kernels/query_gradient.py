"""Gradients that are sums over the keys of a query, of the query itself, and all those of the prior."""

from typing import no_type_check

import triton
import triton.language as tl

from .folds import add_windows, fold_moments, fold_rows, fold_products, folded_blocks
from .pairs import LN2, UNIT, diagonal_sums, divided, gradient_product, pair_gradients, product
from .path_folds import load_edge, load_path_columns, load_path_rows, path_fold_bits, path_fold_rows
from .prior import SMALL, load_path, path_gradients, path_prior, riccati_sum_gradient, table_prior, variance_gradients


@triton.jit
@no_type_check
def query_gradient_kernel(
    query, key, value, query_norm, key_norm, value_norm,  # the frame
    grad_out, log_sum, log_sum_rest, delta, delta_rest,  # of each row
    grad_query, grad_path, grad_scalars, partial, grad_bits,  # results
    tables, key_path, query_path, key_bias, scalars,  # the prior
    key_order, query_order, key_groups, query_groups, ranges,  # who sees whom
    fold_key, fold_value, fold_rows_of_lags, fold_columns, fold_bits, fold_terms,  # folds
    nearest, fold_blocks, polynomials_of_rows, distances, grad_rows, grad_edges,
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
    tile and writes each of its windows once.

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
    q = tl.load(query + query_index[:, None] * CHANNELS + channels[None, :], mask=in_rows[:, None], other=0.0)
    index = query_index[:, None] * VALUE_CHANNELS + value_channels[None, :]
    d_out = tl.load(grad_out + index, mask=in_rows[:, None], other=0.0)
    q_norm = tl.load(query_norm + query_index, mask=in_rows, other=0.0)[:, None]
    row_log_sum = tl.load(log_sum + query_index, mask=in_rows, other=float("inf"))[:, None]
    row_log_sum_rest = tl.load(log_sum_rest + query_index, mask=in_rows, other=0.0)[:, None]
    row_delta = tl.load(delta + query_index, mask=in_rows, other=0.0)[:, None]
    row_delta_rest = tl.load(delta_rest + query_index, mask=in_rows, other=0.0)[:, None]
    coefficient = tl.load(scalars + head)
    offset = keys - queries
    if not UNIFORM:
        inverse_freedom = tl.load(scalars + heads + head)
        eta2 = tl.load(scalars + 2 * heads + head)
        floor = tl.load(scalars + 3 * heads + head)
        gamma2 = tl.load(scalars + 4 * heads + head)
        bias_factor = tl.load(scalars + 5 * heads + head)
        path_pair = batch * heads * path_batched + head
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
            ahead_decay = tl.zeros([COLUMNS], tl.float32)
            ahead_bias = tl.zeros([COLUMNS], tl.float32)
            ahead_weight = tl.zeros([COLUMNS], tl.float32)
            behind_decay = tl.zeros([COLUMNS], tl.float32)
            behind_bias = tl.zeros([COLUMNS], tl.float32)
            behind_weight = tl.zeros([COLUMNS], tl.float32)
            program = partial + tl.program_id(0).to(tl.int64) * 3 * windows * COLUMNS + tl.arange(0, COLUMNS)
            highest = (block + 1) * (ROWS // COLUMNS) - 1 - first_window  # the window that a tile 0 completes
        else:
            key_parts = 4 if RICCATI else 2
            program = partial + tl.program_id(0).to(tl.int64) * key_parts * keys
            inverse_freedoms = tl.zeros([ROWS], tl.float32)
            etas = tl.zeros([ROWS], tl.float32)
            floors = tl.zeros([ROWS], tl.float32)
            gammas = tl.zeros([ROWS], tl.float32)
            bias_factors = tl.zeros([ROWS], tl.float32)
            d_decay_sum = tl.zeros([ROWS], tl.float64)
            d_variance = tl.zeros([ROWS], tl.float64)
            d_riccati_sum = tl.zeros([ROWS], tl.float64)
    if FOLD > 0:
        tl.static_assert(ROWS == FOLD)
        places = tl.arange(0, FOLD)
        q_norms = tl.reshape(q_norm, [ROWS])
        row_deltas = tl.reshape(row_delta + row_delta_rest, [ROWS])
        folded = folded_blocks(
            nearest, fold_blocks, pair, batch, block, row_blocks, offset, FOLD=FOLD, GROUPS=GROUPS, UNIFORM=UNIFORM
        )
        of_log_sum = tl.reshape(row_log_sum + row_log_sum_rest, [ROWS])
        if UNIFORM:
            lag_of_rows = offset + tl.minimum(rows, queries - 1) - (FOLD - 1)  # to the edge of block 0
            term = tl.arange(0, PARTS)
            terms = tl.load(fold_terms + term[:, None] * FOLD + places[None, :])
        else:
            of_rows = load_path_rows(fold_rows_of_lags, path_pair, queries, rows, in_rows, floor, RICCATI=RICCATI)
            at_edge = load_edge(query_path, path_pair, queries, block * ROWS, RICCATI=RICCATI)
            of_queries = gamma2 + q_norms * (inverse_freedom * UNIT)
        if PRIOR and UNIFORM:
            functions = tl.trans(terms).to(tl.float32 if d_out.dtype == tl.float16 else tl.bfloat16)
            distance_to_edge = (FOLD - 1 - places).to(tl.float32) / FOLD  # the first of the functions
            polynomials = tl.load(
                polynomials_of_rows + (term % (PARTS // 2))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            )
            kept = (term[:, None] < PARTS // 2) & (term[None, :] < PARTS // 2)
            moment = grad_bits + tl.program_id(0).to(tl.int64) * distances * (PARTS // 2) * (PARTS // 2)
            moment += term[:, None] * (PARTS // 2) + term[None, :]
            in_program = partial + tl.program_id(0).to(tl.int64) * 3 * windows * COLUMNS - first_window * COLUMNS
            in_program -= offset
        elif PRIOR:
            fold_decays = tl.zeros([ROWS], tl.float32)
            fold_variances = tl.zeros([ROWS], tl.float32)
            fold_freedoms = tl.zeros([ROWS], tl.float32)
            fold_gammas = tl.zeros([ROWS], tl.float32)
            fold_factors = tl.zeros([ROWS], tl.float32)
            fold_biases = tl.zeros([ROWS], tl.float32)
            edges = grad_edges + tl.program_id(0).to(tl.int64) * (keys // FOLD) * 3
        for tile in range(0, folded):
            if UNIFORM:
                lag = lag_of_rows - tile * FOLD
                decay, bias, inverse_gain, of_dot, bits = fold_rows(
                    tables, fold_rows_of_lags, fold_bits, head, heads, lags, keys, lag,
                    FOLD=FOLD, PARTS=PARTS,
                )  # fmt: skip
                of_row = 1.0 + q_norms * inverse_gain
                start = (bias - of_log_sum)[:, None]
            else:
                edge = tile * FOLD + FOLD - 1
                decay, variance, bias, _, edge_decay, edge_variance = path_fold_rows(
                    of_rows, at_edge, key_path, path_pair, keys, edge, RICCATI=RICCATI, FAST_LOG=FAST_LOG
                )
                of_row = variance + of_queries
                inverse_gain = UNIT * inverse_freedom
                of_dot = decay * (-2.0 * UNIT * inverse_freedom)
                of_keys, column_bias = load_path_columns(
                    fold_bits, path_pair, keys, tile * FOLD + places, True, RICCATI=RICCATI
                )
                variances = variance[:, None] + (decay * decay)[:, None] * of_keys[None, :]
                start, of_effective, of_variance = path_fold_bits(
                    variances, (bias - of_log_sum)[:, None], column_bias[None, :], gamma2, coefficient, bias_factor,
                    RICCATI=RICCATI, FAST_LOG=FAST_LOG,
                )  # fmt: skip
            key_index = pair * keys + tile * FOLD + places
            k = tl.load(fold_key + key_index[:, None] * CHANNELS + channels[None, :])
            v = tl.load(fold_value + key_index[:, None] * VALUE_CHANNELS + value_channels[None, :])
            column = tl.load(fold_columns + key_index)
            grad_attention, evidence = fold_products(
                q, d_out, k, v, column, decay, of_row, of_dot, PRECISION=PRECISION, FAST_LOG=FAST_LOG
            )
            z = start - coefficient * evidence
            if UNIFORM:
                z += product(bits, terms, PRECISION=PRECISION)
            attention = tl.exp2(z)
            grad_score = attention * (decay[:, None] * grad_attention - row_deltas[:, None])
            grad_gain = tl.exp2(-evidence) * grad_score  # times -c / G(m): the gradient of G + r
            d_query += gradient_product(grad_gain * (-coefficient * of_dot)[:, None], k, PRECISION=PRECISION)
            gains = tl.sum(grad_gain, 1)
            residuals -= coefficient * inverse_gain * gains
            if PRIOR:
                scores = tl.sum(grad_score, 1)
                of_columns = tl.sum(grad_gain * column[None, :], 1)
                of_decay = scores + row_deltas * tl.sum(attention, 1) + coefficient * (of_row * gains - scores)
            if PRIOR and UNIFORM:
                coefficients -= tl.sum(grad_score * evidence, 1) * LN2
                of_decay = tl.where(decay > 2.0**-60, of_decay / decay, 0.0) - coefficient * of_dot * of_columns
                of_weight = coefficient * UNIT * (gains - scores) / inverse_gain
                window = in_program + lag
                tl.store(window, of_decay, mask=in_rows)
                tl.store(window + windows * COLUMNS, scores * LN2, mask=in_rows)
                tl.store(window + 2 * windows * COLUMNS, of_weight, mask=in_rows)
                of_bits = fold_moments(grad_score, functions, distance_to_edge, PRECISION=PRECISION)
                moments = product(polynomials, of_bits, PRECISION=PRECISION)
                distance = block - tile + offset // FOLD
                tl.store(moment + distance * (PARTS // 2) * (PARTS // 2), moments * LN2, mask=kept)
            elif PRIOR:
                effective = variances + gamma2
                coefficients += tl.sum(grad_score * (of_effective - evidence), 1) * LN2
                through_effective = tl.sum(grad_score * tl.exp2(-of_effective), 1)
                through_gamma = coefficient * (through_effective - gains)
                through_variance = through_gamma
                # The gradient of log E: of E in values and in r, then of E in Sigma.
                of_decay -= coefficient * of_dot * decay * of_columns
                of_decay += 2.0 * coefficient * (scores - (variance + gamma2) * through_effective)
                if RICCATI:
                    fold_biases += scores
                    tl.store(edges + tile * 3 + 2, tl.sum(scores, 0) * LN2)
                else:
                    through_bias = tl.sum(grad_score * tl.exp2(-of_variance), 1)
                    through_variance -= bias_factor * through_bias
                    fold_factors -= tl.sum(grad_score * of_variance, 1)
                    of_decay -= 2.0 * bias_factor * (scores - variance * through_bias)
                fold_freedoms -= coefficient * (scores - tl.sum(grad_gain * effective, 1))
                fold_gammas += through_gamma
                fold_variances += through_variance
                squared = of_rows[0] * of_rows[0] * through_variance
                tl.store(edges + tile * 3, -tl.sum(of_decay, 0))
                tl.store(edges + tile * 3 + 1, tl.sum(squared, 0))
                fold_decays -= of_decay + 2.0 * edge_variance * squared
        first = folded * (FOLD // COLUMNS)
        if PRIOR and UNIFORM:
            tl.debug_barrier()  # the windows below add to what other threads have stored
    for tile in range(first, last):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = columns < keys
        key_index = pair * keys + columns
        k = tl.load(key + key_index[:, None] * CHANNELS + channels[None, :], mask=in_columns[:, None], other=0.0)
        v = tl.load(
            value + key_index[:, None] * VALUE_CHANNELS + value_channels[None, :], mask=in_columns[:, None], other=0.0
        )
        k_norm = tl.load(key_norm + key_index, mask=in_columns, other=0.0)[None, :]
        k_norm = tl.where(k_norm == k_norm, k_norm, 0.0)  # the log sum of a row that sees it is NaN
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
                at_queries,
                at_keys,
                later,
                column_bias,
                inverse_freedom,
                eta2,
                floor,
                gamma2,
                bias_factor,
                SCORE=SCORE,
                GATE=GATE,
                RICCATI=RICCATI,
                CAUSAL=CAUSAL,
                FAST_LOG=FAST_LOG,
            )

        _, grad_dot, grad_residual, grad_decay, grad_bias, grad_weight, grad_coefficient = pair_gradients(
            dot,
            grad_attention,
            q_norm,
            k_norm,
            decay,
            bias,
            weight,
            coefficient,
            row_log_sum,
            row_log_sum_rest,
            row_delta,
            row_delta_rest,
            visible,
            SCORE=SCORE,
            FAST_LOG=FAST_LOG,
        )
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
                inverse_freedoms += fold_freedoms
                floors += fold_variances * SMALL
                gammas += fold_gammas * SMALL
                bias_factors += fold_factors * LN2
                row_index = grad_rows + pair * 3 * queries + rows
                tl.store(row_index, fold_decays, mask=in_rows)
                tl.store(row_index + queries, fold_variances, mask=in_rows)
                tl.store(row_index + 2 * queries, fold_biases * LN2, mask=in_rows)
            tl.store(scalar_index + queries, inverse_freedoms / inverse_freedom, mask=in_rows)
            tl.store(scalar_index + 2 * queries, etas, mask=in_rows)
            tl.store(scalar_index + 3 * queries, floors, mask=in_rows)
            tl.store(scalar_index + 4 * queries, gammas, mask=in_rows)
            tl.store(scalar_index + 5 * queries, bias_factors, mask=in_rows)
            path_index = grad_path + pair * 3 * queries + rows
            tl.store(path_index, d_decay_sum, mask=in_rows)
            tl.store(path_index + queries, d_variance, mask=in_rows)
            tl.store(path_index + 2 * queries, d_riccati_sum, mask=in_rows)
