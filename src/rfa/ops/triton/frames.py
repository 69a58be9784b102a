"""A tile of pairs against the tile's last key: the form of constant dynamics at given times, in half precision.

With r the last of a tile's 64 keys, `e = exp(-(M_i - M_r))` and `f = exp(-(M_r - M_j))` have the product E, and

    Sigma = A_i + e_i^2 B_j    A = V(i, r) + sigma_0^2,    B = V(r, j) + eta^2 f^2
    g     = a_i + e_i (e_i b_j + q.k'_j) = r + S / W       k' = -2 f k,    a = |q|^2 + (A + gamma^2) / W,
                                                           b = |k'|^2 / 4 + B / W
    z     = -c log2 g + c log2 S - c log2 W - B' log2 Sigma

(with the Riccati prior `bias_j + (C_r - C_j) + (C_i - C_r)` is in the place of the last term), so that a pair takes a
third of the instructions. It serves tiles whose keys all count, belong to one group, rise in time and lie close
together, for blocks of later queries, in heads with a noise floor. V is without its factor sigma^2 in the numbers of
keys.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .tiles import BITS, LN2, log2

LEAST_FLOOR = tl.constexpr(1e-30)  # sigma_0^2 of a head: no variance is then as small as LEAST
MOST_NORM = tl.constexpr(2.0**30)  # of |k|^2: k' stays within the range of float16
NUMBERS = tl.constexpr(4)  # of a key: b, f, V(r, j) and, with the Riccati prior, the bias
TILE = tl.constexpr(64)


@triton.jit
@no_type_check
def halves(path, at, mask):
    """A float64 as two float32."""
    number = tl.load(path + at, mask=mask, other=0.0)
    high = number.to(tl.float32)
    return high, (number - high.to(tl.float64)).to(tl.float32)


@triton.jit
@no_type_check
def load_path(path, part, at, mask, VARIANCE: tl.constexpr, THIRD: tl.constexpr):
    """M, u and C, two float32 each; zeros for those that are not asked for. `part` numbers lie between two of them."""
    decay_high, decay_low = halves(path, at, mask)
    high, low = decay_high, decay_low
    third_high, third_low = decay_high, decay_low
    if VARIANCE:
        high, low = halves(path + part, at, mask)
    if THIRD:
        third_high, third_low = halves(path + 2 * part, at, mask)
    return decay_high, decay_low, high, low, third_high, third_low


@triton.jit
@no_type_check
def one_less_exponential(x, exponential):
    """`1 - exp(-x)` for x >= 0, by Taylor's series where the subtraction would lose digits."""
    series = 1.0 - x * (1.0 / 4.0) * (1.0 - x * (1.0 / 5.0) * (1.0 - x * (1.0 / 6.0) * (1.0 - x * (1.0 / 7.0))))
    series = x * (1.0 - x * 0.5 * (1.0 - x * (1.0 / 3.0) * series))
    return tl.where(x < 0.35, series, 1.0 - exponential)


@triton.jit
@no_type_check
def serves(good, query_order, query_groups, key_groups, GROUPS: tl.constexpr):
    """Whether a tile is taken against its last key, whose order `good` is: all its keys count for all rows."""
    found = tl.min(query_order, 0) >= tl.load(good)
    if GROUPS:
        found &= tl.min(query_groups, 0) == tl.max(query_groups, 0)
        found &= tl.max(query_groups, 0) == tl.max(key_groups, 0)
    return found


@triton.jit
@no_type_check
def frame_keys(path, bias, part, at, last, counts, limit, THIRD: tl.constexpr):
    """f, V(r, j), the bias of keys, and whether their tile serves; f is 1 where it does not.

    `part` numbers lie between the rows of a path, `at` and `last` are where the keys and r stand in a row.
    """
    apart = (tl.load(path + last) - tl.load(path + at, mask=counts, other=0.0)).to(tl.float32)
    serves = (tl.min(counts.to(tl.int32), 0) > 0) & (tl.min(apart, 0) >= 0.0) & (tl.max(apart, 0) <= limit)
    decay = tl.where(serves, tl.exp2(apart * -BITS), 1.0)
    own = tl.load(path + part + at, mask=counts, other=0.0)
    less = one_less_exponential(2.0 * apart, decay * decay)
    added = (tl.load(path + part + last) - own).to(tl.float32) + own.to(tl.float32) * less
    third = decay
    if THIRD:
        between = tl.load(path + 2 * part + last) - tl.load(path + 2 * part + at, mask=counts, other=0.0)
        third = tl.load(bias + at, mask=counts, other=0.0) + between.to(tl.float32)
    return decay, added, third, serves


