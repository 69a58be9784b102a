"""Scores of a tile whose lags are split at the edge of its block of keys.

Times are uniform and causal. The edge of a block is its last key. A query that is m behind the edge and a key that is n
before it have the lag `m + n`. With the numbers of the lag tables, `G = 1 / w`, `T = b + c log2 G`, `E_0 = E(0)`:

    E(m + n) = E(m) F(n)                       F(n) = E(n) / E_0
    G(m + n) = G(m) + E(m)^2 C(n)              C(n) = (G(n) - G(0)) / E_0^2
    T(m + n) = T(m) + sum_p u_p(m) f_p(n)
    z        = T - c log2(G + r) = b(m) + sum_p u_p(m) f_p(n) - c log2 g,       g = (G + r) / G(m)
    g        = 1 + |q|^2 / G(m) + E(m)^2 / G(m) (|k'|^2 + C(n)) - 2 E(m) / G(m) q.k',     k' = F(n) k

The states k' and v' = F v come from the host, rounded once. So a pair needs two multiplications and additions, a
logarithm and an exponential. The sum over p is a product of matrices; its coefficients come as a high and a low part.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import log2, product


@triton.jit
@no_type_check
def folded_blocks(
    nearest, fold_blocks, pair, batch, block, row_blocks, offset, FOLD: tl.constexpr, GROUPS: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """How many blocks of keys fold for a block of rows."""
    if UNIFORM:
        folded = tl.maximum(offset + block * FOLD + 1 - tl.load(nearest + pair), 0) // FOLD
        if GROUPS:
            folded = tl.minimum(folded, tl.load(fold_blocks + batch))
    else:
        folded = tl.load(nearest + pair * row_blocks + block)
    return folded


@triton.jit
@no_type_check
def fold_rows(tables, rows, bits, head, heads, lags, keys, lag, FOLD: tl.constexpr, PARTS: tl.constexpr):
    """E, b, `1 / G`, `-2 E / G` and the coefficients u `[rows, PARTS]` at the lags from rows to an edge."""
    decay = tl.load(tables + head * lags + lag)
    bias = tl.load(tables + (head + heads) * lags + lag)
    inverse_gain = tl.load(rows + head * 2 * keys + lag)
    of_dot = tl.load(rows + (head * 2 + 1) * keys + lag)
    index = (head * (keys - FOLD + 1) + lag)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    return decay, bias, inverse_gain, of_dot, tl.load(bits + index)


@triton.jit
@no_type_check
def fold_evidence(dot, of_row, column, decay, of_dot, FAST_LOG: tl.constexpr):
    """`log2 g` with `of_row = 1 + |q|^2 / G` and `column = -(|k'|^2 + C) / 2`, shaped to fit the tile; or `path_folds`' numbers."""
    return log2(of_dot * (dot + decay * column) + of_row, FAST_LOG=FAST_LOG)


@triton.jit
@no_type_check
def fold_products(q, d_out, k, v, column, decay, of_row, of_dot, PRECISION: tl.constexpr, FAST_LOG: tl.constexpr):
    """`<dout, v'>` and `log2 g` of a tile."""
    dot = product(q, tl.trans(k), PRECISION=PRECISION)
    grad_attention = product(d_out, tl.trans(v), PRECISION=PRECISION)
    return grad_attention, fold_evidence(
        dot, of_row[:, None], column[None, :], decay[:, None], of_dot[:, None], FAST_LOG=FAST_LOG
    )


@triton.jit
@no_type_check
def fold_moments(grad_score, functions, distance, PRECISION: tl.constexpr):
    """Sums of gradients of scores over the keys of a tile, times each function of their places, `[rows, PARTS]`.

    The first function is `distance`. Its sum is that of unrounded numbers: it is larger than the others by far.
    """
    sums = product(grad_score.to(functions.dtype), functions, PRECISION=PRECISION)
    first = tl.sum(grad_score * distance[None, :], 1)
    return tl.where(tl.arange(0, functions.shape[1])[None, :] == 0, first[:, None], sums)


@triton.jit
@no_type_check
def add_windows(window, stride, of_decay, of_bias, of_weight, FOLD: tl.constexpr):
    """Store the sums of a window of lags, or add them to what its program has stored for folded tiles."""
    if FOLD > 0:
        of_decay += tl.load(window)
        of_bias += tl.load(window + stride)
        of_weight += tl.load(window + 2 * stride)
    tl.store(window, of_decay)
    tl.store(window + stride, of_bias)
    tl.store(window + 2 * stride, of_weight)
