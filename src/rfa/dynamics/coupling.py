"""How one process drives another: the cross-transport of two coupled modes (appendix E.4)."""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from .moment import exponential_moment


def cross_transport(
    decay: Float[Tensor, "*#shape"],
    frequency: Float[Tensor, "*#shape"],
    driver_decay: Float[Tensor, "*#shape"],
    driver_frequency: Float[Tensor, "*#shape"],
    lag: Float[Tensor, "*#shape"],
) -> Complex[Tensor, "*shape"]:
    """`integral_0^tau e^(lambda_x (tau - s)) e^(lambda_y s) ds`, what a driving mode y adds to a driven mode x.

    With `lambda = -mu + i omega` that is `(e^(lambda_y tau) - e^(lambda_x tau)) / (lambda_y - lambda_x)`, and
    `tau e^(lambda tau)` where the rates are equal. It is formed as `tau e^(lambda_s tau) g(z)` with the slower of the
    two rates, `z = (lambda_s - lambda_f) tau` and `g(z) = (1 - e^-z) / z`, so that nothing overflows, and values and
    derivatives of every order are right at and near equal rates, where the quotient cancels.

    Args:
        decay: mu >= 0 of the driven mode, per unit of time.
        frequency: omega of the driven mode, radians per unit of time.
        driver_decay, driver_frequency: the same of the driving mode.
        lag: tau >= 0, in units of time. All broadcast against each other.

    Returns:
        Complex, in units of time; symmetric in the two modes.

    Source: appendix E.4, `lambda_xy` for b = 1.
    """
    driven_is_slower = decay <= driver_decay
    slow = (
        torch.where(driven_is_slower, decay, driver_decay),
        torch.where(driven_is_slower, frequency, driver_frequency),
    )
    fast = (
        torch.where(driven_is_slower, driver_decay, decay),
        torch.where(driven_is_slower, driver_frequency, frequency),
    )
    carried = torch.complex(*torch.broadcast_tensors(-slow[0] * lag, slow[1] * lag))
    apart = torch.complex(*torch.broadcast_tensors((fast[0] - slow[0]) * lag, (slow[1] - fast[1]) * lag))
    return lag * torch.exp(carried) * exponential_moment(apart)
