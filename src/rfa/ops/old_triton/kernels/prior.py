"""E, b and w of a tile of pairs, from lag tables or from a path, and the gradients of the path.

Numbers of queries are shaped `[rows, 1]` and numbers of keys `[1, columns]`; in a transposed tile it is the other way
round. The arithmetic of pairs is float32, except where a sum over pairs must cancel to far below one term.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import divided, log2

BITS = tl.constexpr(1.4426950408889634)  # a nat
LEAST = tl.constexpr(1.1754943508222875e-38)  # of a variance: the smallest normal float32
LEAST_OF_EXPONENTIAL = tl.constexpr(1.9673781396807392e-24)  # as `least_effective_variance`
SMALL = tl.constexpr(2.3283064365386963e-10)  # 2^-32: gradients of variances are summed in this unit


@triton.jit
@no_type_check
def table_prior(tables, head, heads, lags, lag, visible, CAUSAL: tl.constexpr):
    """E, b, w at the lags `|i - j|`. A tile has few lags, so neighbouring pairs read the same cache lines.

    Tables `(3, heads, lags)`: there may be more lags than keys. No lag may be longer; causal ones below 0 count as 0.
    """
    if CAUSAL:
        lag = tl.maximum(lag, 0)
        decay = tl.load(tables + head * lags + lag)
        bias = tl.load(tables + (head + heads) * lags + lag)
        weight = tl.load(tables + (head + 2 * heads) * lags + lag)
    else:
        lag = tl.abs(lag)
        decay = tl.load(tables + head * lags + lag, mask=visible, other=0.0)
        bias = tl.load(tables + (head + heads) * lags + lag, mask=visible, other=0.0)
        weight = tl.load(tables + (head + 2 * heads) * lags + lag, mask=visible, other=0.0)
    return decay, bias, weight


@triton.jit
@no_type_check
def load_scalars(scalars, head, heads, UNIFORM: tl.constexpr):
    """c, W, eta^2, sigma_0^2, gamma^2 and B of a head; at uniform times only c is used."""
    coefficient = tl.load(scalars + head)
    if UNIFORM:
        return coefficient, 0.0, 0.0, 0.0, 0.0, 0.0
    else:
        return (
            coefficient,
            tl.load(scalars + heads + head),
            tl.load(scalars + 2 * heads + head),
            tl.load(scalars + 3 * heads + head),
            tl.load(scalars + 4 * heads + head),
            tl.load(scalars + 5 * heads + head),
        )


@triton.jit
@no_type_check
def load_path(path, pair, length, indices, present, RICCATI: tl.constexpr):
    """M, u and C (0 where there is none), each a high and a low float32 whose sum is the float64."""
    if RICCATI:
        parts = path + pair * 6 * length + indices
        riccati_high = tl.load(parts + 4 * length, mask=present, other=0.0)
        riccati_low = tl.load(parts + 5 * length, mask=present, other=0.0)
    else:
        parts = path + pair * 4 * length + indices
        riccati_high = tl.zeros_like(indices).to(tl.float32)
        riccati_low = riccati_high
    decay_sum_high = tl.load(parts, mask=present, other=0.0)
    decay_sum_low = tl.load(parts + length, mask=present, other=0.0)
    variance_high = tl.load(parts + 2 * length, mask=present, other=0.0)
    variance_low = tl.load(parts + 3 * length, mask=present, other=0.0)
    return decay_sum_high, decay_sum_low, variance_high, variance_low, riccati_high, riccati_low


@triton.jit
@no_type_check
def _between(query_high, query_low, key_high, key_low, later):
    """The later less the earlier. Close high parts subtract exactly, so no digit is lost."""
    difference = (query_high - key_high) + (query_low - key_low)
    return tl.where(later, difference, -difference)


@triton.jit
@no_type_check
def path_prior(
    query_path,
    key_path,
    later,
    key_bias,
    inverse_freedom,
    eta2,
    floor,
    gamma2,
    bias_factor,
    SCORE: tl.constexpr,
    GATE: tl.constexpr,
    RICCATI: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    """E, b, w and, for the gradients, `1 - E^2`, Sigma and `Sigma + gamma^2`, both before they are clamped.

    A causal pair whose query is earlier takes no part: it gets the numbers of lag 0.
    """
    if CAUSAL:
        decay_sum = tl.maximum((query_path[0] - key_path[0]) + (query_path[1] - key_path[1]), 0.0)
        added = (query_path[2] - key_path[2]) + (query_path[3] - key_path[3])
        earlier = key_path[2]
    else:
        decay_sum = tl.maximum(_between(query_path[0], query_path[1], key_path[0], key_path[1], later), 0.0)
        added = _between(query_path[2], query_path[3], key_path[2], key_path[3], later)
        earlier = tl.where(later, key_path[2], query_path[2])
    decay = tl.exp2(decay_sum * -BITS)
    complement = one_less_exponential(2.0 * decay_sum, decay * decay, FAST_LOG=FAST_LOG)
    variance = added + earlier * complement + (eta2 * decay * decay + floor)
    if CAUSAL:
        variance = tl.where(later, variance, eta2 + floor)
    positive_variance = tl.maximum(variance, LEAST)
    effective_variance = variance + gamma2
    if RICCATI:
        bias = key_bias - tl.abs((query_path[4] - key_path[4]) + (query_path[5] - key_path[5]))
    else:
        bias = -bias_factor * log2(positive_variance, FAST_LOG=FAST_LOG)
    least = LEAST_OF_EXPONENTIAL if SCORE == "exponential" else LEAST
    weight = (
        divided(inverse_freedom, tl.maximum(effective_variance, least), FAST_LOG=FAST_LOG)
        if GATE
        else tl.zeros_like(effective_variance) + inverse_freedom
    )
    return decay, bias, weight, complement, variance, effective_variance


@triton.jit
@no_type_check
def one_less_exponential(x, exponential, FAST_LOG: tl.constexpr):
    """`1 - exp(-x)` for x >= 0; Taylor's series where the subtraction would lose digits, to 2e-8, or to 2e-6."""
    if FAST_LOG:
        series = x * (1.0 - x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0))))
        return tl.where(x < 0.125, series, 1.0 - exponential)
    else:
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
    effective_variance,
    bias_factor,
    SCORE: tl.constexpr,
    GATE: tl.constexpr,
    RICCATI: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    """Gradients of Sigma (through b and w) and of gamma^2 in units of 1 / SMALL, of W times W, and of B."""
    positive_variance = tl.maximum(variance, LEAST)
    if RICCATI:
        grad_variance = tl.zeros_like(variance)
        grad_bias_factor = tl.zeros_like(variance)
    else:
        to_variance = divided((bias_factor * -BITS * SMALL) * grad_bias, positive_variance, FAST_LOG=FAST_LOG)
        grad_variance = tl.where(variance >= LEAST, to_variance, 0.0)
        grad_bias_factor = -grad_bias * log2(positive_variance, FAST_LOG=FAST_LOG)
    if GATE:
        least = LEAST_OF_EXPONENTIAL if SCORE == "exponential" else LEAST
        part = divided(SMALL, tl.maximum(effective_variance, least), FAST_LOG=FAST_LOG)
        grad_effective_variance = tl.where(effective_variance >= least, -grad_weight * weight * part, 0.0)
        grad_variance += grad_effective_variance
    else:
        grad_effective_variance = tl.zeros_like(variance)
    return grad_variance, grad_effective_variance, grad_weight * weight, grad_bias_factor


