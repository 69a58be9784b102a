"""Scores of distances and variances, safe at their limits: what dense operators share (`reference.py` stands alone)."""

import torch
from torch import Tensor

from .inputs import Weight


def positive(variance: Tensor) -> Tensor:
    """A variance that has underflown kept away from zero, so that its logarithm is finite."""
    return variance.clamp(min=torch.finfo(variance.dtype).tiny ** 0.5)


def judged(variance: Tensor, query_noise: Tensor) -> Tensor:
    """`Sigma + gamma^2` of a `positive` Sigma, far enough from zero for gradients, which divide by its square."""
    tiny = torch.finfo(variance.dtype).tiny
    total = variance + query_noise
    return torch.where(total > 2 * tiny**0.5, total, tiny**0.25)


def log_weights(
    distance: Tensor, variance: Tensor, robustness: Tensor, inverse_temperature: Tensor, weight: Weight
) -> Tensor:
    """`beta_s L = beta_s (-log Sigma - (nu_s + 1) log(1 + distance))`; by exponential weights `- distance`.

    `distance` is that of SPEC section 2, `r / (nu_s d (Sigma + gamma^2))`; `variance` is Sigma.
    """
    evidence = (robustness + 1) * torch.log1p(distance) if weight == "student_t" else distance
    return inverse_temperature * (-torch.log(variance) - evidence)


def among_visible(score: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, -inf where a query does not see a key; and which rows see none, `(..., queries, 1)`.

    Those keep the scores that they have: a softmax over nothing but -inf is NaN, and so are its gradients.
    """
    empty = ~visible.any(-1, keepdim=True)
    return score.masked_fill(~visible & ~empty, -torch.inf), empty
