"""Plain flash attention in Triton: causal, no bias. Its instructions are the measure for those of the filter's kernels.

Each kernel first visits the tiles that need no mask, then those on the diagonal. The length is a multiple of every
block, so that nothing else needs a mask. Importing this module imports triton.
"""

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = 1.4426950408889634  # a nat


@triton.jit
@no_type_check
def _states(pointer, pair, positions, length, CHANNELS: tl.constexpr):
    """The states of a head at some positions."""
    offsets = (pair * length + positions)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return tl.load(pointer + offsets)


@triton.jit
@no_type_check
def _store(pointer, states, pair, positions, length, CHANNELS: tl.constexpr):
    offsets = (pair * length + positions)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(pointer + offsets, states.to(pointer.dtype.element_ty))


@triton.jit
@no_type_check
def _weights(score, rows, columns, log_sum, scale, MASKED: tl.constexpr):
    """The weights, formed again from the rows' log sums."""
    weights = tl.exp2(score * scale - log_sum)
    if MASKED:
        return tl.where(rows >= columns, weights, 0.0)
    else:
        return weights


@triton.jit
@no_type_check
def _forward_tile(
    highest, total, estimate, q, key, value, pair, rows, start, length, scale, CHANNELS, COLUMNS, MASKED: tl.constexpr
):
    """Running maximum, sum and estimate with one more tile of keys."""
    columns = start + tl.arange(0, COLUMNS)
    score = tl.dot(q, tl.trans(_states(key, pair, columns, length, CHANNELS)))
    if MASKED:
        score = tl.where(rows[:, None] >= columns[None, :], score, float("-inf"))
    higher = tl.maximum(highest, tl.max(score, 1) * scale)
    weights = tl.exp2(score * scale - higher[:, None])
    rescale = tl.exp2(highest - higher)
    v = _states(value, pair, columns, length, CHANNELS)
    estimate = tl.dot(weights.to(v.dtype), v, estimate * rescale[:, None])
    return higher, total * rescale + tl.sum(weights, 1), estimate


