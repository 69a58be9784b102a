"""The terms that gradients of scores subtract, to more digits than the estimate has."""

from typing import no_type_check

import triton
import triton.language as tl

from .fold_tiles import fold_scores, fold_tile, folded_blocks, of_fold_rows
from .pairs import pair_weights, product
from .prior import load_path, load_scalars, path_prior, table_prior
from .states import load_columns, load_rows

SHARP = tl.constexpr(0.75)  # rows with a larger weight are marked
MOST_MARKED = tl.constexpr(67108864.0)  # 2^26: beyond it a log sum loses its last digit and those above


@triton.jit
@no_type_check
def marked(log_sum, sharp):
    """Whether a row is sharp in the last bit of its log2 sum, a relative change of 2^-52."""
    bits = log_sum.to(tl.int64, bitcast=True)
    bits = (bits & -2) | sharp.to(tl.int64)
    return tl.where(tl.abs(log_sum) <= MOST_MARKED, bits.to(tl.float64, bitcast=True), log_sum)


@triton.jit
@no_type_check
def is_marked(log_sum):
    """Beyond MOST_MARKED weights are 0 or those of equal scores, and every row counts as sharp."""
    bits = log_sum.to(tl.int64, bitcast=True)
    return (0.0 * log_sum == 0.0) & ((tl.abs(log_sum) > MOST_MARKED) | ((bits & 1) == 1))


@triton.jit
@no_type_check
def sharpen_kernel(
    query, key, value, query_norm, key_norm, value_norm,  # the frame
    grad_out, log_sum, log_sum_rest, delta, delta_rest, marked_log_sum,  # of each row
    tables, key_path, query_path, key_bias, scalars,  # the prior
    key_order, query_order, key_groups, query_groups, ranges,  # who sees whom
    fold_key, fold_value, fold_rows_of_lags, fold_columns, fold_bits, fold_terms,  # folds
    nearest, fold_blocks,
    heads, queries, keys, lags, row_blocks, path_batched, order_batched,  # sizes
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCORE: tl.constexpr, CAUSAL: tl.constexpr, GATE: tl.constexpr, UNIFORM: tl.constexpr, RICCATI: tl.constexpr,
    GROUPS: tl.constexpr, RANGES: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    FAST_LOG: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """`<dout_i, out_i>` and log sums of the blocks of queries that hold a marked row, or of `EVERY` block, rewritten.

    Where one weight is nearly 1, `E <dout, v> - <dout, out>` is far smaller than the error of either term. Over a row
    the differences add up to zero, and an error of the second term would be multiplied by log Sigma. So `<dout, out>`
    is formed from the same products that it is subtracted from, as a correction to the rounded one, and the weights are
    made to add up to 1. In half precision every row needs this, in float32 only rows with one large weight.
    """
    block = row_blocks - 1 - tl.program_id(0) % row_blocks
    pair = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    in_rows = rows < queries
    channels = tl.arange(0, CHANNELS)
    value_channels = tl.arange(0, VALUE_CHANNELS)
    query_index = pair * queries + rows
    of_forward = tl.load(marked_log_sum + query_index, mask=in_rows, other=float("-inf"))
    q, d_out, q_norm, row_log_sum, row_log_sum_rest, row_delta = load_rows(
        query, query_norm, grad_out, log_sum, log_sum_rest, delta, query_index, in_rows, channels, value_channels,
        CHANNELS=CHANNELS, VALUE_CHANNELS=VALUE_CHANNELS,
    )  # fmt: skip
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
    if not EVERY:  # noqa: SIM102 (known when it is compiled)
        if tl.max(is_marked(of_forward).to(tl.int32), 0) == 0:
            last = first
    total = tl.zeros([ROWS], tl.float64)
    inner = tl.zeros([ROWS], tl.float64)
    if FOLD > 0:
        tl.static_assert(ROWS == FOLD)  # as of the gradients: they take the same tiles
        places = tl.arange(0, FOLD)
        q_norms = tl.reshape(q_norm, [ROWS])
        folded = folded_blocks(
            nearest, fold_blocks, pair, batch, block, row_blocks, offset, FOLD=FOLD, GROUPS=GROUPS, UNIFORM=UNIFORM
        )
        of_log_sum = tl.reshape(row_log_sum + row_log_sum_rest, [ROWS])
        of_rows = of_fold_rows(
            rows, in_rows, q_norms, block, offset, queries, fold_rows_of_lags, fold_terms, query_path, path_pair,
            of_head, FOLD=FOLD, PARTS=PARTS, UNIFORM=UNIFORM, RICCATI=RICCATI,
        )  # fmt: skip
        for tile in range(0, folded):
            numbers = fold_tile(
                of_rows, tile, tables, key_path, fold_rows_of_lags, fold_bits, head, heads, lags, keys, path_pair,
                of_head, FOLD=FOLD, PARTS=PARTS, UNIFORM=UNIFORM, RICCATI=RICCATI, FAST_LOG=FAST_LOG,
            )  # fmt: skip
            key_index = pair * keys + tile * FOLD + places
            k = tl.load(fold_key + key_index[:, None] * CHANNELS + channels[None, :])
            v = tl.load(fold_value + key_index[:, None] * VALUE_CHANNELS + value_channels[None, :])
            column = tl.load(fold_columns + key_index)
            dot = product(q, tl.trans(k), PRECISION=PRECISION)
            grad_attention = product(d_out, tl.trans(v), PRECISION=PRECISION)
            z, _, _, _ = fold_scores(
                dot, column, of_rows, numbers, numbers[4] - of_log_sum, of_head,
                UNIFORM=UNIFORM, RICCATI=RICCATI, PRECISION=PRECISION, FAST_LOG=FAST_LOG,
            )  # fmt: skip
            attention = tl.exp2(z)
            total += tl.sum(attention, 1).to(tl.float64)
            inner += tl.sum(attention * (numbers[0][:, None] * grad_attention - row_delta), 1).to(tl.float64)
        first = tl.maximum(first, folded * (FOLD // COLUMNS))
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
            decay, bias, weight, _, _, _ = path_prior(
                at_queries, at_keys, later, column_bias, inverse_freedom, eta2, floor, gamma2, bias_factor,
                SCORE=SCORE, GATE=GATE, RICCATI=RICCATI, CAUSAL=CAUSAL, FAST_LOG=FAST_LOG,
            )  # fmt: skip

        attention, _, _, _, _ = pair_weights(
            dot, q_norm, k_norm, decay, bias, weight, coefficient, row_log_sum, row_log_sum_rest, visible,
            SCORE=SCORE, FAST_LOG=FAST_LOG,
        )  # fmt: skip
        total += tl.sum(attention, 1).to(tl.float64)
        inner += tl.sum(attention * (decay * grad_attention - row_delta), 1).to(tl.float64)

    known = in_rows & (0.0 * inner == 0.0) & (total > 0.0) & (total < float("inf"))
    total = tl.where(known, total, 1.0)
    rough = tl.load(delta + query_index, mask=known, other=0.0).to(tl.float64)
    inner = rough + inner / total
    part = inner.to(tl.float32)
    rest = tl.load(delta_rest + query_index, mask=known, other=0.0)
    log_rest = tl.load(log_sum_rest + query_index, mask=known, other=0.0)
    tl.store(delta + query_index, part, mask=known)
    tl.store(delta_rest + query_index, rest + (inner - part.to(tl.float64)).to(tl.float32), mask=known)
    tl.store(log_sum_rest + query_index, log_rest + tl.log2(total).to(tl.float32), mask=known)
