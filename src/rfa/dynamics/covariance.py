"""How uncertainty grows along a lag: the differential Lyapunov equation and the steady Riccati gain, per mode."""

import torch
from jaxtyping import Float
from torch import Tensor

from .moment import exponential_moment


def accumulated_variance(decay: Float[Tensor, "*#shape"], lag: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """`phi(tau) = integral_0^tau exp(-2 mu s) ds = (1 - exp(-2 mu tau)) / (2 mu)`, and `tau` at mu = 0.

    The variance that unit process noise accumulates over a lag (appendix A.2). Values and derivatives of every
    order are right at and near mu = 0, where the quotient cancels.

    Args:
        decay: mu, per unit of time; broadcasts against `lag`. A negative one grows.
        lag: tau >= 0, in units of time.

    Returns:
        `phi(tau)`, in units of time.
    """
    return lag * exponential_moment(2 * decay * lag)


def covariance(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    key_noise: Float[Tensor, "*#shape"],
    noise_floor: Float[Tensor, "*#shape"],
    lag: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`Sigma(tau) = sigma^2 phi(tau) + eta^2 exp(-2 mu tau) + sigma_0^2`, the variance of a transported key.

    Equation `isotropic_covariance` of the paper, with `sigma^2` the noise per unit of time, so that mu = 0 is legal.

    Args:
        decay: mu >= 0, per unit of time.
        process_noise: sigma^2 >= 0, variance per unit of time.
        key_noise: eta^2 >= 0, variance.
        noise_floor: sigma_0^2 >= 0, variance.
        lag: tau >= 0, in units of time. All broadcast against each other.

    Returns:
        `Sigma(tau)`, a variance.
    """
    transported = key_noise * torch.exp(-2 * decay * lag)
    return process_noise * accumulated_variance(decay, lag) + transported + noise_floor


def steady_state_variance(
    decay: Float[Tensor, "*#shape"], process_noise: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """`sigma~^2 = sigma^2 / (2 mu)`, the limit of `sigma^2 phi(tau)` (appendix A.2).

    Args:
        decay: mu >= 0, per unit of time.
        process_noise: sigma^2 >= 0, variance per unit of time. Both broadcast against each other.

    Returns:
        A variance; infinite at mu = 0 unless there is no noise.
    """
    settles, noisy = decay > 0, process_noise > 0
    settled = process_noise / torch.where(settles, 2 * decay, 1.0)  # the gradient, too, keeps clear of 0 / 0
    return torch.where(noisy, torch.where(settles, settled, torch.inf), 0.0)


def riccati_gain(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    measurement_noise: Float[Tensor, "*#shape"],
    interval: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """The steady-state Kalman gain of one mode observed every `interval` (SPEC section 7).

    `K = x / (x + r)` with the predicted variance `x` the positive root of
    `x^2 + x (r (1 - F^2) - q) - q r = 0`, `F = exp(-mu dt)`, `q = sigma^2 phi(dt)`.

    Args:
        decay: mu >= 0, per unit of time.
        process_noise: sigma^2 >= 0, variance per unit of time.
        measurement_noise: r >= 0, variance.
        interval: dt > 0, in units of time. All broadcast against each other.

    Returns:
        The gain, in [0, 1].
    """
    return riccati_log_gain(decay, process_noise, measurement_noise, interval)[0].exp()


def riccati_log_gain(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    measurement_noise: Float[Tensor, "*#shape"],
    interval: Float[Tensor, "*#shape"],
    smallest: float | None = None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """`log K` and `log(1 - K)` of `riccati_gain`, each accurate where the gain is near 0 or 1, and finite.

    With `c = 1 - F^2` and `g = q / r`, `y = x / r` is the root of `y^2 + y (c - g) - g = 0` and `K = y / (1 + y)`. Only
    ratios and square roots of the noises are formed, never a product or a square: value and gradient are right down
    to the smallest normal number. Noises of zero stand for that number and have no gradient; without process noise the
    gain is tiny, without measurement noise nearly 1.

    Args: as `riccati_gain`, and
        smallest: the variance that stands for zero; by default the dtype's smallest normal number. That of float32
            keeps gradients in float32's range when the work is done in float64.

    Returns:
        `(log K, log(1 - K))`, both <= 0.
    """
    smallest = torch.finfo(interval.dtype).tiny if smallest is None else smallest
    r = measurement_noise.clamp(min=smallest)
    noise, grown = process_noise.clamp(min=smallest), accumulated_variance(decay, interval)
    contraction = -torch.expm1(-2 * decay * interval)
    log_g = noise.log() + grown.log() - r.log()
    root_g = noise.sqrt() * (grown.sqrt() / r.sqrt())
    small = root_g < 1
    # g < 1: y itself, in the form without cancellation
    root = torch.where(small, root_g, 0.5)
    half = 0.5 * (contraction - root.square())
    falling = half > 0
    both = torch.hypot(half, root) + torch.where(falling, half, -half)
    below = torch.where(falling, log_g - both.log(), both.log())
    # g >= 1: y / g is the root of z^2 + z (c / g - 1) - 1 / g = 0
    root = 1 / torch.where(small, 2.0, root_g)
    half = 0.5 * (1 - contraction * root.square())
    above = log_g + torch.log(torch.hypot(half, root) + half)
    logit = torch.where(small, below, above)  # K = y / (1 + y) = sigmoid(log y)
    zero = torch.zeros_like(logit)
    return -torch.logaddexp(zero, -logit), -torch.logaddexp(zero, logit)
