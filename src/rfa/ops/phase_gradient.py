"""Gradients of frequencies and times where a kernel turns the states itself.

A kernel reads cosines and sines and has no gradient for them. It needs none. With `y = exp(i s theta) x`, s = 1 or -1,
and J the quarter turn, `dL / dtheta = s <dL/dy, J y> = s <dL/dx, J x>`: J and a rotation commute, and a rotation keeps
inner products. So the states on one side of the rotation and their own gradient are enough.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .dense import all_finite, finite


def with_phase_gradient(states: Tensor, frequency: Tensor, times: Tensor, inverse: bool = False) -> Tensor:
    """The states themselves. Their gradient gives frequencies and times theirs.

    Args:
        states: `(batch, heads, length, 2 d)` in float32, which a kernel turns by the phases `omega t`, or has turned.
        frequency: omega, `(heads, modes)`.
        times: `(b, 1 or heads, length)`.
        inverse: turned backwards.
    """
    return _PhaseGradient.apply(states, frequency, times, -1 if inverse else 1)  # type: ignore[no-any-return]


class _PhaseGradient(torch.autograd.Function):
    @staticmethod
    def forward(states: Tensor, frequency: Tensor, times: Tensor, sign: int) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        *tensors, sign = inputs
        ctx.save_for_backward(*tensors)
        ctx.sign = sign  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        states, frequency, times = ctx.saved_tensors
        poisoned = None if all_finite(states) else finite(states)[1][..., None]  # such a state has no gradient
        turned = states if poisoned is None else states.masked_fill(poisoned, 0.0)
        real, imaginary = turned.chunk(2, dim=-1)
        along, across = (gradient if poisoned is None else gradient.masked_fill(poisoned, 0.0)).chunk(2, dim=-1)
        slope = torch.addcmul(across * real, along, imaginary, value=-1)
        if times.shape[0] == 1:
            slope = slope.sum(0, keepdim=True)
        of_times = of_frequency = None
        if ctx.needs_input_grad[1]:  # in the precision of times: distant ones cancel down to lags
            of_frequency = ctx.sign * (slope.to(times.dtype) * times[..., None]).sum((0, 2)).to(frequency.dtype)
        if ctx.needs_input_grad[2]:
            of_times = (slope @ frequency.to(slope.dtype)[:, :, None])[..., 0].sum_to_size(times.shape)
            of_times = ctx.sign * of_times.to(times.dtype)
        return gradient, of_frequency, of_times, None
