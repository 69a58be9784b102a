"""How uncertainty grows along a lag, per mode, and the integrals of exponentials that it needs.

For constant noise it is the solution of the differential Lyapunov equation and the steady-state Kalman gain of the
Riccati equation. Noise that depends on the time since a key has a solution in closed form too.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from rfa.checks import exported

from .modes import decay_kernel, time_dtype

Quantity = Float[Tensor, "*#shape"]  # the arguments of a function broadcast against each other
Values = Float[Tensor, "*shape"]

_SERIES_BELOW, _SERIES_TERMS = 0.5, 15  # 0.5^15 / 15! < 3e-17: the series is exact in float64


class _DecayIntegral(torch.autograd.Function):
    """`g_n(x) = integral_0^1 s^n exp(-x s) ds` for real or complex x.

    Since `g_n' = -g_{n+1}`, each derivative is again a function of this family.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.order = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:  # type: ignore[override]
        if order == 0 and not x.is_complex():  # expm1 is accurate for every x != 0; only derivatives cancel near 0
            return torch.where(x == 0, 1.0, -torch.expm1(-x) / x)
        small = x.abs() < _SERIES_BELOW
        large, near = torch.where(small, _SERIES_BELOW, x), torch.where(small, x, 0.0)
        decayed = torch.exp(-large)
        closed = (1 - decayed if x.is_complex() else -torch.expm1(-large)) / large
        for n in range(1, order + 1):
            closed = (n * closed - decayed) / large
        series = torch.zeros_like(x)
        for k in reversed(range(_SERIES_TERMS)):
            series = 1 / (math.factorial(k) * (order + k + 1)) - series * near
        return torch.where(small, series, closed)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return -grad * _decay_integral(x, ctx.order + 1).conj(), None


