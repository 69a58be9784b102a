"""Sums of a folded tile for the gradient of the prior: over the keys of a row and, for edges, over the rows too."""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import LN2, UNIT, product

# The gradient of E is a difference of sums that are as large where E is small. Its rounding would then be multiplied by
# the lag, which grows while E falls. Where E is below this, its gradient is less than the rounding of half precision.
LEAST_DECAY = tl.constexpr(2.0**-18)


@triton.jit
@no_type_check
def row_sums(attention, grad_score, grad_gain, gains, column, row_deltas, of_row, coefficient):
    """Of a row: gradients of scores; those over g; these times the keys' numbers; the gradient of log E beside them.

    The last is through the values, and through `g - of_row` as if the norms of keys had no E.
    """
    scores = tl.sum(grad_score, 1)
    of_columns = tl.sum(grad_gain * column[None, :], 1)
    of_decay = scores + row_deltas * tl.sum(attention, 1) + coefficient * (of_row * gains - scores)
    return scores, gains, of_columns, of_decay


@triton.jit
@no_type_check
def store_lag_sums(window, stride, sums, numbers, coefficient, unit, in_rows):
    """Gradients of the tables at the lags from the rows to an edge; `unit` is that of the sums."""
    scores, gains, of_columns, of_decay = sums
    decay, _, of_dot, inverse_gain, _, _ = numbers
    of_decay = tl.where(decay > LEAST_DECAY, of_decay / decay - coefficient * of_dot * of_columns, 0.0)
    of_weight = (coefficient * UNIT) * unit * (gains - scores) / inverse_gain
    store_three(window, stride, of_decay * unit, scores * (unit * LN2), of_weight, in_rows)


@triton.jit
@no_type_check
def load_polynomials(polynomials, unit, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Those of the rows' places, twice, `(2 terms, rows)`, times the unit of the rows' gradients of scores."""
    term = tl.arange(0, PARTS) % (PARTS // 2)
    loaded = tl.load(polynomials + term[:, None] * ROWS + tl.arange(0, ROWS)[None, :])
    return loaded * (unit + tl.zeros([ROWS], tl.float32))[None, :]


@triton.jit
@no_type_check
def store_moments(moment, grad_score, functions, polynomials, PRECISION: tl.constexpr):
    """Sums of gradients of scores times functions of the keys' places and polynomials of the rows'.

    `functions` are `(keys, 2 terms)`, twice the same. The first is the distance to the edge in blocks. Its sum is that
    of unrounded numbers, because it is larger than the others by far. Its product has a high part, which TF32 holds
    exactly, and a low part, which is stored after the last function's.
    """
    keys: tl.constexpr = functions.shape[0]
    parts: tl.constexpr = functions.shape[1]
    distance = 1.0 - (tl.arange(0, keys) + 1).to(tl.float32) / keys
    term = tl.arange(0, parts)
    sums = product(grad_score.to(functions.dtype), functions, PRECISION=PRECISION)
    first = tl.sum(grad_score * distance[None, :], 1)
    high = (first.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    sums = tl.where(term[None, :] == 0, high[:, None], sums)
    sums = tl.where(term[None, :] == parts // 2, (first - high)[:, None], sums)
    moments = product(polynomials, sums, PRECISION=PRECISION)
    kept = (term[:, None] < parts // 2) & (term[None, :] <= parts // 2)
    tl.store(moment + term[:, None] * (parts // 2 + 1) + term[None, :], moments * LN2, mask=kept)


@triton.jit
@no_type_check
def store_three(rows, stride, first, second, third, in_rows):
    """Numbers of rows, each kind in a row of its own."""
    tl.store(rows, first, mask=in_rows)
    tl.store(rows + stride, second, mask=in_rows)
    tl.store(rows + 2 * stride, third, mask=in_rows)


@triton.jit
@no_type_check
def no_path_sums(ROWS: tl.constexpr):
    """Of `M_i - M_a`, V_i, `C_i - C_a`, W times W, gamma^2 and B: nothing yet."""
    zeros = tl.zeros([ROWS], tl.float32)
    return zeros, zeros, zeros, zeros, zeros, zeros


@triton.jit
@no_type_check
def add_path_sums(
    path_sums, edge, grad_score, grad_gain, of_effective, of_variance, sums, numbers, row_decay, scalars, unit,
    RICCATI: tl.constexpr,
):  # fmt: skip
    """The sums with those of a tile. What is of `M_a - M_b`, V_ab and `C_a - C_b` is stored.

    The gradient of log E is that of E in values and in r, then of E in Sigma: `Sigma - variance` is E^2 times V_j.
    """
    coefficient, _, _, _, gamma2, bias_factor = scalars
    scores, gains, of_columns, of_decay = sums
    decay, _, of_dot, _, _, more = numbers
    variance, variances, _, edge_variance, _ = more
    decays, through_variances, biases, freedoms, gammas, bias_factors = path_sums

    effective = tl.sum(grad_score * tl.exp2(-of_effective), 1)
    through_variance = coefficient * (effective - gains)
    gammas += through_variance
    of_decay -= coefficient * of_dot * decay * of_columns
    of_decay += 2.0 * coefficient * (scores - (variance + gamma2) * effective)
    if RICCATI:
        biases += scores * LN2
        tl.store(edge + 2, tl.sum(scores * unit, 0) * LN2)
    else:
        through_bias = tl.sum(grad_score * tl.exp2(-of_variance), 1)
        through_variance -= bias_factor * through_bias
        bias_factors -= tl.sum(grad_score * of_variance, 1) * LN2
        of_decay -= 2.0 * bias_factor * (scores - variance * through_bias)
    of_decay = tl.where(decay > LEAST_DECAY, of_decay, 0.0)
    freedoms -= coefficient * (scores - tl.sum(grad_gain * (variances + gamma2), 1))
    to_edge = row_decay * row_decay * through_variance
    tl.store(edge, -tl.sum(of_decay * unit, 0))
    tl.store(edge + 1, tl.sum(to_edge * unit, 0))
    decays -= of_decay + 2.0 * edge_variance * to_edge
    return decays, through_variances + through_variance, biases, freedoms, gammas, bias_factors


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
