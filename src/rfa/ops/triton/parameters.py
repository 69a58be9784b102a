"""The formulas of a head by its parameters, what each parameter does to T and g, and the gradients of all of them."""

from typing import no_type_check

import triton
import triton.language as tl

from .tiles import BITS, COUNTS, FOLD, FUNCTIONALS, IEEE, LEAST, LN2, SUMS, TERMS, WAVES, product

LEAST_GAIN = tl.constexpr(2.0**-120)
GATE, RICCATI, IN_BIAS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the options of a form


@triton.jit
@no_type_check
def integrals(rate, lag):
    """`phi = (1 - exp(-2 mu tau)) / (2 mu)` and `exp(-2 mu tau)`, by a series near 0; `rate` is 2 mu."""
    x = rate * lag
    decayed = tl.exp(-x)
    small = tl.abs(x) < 0.5
    near = tl.where(small, x, 0.0)
    series = tl.zeros_like(x)
    for term in tl.static_range(10):
        k = 9 - term
        series = 1.0 / (k + 1) - series * near / (k + 1)
    return tl.where(small, lag * series, (1.0 - decayed) / tl.where(small, 1.0, rate)), decayed


@triton.jit
@no_type_check
def load_head(
    decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon, head, keys,
    modes, FORM: tl.constexpr, HORIZON: tl.constexpr,
):  # fmt: skip
    """mu, sigma^2, eta^2, gamma^2, sigma_0^2, nu_s, beta_s and h of a head, in float32, and its constants.

    These are d, and log K and log(1 - K) with the Riccati prior. Where a number is out of range mu is NaN.
    """
    mu, sigma2 = tl.load(decay + head).to(tl.float32), tl.load(process_noise + head).to(tl.float32)
    eta2, gamma2 = tl.load(key_noise + head).to(tl.float32), tl.load(query_noise + head).to(tl.float32)
    floor, freedom = tl.load(noise_floor + head).to(tl.float32), tl.load(robustness + head).to(tl.float32)
    beta, ahead, log_gain, log_rest = tl.load(inverse_temperature + head).to(tl.float32), 0.0, 0.0, 0.0
    if HORIZON:
        ahead = tl.load(horizon + head).to(tl.float32)
    fits = (mu >= 0.0) & (sigma2 >= 0.0) & (eta2 >= 0.0) & (gamma2 >= 0.0) & (floor >= 0.0) & (ahead >= 0.0)
    mu = tl.where(fits & (freedom > 0.0) & (beta > 0.0), mu, float("nan"))
    if FORM[RICCATI]:
        y, _, _, _ = steady_ratio(mu, sigma2, eta2 + floor, tl.zeros([1], tl.float64) + 1.0)
        log_gain, log_rest = steady_gain(y)
        log_gain, log_rest = tl.sum(log_gain, 0).to(tl.float32), tl.sum(log_rest, 0).to(tl.float32)
        log_gain = tl.where(keys < 2, 0.0, log_gain)  # a key that is alone has the gain 1
    return mu, sigma2, eta2, gamma2, floor, freedom, beta, ahead, modes, log_gain, log_rest


@triton.jit
@no_type_check
def steady_ratio(mu, sigma2, observed, interval):
    """`y = K / (1 - K)` of the steady Kalman gain K of intervals, g, the square root in y, and phi, in float64.

    y is the root of `y^2 + y (c - g) - g = 0`, with g the noise of an interval over that of a reading and
    `c = 1 - exp(-2 mu dt)`. A noise of zero counts as the smallest normal number.
    """
    mu, interval = mu.to(tl.float64), interval.to(tl.float64)
    phi, _ = integrals(2.0 * mu, interval)
    g = tl.maximum(sigma2.to(tl.float64), LEAST) * phi / tl.maximum(observed.to(tl.float64), LEAST)
    half = 0.5 * (2.0 * mu * phi - g)
    root = tl.sqrt(half * half + g)
    return tl.where(half > 0.0, g / (half + root), root - half), g, root, phi


@triton.jit
@no_type_check
def steady_gain(y):
    """`log K` and `log(1 - K)` in nats, of `y = K / (1 - K)`."""
    return -log1p(1.0 / y), -log1p(y)


