"""What is known of a state: a mean, a covariance, and the directions of which nothing is known yet."""

from typing import NamedTuple

import torch
from torch import Tensor

from .matrices import symmetric

_TINY = 1e-7  # relative: as little of an unknown direction in what is seen is none of it
_VISIBLE = 1e-9  # relative: a correlation of two unknown states that is none


class Correction(NamedTuple):
    """What an observation does to a mean: `m -> keep m + gain z`, `(models, n, n)` and `(models, n, m)`."""

    keep: Tensor
    gain: Tensor

    @classmethod
    def of(cls, rows: Tensor, gains: list[Tensor]) -> "Correction":
        """Of components that came one after the other, each with its gain `(models, n)`: `m -> m + k (z - h m)`."""
        n = rows.shape[-1]
        keep, found = torch.eye(n, dtype=rows.dtype, device=rows.device).expand(len(rows), n, n), list[Tensor]()
        for row, gain in zip(rows.unbind(-2), gains, strict=True):
            keep = keep - gain[..., :, None] * (row[..., None, :] @ keep)
            found = [earlier - gain * (row * earlier).sum(-1, keepdim=True) for earlier in found] + [gain]
        return cls(keep, torch.stack(found, dim=-1))


class Unknown(NamedTuple):
    """Directions without any information: the columns of L, whose variance is infinite.

    Args:
        root: L, `(models, n, n)`.
        origin: `(models, n, n)`: what L would be had nothing been seen, against which rounding in it is told.
        left: `(models,)`: how many directions are left.
    """

    root: Tensor
    origin: Tensor
    left: Tensor

    def moved(self, transition: Tensor) -> "Unknown":
        """`L -> Phi L`; all directions stay all directions, whatever has decayed."""
        blank = self.blank()
        root, origin = (torch.where(blank, x, transition @ x) for x in (self.root, self.origin))
        return Unknown(root, origin, self.left)

    def blank(self) -> Tensor:
        """Whether nothing has been seen yet, `(models, 1, 1)`."""
        return (self.left == self.root.shape[-1])[:, None, None]

    def seen(self, row: Tensor) -> tuple[Tensor, Tensor, "Unknown"]:
        """Whether `h x` shows a part of it, `(models, 1)`; then `L a / a^T a`, `a = L^T h`; and what is left."""
        shown = (self.root.mT @ row[..., None])[..., 0]
        most = (row.abs() * self.sizes()).sum(-1, keepdim=True)
        size = shown.square().sum(-1, keepdim=True)
        first = size > (_TINY * most).square()
        direction = shown / torch.where(first, size, 1.0)
        gain = (self.root @ direction[..., None])[..., 0] * first
        left = self.left - first[..., 0].to(self.left.dtype)
        root = (self.root - gain[..., :, None] * shown[..., None, :]) * (left > 0)[..., None, None]
        return first, gain, Unknown(root, self.origin, left)

    def sizes(self) -> Tensor:
        """Of each state's variation had nothing been seen, `(models, n)`."""
        return self.origin.square().sum(-1).sqrt()


class Gaussian(NamedTuple):
    """A state `x ~ N(mean, covariance + c L L^T)` for `c -> infinity` (the exact diffuse start).

    Covariances do not depend on what was measured: where series share a model, theirs have a batch of one.

    Args:
        mean: `(b, n)`.
        covariance: `(models, n, n)`.
        unknown: None where all is known.
        least: `(b,)`: the sum of squares that no state can be below, given what was seen.

    Source: Durbin and Koopman, Time Series Analysis by State Space Methods, sections 5.2 and 6.4.
    """

    mean: Tensor
    covariance: Tensor
    unknown: Unknown | None
    least: Tensor

    def expanded(self, count: int) -> "Gaussian":
        """For so many series, each with what may have been all series' own."""

        def each(x: Tensor) -> Tensor:
            return x.repeat(count // len(x), *(1,) * (x.dim() - 1))

        unknown = None if self.unknown is None else Unknown(*map(each, self.unknown))
        return Gaussian(each(self.mean), each(self.covariance), unknown, each(self.least))

    def taken(self, index: Tensor) -> "Gaussian":
        """Of some series; all have their own."""
        unknown = None if self.unknown is None else Unknown(*(x[index] for x in self.unknown))
        return Gaussian(self.mean[index], self.covariance[index], unknown, self.least[index])

    def first(self, count: int) -> "Gaussian":
        """Of the first series; all have their own."""
        return self.taken(torch.arange(count, device=self.mean.device))

    def moved(self, transition: Tensor, variance: Tensor) -> "Gaussian":
        """`m -> Phi m`, `P -> Phi P Phi^T + V`."""
        mean = (transition @ self.mean[..., None])[..., 0]
        covariance = symmetric(transition @ self.covariance @ transition.mT) + variance
        if self.unknown is None:
            return Gaussian(mean, covariance, None, self.least)
        covariance = torch.where(self.unknown.blank(), self.covariance, covariance)
        return Gaussian(mean, covariance, self.unknown.moved(transition), self.least)

    def corrected(self, rows: Tensor, values: Tensor) -> tuple["Gaussian", list[Tensor]]:
        """After seeing `z = H x + e`, `e ~ N(0, I)`, one component after the other; and the gain of each.

        Args:
            rows: H, `(models, m, n)`; a row of zeros says nothing.
            values: z, `(b, m)`.
        """
        mean, covariance, unknown, least = self
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        gains: list[Tensor] = []
        for row, value in zip(rows.unbind(-2), values.unbind(-1), strict=True):
            spread = (covariance @ row[..., None])[..., 0]
            total = (row * spread).sum(-1, keepdim=True) + 1
            gain = spread / total
            missed = value - (row * mean).sum(-1)
            share = missed.square() / total[..., 0]
            if unknown is not None:
                first, all_of_it, unknown = unknown.seen(row)
                gain = torch.where(first, all_of_it, gain)
                share = torch.where(first[..., 0], 0.0, share)
            mean, least = mean + gain * missed[..., None], least + share
            keep = identity - gain[..., :, None] * row[..., None, :]  # Joseph's form: nothing cancels
            covariance = symmetric(keep @ covariance @ keep.mT) + gain[..., :, None] * gain[..., None, :]
            gains.append(gain)
        if unknown is not None and not bool(unknown.root.any()):
            unknown = None
        return Gaussian(mean, covariance, unknown, least), gains

    def spread(self, settled: Tensor | None, seen: Tensor) -> Tensor:
        """The covariance `(b, n, n)`, infinite where a direction is unknown.

        Args:
            settled: the stationary covariance, which stands for it where nothing was seen.
            seen: how many observations were, `(b,)`.
        """
        known = self._with_infinities().expand(*self.mean.shape, -1)
        return known if settled is None else torch.where((seen == 0)[:, None, None], settled, known)

    def _with_infinities(self) -> Tensor:
        if self.unknown is None:
            return self.covariance
        root, size = self.unknown.root, self.unknown.sizes()
        length = root.square().sum(-1).sqrt()
        vague = length > _TINY * size
        shared = (root @ root.mT).abs() > _VISIBLE * length[..., :, None] * length[..., None, :]
        infinite = torch.copysign(torch.full_like(root, torch.inf), root @ root.mT)
        return torch.where(vague[..., :, None] & vague[..., None, :] & shared, infinite, self.covariance)
