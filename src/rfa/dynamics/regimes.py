"""How the noises of a head weigh a lag: bias, gate, regime, prior response and its peak (section 3.5, appendix C.2)."""

import torch
from jaxtyping import Float
from torch import Tensor

from .covariance import covariance, steady_state_variance
from .transition import decay_kernel


def bias(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    key_noise: Float[Tensor, "*#shape"],
    noise_floor: Float[Tensor, "*#shape"],
    lag: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`B(tau) = -log Sigma(tau)`, the additive prior of a lag (section 3.5).

    Args: as `covariance`.

    Returns:
        The bias, in nats.
    """
    return -torch.log(covariance(decay, process_noise, key_noise, noise_floor, lag))


def gate(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    key_noise: Float[Tensor, "*#shape"],
    noise_floor: Float[Tensor, "*#shape"],
    query_noise: Float[Tensor, "*#shape"],
    lag: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`P~(tau) = 1 / (Sigma(tau) + gamma^2)`, the precision that scales squared residuals at a lag (section 3.5).

    Args: as `covariance`, and
        query_noise: gamma^2 >= 0, variance.

    Returns:
        A precision.
    """
    return 1 / (covariance(decay, process_noise, key_noise, noise_floor, lag) + query_noise)


def regime(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    key_noise: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`alpha = eta^2 - sigma~^2`: negative in the diffusive regime, positive in the integrative one (appendix C.2).

    Args:
        decay: mu >= 0, per unit of time.
        process_noise: sigma^2 >= 0, variance per unit of time.
        key_noise: eta^2 >= 0, variance. All broadcast against each other.

    Returns:
        A difference of variances. It is `-inf` at mu = 0, where a noisy process has no stationary variance.
    """
    return key_noise - steady_state_variance(decay, process_noise)


def prior_response(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    key_noise: Float[Tensor, "*#shape"],
    noise_floor: Float[Tensor, "*#shape"],
    lag: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`exp(-mu tau) / Sigma(tau)`, the weight of a lag before the content is compared (section 3.7).

    Args: as `covariance`.

    Returns:
        A precision times the remaining fraction of the state.
    """
    return decay_kernel(decay, lag) / covariance(decay, process_noise, key_noise, noise_floor, lag)


def peak_lag(
    decay: Float[Tensor, "*#shape"],
    process_noise: Float[Tensor, "*#shape"],
    key_noise: Float[Tensor, "*#shape"],
    noise_floor: Float[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """`tau* = log(alpha / beta) / (2 mu)`, the lag at which `prior_response` is largest (section 3.7).

    With `alpha <= beta = sigma_0^2 + sigma~^2` the response falls from the start, and the peak is at lag 0. At mu = 0
    the response never rises either, and the result is 0.

    Args: as `covariance`, without the lag.

    Returns:
        A lag >= 0, in units of time.
    """
    alpha = regime(decay, process_noise, key_noise)
    beta = noise_floor + steady_state_variance(decay, process_noise)
    rises = (alpha > beta) & (decay > 0)
    ratio = torch.where(rises, alpha, 1.0) / torch.where(rises, beta, 1.0)
    return torch.log(ratio) / (2 * torch.where(rises, decay, 1.0))
