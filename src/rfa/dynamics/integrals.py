"""Integrals of exponentials over a lag. They stay accurate where the quotient of the closed form cancels."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

Quantity = Float[Tensor, "*#shape"]  # the arguments of a function broadcast against each other

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