@triton.jit
@no_type_check
def steady_gradient(of_gain, of_rest, y, root):
    """The gradient of g, from those of `log K` and `log(1 - K)`: `dy / dg = (1 + y) / (2 root)`."""
    return (of_gain / y - of_rest) / (2.0 * root)


@triton.jit
@no_type_check
def log1p(x):
    """In nats."""
    one = 1.0 + x
    return tl.where(x > 1e15, tl.log(x), tl.log(one) + (x - (one - 1.0)) / one)


@triton.jit
@no_type_check
def variances(of_head, lag, FORM: tl.constexpr):
    """`nu d Sigma~`, Sigma, phi and `exp(-2 mu tau)` at lags, which grow by the horizon."""
    mu, sigma2, eta2, gamma2, floor, freedom, _, ahead, modes, _, _ = of_head
    phi, square = integrals(2.0 * mu, lag + ahead)
    variance = sigma2 * phi + eta2 * square + floor
    gain = variance + gamma2 if FORM[GATE] else 1.0 + tl.zeros_like(variance)
    return freedom * modes * gain, variance, phi, square


@triton.jit
@no_type_check
def prior_bits(of_head, lag, FORM: tl.constexpr):
    """T at lags of 0 and more."""
    _, _, _, gamma2, _, freedom, beta, _, _, log_gain, log_rest = of_head
    gain, variance, _, _ = variances(of_head, lag, FORM=FORM)
    if FORM[RICCATI]:
        bits = (beta * BITS) * (log_gain + log_rest * lag)
    else:
        bits = -beta * tl.log2(tl.maximum(variance + gamma2 if FORM[IN_BIAS] else variance, LEAST))
    return bits + beta * (freedom + 1.0) * tl.log2(tl.maximum(gain, LEAST_GAIN))


@triton.jit
@no_type_check
def effect_of(kind, of_head, lag, FORM: tl.constexpr):
    """The derivatives of T in bits and of `nu d Sigma~` by a parameter, at lags.

    Kinds: sigma^2, eta^2, gamma^2, sigma_0^2, nu_s, beta_s, and with the Riccati prior log K and log(1 - K).
    """
    _, _, _, gamma2, _, freedom, beta, _, modes, log_gain, log_rest = of_head
    gain, variance, phi, square = variances(of_head, lag, FORM=FORM)
    scale, one = freedom * modes, tl.zeros_like(variance) + 1.0
    of_variance = tl.where(kind == 0, phi, tl.where(kind == 1, square, one))
    of_variance = tl.where((kind < 4) & (kind != 2), of_variance, 0.0)
    of_effective = tl.where(kind == 2, one, of_variance)
    of_gain = scale * of_effective if FORM[GATE] else tl.zeros_like(gain)
    of_gain = tl.where(kind == 4, gain / freedom, of_gain)
    bits = tl.zeros_like(variance)
    if FORM[RICCATI]:
        bits += tl.where(kind == 6, beta * BITS, tl.where(kind == 7, beta * BITS * lag, 0.0))
        bits += tl.where(kind == 5, (log_gain + log_rest * lag) * BITS, 0.0)
    else:
        within, of_within = variance, of_variance
        if FORM[IN_BIAS]:
            within, of_within = variance + gamma2, of_effective
        known = within >= LEAST
        within = tl.maximum(within, LEAST)
        bits += tl.where(known, -(beta * BITS) * of_within / within, 0.0)
        bits += tl.where(kind == 5, -tl.log2(within), 0.0)
    power, logarithm = beta * (freedom + 1.0), tl.log2(tl.maximum(gain, LEAST_GAIN))
    bits += (power * BITS) * of_gain / gain
    bits += tl.where(kind == 4, beta * logarithm, tl.where(kind == 5, (freedom + 1.0) * logarithm, 0.0))
    return bits, of_gain


@triton.jit
@no_type_check
def effect_beside_middle(kind, of_head, lag, FORM: tl.constexpr):
    """The derivative of T less that at one lag, FOLD. s sums to 0 over a row, but for rounding."""
    middle = tl.zeros([1, 1], tl.float32) + FOLD
    return effect_of(kind, of_head, lag, FORM=FORM)[0] - effect_of(kind, of_head, middle, FORM=FORM)[0]