class _DecayIntegralWithTangent(_DecayIntegral):
    """The same function with forward-mode derivatives. The compiler refuses to trace a function that has a `jvp`."""

    @staticmethod
    def jvp(ctx, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return -tangent * _decay_integral(x, ctx.order + 1)


def _decay_integral(x: Tensor, order: int) -> Tensor:
    function = _DecayIntegral if torch.compiler.is_compiling() else _DecayIntegralWithTangent
    return function.apply(x, order)


def unit_decay_integral(x: Tensor) -> Tensor:
    """`integral_0^1 exp(-x s) ds = (1 - exp(-x)) / x`, and 1 at x = 0, for real or complex x."""
    return _decay_integral(x, 0)


def cross_transport(
    decay: Quantity, frequency: Quantity, driver_decay: Quantity, driver_frequency: Quantity, lag: Quantity
) -> Complex[Tensor, "*shape"]:
    """`integral_0^tau e^(lambda_x (tau - s)) e^(lambda_y s) ds`, what a driving mode y adds to a driven mode x.

    With `lambda = -mu + i omega` it is `(e^(lambda_y tau) - e^(lambda_x tau)) / (lambda_y - lambda_x)`. Where the two
    rates are equal it is `tau e^(lambda tau)`.

    It is computed as `tau e^(lambda_s tau) g(z)`, with `z = (lambda_s - lambda_f) tau` and `g(z) = (1 - e^-z) / z`;
    lambda_s is the slower and lambda_f the faster rate. So nothing overflows. The quotient cancels near equal rates;
    values and derivatives of every order are accurate there too.

    Args:
        decay: mu >= 0 of the driven mode, per unit of time.
        frequency: omega of the driven mode, radians per unit of time.
        driver_decay, driver_frequency: the same of the driving mode.
        lag: tau >= 0, in units of time. All broadcast against each other.

    Returns:
        A complex number in units of time. Exchanging the two modes does not change it.

    Source: appendix E.4, `lambda_xy` for b = 1.
    """
    driven_is_slower = decay <= driver_decay
    driven, driver = (decay, frequency), (driver_decay, driver_frequency)
    slow = [torch.where(driven_is_slower, x, y) for x, y in zip(driven, driver, strict=True)]
    fast = [torch.where(driven_is_slower, y, x) for x, y in zip(driven, driver, strict=True)]
    exponent = torch.complex(*torch.broadcast_tensors(-slow[0] * lag, slow[1] * lag))
    difference = torch.complex(*torch.broadcast_tensors((fast[0] - slow[0]) * lag, (slow[1] - fast[1]) * lag))
    return lag * torch.exp(exponent) * unit_decay_integral(difference)


def accumulated_variance(decay: Quantity, lag: Quantity) -> Values:
    """`phi(tau) = integral_0^tau exp(-2 mu s) ds = (1 - exp(-2 mu tau)) / (2 mu)`, and `tau` at mu = 0.

    This is the variance that unit process noise accumulates over a lag (appendix A.2). The quotient cancels at and
    near mu = 0; values and derivatives of every order are accurate there too.

    Args:
        decay: mu, per unit of time; broadcasts against `lag`. A negative value means growth.
        lag: tau >= 0, in units of time, as the result.
    """
    rate = 2 * decay
    x = rate * lag
    # for x > 1 the product below would round exp(-x), which is the derivative by the lag
    long = x > 1
    near = lag * unit_decay_integral(torch.where(long, 1.0, x))
    return torch.where(long, (1 - torch.exp(-x.where(long, 1.0))) / torch.where(long, rate, 1.0), near)


def covariance(
    decay: Quantity, process_noise: Quantity, key_noise: Quantity, noise_floor: Quantity, lag: Quantity
) -> Values:
    """`Sigma(tau) = sigma^2 phi(tau) + eta^2 exp(-2 mu tau) + sigma_0^2`, the variance of a transported key.

    This is equation `isotropic_covariance` of the paper. Here `sigma^2` is the noise per unit of time, so that mu = 0
    is allowed.

    Args:
        decay: mu >= 0, per unit of time.
        process_noise: sigma^2 >= 0, variance per unit of time.
        key_noise, noise_floor: eta^2 >= 0 and sigma_0^2 >= 0, variances.
        lag: tau >= 0, in units of time. All broadcast against each other.
    """
    transported = key_noise * torch.exp(-2 * decay * lag)
    return process_noise * accumulated_variance(decay, lag) + transported + noise_floor


def steady_state_variance(decay: Quantity, process_noise: Quantity) -> Values:
    """`sigma~^2 = sigma^2 / (2 mu)`, the stationary variance: the limit of `sigma^2 phi(tau)` (appendix A.2).

    Args: as `covariance`.

    Returns:
        A variance. It is infinite at mu = 0, and 0 without process noise.
    """
    has_limit, noisy = decay > 0, process_noise > 0
    stationary = process_noise / torch.where(has_limit, 2 * decay, 1.0)  # the gradient must not meet 0 / 0 either
    return torch.where(noisy, torch.where(has_limit, stationary, torch.inf), 0.0)


def riccati_gain(decay: Quantity, process_noise: Quantity, measurement_noise: Quantity, interval: Quantity) -> Values:
    """The steady-state Kalman gain of one mode that is observed every `interval`.

    `K = x / (x + r)`. The predicted variance `x` is the positive root of the discrete Riccati equation
    `x^2 + x (r (1 - F^2) - q) - q r = 0`, with `F = exp(-mu dt)` and `q = sigma^2 phi(dt)`.

    Args: as `covariance`, and
        measurement_noise: r >= 0, variance.
        interval: dt > 0, in units of time.

    Returns:
        The gain, in [0, 1].
    """
    return riccati_log_gain(decay, process_noise, measurement_noise, interval)[0].exp()


def riccati_log_gain(
    decay: Quantity,
    process_noise: Quantity,
    measurement_noise: Quantity,
    interval: Quantity,
    smallest: float | None = None,
) -> tuple[Values, Values]:
    """`log K` and `log(1 - K)` of `riccati_gain`. Both are finite, and accurate where the gain is near 0 or 1.

    With `c = 1 - F^2` and `g = q / r`, `y = x / r` is the root of `y^2 + y (c - g) - g = 0`, and `K = y / (1 + y)`.
    The roots are y and `-g / y`, so `y - g / y = g - c`, and

        log y = 1/2 log g + asinh((sqrt(g) - c / sqrt(g)) / 2).

    Only ratios and square roots of the noises are formed, never a product or a square. Value and gradient are
    therefore accurate down to the smallest normal number. A noise of zero counts as that number and has no gradient.
    Without process noise the gain is tiny; without measurement noise it is nearly 1.

    Args: as `riccati_gain`, and
        smallest: the variance that replaces zero; by default the dtype's smallest normal number. Float32's number
            keeps gradients in float32's range when the work is done in float64.

    Returns:
        `(log K, log(1 - K))`, both <= 0.
    """
    smallest = torch.finfo(interval.dtype).tiny if smallest is None else smallest
    noise, r = process_noise.clamp(min=smallest), measurement_noise.clamp(min=smallest)
    grown = accumulated_variance(decay, interval)
    contraction = -torch.expm1(-2 * decay * interval)
    log_g = noise.log() + grown.log() - r.log()
    root = grown.sqrt() * (noise.sqrt() / r.sqrt())
    half = 0.5 * (root - contraction * (-0.5 * log_g).exp())  # a quotient would have a gradient of 1 / root^2
    sign = torch.where(half < 0, -1.0, 1.0)
    # asinh, whose gradient in PyTorch squares its argument
    logit = 0.5 * log_g + sign * (sign * half + _hypot_of_one(half)).log()
    zero = torch.zeros_like(logit)
    return -torch.logaddexp(zero, -logit), -torch.logaddexp(zero, logit)


def _hypot_of_one(x: Values) -> Values:
    """`sqrt(x^2 + 1)`, also where the square would overflow."""
    if not exported():
        return torch.hypot(x, torch.ones_like(x))
    size = x.abs()  # ONNX has no `hypot`
    larger = size.clamp(min=1.0)
    return larger * (1.0 + (size.clamp(max=1.0) / larger).square()).sqrt()


class TimeDependentNoise(NamedTuple):
    """Damped waves of a noise rate, any number of them for each head. The white part is the process noise.

        q(s) = sigma^2 + sum_j a_j exp(-kappa_j s) (1 + cos(nu_j s + psi_j)),     s >= 0 since the key

    In the form of appendix E.5, `q(s) = sum_j c_j exp(g_j s)`, a part is the pair `g = -kappa` with `c = a` and
    `g = -kappa + i nu` with `c = a exp(i psi)`. An exponential alone has `nu = psi = 0` and counts twice; a wave alone
    has `kappa = 0`. No choice of the parameters makes q negative.

    Fields, each `(..., parts)`:
        amplitude: a_j >= 0, variance per unit of time.
        rate: kappa_j >= 0, per unit of time: noise that grew with the lag would have no bound.
        angular_frequency: nu_j, radians per unit of time.
        phase: psi_j, radians.
    """

    amplitude: Tensor
    rate: Tensor
    angular_frequency: Tensor
    phase: Tensor

    def parts(self) -> list[tuple[Float[Tensor, "..."], ...]]:
        """Amplitude, rate, angular frequency and phase of each part."""
        return list(zip(*(field.unbind(-1) for field in self), strict=True))


def time_dependent_variance(
    decay: Quantity, process_noise: Quantity, noise: TimeDependentNoise, lag: Quantity
) -> Values:
    """`V(tau) = integral_0^tau exp(-2 mu (tau - s)) q(s) ds`, the variance that time-dependent noise accumulates.

    With `phi` from `accumulated_variance`, this is appendix E.5 for the exponentials of `TimeDependentNoise`:

        V = sigma^2 phi(tau) + Re sum_j c_j (exp(g_j tau) - exp(-2 mu tau)) / (2 mu + g_j)

    Values and gradients are accurate where a denominator vanishes: the limit is `c_j tau exp(-2 mu tau)`.

    V is never negative. With sigma^2, a_j >= 0 no term of q is negative, because `exp > 0` and `1 + cos >= 0`, and V
    integrates q times an exponential. Therefore `V + eta^2 E^2 + sigma_0^2` is positive wherever the key's own noise
    or the floor is positive.

    Args:
        decay: mu >= 0, per unit of time.
        process_noise: sigma^2 >= 0, the white part, variance per unit of time.
        noise: the other parts.
        lag: tau >= 0, in units of time. All broadcast against each other; phases are formed in `time_dtype`.

    Returns:
        A variance, 0 at lag 0, in the dtype of `lag`.
    """
    dtype = time_dtype(lag.device)
    mu, white, tau = (x.to(dtype) for x in (decay, process_noise, lag))
    variance = white * accumulated_variance(mu, tau)
    for part in noise.parts():
        amplitude, kappa, nu, psi = (x.to(dtype) for x in part)
        variance = variance + amplitude * _faded_wave(mu, kappa, nu, psi, tau)
    return variance.to(lag.dtype)


def _faded_wave(mu: Tensor, kappa: Tensor, nu: Tensor, psi: Tensor, tau: Tensor) -> Tensor:
    """`integral_0^tau exp(-2 mu (tau - s)) exp(-kappa s) (1 + cos(nu s + psi)) ds`, which is not negative.

    The slower of the two exponentials is taken out of the integral. What remains decays, so neither factor can
    overflow: from the query back if kappa is the slower, else from the key on. The cosine's part is
    `tau Re[exp(i phase) g(z)]` with `g(z) = (1 - exp(-z)) / z`.
    """
    mu, kappa, nu, psi, tau = torch.broadcast_tensors(mu, kappa, nu, psi, tau)
    backwards = 2 * mu >= kappa  # no minimum: its gradient at a tie would be neither side's
    slower, rest = torch.where(backwards, kappa, 2 * mu), torch.where(backwards, 2 * mu - kappa, kappa - 2 * mu)
    phase, turn = torch.where(backwards, nu * tau + psi, psi), torch.where(backwards, nu, -nu)
    mean = unit_decay_integral(torch.complex(rest * tau, turn * tau))
    wave = tau * (torch.cos(phase) * mean.real - torch.sin(phase) * mean.imag)
    # rounding can make the sum negative
    return decay_kernel(slower, tau) * (accumulated_variance(0.5 * rest, tau) + wave).clamp(min=0)


# How the noises of a head weigh a lag (section 3.5, appendix C.2)


def bias(decay: Quantity, process_noise: Quantity, key_noise: Quantity, noise_floor: Quantity, lag: Quantity) -> Values:
    """`B(tau) = -log Sigma(tau)`, the additive prior of a lag (section 3.5).

    Args: as `covariance`. The bias is in nats.
    """
    return -torch.log(covariance(decay, process_noise, key_noise, noise_floor, lag))


def gate(
    decay: Quantity,
    process_noise: Quantity,
    key_noise: Quantity,
    noise_floor: Quantity,
    query_noise: Quantity,
    lag: Quantity,
) -> Values:
    """`P~(tau) = 1 / (Sigma(tau) + gamma^2)`, the precision that scales squared residuals at a lag (section 3.5).

    Args: as `covariance`, and
        query_noise: gamma^2 >= 0, variance.
    """
    return 1 / (covariance(decay, process_noise, key_noise, noise_floor, lag) + query_noise)


def regime(decay: Quantity, process_noise: Quantity, key_noise: Quantity) -> Values:
    """`alpha = eta^2 - sigma~^2`: negative in the diffusive regime, positive in the integrative one (appendix C.2).

    Args: as `covariance`. At mu = 0, where a noisy process has no stationary variance, the result is `-inf`.
    """
    return key_noise - steady_state_variance(decay, process_noise)


def prior_response(
    decay: Quantity, process_noise: Quantity, key_noise: Quantity, noise_floor: Quantity, lag: Quantity
) -> Values:
    """`exp(-mu tau) / Sigma(tau)`, the weight of a lag before the content is compared (section 3.7).

    Args: as `covariance`.
    """
    return decay_kernel(decay, lag) / covariance(decay, process_noise, key_noise, noise_floor, lag)


def peak_lag(decay: Quantity, process_noise: Quantity, key_noise: Quantity, noise_floor: Quantity) -> Values:
    """`tau* = log(alpha / beta) / (2 mu)`, the lag at which `prior_response` is largest (section 3.7).

    With `alpha <= beta = sigma_0^2 + sigma~^2` the response falls from the start, and the peak is at lag 0. At mu = 0
    the response never rises either, and the result is 0.

    Args: as `covariance`, without the lag.
    """
    alpha = regime(decay, process_noise, key_noise)
    beta = noise_floor + steady_state_variance(decay, process_noise)
    rises = (alpha > beta) & (decay > 0)
    ratio = torch.where(rises, alpha, 1.0) / torch.where(rises, beta, 1.0)
    return torch.log(ratio) / (2 * torch.where(rises, decay, 1.0))