@triton.jit
@no_type_check
def frame_rows(
    own, last, q_norm, scalars, GATE: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """e, `e^2`, A, a, the row's part of z, V(i, r) and 1 / W, of rows against the last key of a tile."""
    coefficient, freedom, _, floor, gamma2, _, factor = scalars
    apart = tl.maximum((own[0] - last[0]) + (own[1] - last[1]), 0.0)
    decay = tl.exp2(apart * -BITS)
    square = decay * decay
    added = (own[2] - last[2]) + (own[3] - last[3]) + last[2] * one_less_exponential(2.0 * apart, square)
    rest = factor * added + floor
    inverse = 1.0 / freedom
    gain = q_norm + ((rest + gamma2) * inverse if GATE else inverse)
    bias = -coefficient * tl.log2(freedom) + tl.zeros_like(decay)
    if THIRD:
        bias += (own[4] - last[4]) + (own[5] - last[5])
    return decay, square, rest, gain, bias, added, inverse


@triton.jit
@no_type_check
def load_frame(
    own, q_norm, path, part, start, numbers, stride, scalars, AXIS: tl.constexpr, COLUMNS: tl.constexpr,
    GATE: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """`frame_rows` against the last key of a tile, and the numbers of its keys from `start` on along an axis."""
    last = load_path(path, part, start // TILE * TILE + TILE - 1, True, VARIANCE=True, THIRD=THIRD)
    of_row = frame_rows(own, last, q_norm, scalars, GATE=GATE, THIRD=THIRD)
    at_key = numbers + start + tl.arange(0, COLUMNS)
    number, near, spread = tl.load(at_key), tl.load(at_key + stride), tl.load(at_key + 2 * stride)
    third = number
    if THIRD:
        third = tl.load(at_key + 3 * stride)
    return of_row, (
        tl.expand_dims(number, AXIS), tl.expand_dims(near, AXIS), tl.expand_dims(spread, AXIS),
        tl.expand_dims(third, AXIS),
    )  # fmt: skip


@triton.jit
@no_type_check
def frame_scores(
    dot, of_key, of_row, scalars, GATE: tl.constexpr, THIRD: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """z less the row's part, log2 g, S, log2 S and log2 Sigma (any number where it is not needed)."""
    coefficient, _, eta2, _, gamma2, power, factor = scalars
    number, near, spread, third = of_key
    decay, square, rest, gain, _, _, inverse = of_row
    g = decay * tl.fma(decay, number, dot) + gain
    variance, divisor, log_divisor, log_variance = 0.0, 1.0, 0.0, 0.0
    if GATE or not THIRD:
        variance = rest + square * (factor * spread + eta2 * near * near)
    if GATE:
        divisor = variance + gamma2
        log_divisor = log2(divisor, FAST=QUICK)
    g = tl.maximum(g, divisor * inverse, propagate_nan=tl.PropagateNan.ALL)  # r >= 0, but for rounding
    logarithm = log2(g, FAST=QUICK)
    z = coefficient * (log_divisor - logarithm)
    if THIRD:
        z += third
    else:
        log_variance = log2(variance, FAST=QUICK)
        z -= power * log_variance
    return z, logarithm, divisor, log_divisor, log_variance


@triton.jit
@no_type_check
def frame_gradients(
    dot, through, of_key, of_row, log_sum, delta, scalars,
    GATE: tl.constexpr, THIRD: tl.constexpr, PRIOR: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """`A e`, s, the gradient of r, and with PRIOR those of Sigma, gamma^2, c, W and B; `through` is `dout.f v`."""
    coefficient, freedom, _, _, _, power, _ = scalars
    decay, bias, inverse = of_row[0], of_row[4], of_row[6]
    z, logarithm, divisor, log_divisor, log_variance = frame_scores(
        dot, of_key, of_row, scalars, GATE=GATE, THIRD=THIRD, QUICK=QUICK
    )
    weight = tl.exp2(z + ((bias - log_sum[0]) - log_sum[1]))
    s = weight * (decay * through - delta)
    scaled = coefficient * s
    share = scaled * tl.exp2(-logarithm)  # c s / g
    of_variance, of_effective, of_coefficient, of_freedom, of_power = s, s, s, s, s
    if PRIOR:
        less = share * inverse  # c s / G
        of_effective = scaled * tl.exp2(-log_divisor) - less if GATE else tl.zeros_like(s)
        of_variance = of_effective
        if not THIRD:
            of_variance -= power * (s * tl.exp2(-log_variance))
            of_power = -LN2 * (s * log_variance)
        of_coefficient = LN2 * (s * (log_divisor - logarithm - tl.log2(freedom)))
        of_freedom = (divisor * less - scaled) * inverse
    return weight * decay, s, -share, of_variance, of_effective, of_coefficient, of_freedom, of_power
