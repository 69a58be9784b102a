"""The lag tables of constant dynamics and their gradients, in float64; formulas of `rfa.dynamics` and `rfa.ops`."""

from typing import no_type_check

import triton
import triton.language as tl

from .pairs import LN2

LEAST_VARIANCE = tl.constexpr(1.1754943508222875e-38)  # a smaller variance counts as this and has no gradient
MOST_WEIGHT = tl.constexpr(3.4028234663852886e38)
SERIES_TERMS = tl.constexpr(15)  # of a series below 1/2: 0.5^15 / 15! < 3e-17
PARAMETERS = tl.constexpr(10)


@triton.jit
@no_type_check
def decay_integrals(x):
    """`g_0 = (1 - e^-x) / x`, `g_1 = integral_0^1 s e^(-x s) ds`, and `e^-x`; by series near 0."""
    decayed = tl.exp(-x)
    small = tl.abs(x) < 0.5
    divisor = tl.where(small, 1.0, x)
    closed = (1.0 - decayed) / divisor
    near = tl.where(small, x, 0.0)
    zeroth, first = tl.zeros_like(x), tl.zeros_like(x)
    for term in tl.static_range(SERIES_TERMS):
        k = SERIES_TERMS - 1 - term  # by Horner: the coefficients 1 / (k! (n + k + 1)) over those before
        zeroth = 1.0 / (k + 1) - zeroth * near / (k + 1)
        first = 1.0 / (k + 2) - first * near / (k + 1)
    return tl.where(small, zeroth, closed), tl.where(small, first, (closed - decayed) / divisor), decayed


@triton.jit
@no_type_check
def load_parameter(parameter, head):
    """In float64."""
    return tl.load(parameter + head).to(tl.float64)


@triton.jit
@no_type_check
def numbers_of_lags(
    decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon,
    log_gain, log_rest,  # parameters
    head, steps, scale, least,
    GATE: tl.constexpr, IN_BIAS: tl.constexpr, RICCATI: tl.constexpr, HORIZON: tl.constexpr,
):  # fmt: skip
    """Three groups of numbers, for lags of so many steps.

    Of the head mu, sigma^2, eta^2, nu_s and beta_s. Of tau: tau, phi, the `g_1` of its derivative, `exp(-2 mu tau)`. Of
    the tables: the logarithm of the prior's weight, the variance within it, `Sigma + gamma^2`, and w before its limit.
    """
    mu, sigma2, eta2 = load_parameter(decay, head), load_parameter(process_noise, head), load_parameter(key_noise, head)
    gamma2, freedom = load_parameter(query_noise, head), load_parameter(robustness, head)
    lag = steps + load_parameter(horizon, head) if HORIZON else steps
    rate = 2.0 * mu
    integral, first, square = decay_integrals(rate * lag)
    long = rate * lag > 1.0  # the product below would round exp(-x), which is the derivative by the lag
    phi = tl.where(long, (1.0 - square) / tl.where(long, rate, 1.0), lag * integral)
    variance = sigma2 * phi + eta2 * square + load_parameter(noise_floor, head)
    effective = variance + gamma2
    within = effective if IN_BIAS else variance
    if RICCATI:
        log_prior = load_parameter(log_gain, head) + load_parameter(log_rest, head) * steps
    else:
        log_prior = -tl.log(tl.where(within < LEAST_VARIANCE, LEAST_VARIANCE, within))
    divisor = tl.where(effective < least, least, effective) if GATE else tl.full(effective.shape, 1.0, tl.float64)
    of_head = mu, sigma2, eta2, freedom, load_parameter(inverse_temperature, head)
    return of_head, (lag, phi, first, square), (log_prior, within, effective, 1.0 / (scale * freedom * divisor))


