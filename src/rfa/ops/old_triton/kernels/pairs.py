"""Scores of a tile of pairs and the gradients of everything that made them."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import libdevice

LN2 = tl.constexpr(0.6931471805599453)
BITS = tl.constexpr(1.4426950408889634)
UNIT_BITS = tl.constexpr(40.0)  # w of Student-t scores is in units of 1 / UNIT, to stay in range
UNIT = tl.constexpr(2.0**40)
ONE = tl.constexpr(2.0**-40)  # the number one in that unit
LARGE = tl.constexpr(2.0**-20)


@triton.jit
@no_type_check
def log2(x, FAST_LOG: tl.constexpr):
    """The fast form is one instruction instead of some twenty; near 1 its absolute error is 2^-22."""
    if FAST_LOG:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
@no_type_check
def divided(x, y, FAST_LOG: tl.constexpr):
    """The fast form is two instructions instead of some eight, and 0 for y above 2^126."""
    if FAST_LOG:
        return libdevice.fast_dividef(x, y)
    else:
        return x / y


@triton.jit
@no_type_check
def log2_1p(x, FAST_LOG: tl.constexpr):
    """`log2(1 + UNIT x)`; a small argument keeps its precision, a large one is scaled before its logarithm."""
    large = x > LARGE
    distance = tl.where(large, 0.0, x) * UNIT
    one_more = 1.0 + distance
    result = log2(tl.where(large, x, one_more), FAST_LOG=FAST_LOG) + tl.where(large, UNIT_BITS, 0.0)
    if FAST_LOG:
        return result
    else:
        return result + (distance - (one_more - 1.0)) * BITS / one_more


@triton.jit
@no_type_check
def scores(dot, query_norm, key_norm, decay, bias, weight, coefficient, SCORE: tl.constexpr, FAST_LOG: tl.constexpr):
    """z in bits, as the formulas of `rfa.ops.kernel` have it."""
    if SCORE == "dot_product":
        return bias + coefficient * dot + 0.0 * (query_norm + key_norm)  # NaN where either norm is NaN
    else:
        residual = query_norm + decay * (decay * key_norm - 2.0 * dot)
        distance = weight * tl.where(residual < 0.0, 0.0, residual)  # a maximum would hide NaN
        if SCORE == "student_t":
            distance = log2_1p(distance, FAST_LOG=FAST_LOG)
        return bias - coefficient * distance


@triton.jit
@no_type_check
def pair_weights(
    dot,
    query_norm,
    key_norm,
    decay,
    bias,
    weight,
    coefficient,
    log_sum,
    log_sum_rest,
    visible,
    SCORE: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    """The weights A, formed from the row's log sum; r, whether r > 0, w r, and the term that c multiplies."""
    if SCORE == "dot_product":
        residual, distance = tl.zeros_like(dot), tl.zeros_like(dot)
        positive = visible
        evidence = -dot
    else:
        residual = query_norm + decay * (decay * key_norm - 2.0 * dot)
        # Where r is 0, q - E k consists of rounding alone. For a query of zeros E^2 |k|^2 may have underflown.
        positive = (residual > 0.0) | (query_norm == 0.0)
        residual = tl.maximum(residual, 0.0)
        distance = weight * residual
        evidence = log2_1p(distance, FAST_LOG=FAST_LOG) if SCORE == "student_t" else distance
    score = bias - coefficient * evidence
    attention = tl.exp2(tl.where(visible, (score - log_sum) - log_sum_rest, float("-inf")))
    return attention, residual, positive, distance, evidence


@triton.jit
@no_type_check
def pair_gradients(
    dot,
    grad_attention,
    query_norm,
    key_norm,
    decay,
    bias,
    weight,
    coefficient,
    log_sum,
    log_sum_rest,
    delta,
    delta_rest,
    visible,
    SCORE: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    """Gradients of each pair, with A its weight and `grad_attention` the product of dout_i and v_j.

    Returns:
        `A E`; the gradients of q.k with everything else held, of r, of E (without Sigma), of b, of w and of c.
    """
    attention, residual, positive, distance, evidence = pair_weights(
        dot,
        query_norm,
        key_norm,
        decay,
        bias,
        weight,
        coefficient,
        log_sum,
        log_sum_rest,
        visible,
        SCORE=SCORE,
        FAST_LOG=FAST_LOG,
    )
    grad_score = attention * LN2 * ((decay * grad_attention - delta) - delta_rest)
    grad_decay = attention * grad_attention
    if SCORE == "dot_product":
        grad_dot = coefficient * grad_score
        grad_residual = tl.zeros_like(dot)
        grad_weight = tl.zeros_like(dot)
    else:
        grad_distance = -coefficient * grad_score
        if SCORE == "student_t":
            grad_distance = divided(grad_distance, (ONE + distance) * LN2, FAST_LOG=FAST_LOG)
        grad_weight = grad_distance * residual
        grad_residual = tl.where(positive, grad_distance * weight, 0.0)
        grad_dot = -2.0 * grad_residual * decay
        grad_decay += 2.0 * grad_residual * (decay * key_norm - dot)
    return attention * decay, grad_dot, grad_residual, grad_decay, grad_score, grad_weight, -grad_score * evidence


@triton.jit
@no_type_check
def product(a, b, PRECISION: tl.constexpr):
    """A matrix product that accumulates in float32; `PRECISION` is "ieee", "tf32" or "interpreted".

    Triton's interpreter multiplies the bits of bfloat16 as if they were integers, and its order of summation depends on
    the order of the factors. Where r is a difference of large numbers, backward would then form other weights than the
    forward pass. In float64 neither matters.
    """
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def gradient_product(weights, states, PRECISION: tl.constexpr):
    """A product with states, on tensor cores for half precision.

    The weights contain `1 / (Sigma + gamma^2)` and may leave the range of float16. There the product is in TF32, which
    has the mantissa of float16 and the range of float32.
    """
    if states.dtype == tl.float16:
        return product(weights, states.to(tl.float32), PRECISION=PRECISION)
    else:
        return product(weights.to(states.dtype), states, PRECISION=PRECISION)


@triton.jit
@no_type_check
def diagonal_sums(tile, ahead, behind, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the diagonals of a tile to windows of COLUMNS lags; ROWS is COLUMNS or twice as many.

    Row i is turned round by i, so that column c holds the pairs of `i - j = c + COLUMNS m`, with m from -1 to
    `ROWS / COLUMNS - 1`. `ahead` and `behind` are what the tiles of earlier keys have left for the windows of the
    greatest m and of the one before it.

    Returns:
        The window of the greatest m, complete; what is left for the next two.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    skewed = tl.gather(tile, (row - column) & (COLUMNS - 1), 1)
    band = (row - column + COLUMNS) // COLUMNS  # m + 1
    lowest = tl.sum(tl.where(band == 0, skewed, 0.0), 0)
    middle = tl.sum(tl.where(band == 1, skewed, 0.0), 0)
    if ROWS == COLUMNS:
        return ahead + middle, lowest, behind
    else:
        highest = tl.sum(tl.where(band == 2, skewed, 0.0), 0)
        return ahead + highest, behind + middle, lowest
