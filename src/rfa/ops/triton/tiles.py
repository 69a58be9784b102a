"""A tile of pairs: the numbers g, z and T of a query and a key, and which pairs count.

The lag is split at the tile's last key, `tau = m + n`: m belongs to the row, n to the key.

    g = a_i + e_i (e_i b_j + q.k'_j)        e = E(m), k' = -2 E(n) k, v' = E(n) v
    a = |q|^2 + nu d Sigma~(m)              b = |k'|^2 / 4 + nu d (sigma^2 phi(n) - eta^2 (1 - E(n)^2))
    z = T(m + n) - c log2 g                 T = c log2(nu d Sigma~) - beta log2 Sigma,   c = beta (nu_s + 1)

A tile is taken in one of three ways. FULL: all pairs count, and T is a product of rank 8. EDGE: some pairs count, and
T is read for each pair. PAIRS: n is 0, and every number is read for each pair (heads too fast to fold, float32, times
that run both ways, exponential weights).
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import libdevice

FULL, EDGE, PAIRS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BITS = tl.constexpr(1.4426950408889634)
NEAREST = tl.constexpr(-63)  # the least m of a pair that counts
LN2 = tl.constexpr(0.6931471805599453)
TERMS = tl.constexpr(8)  # of the expansion of T within a tile
FOLD = tl.constexpr(64)  # keys of a tile
TABLES = tl.constexpr(5)  # nu d Sigma~, T, phi, E, T + log2 E; each from lag 1 - FOLD on
MOST_NORM = tl.constexpr(2.0**14)  # of |q|^2 over the least g: then g stays above 0, however it is rounded
WAVES = tl.constexpr(16)  # sums of s times a constant, the distance in a tile, and exponentials of the lag
FUNCTIONALS = tl.constexpr(8)  # parameters with an effect on T, log K and log(1 - K) among them
SUMS = tl.constexpr(32)  # of a program of the query kernel: waves, functionals, four more
HALF = tl.constexpr(32)  # keys at once where numbers are read for each pair: they take registers
NONE = tl.constexpr(-1e30)  # a score of no weight that subtracts without NaN
# of which a kernel compiles no variants: a compilation takes some 15 seconds
COUNTS = [
    *("heads", "queries", "keys", "batch", "modes", "row_blocks", "key_blocks", "blocks", "distances", "first_stride"),
    *("table_blocks", "key_programs", "query_programs", "effect_blocks", "phase_batch", "phase_head"),
]


@triton.jit
@no_type_check
def log2(x, FAST: tl.constexpr):
    """One instruction instead of some twenty; near 1 its absolute error is 2^-22."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
@no_type_check
def product(a, b, FAST: tl.constexpr):
    """A matrix product in float32. Triton's interpreter multiplies bfloat16 wrongly, and sums in another order."""
    if FAST:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)


@triton.jit
@no_type_check
def row_numbers(m, tables, length):
    """e, `nu d Sigma~` and T of rows at a distance m from a tile's last key, from the tables of a head."""
    at = tables + (FOLD - 1) + m
    return tl.load(at + 3 * length), tl.load(at), tl.load(at + length)


@triton.jit
@no_type_check
def lags_of(positions, columns, CAUSAL: tl.constexpr):
    """The lag of each pair, as two shapes that broadcast; 0 where it does not count."""
    if CAUSAL:
        return tl.maximum(positions - columns, 0)
    else:
        return tl.abs(positions - columns)
