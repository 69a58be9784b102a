"""E, b and w of a tile of pairs, from lag tables or along a path, and the gradients of the path.

Everything about queries is shaped `[rows, 1]` and about keys `[1, columns]`, or the other way round for a transposed
tile. All arithmetic of pairs is float32, except where a sum over pairs must cancel to far below one term.
"""

from typing import no_type_check

import triton
import triton.language as tl

BITS = tl.constexpr(1.4426950408889634)  # a nat
LEAST = tl.constexpr(1.1754943508222875e-38)  # of a variance: the smallest normal float32
LEAST_OF_EXPONENTIAL = tl.constexpr(1.9673781396807392e-24)  # of Sigma~, as in `rfa.ops.scores.least_judged`
SMALL = tl.constexpr(2.3283064365386963e-10)  # 2^-32: gradients of variances are summed in this unit


@triton.jit
@no_type_check
def table_prior(tables, head, heads, lags, lag, visible):
    """E, b, w at the lags `|i - j|`; neighbouring pairs share cache lines, for the lags of a tile are few.

    Tables `(3, heads, lags)`: there may be more lags than keys.
    """
    lag = tl.abs(lag)
    decay = tl.load(tables + head * lags + lag, mask=visible, other=0.0)
    bias = tl.load(tables + (head + heads) * lags + lag, mask=visible, other=0.0)
    weight = tl.load(tables + (head + 2 * heads) * lags + lag, mask=visible, other=0.0)
    return decay, bias, weight


@triton.jit
@no_type_check
def load_path(path, pair, length, places, present, RICCATI: tl.constexpr):
    """M, u and C (0 where there is none), each a high and a low float32 whose sum is the float64."""
    if RICCATI:
        parts = path + pair * 6 * length + places
        weight_high = tl.load(parts + 4 * length, mask=present, other=0.0)
        weight_low = tl.load(parts + 5 * length, mask=present, other=0.0)
    else:
        parts = path + pair * 4 * length + places
        weight_high = tl.zeros_like(places).to(tl.float32)
        weight_low = weight_high
    damping_high = tl.load(parts, mask=present, other=0.0)
    damping_low = tl.load(parts + length, mask=present, other=0.0)
    variance_high = tl.load(parts + 2 * length, mask=present, other=0.0)
    variance_low = tl.load(parts + 3 * length, mask=present, other=0.0)
    return damping_high, damping_low, variance_high, variance_low, weight_high, weight_low


@triton.jit
@no_type_check
def _between(query_high, query_low, key_high, key_low, later):
    """The later less the earlier; the high parts subtract exactly where they are close, so no digit is lost."""
    difference = (query_high - key_high) + (query_low - key_low)
    return tl.where(later, difference, -difference)


@triton.jit
@no_type_check
def path_prior(
    query_path,
    key_path,
    later,
    key_bias,
    share,
    eta2,
    floor,
    gamma2,
    temper,
    SCORE: tl.constexpr,
    GATE: tl.constexpr,
    RICCATI: tl.constexpr,
):
    """E, b, w and, for the gradients, `1 - E^2`, Sigma and Sigma~ before they are kept from zero."""
    damping = tl.maximum(_between(query_path[0], query_path[1], key_path[0], key_path[1], later), 0.0)
    decay = tl.exp2(damping * -BITS)
    lost = _one_less_exponential(2.0 * damping, decay * decay)
    grown = _between(query_path[2], query_path[3], key_path[2], key_path[3], later)
    earlier = tl.where(later, key_path[2], query_path[2])
    variance = grown + earlier * lost + eta2 * decay * decay + floor
    kept = tl.maximum(variance, LEAST)
    judged = variance + gamma2
    if RICCATI:
        bias = key_bias - tl.abs((query_path[4] - key_path[4]) + (query_path[5] - key_path[5]))
    else:
        bias = -temper * tl.log2(kept)
    least = LEAST_OF_EXPONENTIAL if SCORE == "exponential" else LEAST
    weight = share / tl.maximum(judged, least) if GATE else tl.zeros_like(judged) + share
    return decay, bias, weight, lost, variance, judged


@triton.jit
@no_type_check
def _one_less_exponential(x, exponential):
    """`1 - exp(-x)` for x >= 0; Taylor's series to 2e-8 where the subtraction would lose digits."""
    series = 1.0 - x * (1.0 / 4.0) * (1.0 - x * (1.0 / 5.0) * (1.0 - x * (1.0 / 6.0) * (1.0 - x * (1.0 / 7.0))))
    series = x * (1.0 - x * 0.5 * (1.0 - x * (1.0 / 3.0) * series))
    return tl.where(x < 0.35, series, 1.0 - exponential)


@triton.jit
@no_type_check
def variance_gradients(
    grad_bias,
    grad_weight,
    weight,
    variance,
    judged,
    temper,
    SCORE: tl.constexpr,
    GATE: tl.constexpr,
    RICCATI: tl.constexpr,
):
    """Of Sigma in all and of gamma^2, in units of 1 / SMALL, of W times W, and of B."""
    kept = tl.maximum(variance, LEAST)
    if RICCATI:
        grad_variance = tl.zeros_like(variance)
        grad_temper = tl.zeros_like(variance)
    else:
        grad_variance = tl.where(variance >= LEAST, (temper * -BITS * SMALL) * grad_bias / kept, 0.0)
        grad_temper = -grad_bias * tl.log2(kept)
    if GATE:
        least = LEAST_OF_EXPONENTIAL if SCORE == "exponential" else LEAST
        grad_judged = tl.where(judged >= least, -grad_weight * weight * (SMALL / tl.maximum(judged, least)), 0.0)
        grad_variance += grad_judged
    else:
        grad_judged = tl.zeros_like(variance)
    return grad_variance, grad_judged, grad_weight * weight, grad_temper


@triton.jit
@no_type_check
def path_gradients(grad_decay, grad_variance, decay, lost, query_path, key_path, later, eta2):
    """Of M at the query (at the key: less that), of u at the query and at the key, pair by pair, in float64.

    The sums over all pairs are later weighed with times: 1e5 lags long, they must cancel to the lag. So a pair's share
    at the query and at the key are the same number with two signs, and what is of the order of u is formed in float64.
    `grad_variance` comes, and all but C leaves, in units of 1 / SMALL.
    """
    to_variance = grad_variance.to(tl.float64)
    high = tl.where(later, key_path[2], query_path[2])
    low = tl.where(later, key_path[3], query_path[3])
    earlier = high.to(tl.float64) + low.to(tl.float64)
    near = lost < 0.5  # E^2 is 1 less `lost` there: each is right to all its digits where it is small
    to_earlier = (grad_variance * tl.where(near, lost, -decay * decay)).to(tl.float64)
    to_earlier -= tl.where(near, to_variance, 0.0)
    to_damping = 2.0 * to_earlier * (eta2.to(tl.float64) - earlier)
    to_damping -= (decay * SMALL * grad_decay).to(tl.float64)
    return (
        tl.where(later, to_damping, -to_damping),
        tl.where(later, to_variance, to_earlier),
        tl.where(later, to_earlier, to_variance),
    )


@triton.jit
@no_type_check
def cumulative_gradient(grad_bias, query_path, key_path):
    """Of C at the query, through `-|C_i - C_j|`; at the key it has the other sign. C may fall along time."""
    difference = (query_path[4] - key_path[4]) + (query_path[5] - key_path[5])
    gradient = tl.where(difference > 0.0, -grad_bias, tl.where(difference < 0.0, grad_bias, 0.0))
    return gradient.to(tl.float64)