@triton.jit
@no_type_check
def path_gradients(grad_decay, grad_variance, decay, complement, query_path, key_path, later, eta2):
    """Gradients of M at the query, of u at the query and of u at the key, pair by pair, in float64.

    The gradient of M at the key is that at the query with the other sign. The sums over all pairs are later multiplied
    by times of up to 1e5 lags and must cancel down to the lag. So terms of the order of u are formed in float64, and so
    is `1 - E^2` while it is small. `grad_variance` and the results are in units of 1 / SMALL.
    """
    to_variance = grad_variance.to(tl.float64)
    high = tl.where(later, key_path[2], query_path[2])
    low = tl.where(later, key_path[3], query_path[3])
    earlier = high.to(tl.float64) + low.to(tl.float64)
    near = complement < 0.5
    apart = (query_path[0].to(tl.float64) - key_path[0]) + (query_path[1].to(tl.float64) - key_path[1])
    less = 2.0 * tl.where(near, tl.abs(apart), 0.0)
    series = 1.0 - less * (1.0 / 6.0) * (1.0 - less * (1.0 / 7.0) * (1.0 - less * (1.0 / 8.0)))
    series = 1.0 - less * (1.0 / 3.0) * (1.0 - less * (1.0 / 4.0) * (1.0 - less * (1.0 / 5.0) * series))
    less = less * (1.0 - less * 0.5 * series)
    to_earlier = tl.where(near, to_variance * (less - 1.0), (grad_variance * (-decay * decay)).to(tl.float64))
    to_decay_sum = 2.0 * to_earlier * (eta2.to(tl.float64) - earlier)
    to_decay_sum -= (decay * SMALL * grad_decay).to(tl.float64)
    return (
        tl.where(later, to_decay_sum, -to_decay_sum),
        tl.where(later, to_variance, to_earlier),
        tl.where(later, to_earlier, to_variance),
    )


@triton.jit
@no_type_check
def riccati_sum_gradient(grad_bias, query_path, key_path):
    """Gradient of C at the query, through `-|C_i - C_j|`; at the key it has the other sign. C may fall along time."""
    difference = (query_path[4] - key_path[4]) + (query_path[5] - key_path[5])
    gradient = tl.where(difference > 0.0, -grad_bias, tl.where(difference < 0.0, grad_bias, 0.0))
    return gradient.to(tl.float64)
