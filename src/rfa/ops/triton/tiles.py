"""A tile of pairs: the numbers g, z and T of a query and a key, and which pairs count.

The lag is split at the tile's last key, `tau = m + n`: m belongs to the row, n to the key.

    g = a_i + e_i (e_i b_j + q.k'_j)        e = E(m), k' = -2 E(n) k, v' = E(n) v
    a = |q|^2 + nu d Sigma~(m)              b = |k'|^2 / 4 + nu d (sigma^2 phi(n) - eta^2 (1 - E(n)^2))
    z = T(m + n) - c log2 g                 T = c log2(nu d Sigma~) - beta log2 Sigma,   c = beta (nu_s + 1)

A tile is taken in one of three ways. FULL: all pairs count, and T is a product of rank 8. EDGE: some pairs count, and
T is read for each pair. PAIRS: n is 0, and every number is read for each pair (heads too fast to fold).
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import libdevice

FULL, EDGE, PAIRS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BITS = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(1.1754943508222875e-38)  # a smaller variance counts as this and has no gradient
LN2 = tl.constexpr(0.6931471805599453)
TERMS = tl.constexpr(8)  # of the expansion of T within a tile
FOLD = tl.constexpr(64)  # keys of a tile
TABLES = tl.constexpr(5)  # nu d Sigma~, T, phi, E, T + log2 E; each from lag 1 - FOLD on
MOST_NORM = tl.constexpr(2.0**14)  # of |q|^2 over the least g: then g stays above 0, however it is rounded
WAVES = tl.constexpr(16)  # sums of s times a constant, the distance in a tile, and exponentials of the lag
FUNCTIONALS = tl.constexpr(8)  # parameters with an effect on T, log K and log(1 - K) among them
SUMS = tl.constexpr(32)  # of a program of the query kernel: waves, functionals, four more
HALF = tl.constexpr(32)  # keys or rows at once where numbers are read for each pair: they take registers
TF32, IEEE = tl.constexpr("tf32"), tl.constexpr("ieee")  # how float32 is multiplied
NONE = tl.constexpr(-1e30)  # a score of no weight that subtracts without NaN
# of which a kernel compiles no variants: a compilation takes some 15 seconds
COUNTS = [
    *("heads", "queries", "keys", "batch", "modes", "row_blocks", "key_blocks", "blocks", "distances", "table_blocks"),
    *("key_programs", "query_programs", "effect_blocks", "phase_batch", "phase_head", "path_batch", "time_batch"),
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
def product(a, b, FAST: tl.constexpr, start=None, PRECISION: tl.constexpr = TF32):
    """`start + a b` in float32. Triton's interpreter multiplies bfloat16 wrongly, and sums in another order."""
    if FAST:
        return tl.dot(a, b, start, input_precision=PRECISION)
    else:
        found = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
        return found if start is None else start + found


@triton.jit
@no_type_check
def lag_numbers(positions, columns, tile, q_norm, tables, length, ROWS_AT: tl.constexpr, WAY: tl.constexpr):
    """e and a, which broadcast to the pairs, and T of each pair.

    In a FULL tile T is that of the row alone, one-dimensional, and with log2 e where rows lie along the second axis.
    """
    rows = tl.expand_dims(positions, 1 - ROWS_AT)
    lag = (FOLD - 1) + tl.maximum(rows - tl.expand_dims(columns, ROWS_AT), 0)
    if WAY == PAIRS:
        at = tables + lag
        return tl.load(at + 3 * length), tl.expand_dims(q_norm, 1 - ROWS_AT) + tl.load(at), tl.load(at + length)
    else:
        place = positions - tile * FOLD  # a pair that counts has one of at least 0
        if WAY == EDGE:
            place = tl.maximum(place, 0)
        at = tables + place
        e, gain = tl.load(at + 3 * length), q_norm + tl.load(at)
        of_rows: tl.constexpr = 1 if ROWS_AT == 0 else 4
        bits = tl.load(tables + length + lag) if WAY == EDGE else tl.load(at + of_rows * length)
        return tl.expand_dims(e, 1 - ROWS_AT), tl.expand_dims(gain, 1 - ROWS_AT), bits


@triton.jit
@no_type_check
def counted(positions, columns, of_rows, of_keys, ROWS_AT: tl.constexpr, GROUPS: tl.constexpr):
    """Which pairs count. Beyond the last key there are rows of no query alone."""
    seen = tl.expand_dims(positions, 1 - ROWS_AT) >= tl.expand_dims(columns, ROWS_AT)
    if GROUPS:
        seen = seen & (tl.expand_dims(of_rows, 1 - ROWS_AT) == tl.expand_dims(of_keys, ROWS_AT))
    return seen


@triton.jit
@no_type_check
def load_states(at, places, CHANNELS: tl.constexpr):
    """States of so many channels at places in rows."""
    return tl.load(at + places[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :])


@triton.jit
@no_type_check
def tiles_of_rows(
    block, offset, keys, first_block, at_first, q_norm, least, fold,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """A block's first tile, the first that is not FULL, the first that is taken in PAIRS, and the end."""
    first, last = 0, tl.minimum(tl.cdiv(keys, FOLD), tl.cdiv(offset + (block + 1) * ROWS, FOLD))
    if FIRST:
        first = tl.load(first_block + at_first)
    full, in_pairs = first, first
    if FOLDS:
        folded = tl.load(fold) != 0
        in_pairs = tl.where(folded, last, first)
        if not GROUPS:
            full = tl.maximum(tl.minimum((offset + block * ROWS + 1) // FOLD, in_pairs), first)
            full = tl.where(tl.max(q_norm, 0) <= least * MOST_NORM, full, first)
    return first, full, in_pairs, last


@triton.jit
@no_type_check
def turn_and_store(states, target, at_row, rows, in_rows, cos, sin, WIDTH: tl.constexpr, TURN: tl.constexpr, low=None):
    """Store states, turned by the phases of their rows or as they are; in `low` what rounding leaves out."""
    if TURN:
        size: tl.constexpr = states.shape[0]
        half: tl.constexpr = WIDTH // 2
        mode = tl.arange(0, half)
        real, imaginary = tl.split(tl.permute(tl.reshape(states, [size, 2, half]), (0, 2, 1)))
        phase = rows[:, None] * half + mode[None, :]
        c = tl.load(cos + phase, mask=in_rows[:, None], other=0.0)
        s = tl.load(sin + phase, mask=in_rows[:, None], other=0.0)
        index = at_row[:, None] * WIDTH + mode[None, :]
        store_rounded(c * real - s * imaginary, target, low, index, in_rows)
        store_rounded(s * real + c * imaginary, target, low, index + half, in_rows)
    else:
        store_rounded(states, target, low, at_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], in_rows)


@triton.jit
@no_type_check
def store_rounded(states, target, low, index, in_rows):
    """The rounded states and, for the backward pass, the rest: a rounded `<dout, out>` would not sum dS to 0."""
    rounded = states.to(target.dtype.element_ty)
    tl.store(target + index, rounded, mask=in_rows[:, None])
    if low is not None:
        tl.store(low + index, (states - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=in_rows[:, None])
