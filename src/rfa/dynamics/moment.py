"""The integral behind every variance and transport here, right to any derivative where its quotient cancels."""

import math

import torch
from torch import Tensor

_SERIES_BELOW, _SERIES_TERMS = 0.5, 15  # 0.5^15 / 15! < 3e-17: the series is exact in float64


class _ExponentialMoment(torch.autograd.Function):
    """`g_n(x) = integral_0^1 s^n exp(-x s) ds`, real or complex. Since `g_n' = -g_{n+1}`, it is smooth to any order."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.order = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:  # type: ignore[override]
        if order == 0 and not x.is_complex():  # expm1 is exact for every x != 0; only the derivatives cancel near zero
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
        return -grad * _moment(x, ctx.order + 1).conj(), None


class _WithTangent(_ExponentialMoment):
    """The same in forward mode too. The compiler refuses to trace a function that has a `jvp`."""

    @staticmethod
    def jvp(ctx, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return -tangent * _moment(x, ctx.order + 1)


def _moment(x: Tensor, order: int) -> Tensor:
    function = _ExponentialMoment if torch.compiler.is_compiling() else _WithTangent
    return function.apply(x, order)


def exponential_moment(x: Tensor) -> Tensor:
    """`integral_0^1 exp(-x s) ds = (1 - exp(-x)) / x`, and 1 at 0; for real or complex x."""
    return _moment(x, 0)
