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

from .pairs import log2


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
    """`log2 g` with `of_row = 1 + |q|^2 / G` and `column = -(|k'|^2 + C) / 2`, or as `path_folds` has them."""
    return log2(of_dot * (dot + decay * column) + of_row, FAST_LOG=FAST_LOG)