@triton.jit
@no_type_check
def lag_tables_kernel(
    decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon,
    log_gain, log_rest,  # parameters
    tables, coefficient,  # results
    heads, lags, blocks, scale, least,
    STUDENT_T: tl.constexpr, GATE: tl.constexpr, IN_BIAS: tl.constexpr, RICCATI: tl.constexpr,
    HORIZON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK lags of a head. `scale` is the product of the modes and the unit of w."""
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    step = block * BLOCK + tl.arange(0, BLOCK)
    inside = step < lags
    of_head, of_lag, of_tables = numbers_of_lags(
        decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon,
        log_gain, log_rest, head, step.to(tl.float64), scale, least,
        GATE=GATE, IN_BIAS=IN_BIAS, RICCATI=RICCATI, HORIZON=HORIZON,
    )  # fmt: skip
    mu, _, _, freedom, beta = of_head
    log_prior, _, _, weight = of_tables
    weight = tl.where(weight > MOST_WEIGHT, MOST_WEIGHT, weight)
    result = tables + head * lags + step
    tl.store(result, tl.exp(-mu * of_lag[0]).to(tl.float32), mask=inside)
    tl.store(result + heads * lags, (beta / LN2 * log_prior).to(tl.float32), mask=inside)
    tl.store(result + 2 * heads * lags, weight.to(tl.float32), mask=inside)
    if block == 0:
        tl.store(coefficient + head, (beta * (freedom + 1.0) if STUDENT_T else beta / LN2).to(tl.float32))


@triton.jit
@no_type_check
def lag_tables_gradient_kernel(
    decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon,
    log_gain, log_rest,  # parameters
    grad_tables, grad_coefficient,  # incoming
    gradient,  # result
    heads, lags, blocks, scale, least,
    STUDENT_T: tl.constexpr, GATE: tl.constexpr, IN_BIAS: tl.constexpr, RICCATI: tl.constexpr,
    HORIZON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over BLOCK lags of a head, `(blocks, PARAMETERS, heads)` float64, in the order of the arguments."""
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    step = block * BLOCK + tl.arange(0, BLOCK)
    inside = step < lags
    incoming = grad_tables + head * lags + step
    of_decay = tl.load(incoming, mask=inside, other=0.0).to(tl.float64)
    of_bias = tl.load(incoming + heads * lags, mask=inside, other=0.0).to(tl.float64)
    of_weight = tl.load(incoming + 2 * heads * lags, mask=inside, other=0.0).to(tl.float64)

    steps = step.to(tl.float64)
    of_head, at_lag, of_tables = numbers_of_lags(
        decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon,
        log_gain, log_rest, head, steps, scale, least,
        GATE=GATE, IN_BIAS=IN_BIAS, RICCATI=RICCATI, HORIZON=HORIZON,
    )  # fmt: skip
    mu, sigma2, eta2, freedom, beta = of_head
    lag, phi, first, square = at_lag
    log_prior, within, effective, weight = of_tables
    of_log_prior = of_bias * (beta / LN2)
    of_beta = tl.sum(of_bias * log_prior, 0) / LN2
    of_gain, of_rest = 0.0, 0.0
    of_within = tl.zeros_like(within)
    if RICCATI:
        of_gain, of_rest = tl.sum(of_log_prior, 0), tl.sum(of_log_prior * steps, 0)
    else:
        known = within >= LEAST_VARIANCE
        of_within = tl.where(known, -of_log_prior / tl.where(known, within, 1.0), 0.0)
    through_weight = tl.where(weight > MOST_WEIGHT, 0.0, -of_weight * weight)
    of_freedom = tl.sum(through_weight, 0) / freedom
    of_effective = tl.zeros_like(effective)
    if GATE:
        of_effective = tl.where(effective >= least, through_weight / tl.maximum(effective, least), 0.0)
    of_variance = of_within + of_effective
    of_query_noise = of_variance if IN_BIAS else of_effective
    remaining = tl.exp(-mu * lag)
    # `d phi / d mu = -2 tau^2 g_1(2 mu tau)`
    of_mu = -lag * (of_decay * remaining + 2.0 * of_variance * (sigma2 * lag * first + eta2 * square))
    of_lag = -mu * of_decay * remaining + of_variance * (sigma2 - 2.0 * mu * eta2) * square
    if block == 0:
        of_coefficient = tl.load(grad_coefficient + head).to(tl.float64)
        of_beta += of_coefficient * (freedom + 1.0) if STUDENT_T else of_coefficient / LN2
        of_freedom += of_coefficient * beta if STUDENT_T else 0.0
    result = gradient + block * PARAMETERS * heads + head
    tl.store(result, tl.sum(of_mu, 0))
    tl.store(result + heads, tl.sum(of_variance * phi, 0))
    tl.store(result + 2 * heads, tl.sum(of_variance * square, 0))
    tl.store(result + 3 * heads, tl.sum(of_query_noise, 0))
    tl.store(result + 4 * heads, tl.sum(of_variance, 0))
    tl.store(result + 5 * heads, of_freedom)
    tl.store(result + 6 * heads, of_beta)
    tl.store(result + 7 * heads, tl.sum(of_lag, 0))
    tl.store(result + 8 * heads, of_gain)
    tl.store(result + 9 * heads, of_rest)
