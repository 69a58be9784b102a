"""Estimates and log sums of the scores: one program for each block of queries of a head."""

from typing import no_type_check

import triton
import triton.language as tl

from .fold_tiles import fold_scores, fold_tile, folded_blocks, of_fold_rows
from .pairs import product, scores
from .prior import BITS, load_path, load_scalars, path_prior, table_prior
from .sharp import SHARP, marked

LOWEST = tl.constexpr(-3e38)  # a maximum before the first score; all of Student-t weights are higher


@triton.jit
@no_type_check
def forward_kernel(
    query, key, value, query_norm, key_norm, value_norm,  # the frame
    out, log_sum,  # results
    tables, key_path, query_path, key_bias, scalars,  # the prior
    key_order, query_order, key_groups, query_groups, ranges,  # who sees whom
    fold_key, fold_value, fold_rows_of_lags, fold_columns, fold_bits, fold_terms,  # folds
    nearest, fold_blocks, poisoned,
    heads, queries, keys, lags, row_blocks, path_batched, order_batched,  # sizes
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCORE: tl.constexpr, CAUSAL: tl.constexpr, GATE: tl.constexpr, UNIFORM: tl.constexpr, RICCATI: tl.constexpr,
    GROUPS: tl.constexpr, RANGES: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    FAST_LOG: tl.constexpr,
):  # fmt: skip
    """States in the common frame in, estimates in the common frame out.

    A running maximum keeps the sums in range. The prior's bound would save a maximum and a rescaling in each tile. But
    the weights of rows far from every key would be smaller than 2^-60 then, and such rows would have to be computed
    again. With exponential weights these are most rows of an untrained layer.
    """
    block = row_blocks - 1 - tl.program_id(0) % row_blocks  # the longest first
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    channels = tl.arange(0, CHANNELS)
    value_channels = tl.arange(0, VALUE_CHANNELS)
    query_index = pair * queries + rows
    q = tl.load(query + query_index[:, None] * CHANNELS + channels[None, :], mask=in_rows[:, None], other=0.0)
    q_norm = tl.load(query_norm + query_index, mask=in_rows, other=0.0)[:, None]
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
    elif CAUSAL:  # uniform times: up to the diagonal
        last = tl.minimum(last, tl.cdiv(offset + (block + 1) * ROWS, COLUMNS))
    highest = tl.full([ROWS], float("-inf") if FOLD == 0 else LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    estimate = tl.zeros([ROWS, VALUE_CHANNELS], tl.float32)
    unknown = tl.zeros([ROWS], tl.int32)  # how many poisoned values a row sees
    if FOLD > 0:
        tl.static_assert(ROWS == FOLD)  # as of the gradients: they take the same tiles
        places = tl.arange(0, FOLD)
        q_norms = tl.reshape(q_norm, [ROWS])
        folded = folded_blocks(
            nearest, fold_blocks, pair, batch, block, row_blocks, offset, FOLD=FOLD, GROUPS=GROUPS, UNIFORM=UNIFORM
        )
        of_rows = of_fold_rows(
            rows, in_rows, q_norms, block, offset, queries, fold_rows_of_lags, fold_terms, query_path, path_pair,
            of_head, FOLD=FOLD, PARTS=PARTS, UNIFORM=UNIFORM, RICCATI=RICCATI,
        )  # fmt: skip
        if UNIFORM:
            start = tl.load(tables + head * lags)
            step = tl.load(tables + head * lags + FOLD) / tl.where(start > 0.0, start, 1.0)
        else:
            before = float("inf")  # `M_a - M_b` of the last tile
        in_keys = places[:, None] * CHANNELS + channels[None, :]
        in_values = places[:, None] * VALUE_CHANNELS + value_channels[None, :]
        for tile in range(0, folded):
            numbers = fold_tile(
                of_rows, tile, tables, key_path, fold_rows_of_lags, fold_bits, head, heads, lags, keys, path_pair,
                of_head, FOLD=FOLD, PARTS=PARTS, UNIFORM=UNIFORM, RICCATI=RICCATI, FAST_LOG=FAST_LOG,
            )  # fmt: skip
            if not UNIFORM:
                apart = numbers[5][4]
                step = tl.exp2((apart - before) * BITS)
                before = apart
            key_index = pair * keys + tile * FOLD + places
            k = tl.load(fold_key + (pair * keys + tile * FOLD) * CHANNELS + in_keys)
            v = tl.load(fold_value + (pair * keys + tile * FOLD) * VALUE_CHANNELS + in_values)
            column = tl.load(fold_columns + key_index)
            dot = product(q, tl.trans(k), PRECISION=PRECISION)
            z, _, _, _ = fold_scores(
                dot, column, of_rows, numbers, numbers[4], of_head,
                UNIFORM=UNIFORM, RICCATI=RICCATI, PRECISION=PRECISION, FAST_LOG=FAST_LOG,
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(z, 1))
            attention = tl.exp2(z - higher[:, None])
            rescale = tl.exp2(highest - higher)
            total = total * rescale + tl.sum(attention, 1)
            # The estimate is that at the edge of the block: all rows decay alike from one block to the next.
            estimate = estimate * (rescale * step)[:, None] + product(attention.to(v.dtype), v, PRECISION=PRECISION)
            highest = higher
        if folded > 0:
            first = folded * (FOLD // COLUMNS)
            unknown += tl.load(poisoned + pair * (keys // FOLD) + folded - 1)
            if UNIFORM:
                decay = tl.load(tables + head * lags + of_rows[0] - (folded - 1) * FOLD)
            else:
                decay = of_rows[0][0] * tl.exp2(before * -BITS)
            estimate *= decay[:, None]
    for tile in range(first, last):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = columns < keys
        key_index = pair * keys + columns
        k = tl.load(key + key_index[:, None] * CHANNELS + channels[None, :], mask=in_columns[:, None], other=0.0)
        k_norm = tl.load(key_norm + key_index, mask=in_columns, other=0.0)[None, :]
        dot = product(q, tl.trans(k), PRECISION=PRECISION)

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
            decay, bias, weight, _, _, _ = path_prior(
                at_queries, at_keys, later, column_bias, inverse_freedom, eta2, floor, gamma2, bias_factor,
                SCORE=SCORE, GATE=GATE, RICCATI=RICCATI, CAUSAL=CAUSAL, FAST_LOG=FAST_LOG,
            )  # fmt: skip

        z = scores(dot, q_norm, k_norm, decay, bias, weight, coefficient, SCORE=SCORE, FAST_LOG=FAST_LOG)
        z = tl.where(visible, z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        attention = tl.exp2(z - reference[:, None])
        rescale = tl.exp2(highest - reference)
        total = total * rescale + tl.sum(attention, 1)
        v = tl.load(
            value + key_index[:, None] * VALUE_CHANNELS + value_channels[None, :], mask=in_columns[:, None], other=0.0
        )
        weights = (attention * decay).to(v.dtype)
        estimate = estimate * rescale[:, None] + product(weights, v, PRECISION=PRECISION)
        highest = higher
        v_norm = tl.load(value_norm + key_index, mask=in_columns, other=0.0)
        if tl.max((v_norm != v_norm).to(tl.int32), 0) > 0:
            unknown += tl.sum((visible & (v_norm != v_norm)[None, :]).to(tl.int32), 1)

    seen = total != 0.0  # NaN too
    estimate = estimate / tl.where(seen, total, 1.0)[:, None]
    estimate = tl.where(unknown[:, None] > 0, float("nan"), estimate)
    # in float64: near large scores float32 is too coarse to form the weights again
    logarithm = highest.to(tl.float64) + tl.log2(tl.where(seen, total, 1.0)).to(tl.float64)
    logarithm = marked(tl.where(seen, logarithm, float("-inf")), total * SHARP < 1.0)  # the largest weight is 1 / total
    tl.store(log_sum + query_index, logarithm, mask=in_rows)
    index = query_index[:, None] * VALUE_CHANNELS + value_channels[None, :]
    tl.store(out + index, estimate.to(out.dtype.element_ty), mask=in_rows[:, None])