@triton.jit
@no_type_check
def store_effects(
    block, head, of_head, spread, effects, pair_effects, length, distances,
    FORM: tl.constexpr, FOLDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The effects of parameters by lag, `(heads, 2, FUNCTIONALS, length)`, and on moments of tiles at a distance."""
    kind, place = tl.arange(0, FUNCTIONALS), tl.arange(0, 2 * FOLD)
    if block >= distances:
        lag = (block - distances) * 2 * FOLD + place
        bits, of_gain = effect_of(kind[:, None], of_head, lag[None, :].to(tl.float32), FORM=FORM)
        at = pair_effects + (head * 2 * FUNCTIONALS + kind)[:, None] * length + lag[None, :]
        mask = (lag < length)[None, :] & (kind < FUNCTIONALS)[:, None]
        tl.store(at, bits, mask=mask)
        tl.store(at + length * FUNCTIONALS, of_gain, mask=mask)
    elif FOLDS:
        tile_lag = tl.maximum(block * FOLD - (FOLD - 1) + place, 0).to(tl.float32)
        padded = tl.arange(0, 2 * FUNCTIONALS)
        in_tile = effect_beside_middle(padded[:, None], of_head, tile_lag[None, :], FORM=FORM)
        row = tl.arange(0, TERMS * TERMS)
        chosen = spread + tl.minimum(block, 1) * (2 * FOLD * TERMS * TERMS)
        matrix = tl.load(chosen + row[:, None] * (2 * FOLD) + place[None, :])
        found = product(matrix, tl.trans(in_tile), FAST=FAST, PRECISION=IEEE)
        at_effects = (
            effects + ((head * distances + block) * FUNCTIONALS + padded)[None, :] * (TERMS * TERMS) + row[:, None]
        )
        tl.store(at_effects, found, mask=(padded < FUNCTIONALS)[None, :])


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def epilogue_kernel(
    decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon,
    row_sums, key_sums, numbers, folds, grad_log_sum, wave_fit, wave_lags, gradients,
    heads, batch, row_blocks, key_blocks, queries, keys, modes,
    FORM: tl.constexpr, HORIZON: tl.constexpr, FOLDS: tl.constexpr, LOG_SUM: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of sigma^2, eta^2, gamma^2, sigma_0^2, nu_s and beta_s, `(6, heads)`: one program a head."""
    head = tl.program_id(0)
    of_head = load_head(
        decay, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, horizon, head,
        keys, modes, FORM=FORM, HORIZON=HORIZON,
    )  # fmt: skip
    mu, sigma2, eta2, gamma2, floor = of_head[0], of_head[1], of_head[2], of_head[3], of_head[4]
    freedom, beta, log_rest = of_head[5], of_head[6], of_head[10]
    place = tl.arange(0, FOLD)
    index = tl.arange(0, SUMS)  # waves, functionals, four more
    kind = index - WAVES
    kept = kind < FUNCTIONALS + 4
    if not FOLDS:
        kept = kept & (kind >= 0)
    totals = tl.zeros([FOLD, SUMS], tl.float32)
    of_phi, of_square, through = (
        tl.zeros([FOLD], tl.float32), tl.zeros([FOLD], tl.float32), tl.zeros([FOLD], tl.float32),
    )  # fmt: skip
    for start in range(0, batch * row_blocks, FOLD):
        row = start + place
        at = ((row // row_blocks * heads + head).to(tl.int64) * row_blocks + row % row_blocks) * SUMS
        mask = (row < batch * row_blocks)[:, None] & kept[None, :]
        totals += tl.load(row_sums + at[:, None] + index[None, :], mask=mask, other=0.0)
    for start in range(0, batch * key_blocks, FOLD):
        row = start + place
        at = key_sums + ((row // key_blocks * heads + head).to(tl.int64) * key_blocks + row % key_blocks) * 2
        of_phi += tl.load(at, mask=row < batch * key_blocks, other=0.0)
        of_square += tl.load(at + 1, mask=row < batch * key_blocks, other=0.0)
    if LOG_SUM:
        for start in range(0, batch * queries, FOLD):
            row = start + place
            at = grad_log_sum + (row // queries * heads + head).to(tl.int64) * queries + row % queries
            given = tl.load(at, mask=row < batch * queries, other=0.0)
            through += tl.where(given == given, given, 0.0)
    total = tl.sum(totals, 0)
    power, least = tl.load(numbers + heads + head), tl.load(numbers + 2 * heads + head)
    of_power = tl.sum(tl.where(kind == FUNCTIONALS, total, 0.0), 0)
    gradient = tl.where((kind >= 0) & (kind < FUNCTIONALS), total, 0.0)
    folded = False
    if FOLDS:
        folded = tl.load(folds + head) != 0
    if folded:
        of_one = tl.sum(tl.where(kind == FUNCTIONALS + 1, total, 0.0), 0)
        of_variance = tl.sum(tl.where(kind == FUNCTIONALS + 2, total, 0.0), 0) + tl.sum(of_phi, 0)
        of_noise = tl.sum(of_square, 0)
        scale = -power * freedom * modes
        if not FORM[GATE]:
            scale = 0.0
        gradient += tl.where(kind == 0, scale * of_variance, tl.where(kind == 1, scale * of_noise, 0.0))
        gradient += tl.where((kind == 2) | (kind == 3), scale * of_one, 0.0)
        wave, sample = tl.arange(0, WAVES), tl.arange(0, 2 * FOLD)
        lag = tl.load(wave_lags + sample)[None, :]
        slope = tl.zeros([SUMS], tl.float32)  # what grows with the lag is kept apart
        if FORM[RICCATI]:
            slope = tl.where(kind == 7, beta * BITS, tl.where(kind == 5, log_rest * BITS, 0.0))
        bits = effect_beside_middle(kind[:, None], of_head, lag, FORM=FORM) - slope[:, None] * (lag - FOLD)
        fit = tl.load(wave_fit + wave[:, None] * (2 * FOLD) + sample[None, :])
        coefficients = product(bits, tl.trans(fit), FAST=FAST, PRECISION=IEEE)
        of_waves = tl.sum(tl.where(index[:, None] == wave[None, :], total[:, None], 0.0), 0)
        in_full = tl.sum(coefficients * tl.where(wave == 1, 0.0, of_waves)[None, :], 1)
        far = tl.sum(tl.where(kind == FUNCTIONALS + 3, total, 0.0), 0)
        far += tl.sum(tl.where(wave == 1, of_waves, tl.where(wave == 0, -of_waves, 0.0)), 0) * FOLD
        gradient += tl.where((kind >= 0) & (kind < FUNCTIONALS), (in_full + slope * far) * LN2, 0.0)
        gain = sigma2 * of_variance + eta2 * of_noise + (gamma2 + floor) * of_one
        if not FORM[GATE]:
            gain = of_one
        gradient += tl.where(kind == 4, -power * modes * gain, 0.0)
        if LOG_SUM:  # what was left out of T: its value at the middle
            middle = effect_of(kind, of_head, tl.zeros([SUMS], tl.float32) + FOLD, FORM=FORM)[0]
            gradient += tl.where((kind >= 0) & (kind < FUNCTIONALS), tl.sum(through, 0) * middle, 0.0)
    if LOG_SUM:
        of_power += tl.sum(through, 0) * BITS * tl.log2(least)
    gradient -= tl.where(kind == 4, beta * LN2 * of_power, tl.where(kind == 5, (freedom + 1.0) * LN2 * of_power, 0.0))
    if FORM[RICCATI]:
        y, g, root, phi = steady_ratio(mu, sigma2, eta2 + floor, tl.zeros([1], tl.float64) + 1.0)
        of_gain = tl.sum(tl.where((kind == 6) & (keys > 1), gradient, 0.0), 0).to(tl.float64)
        of_rest = tl.sum(tl.where((kind == 7) & (keys > 1), gradient, 0.0), 0).to(tl.float64)
        of_g = steady_gradient(of_gain, of_rest, y, root)
        observed = tl.maximum((eta2 + floor).to(tl.float64), LEAST)
        of_sigma = tl.where(sigma2 >= LEAST, tl.sum(of_g * phi / observed, 0), 0.0).to(tl.float32)
        of_observed = tl.where(eta2 + floor >= LEAST, -tl.sum(of_g * g / observed, 0), 0.0).to(tl.float32)
        gradient += tl.where(kind == 0, of_sigma, 0.0)
        gradient += tl.where((kind == 1) | (kind == 3), of_observed, 0.0)
    tl.store(gradients + kind * heads + head, gradient, mask=(kind >= 0) & (kind < 6))