@triton.jit
@no_type_check
def flash_forward_kernel(
    query, key, value, out, log_sum, scale, length, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Estimates and log2 sums of a block of queries."""
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    q = _states(query, pair, rows, length, CHANNELS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    estimate = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, block * ROWS, COLUMNS):
        highest, total, estimate = _forward_tile(
            highest, total, estimate, q, key, value, pair, rows, start, length, scale, CHANNELS, COLUMNS, MASKED=False
        )
    for start in range(block * ROWS, (block + 1) * ROWS, COLUMNS):
        highest, total, estimate = _forward_tile(
            highest, total, estimate, q, key, value, pair, rows, start, length, scale, CHANNELS, COLUMNS, MASKED=True
        )
    tl.store(log_sum + pair * length + rows, highest + tl.log2(total))
    _store(out, estimate / total[:, None], pair, rows, length, CHANNELS)


@triton.jit
@no_type_check
def _key_tile(d_key, d_value, k, v, query, grad_out, log_sum, delta, pair, columns, start, length, scale,
              CHANNELS, ROWS, MASKED: tl.constexpr):  # fmt: skip
    """Both gradients with one more tile of queries, which is `[keys, queries]`: no product is transposed."""
    rows = start + tl.arange(0, ROWS)
    q = _states(query, pair, rows, length, CHANNELS)
    d_out = _states(grad_out, pair, rows, length, CHANNELS)
    row_log_sum = tl.load(log_sum + pair * length + rows)[None, :]
    row_delta = tl.load(delta + pair * length + rows)[None, :]
    weights = _weights(tl.dot(k, tl.trans(q)), rows[None, :], columns[:, None], row_log_sum, scale, MASKED)
    d_value = tl.dot(weights.to(d_out.dtype), d_out, d_value)
    grad_score = weights * (tl.dot(v, tl.trans(d_out)) - row_delta)
    return tl.dot(grad_score.to(q.dtype), q, d_key), d_value


@triton.jit
@no_type_check
def flash_key_gradient_kernel(
    query, key, value, grad_out, log_sum, delta, grad_key, grad_value, scale, unit, length,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values."""
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k = _states(key, pair, columns, length, CHANNELS)
    v = _states(value, pair, columns, length, CHANNELS)
    d_key = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    d_value = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    for start in range((block + 1) * COLUMNS, length, ROWS):
        d_key, d_value = _key_tile(
            d_key, d_value, k, v, query, grad_out, log_sum, delta, pair, columns, start, length, scale,
            CHANNELS, ROWS, MASKED=False,
        )  # fmt: skip
    for start in range(block * COLUMNS, (block + 1) * COLUMNS, ROWS):
        d_key, d_value = _key_tile(
            d_key, d_value, k, v, query, grad_out, log_sum, delta, pair, columns, start, length, scale,
            CHANNELS, ROWS, MASKED=True,
        )  # fmt: skip
    _store(grad_key, d_key * unit, pair, columns, length, CHANNELS)
    _store(grad_value, d_value, pair, columns, length, CHANNELS)


@triton.jit
@no_type_check
def _query_tile(d_query, q, d_out, row_log_sum, row_delta, key, value, pair, rows, start, length, scale,
                CHANNELS, COLUMNS, MASKED: tl.constexpr):  # fmt: skip
    """The gradient with one more tile of keys."""
    columns = start + tl.arange(0, COLUMNS)
    k = _states(key, pair, columns, length, CHANNELS)
    v = _states(value, pair, columns, length, CHANNELS)
    weights = _weights(tl.dot(q, tl.trans(k)), rows[:, None], columns[None, :], row_log_sum, scale, MASKED)
    grad_score = weights * (tl.dot(d_out, tl.trans(v)) - row_delta)
    return tl.dot(grad_score.to(k.dtype), k, d_query)


@triton.jit
@no_type_check
def flash_query_gradient_kernel(
    query, key, value, grad_out, log_sum, delta, grad_query, scale, unit, length,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries."""
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    q = _states(query, pair, rows, length, CHANNELS)
    d_out = _states(grad_out, pair, rows, length, CHANNELS)
    row_log_sum = tl.load(log_sum + pair * length + rows)[:, None]
    row_delta = tl.load(delta + pair * length + rows)[:, None]
    d_query = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, block * ROWS, COLUMNS):
        d_query = _query_tile(
            d_query, q, d_out, row_log_sum, row_delta, key, value, pair, rows, start, length, scale,
            CHANNELS, COLUMNS, MASKED=False,
        )  # fmt: skip
    for start in range(block * ROWS, (block + 1) * ROWS, COLUMNS):
        d_query = _query_tile(
            d_query, q, d_out, row_log_sum, row_delta, key, value, pair, rows, start, length, scale,
            CHANNELS, COLUMNS, MASKED=True,
        )  # fmt: skip
    _store(grad_query, d_query * unit, pair, rows, length, CHANNELS)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention of contiguous states `(batch, heads, length, channels)`; 128 divides the length."""
    estimate: Tensor = _FlashAttention.apply(query, key, value)
    return estimate


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, channels = query.shape
        out, log_sum = torch.empty_like(query), query.new_empty(batch, heads, length, dtype=torch.float32)
        scale = BITS / math.sqrt(channels)
        launch = {"CHANNELS": channels, "ROWS": 128, "COLUMNS": 64, "num_stages": 2}
        launch["num_warps"] = 8 if channels > 64 else 4
        grid = (length // 128, batch * heads)
        flash_forward_kernel[grid](query, key, value, out, log_sum, scale, length, **launch)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        query, key, value, out, log_sum = ctx.saved_tensors
        batch, heads, length, channels = query.shape
        grad_out = grad_out.contiguous()
        delta = (grad_out.to(torch.float32) * out).sum(-1)
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        scale = BITS / math.sqrt(channels), 1 / math.sqrt(channels)
        launch = {"CHANNELS": channels, "ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
        grid = (length // 64, batch * heads)
        given = (query, key, value, grad_out, log_sum, delta)
        flash_key_gradient_kernel[grid](*given, *gradients[1:], *scale, length, **launch)
        flash_query_gradient_kernel[grid](*given, gradients[0], *scale, length, **launch)
        return gradients[0], gradients[1], gradients[2]
