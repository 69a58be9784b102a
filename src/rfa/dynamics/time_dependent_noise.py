"""Process noise that depends on the time since a key was seen, and the variance it accumulates in closed form."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .covariance import accumulated_variance
from .moment import exponential_moment
from .transition import decay_kernel, time_dtype


class TimeDependentNoise(NamedTuple):
    """The exponential and the periodic part of a noise rate, per head; the white part is the process noise.

        q(s) = sigma^2 + sigma_e^2 exp(-kappa s) + sigma_p^2 (1 + cos(nu s + psi)),     s >= 0 since the key

    The periodic part stands on a white share of its own, as large as its amplitude, so that no choice of the
    parameters makes q negative.

    Fields:
        transient_noise: sigma_e^2 >= 0, variance per unit of time, at the key's time.
        transient_rate: kappa >= 0, per unit of time.
        periodic_noise: sigma_p^2 >= 0, variance per unit of time, its mean over a period.
        periodic_frequency: nu, radians per unit of time.
        periodic_phase: psi, radians.
    """

    transient_noise: Tensor
    transient_rate: Tensor
    periodic_noise: Tensor
    periodic_frequency: Tensor
    periodic_phase: Tensor


def noise_rate(
    process_noise: Float[Tensor, "*#shape"], noise: TimeDependentNoise, elapsed: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """`q(s) >= 0` of `TimeDependentNoise`: the variance that enters per unit of time.

    Args:
        process_noise: sigma^2 >= 0, the white part, variance per unit of time.
        noise: the other parts. All broadcast against each other.
        elapsed: s >= 0 since the key, in units of time.

    Returns:
        A variance per unit of time.
    """
    transient = noise.transient_noise * torch.exp(-noise.transient_rate * elapsed)
    wave = 1 + torch.cos(noise.periodic_frequency * elapsed + noise.periodic_phase)
    return process_noise + transient + noise.periodic_noise * wave


def time_dependent_variance(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    noise: TimeDependentNoise,
    lag: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`V(tau) = integral_0^tau exp(-2 mu (tau - s)) q(s) ds`, the variance that time-dependent noise accumulates.

    With `phi` of `accumulated_variance`, appendix E.5 for `gamma_j = 0, -kappa, +-i nu`:

        V = (sigma^2 + sigma_p^2) phi(tau)
            + sigma_e^2 (exp(-kappa tau) - exp(-2 mu tau)) / (2 mu - kappa)
            + sigma_p^2 Re[exp(i psi) (exp(i nu tau) - exp(-2 mu tau)) / (2 mu + i nu)]

    Values and gradients are right where a denominator vanishes: `tau exp(-2 mu tau)` at `kappa = 2 mu`, `tau cos psi`
    at `mu = nu = 0`.

    Not negative, whatever the parameters: with sigma^2, sigma_e^2, sigma_p^2 >= 0 each term of q is, because
    `exp > 0` and `1 + cos >= 0`; V integrates q times an exponential, both >= 0. So `V + eta^2 E^2 + sigma_0^2` is
    positive wherever the key's own noise or the floor is.

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
    transient, kappa, periodic, nu, psi = (x.to(dtype) for x in noise)
    slower = torch.minimum(2 * mu, kappa)  # leaves an integral of a decay: neither factor can overflow
    faded = decay_kernel(slower, tau) * accumulated_variance((mu - 0.5 * kappa).abs(), tau)
    wave = accumulated_variance(mu, tau) + _turned_integral(mu, nu, psi, tau)
    variance = white * accumulated_variance(mu, tau) + transient * faded + periodic * wave.clamp(min=0)  # rounding
    return variance.to(lag.dtype)


def _turned_integral(mu: Tensor, nu: Tensor, psi: Tensor, tau: Tensor) -> Tensor:
    """`integral_0^tau exp(-2 mu (tau - s)) cos(nu s + psi) ds`.

    `tau Re[exp(i (nu tau + psi)) g(z)]` with `g(z) = (1 - exp(-z)) / z` and `z = (2 mu + i nu) tau`.
    """
    mu, nu, psi, tau = torch.broadcast_tensors(mu, nu, psi, tau)
    mean, phase = exponential_moment(torch.complex(2 * mu * tau, nu * tau)), nu * tau + psi
    return tau * (torch.cos(phase) * mean.real - torch.sin(phase) * mean.imag)
