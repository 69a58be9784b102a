"""Gradients that are sums over the keys of a query, of the query itself, and all those of the prior."""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import diagonal_sums, gradient_product, pair_gradients, product
from .prior import cumulative_gradient, load_path, path_gradients, path_prior, table_prior, variance_gradients


@triton.jit
@no_type_check
def query_gradient_kernel(
    query,
    key,
    value,
    query_norm,
    key_norm,
    grad_out,
    log_sum,
    log_sum_rest,
    delta,
    grad_query,
    grad_path,
    grad_scalars,
    partial,
    tables,
    key_path,
    query_path,
    key_bias,
    scalars,
    key_order,
    query_order,
    key_groups,
    query_groups,
    ranges,
    heads,
    queries,
    keys,
    lags,
    row_blocks,
    path_batched,
    order_batched,
    first_block,
    launched_blocks,
    first_window,
    windows,
    CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORE: tl.constexpr,
    CAUSAL: tl.constexpr,
    GATE: tl.constexpr,
    UNIFORM: tl.constexpr,
    RICCATI: tl.constexpr,
    GROUPS: tl.constexpr,
    RANGES: tl.constexpr,
    PRIOR: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    """One program for each block of queries of a head, of the blocks from `first_block` on.

    A number of the prior that belongs to no query gets its share from each program, in the program's own part of
    `partial`, and the host sums the programs in a fixed order.

    Lag tables `(programs, 3, windows, COLUMNS)`: the diagonals of a tile fall into two or three neighbouring windows of
    COLUMNS lags, and those of the next tile into windows one further down. So a program completes one window with each
    tile and writes each of its windows once.

    Paths at the keys `(programs, 2 or 4, keys)` in float64: of M, u, and with the Riccati prior C and the key's bias.
    They could be summed beside the gradients of the keys, but only from the very tiles that the queries' sums come from
    do the two cancel: see `path_gradients`.
    """
    block = first_block + launched_blocks - 1 - tl.program_id(0) % launched_blocks
    pair = (tl.program_id(0) // launched_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    channels = tl.arange(0, CHANNELS)
    value_channels = tl.arange(0, VALUE_CHANNELS)
    query_place = pair * queries + rows
    q = tl.load(query + query_place[:, None] * CHANNELS + channels[None, :], mask=in_rows[:, None], other=0.0)
    place = query_place[:, None] * VALUE_CHANNELS + value_channels[None, :]
    d_out = tl.load(grad_out + place, mask=in_rows[:, None], other=0.0)
    q_norm = tl.load(query_norm + query_place, mask=in_rows, other=0.0)[:, None]
    row_log_sum = tl.load(log_sum + query_place, mask=in_rows, other=0.0)[:, None]
    row_log_sum_rest = tl.load(log_sum_rest + query_place, mask=in_rows, other=0.0)[:, None]
    row_delta = tl.load(delta + query_place, mask=in_rows, other=0.0)[:, None]
    coefficient = tl.load(scalars + head)
    offset = keys - queries
    if not UNIFORM:
        share = tl.load(scalars + heads + head)
        eta2 = tl.load(scalars + 2 * heads + head)
        floor = tl.load(scalars + 3 * heads + head)
        gamma2 = tl.load(scalars + 4 * heads + head)
        temper = tl.load(scalars + 5 * heads + head)
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
            shares = tl.zeros([ROWS], tl.float32)
            etas = tl.zeros([ROWS], tl.float32)
            floors = tl.zeros([ROWS], tl.float32)
            gammas = tl.zeros([ROWS], tl.float32)
            tempers = tl.zeros([ROWS], tl.float32)
            d_damping = tl.zeros([ROWS], tl.float64)
            d_variance = tl.zeros([ROWS], tl.float64)
            d_cumulative = tl.zeros([ROWS], tl.float64)
    for tile in range(first, last):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = columns < keys
        key_place = pair * keys + columns
        k = tl.load(key + key_place[:, None] * CHANNELS + channels[None, :], mask=in_columns[:, None], other=0.0)
        v = tl.load(
            value + key_place[:, None] * VALUE_CHANNELS + value_channels[None, :], mask=in_columns[:, None], other=0.0
        )
        k_norm = tl.load(key_norm + key_place, mask=in_columns, other=0.0)[None, :]
        k_norm = tl.where(k_norm == k_norm, k_norm, 0.0)  # rows that see no number know it by their log sum
        dot = product(q, tl.trans(k), PRECISION=PRECISION)
        grad_attention = product(d_out, tl.trans(v), PRECISION=PRECISION)

        visible = in_rows[:, None] & in_columns[None, :]
        if GROUPS:
            column_groups = tl.load(key_groups + batch * keys + columns, mask=in_columns, other=-1)[None, :]
            visible &= (row_groups == column_groups) & (column_groups >= 0)
        if UNIFORM:
            lag = offset + rows[:, None] - columns[None, :]
            if CAUSAL:
                visible &= lag >= 0
            decay, bias, weight = table_prior(tables, head, heads, lags, lag, visible)
        else:
            column_order = tl.load(key_order + batch * order_batched * keys + columns, mask=in_columns, other=0)
            later = row_order >= column_order[None, :]
            if CAUSAL:
                visible &= later
            at_keys = load_path(key_path, path_pair, keys, columns[None, :], in_columns[None, :], RICCATI=RICCATI)
            column_bias = 0.0
            if RICCATI:
                column_bias = tl.load(key_bias + path_pair * keys + columns, mask=in_columns, other=0.0)[None, :]
            decay, bias, weight, lost, variance, judged = path_prior(
                at_queries,
                at_keys,
                later,
                column_bias,
                share,
                eta2,
                floor,
                gamma2,
                temper,
                SCORE=SCORE,
                GATE=GATE,
                RICCATI=RICCATI,
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
                whole, ahead_decay, behind_decay = diagonal_sums(
                    grad_decay, ahead_decay, behind_decay, ROWS=ROWS, COLUMNS=COLUMNS
                )
                tl.store(window, whole)
                whole, ahead_bias, behind_bias = diagonal_sums(
                    grad_bias, ahead_bias, behind_bias, ROWS=ROWS, COLUMNS=COLUMNS
                )
                tl.store(window + windows * COLUMNS, whole)
                whole, ahead_weight, behind_weight = diagonal_sums(
                    grad_weight, ahead_weight, behind_weight, ROWS=ROWS, COLUMNS=COLUMNS
                )
                tl.store(window + 2 * windows * COLUMNS, whole)
            else:
                grad_variance, grad_gamma, grad_share, grad_temper = variance_gradients(
                    grad_bias, grad_weight, weight, variance, judged, temper, SCORE=SCORE, GATE=GATE, RICCATI=RICCATI
                )
                shares += tl.sum(grad_share, 1)
                etas += tl.sum(grad_variance * decay * decay, 1)
                floors += tl.sum(grad_variance, 1)
                gammas += tl.sum(grad_gamma, 1)
                tempers += tl.sum(grad_temper, 1)
                to_damping, to_variance, to_key_variance = path_gradients(
                    grad_decay, grad_variance, decay, lost, at_queries, at_keys, later, eta2
                )
                d_damping += tl.sum(to_damping, 1)
                d_variance += tl.sum(to_variance, 1)
                tl.store(program + columns, -tl.sum(to_damping, 0), mask=in_columns)
                tl.store(program + keys + columns, tl.sum(to_key_variance, 0), mask=in_columns)
                if RICCATI:
                    to_cumulative = cumulative_gradient(grad_bias, at_queries, at_keys)
                    d_cumulative += tl.sum(to_cumulative, 1)
                    tl.store(program + 2 * keys + columns, -tl.sum(to_cumulative, 0), mask=in_columns)
                    tl.store(program + 3 * keys + columns, tl.sum(grad_bias.to(tl.float64), 0), mask=in_columns)

    d_query += 2.0 * residuals[:, None] * q.to(tl.float32)
    place = query_place[:, None] * CHANNELS + channels[None, :]
    tl.store(grad_query + place, d_query.to(grad_query.dtype.element_ty), mask=in_rows[:, None])
    if PRIOR:
        scalar_place = grad_scalars + pair * queries + rows
        if not UNIFORM:
            scalar_place = grad_scalars + pair * 6 * queries + rows
        tl.store(scalar_place, coefficients, mask=in_rows)
        if UNIFORM:  # the windows after the last tile; of a causal head they may lie wholly before lag 0
            window = program + (highest - last) * COLUMNS
            if highest - last >= 0:
                tl.store(window, ahead_decay)
                tl.store(window + windows * COLUMNS, ahead_bias)
                tl.store(window + 2 * windows * COLUMNS, ahead_weight)
            if ROWS > COLUMNS and highest - last >= 1:
                tl.store(window - COLUMNS, behind_decay)
                tl.store(window + (windows - 1) * COLUMNS, behind_bias)
                tl.store(window + (2 * windows - 1) * COLUMNS, behind_weight)
        else:
            tl.store(scalar_place + queries, shares / share, mask=in_rows)
            tl.store(scalar_place + 2 * queries, etas, mask=in_rows)
            tl.store(scalar_place + 3 * queries, floors, mask=in_rows)
            tl.store(scalar_place + 4 * queries, gammas, mask=in_rows)
            tl.store(scalar_place + 5 * queries, tempers, mask=in_rows)
            path_place = grad_path + pair * 3 * queries + rows
            tl.store(path_place, d_damping, mask=in_rows)
            tl.store(path_place + queries, d_variance, mask=in_rows)
            tl.store(path_place + 2 * queries, d_cumulative, mask=in_rows)
