"""What is known of a state: a mean, a covariance, and the directions of which nothing is known yet."""

from typing import NamedTuple

import torch
from torch import Tensor

from .matrices import symmetric

_TINY = 1e-13  # relative: what is left of a variance by rounding
_VISIBLE = 1e-9  # relative: an entry of a covariance that is said to be infinite


class Correction(NamedTuple):
    """What an observation does to a mean: `m -> keep m + gain z`, `(models, n, n)` and `(models, n, m)`."""

    keep: Tensor
    gain: Tensor


class Gaussian(NamedTuple):
    """A state `x ~ N(mean, covariance + c unknown)` for `c -> infinity` (the exact diffuse start).

    Covariances do not depend on what was measured: where series share a model, theirs have a batch of one.

    Args:
        mean: `(b, n)`.
        covariance: `(models, n, n)`.
        unknown: `(models, n, n)`, or None where all is known.
        origin: what `unknown` would be had nothing been seen, against which rounding in it is told; None with it.
        least: `(b,)`: the sum of squares that no state can be below, given what was seen.

    Source: Durbin and Koopman, Time Series Analysis by State Space Methods, sections 5.2 and 6.4.
    """

    mean: Tensor
    covariance: Tensor
    unknown: Tensor | None
    origin: Tensor | None
    least: Tensor

    def moved(self, transition: Tensor, variance: Tensor) -> "Gaussian":
        """`m -> Phi m`, `P -> Phi P Phi^T + V`."""
        mean = (transition @ self.mean[..., None])[..., 0]
        covariance = symmetric(transition @ self.covariance @ transition.mT) + variance
        unknown, origin = (
            None if x is None else symmetric(transition @ x @ transition.mT) for x in (self.unknown, self.origin)
        )
        return Gaussian(mean, covariance, unknown, origin, self.least)

    def corrected(self, rows: Tensor, values: Tensor) -> tuple["Gaussian", Correction]:
        """After seeing `z = H x + e`, `e ~ N(0, I)`, one component after the other.

        Args:
            rows: H, `(models, m, n)`; a row of zeros says nothing.
            values: z, `(b, m)`.
        """
        mean, covariance, unknown, origin, least = self
        n = mean.shape[-1]
        keep = torch.eye(n, dtype=mean.dtype, device=mean.device).expand_as(covariance)
        gains: list[Tensor] = []
        for row, value in zip(rows.unbind(-2), values.unbind(-1), strict=True):
            spread = (covariance @ row[..., None])[..., 0]
            total = (row * spread).sum(-1, keepdim=True) + 1
            gain, first = spread / total, None
            if unknown is not None and origin is not None:
                vague = (unknown @ row[..., None])[..., 0]
                vagueness = (row * vague).sum(-1, keepdim=True)
                most = (row.abs() * origin.diagonal(dim1=-2, dim2=-1).sqrt()).sum(-1, keepdim=True).square()
                first = vagueness > _TINY * most
                gain = torch.where(first, vague / torch.where(first, vagueness, 1.0), gain)
                unknown = _without(unknown, origin, row, gain * first)
            missed = value - (row * mean).sum(-1)
            mean = mean + gain * missed[..., None]
            share = missed.square() / total[..., 0]
            least = least + (share if first is None else torch.where(first[..., 0], 0.0, share))
            cross = gain[..., :, None] * spread[..., None, :]
            covariance = covariance - cross - cross.mT + total[..., None] * gain[..., :, None] * gain[..., None, :]
            keep = keep - gain[..., :, None] * (row[..., None, :] @ keep)
            gains = [earlier - gain * (row * earlier).sum(-1, keepdim=True) for earlier in gains] + [gain]
        if unknown is not None and not bool(unknown.any()):
            unknown = origin = None
        return Gaussian(mean, covariance, unknown, origin, least), Correction(keep, torch.stack(gains, dim=-1))

    def with_infinities(self) -> Tensor:
        """The covariance, infinite where a direction is unknown."""
        if self.unknown is None or self.origin is None:
            return self.covariance
        size = self.origin.diagonal(dim1=-2, dim2=-1).sqrt()
        blank = self.unknown.abs() > _VISIBLE * size[..., :, None] * size[..., None, :]
        infinite = torch.copysign(torch.full_like(self.unknown, torch.inf), self.unknown)
        return torch.where(blank, infinite, self.covariance)

    def known(self) -> Tensor:
        """Whether no direction is unknown, `(models,)`."""
        if self.unknown is None:
            return torch.ones_like(self.covariance[..., 0, 0], dtype=torch.bool)
        return ~self.unknown.any(-1).any(-1)


def _without(unknown: Tensor, origin: Tensor, row: Tensor, gain: Tensor) -> Tensor:
    """`(I - k h) U (I - k h)^T`, with zeros where only rounding is left."""
    left = unknown - gain[..., :, None] * (row[..., None, :] @ unknown)
    both = symmetric(left - (left @ row[..., None]) * gain[..., None, :])
    size = origin.diagonal(dim1=-2, dim2=-1).sqrt()
    return both.masked_fill(both.abs() <= _TINY * size[..., :, None] * size[..., None, :], 0.0)
