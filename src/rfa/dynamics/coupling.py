"""How one process drives another: the cross-transport of two coupled modes (appendix E.4)."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

_SERIES_BELOW, _SERIES_TERMS = 0.5, 15  # 0.5^15 / 15! < 3e-17: the series is exact in float64


class _ComplexMoment(torch.autograd.Function):
    """`g_n(z) = integral_0^1 s^n exp(z s) ds` for complex z. Holomorphic, `g_n' = g_{n+1}`: smooth to any order."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, int], output: Tensor) -> None:
        z, ctx.order = inputs
        ctx.save_for_backward(z)

    @staticmethod
    def forward(z: Tensor, order: int) -> Tensor:  # type: ignore[override]
        small = z.abs() < _SERIES_BELOW
        large = torch.where(small, _SERIES_BELOW, z)
        exponential = torch.exp(large)
        closed = (exponential - 1) / large
        for n in range(1, order + 1):
            closed = (exponential - n * closed) / large
        series, near = torch.zeros_like(z), torch.where(small, z, 0.0)
        for k in reversed(range(_SERIES_TERMS)):
            series = 1 / (math.factorial(k) * (order + k + 1)) + series * near
        return torch.where(small, series, closed)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (z,) = ctx.saved_tensors
        return grad * _ComplexMoment.apply(z, ctx.order + 1).conj(), None


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
    two rates, `z = (lambda_f - lambda_s) tau` and `g(z) = (e^z - 1) / z`, so that nothing overflows, and values and
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
    apart = torch.complex(*torch.broadcast_tensors((slow[0] - fast[0]) * lag, (fast[1] - slow[1]) * lag))
    return lag * torch.exp(carried) * _ComplexMoment.apply(apart, 0)
