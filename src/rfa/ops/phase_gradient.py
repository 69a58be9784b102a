"""Gradients of frequencies and times where a kernel turns the states itself.

A kernel reads cosines and sines and has no gradient for them. It needs none. With `y = exp(i s theta) x`, s = 1 or -1,
and J the quarter turn, `dL / dtheta = s <dL/dy, J y> = s <dL/dx, J x>`: J and a rotation commute, and a rotation keeps
inner products. So the states on one side of the rotation and their own gradient are enough.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .dense import all_finite, finite


def with_phase_gradient(
    states: Sequence[Tensor], frequency: Tensor, times: Tensor, inverse: bool = False
) -> tuple[Tensor, ...]:
    """The states themselves. Their gradients give frequencies and times theirs.

    Args:
        states: `(batch, heads, length, 2 d)` each, in float32, of the same times. A kernel turns them by the phases
            `omega t`, or has turned them.
        frequency: omega, `(heads, modes)`.
        times: `(b, 1 or heads, length)`.
        inverse: turned backwards.
    """
    return _PhaseGradient.apply(frequency, times, -1 if inverse else 1, *states)  # type: ignore[no-any-return]


class _PhaseGradient(torch.autograd.Function):
    @staticmethod
    def forward(frequency: Tensor, times: Tensor, sign: int, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in states)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:  # type: ignore[type-arg]
        frequency, times, sign, *states = inputs
        ctx.save_for_backward(frequency, times, *states)
        ctx.sign = sign  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        frequency, times, *states = ctx.saved_tensors
        slope = functools.reduce(torch.add, map(_slope, states, gradients))
        if times.shape[0] == 1:
            slope = slope.sum(0, keepdim=True)
        of_times = of_frequency = None
        if ctx.needs_input_grad[0]:  # in the precision of times: distant ones cancel down to lags
            of_frequency = ctx.sign * (slope.to(times.dtype) * times[..., None]).sum((0, 2)).to(frequency.dtype)
        if ctx.needs_input_grad[1]:
            of_times = (slope @ frequency.to(slope.dtype)[:, :, None])[..., 0].sum_to_size(times.shape)
            of_times = ctx.sign * of_times.to(times.dtype)
        return of_frequency, of_times, None, *gradients


def _slope(states: Tensor, gradient: Tensor) -> Tensor:
    """`<dL/dx, J x>` of each mode, `(batch, heads, length, modes)`. A state that is not finite has none."""
    real, imaginary = states.chunk(2, dim=-1)
    along, across = gradient.chunk(2, dim=-1)
    slope = torch.addcmul(across * real, along, imaginary, value=-1)
    return slope if all_finite(states) else slope.masked_fill(finite(states)[1][..., None], 0.0)
