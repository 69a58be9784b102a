"""The states of a tile as the gradient kernels read them, and what arrives at its rows."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def load_rows(
    query, query_norm, grad_out, log_sum, log_sum_rest, delta, index, in_rows, channels, value_channels,
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
):  # fmt: skip
    """q, dout, and `|q|^2`, the log sum, its rest and delta as `[rows, 1]`; an absent row weighs nothing."""
    q = tl.load(query + index[:, None] * CHANNELS + channels[None, :], mask=in_rows[:, None], other=0.0)
    values = index[:, None] * VALUE_CHANNELS + value_channels[None, :]
    d_out = tl.load(grad_out + values, mask=in_rows[:, None], other=0.0)
    q_norm = tl.load(query_norm + index, mask=in_rows, other=0.0)[:, None]
    row_log_sum = tl.load(log_sum + index, mask=in_rows, other=float("inf"))[:, None]
    row_log_sum_rest = tl.load(log_sum_rest + index, mask=in_rows, other=0.0)[:, None]
    row_delta = tl.load(delta + index, mask=in_rows, other=0.0)[:, None]
    return q, d_out, q_norm, row_log_sum, row_log_sum_rest, row_delta


@triton.jit
@no_type_check
def load_columns(
    key, value, key_norm, index, in_columns, channels, value_channels,
    CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
):  # fmt: skip
    """k, v and `|k|^2` as `[1, columns]`. That of a poisoned key is 0: the log sum of a row that sees it is NaN."""
    k = tl.load(key + index[:, None] * CHANNELS + channels[None, :], mask=in_columns[:, None], other=0.0)
    values = index[:, None] * VALUE_CHANNELS + value_channels[None, :]
    v = tl.load(value + values, mask=in_columns[:, None], other=0.0)
    k_norm = tl.load(key_norm + index, mask=in_columns, other=0.0)[None, :]
    return k, v, tl.where(k_norm == k_norm, k_norm, 0.0)
