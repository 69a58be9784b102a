"""Scores of residuals and variances, right at their limits: what all computations in ordinary autograd code share.

A variance is right down to the dtype's smallest normal number (1.2e-38 in float32, 2.2e-308 in float64). What lies
below it counts as that number and has no gradient. Scores of exponential weights, `r / (nu_s d Sigma~)`, leave the
dtype's range before: there `Sigma~` counts as `least_judged` where it lies below.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rfa.dynamics import rotate

from .inputs import Weight
from .transforms import readable


def least_judged(weight: Weight, dtype: torch.dtype) -> float:
    """The least `Sigma + gamma^2` that residuals are divided by: 2e-24 with exponential weights in float32."""
    tiny = torch.finfo(dtype).tiny
    return tiny if weight == "student_t" else tiny**0.625


def positive(variance: Tensor) -> Tensor:
    """A variance kept away from zero, so that its logarithm is finite."""
    return variance.clamp(min=torch.finfo(variance.dtype).tiny)


def judged(variance: Tensor, query_noise: Tensor, weight: Weight) -> Tensor:
    """`Sigma~ = Sigma + gamma^2` as residuals are divided by it; Sigma may be 0."""
    return (variance + query_noise).clamp(min=least_judged(weight, variance.dtype))


def evidence(residual: Tensor, scale: tuple[Tensor, ...], weight: Weight) -> Tensor:
    """`log(1 + r / s)`, or `r / s` of exponential weights, where s is the product of `scale`.

    The gradient of a quotient divides by the square of s, which may be 0. So the quotient is formed with s held
    constant, times each factor's constant over that factor: 1, with the gradient of its reciprocal. Beyond 1e19 in
    float32 the quotient is formed as two factors, each with a logarithm of its own.
    """
    held = functools.reduce(torch.mul, [factor.detach() for factor in scale])
    one = functools.reduce(torch.mul, [factor.detach() / factor for factor in scale])
    if weight == "exponential":
        return residual / held * one
    largest = torch.finfo(residual.dtype).max
    ordinary = _numbers_at_hand(residual, held) and residual.numel()
    if ordinary and residual.detach().max() < largest**0.5 * held.min():
        return torch.log1p(residual / held * one)
    ceiling = (largest**0.5 * held).clamp(max=largest)
    near = torch.minimum(residual, ceiling) / held * one
    return torch.log1p(near) + torch.log(torch.maximum(residual, ceiling) / ceiling)


def log_weights(
    lost: Tensor, variance: Tensor, robustness: Tensor, inverse_temperature: Tensor, weight: Weight
) -> Tensor:
    """`beta_s L = beta_s (-log Sigma - (nu_s + 1) lost)` of SPEC section 2, with exponential weights `- lost`.

    `lost` is the `evidence` of r against `nu_s d Sigma~`; `variance` is Sigma.
    """
    exponent = robustness + 1 if weight == "student_t" else 1.0
    return inverse_temperature * (-torch.log(positive(variance)) - exponent * lost)


def log_sum(score: Tensor) -> Tensor:
    """`log sum_j exp(score_j)`. Its gradient is the softmax to all digits.

    PyTorch forms it as the exponential of score less the result: of a result of 1e6 float32 knows 0.06.
    """
    if not score.shape[-1]:
        return score.logsumexp(-1)
    highest = score.detach().amax(-1, keepdim=True)
    return highest[..., 0] + (score - highest).exp().sum(-1).log()


def finite(states: Tensor) -> tuple[Tensor, Tensor]:
    """States with zeros in the place of those that hold NaN or infinity; and which do, `(batch, heads, length)`.

    A weight of zero makes no number of one that is none. So it must not meet those that it stands for.
    """
    poisoned = ~states.isfinite().all(-1)
    return states.masked_fill(poisoned[..., None], 0.0), poisoned


def rotated(states: Tensor, frequency: Tensor, times: Tensor, inverse: bool = False) -> Tensor:
    """`rotate`. What is no number turns into none, but gives the frequencies no gradient."""
    return of_numbers(lambda states: rotate(states, frequency, times, inverse), states)


def of_numbers(function: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """`function(states)`, state by state; where there is no number, none comes out and no gradient goes back."""
    if _numbers_at_hand(states) and states.detach().sum(dtype=torch.float32).isfinite():
        return function(states)  # all are finite
    states, poisoned = finite(states)
    return function(states).masked_fill(poisoned[..., None], torch.nan)


def _numbers_at_hand(*tensors: Tensor) -> bool:
    """Whether a look at the numbers is allowed and costs little: a GPU would have to finish its work first."""
    return readable(*tensors) and all(x.device.type == "cpu" for x in tensors)


def sees_any(visible: Tensor, poisoned: Tensor) -> Tensor:
    """Which queries see a key that is `poisoned` `(batch, heads, keys)`; `visible` `(b, 1, queries, keys)`."""
    seen = visible[:, 0].to(torch.float32) @ poisoned.mT.to(torch.float32)  # counted: no mask of every head
    return seen.mT > 0


def among_visible(score: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, -inf where a query does not see a key; and which rows see none, `(..., queries, 1)`.

    Those keep the scores that they have: a softmax over nothing but -inf is NaN, and so are its gradients.
    """
    empty = ~visible.any(-1, keepdim=True)
    return score.masked_fill(~visible & ~empty, -torch.inf), empty
