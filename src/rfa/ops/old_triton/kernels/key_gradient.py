"""Gradients that are sums over the queries of a key: of key and value."""

from typing import no_type_check

import triton
import triton.language as tl

from .folds import fold_evidence, fold_rows
from .pairs import LN2, UNIT, gradient_product, pair_gradients, product
from .path_folds import between_edges, load_edge, load_path_columns, load_path_rows, path_fold_bits
from .prior import load_path, load_scalars, path_prior, table_prior


@triton.jit
@no_type_check
def key_gradient_kernel(
    query, key, value, query_norm, key_norm, value_norm,  # the frame
    grad_out, log_sum, log_sum_rest, delta, delta_rest,  # of each row
    grad_key, grad_value, grad_factor, grad_constant, grad_bias,  # results
    tables, key_path, query_path, key_bias, scalars,  # the prior
    key_order, query_order, key_groups, query_groups, ranges,  # who sees whom
    fold_key, fold_value, fold_rows_of_lags, fold_columns, fold_bits, fold_terms,  # folds
    nearest, fold_blocks, fold_factors, fold_scales,
    heads, queries, keys, lags, column_blocks, path_batched, order_batched,  # sizes
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCORE: tl.constexpr, CAUSAL: tl.constexpr, GATE: tl.constexpr, UNIFORM: tl.constexpr, RICCATI: tl.constexpr,
    GROUPS: tl.constexpr, RANGES: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, PRIOR: tl.constexpr,
    PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """One program for each block of keys of a head; tiles are `[keys, queries]`: no tile is transposed."""
    block = tl.program_id(0) % column_blocks  # the longest first, when causal
    pair = (tl.program_id(0) // column_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < keys
    channels = tl.arange(0, CHANNELS)
    value_channels = tl.arange(0, VALUE_CHANNELS)
    key_index = pair * keys + columns
    state_index = key_index[:, None] * CHANNELS + channels[None, :]
    value_index = key_index[:, None] * VALUE_CHANNELS + value_channels[None, :]
    k_norm = tl.load(key_norm + key_index, mask=in_columns, other=0.0)[:, None]
    k_norm = tl.where(k_norm == k_norm, k_norm, 0.0)  # the log sum of a row that sees it is NaN
    of_head = load_scalars(scalars, head, heads, UNIFORM=UNIFORM)
    coefficient, inverse_freedom, eta2, floor, gamma2, bias_factor = of_head
    offset = keys - queries
    path_pair = batch * heads * path_batched + head
    column_bias = 0.0
    if not UNIFORM:
        at_keys = load_path(key_path, path_pair, keys, columns[:, None], in_columns[:, None], RICCATI=RICCATI)
        column_order = tl.load(key_order + batch * order_batched * keys + columns, mask=in_columns, other=0)[:, None]
        if RICCATI:
            column_bias = tl.load(key_bias + path_pair * keys + columns, mask=in_columns, other=0.0)[:, None]
    if GROUPS:
        column_groups = tl.load(key_groups + batch * keys + columns, mask=in_columns, other=-1)[:, None]

    first, last = 0, tl.cdiv(queries, ROWS)
    if RANGES:
        first = tl.load(ranges + (batch * column_blocks + block) * 2)
        last = tl.load(ranges + (batch * column_blocks + block) * 2 + 1)
    elif CAUSAL:  # uniform times: from the diagonal on
        first = tl.maximum(block * COLUMNS - offset, 0) // ROWS
    d_key = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    d_value = tl.zeros([COLUMNS, VALUE_CHANNELS], tl.float32)
    residuals = tl.zeros([COLUMNS], tl.float32)
    if FOLD > 0:
        tl.static_assert(COLUMNS == FOLD)
        edge = block * FOLD + FOLD - 1
        if UNIFORM:
            factor = tl.load(fold_factors + head * FOLD + columns % FOLD)
            unfolded = tl.cdiv(tl.maximum(edge + tl.load(nearest + pair) - offset, 0), FOLD) * (FOLD // ROWS)
            if GROUPS:
                unfolded = tl.where(block < tl.load(fold_blocks + batch), unfolded, last)
            terms = tl.load(fold_terms + (columns % FOLD)[:, None] + tl.arange(0, PARTS)[None, :] * FOLD)
        else:
            factor = tl.load(fold_factors + path_pair * keys + columns, mask=in_columns, other=0.0)
            unfolded = last
            if edge < keys:
                unfolded = tl.load(fold_blocks + pair * (keys // FOLD) + block) * (FOLD // ROWS)
            of_keys, fold_bias = load_path_columns(fold_bits, path_pair, keys, columns, in_columns, RICCATI=RICCATI)
            at_edge = load_edge(key_path, path_pair, keys, tl.minimum(edge, keys - 1), RICCATI=RICCATI)
            variances_of_keys = tl.zeros([COLUMNS], tl.float32)
            biases_of_keys = tl.zeros([COLUMNS], tl.float32)
        column = tl.load(fold_columns + key_index, mask=in_columns, other=0.0)[:, None]
        scale = tl.load(fold_scales + pair) if query.dtype.element_ty == tl.float16 else 1.0
        k = tl.load(fold_key + state_index, mask=in_columns[:, None], other=0.0)
        v = tl.load(fold_value + value_index, mask=in_columns[:, None], other=0.0)
        for tile in range(tl.maximum(first, unfolded), last):
            rows = tile * ROWS + tl.arange(0, ROWS)
            in_rows = rows < queries
            query_index = pair * queries + rows
            q = tl.load(query + query_index[:, None] * CHANNELS + channels[None, :], mask=in_rows[:, None], other=0.0)
            index = query_index[:, None] * VALUE_CHANNELS + value_channels[None, :]
            d_out = tl.load(grad_out + index, mask=in_rows[:, None], other=0.0)
            q_norm = tl.load(query_norm + query_index, mask=in_rows, other=0.0)
            total = tl.load(log_sum + query_index, mask=in_rows, other=float("inf"))
            total += tl.load(log_sum_rest + query_index, mask=in_rows, other=0.0)
            subtracted = tl.load(delta + query_index, mask=in_rows, other=0.0)
            subtracted += tl.load(delta_rest + query_index, mask=in_rows, other=0.0)
            if UNIFORM:
                lag = offset + tl.minimum(rows, queries - 1) - edge
                decay, bias, inverse_gain, of_dot, bits = fold_rows(
                    tables, fold_rows_of_lags, fold_bits, head, heads, lags, keys, lag, FOLD=FOLD, PARTS=PARTS
                )
                of_row = 1.0 + q_norm * inverse_gain
            else:
                row_decay, row_variance, bias = load_path_rows(
                    fold_rows_of_lags, path_pair, queries, rows, in_rows, floor, RICCATI=RICCATI
                )
                row_edge = load_edge(query_path, path_pair, queries, tile * ROWS // FOLD * FOLD, RICCATI=RICCATI)
                _, edge_decay, edge_variance, edge_bias = between_edges(row_edge, at_edge, FAST_LOG=FAST_LOG)
                decay = row_decay * edge_decay
                of_dot = decay * (-2.0 * UNIT * inverse_freedom)
                bias += edge_bias
                of_row = (
                    row_variance + row_decay * row_decay * edge_variance + (gamma2 + q_norm * (UNIT * inverse_freedom))
                )
            dot = product(k, tl.trans(q), PRECISION=PRECISION)
            grad_attention = product(v, tl.trans(d_out), PRECISION=PRECISION)
            evidence = fold_evidence(dot, of_row[None, :], column, decay[None, :], of_dot[None, :], FAST_LOG=FAST_LOG)
            if UNIFORM:
                z = (
                    product(terms, tl.trans(bits), PRECISION=PRECISION)
                    - coefficient * evidence
                    - (total - bias)[None, :]
                )
            else:
                variance = edge_variance + edge_decay * edge_decay * of_keys
                square = row_decay * row_decay
                variances = row_variance[None, :] + square[None, :] * variance[:, None]
                z, of_effective, of_variance = path_fold_bits(
                    variances, (bias - total)[None, :], fold_bias[:, None], gamma2, coefficient, bias_factor,
                    RICCATI=RICCATI, FAST_LOG=FAST_LOG,
                )  # fmt: skip
                z -= coefficient * evidence
            attention = tl.exp2(z)
            grad_score = attention * (decay[None, :] * grad_attention - subtracted[None, :])
            grad_dot = tl.exp2(-evidence) * grad_score * (of_dot * scale)[None, :]  # times -c
            d_value += product((attention * decay[None, :]).to(d_out.dtype), d_out, PRECISION=PRECISION)
            d_key += product(grad_dot.to(q.dtype), q, PRECISION=PRECISION)
            residuals -= tl.sum(grad_dot * decay[None, :], 1)
            if PRIOR and not UNIFORM:
                of_variance_gradient = coefficient * tl.exp2(-of_effective)
                if RICCATI:
                    biases_of_keys += tl.sum(grad_score, 1)
                else:
                    of_variance_gradient -= bias_factor * tl.exp2(-of_variance)
                grad_variance = of_variance_gradient * grad_score
                variances_of_keys += edge_decay * edge_decay * tl.sum(grad_variance * square[None, :], 1)
        residuals /= scale
        d_key = -coefficient * (d_key / scale + residuals[:, None] * k.to(tl.float32))
        if PRIOR:
            through_states = tl.sum(d_key * k.to(tl.float32), 1) + tl.sum(d_value * v.to(tl.float32), 1)
            if UNIFORM:
                through_states /= factor
                variances_of_keys = -0.5 * coefficient * residuals
            else:  # Sigma is in g, too
                variances_of_keys -= 0.5 * coefficient * residuals / (UNIT * inverse_freedom)
            tl.store(grad_factor + key_index, through_states, mask=in_columns)
            tl.store(grad_constant + key_index, variances_of_keys, mask=in_columns)
            if RICCATI and not UNIFORM:
                tl.store(grad_bias + key_index, biases_of_keys * LN2, mask=in_columns)
        residuals = tl.zeros([COLUMNS], tl.float32)
        last = tl.minimum(unfolded, last)
        d_key *= factor[:, None]
        d_value *= factor[:, None]
    k = tl.load(key + state_index, mask=in_columns[:, None], other=0.0)
    v = tl.load(value + value_index, mask=in_columns[:, None], other=0.0)
    for tile in range(first, last):
        rows = tile * ROWS + tl.arange(0, ROWS)
        in_rows = rows < queries
        query_index = pair * queries + rows
        q = tl.load(query + query_index[:, None] * CHANNELS + channels[None, :], mask=in_rows[:, None], other=0.0)
        index = query_index[:, None] * VALUE_CHANNELS + value_channels[None, :]
        d_out = tl.load(grad_out + index, mask=in_rows[:, None], other=0.0)
        q_norm = tl.load(query_norm + query_index, mask=in_rows, other=0.0)[None, :]
        row_log_sum = tl.load(log_sum + query_index, mask=in_rows, other=float("inf"))[None, :]
        row_log_sum_rest = tl.load(log_sum_rest + query_index, mask=in_rows, other=0.0)[None, :]
        row_delta = tl.load(delta + query_index, mask=in_rows, other=0.0)[None, :]
        row_delta_rest = tl.load(delta_rest + query_index, mask=in_rows, other=0.0)[None, :]
        dot = product(k, tl.trans(q), PRECISION=PRECISION)
        grad_attention = product(v, tl.trans(d_out), PRECISION=PRECISION)

        visible = in_columns[:, None] & in_rows[None, :]
        if GROUPS:
            row_groups = tl.load(query_groups + batch * queries + rows, mask=in_rows, other=-2)[None, :]
            visible &= (row_groups == column_groups) & (column_groups >= 0)
        if UNIFORM:
            lag = offset + tl.minimum(rows, queries - 1)[None, :] - columns[:, None]
            if CAUSAL and not GROUPS:  # keys after the last query are later than it; an absent row weighs nothing
                visible = lag >= 0
            elif CAUSAL:
                visible &= lag >= 0
            decay, bias, weight = table_prior(tables, head, heads, lags, lag, visible, CAUSAL=CAUSAL)
        else:
            row_order = tl.load(query_order + batch * order_batched * queries + rows, mask=in_rows, other=-1)
            later = row_order[None, :] >= column_order
            if CAUSAL:
                visible &= later
            at_queries = load_path(query_path, path_pair, queries, rows[None, :], in_rows[None, :], RICCATI=RICCATI)
            decay, bias, weight, _, _, _ = path_prior(
                at_queries, at_keys, later, column_bias, inverse_freedom, eta2, floor, gamma2, bias_factor,
                SCORE=SCORE, GATE=GATE, RICCATI=RICCATI, CAUSAL=CAUSAL, FAST_LOG=FAST_LOG,
            )  # fmt: skip

        weights, grad_dot, grad_residual, _, _, _, _ = pair_gradients(
            dot, grad_attention, q_norm, k_norm, decay, bias, weight, coefficient, row_log_sum, row_log_sum_rest,
            row_delta, row_delta_rest, visible, SCORE=SCORE, FAST_LOG=FAST_LOG,
        )  # fmt: skip
        d_value += product(weights.to(d_out.dtype), d_out, PRECISION=PRECISION)
        d_key += gradient_product(grad_dot, q, PRECISION=PRECISION)
        residuals += tl.sum(grad_residual * decay * decay, 1)

    d_key += 2.0 * residuals[:, None] * k.to(tl.float32)
    tl.store(grad_key + state_index, d_key.to(grad_key.dtype.element_ty), mask=in_columns[:, None])
    tl.store(grad_value + value_index, d_value.to(grad_value.dtype.element_ty), mask=in_columns[:, None])
