"""Gaussian knowledge of a state, in two forms: mean and covariance, and information.

    Gaussian:     x ~ N(m, P + c L L^T) for c -> infinity. The columns of L are directions without any information.
    Information:  -(x^T J x - 2 y^T x + c) / 2, a log-likelihood whose J may have any rank.

An observation `z = H x + e`, `e ~ N(0, I)`, updates the first by `m -> m + K (z - H m)`, `P -> (I - K H) P`. It adds
`H^T H` and `H^T z` to the second.

Source: Durbin and Koopman, Time Series Analysis by State Space Methods, sections 5.2 and 6.4 (exact diffuse start).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .matrices import identity_like, inverse, symmetric

_NO_PART = 1e-7  # relative: an observation that shows less of a diffuse direction shows nothing of it
_NO_CORRELATION = 1e-9  # relative: of two diffuse states
_LARGEST_PRECISION = 1e100  # products of larger ones overflow
_NO_INFORMATION = 1e-280  # precisions from here on: the square of their scale would overflow
_SINGULAR = 1e-13  # smallest eigenvalue over the largest, at a unit diagonal, below which a direction is unknown


class AffineUpdate(NamedTuple):
    """What an observation does to a mean: `m -> factor m + gain z`."""

    factor: Float[Tensor, "#b n n"]
    gain: Float[Tensor, "#b n m"]

    @classmethod
    def of_components(cls, rows: Float[Tensor, "#b m n"], gains: list[Tensor]) -> "AffineUpdate":
        """Of m components, used one after another: component i does `m -> m + k_i (z_i - h_i m)`."""
        n = rows.shape[-1]
        factor, found = identity_like(rows).expand(len(rows), n, n), list[Tensor]()
        for row, gain in zip(rows.unbind(-2), gains, strict=True):
            factor = factor - gain[..., :, None] * (row[..., None, :] @ factor)
            found = [earlier - gain * (row * earlier).sum(-1, keepdim=True) for earlier in found] + [gain]
        return cls(factor, torch.stack(found, dim=-1))


class DiffuseDirections(NamedTuple):
    """Directions without any information: the columns of L. Their variance is infinite.

    Args:
        root: L, `(b or 1, n, n)`.
        origin: L as it would be without observations. Rounding errors in L are measured against it.
        remaining: how many directions are still diffuse, `(b or 1,)`.
    """

    root: Float[Tensor, "#b n n"]
    origin: Float[Tensor, "#b n n"]
    remaining: Float[Tensor, "#b"]

    def predicted(self, transition: Float[Tensor, "#b n n"]) -> "DiffuseDirections":
        """`L -> Phi L`. While all directions are diffuse L stays as it is, so that decay cannot shrink it to zero."""
        unobserved = self.unobserved()
        root, origin = (torch.where(unobserved, x, transition @ x) for x in (self.root, self.origin))
        return DiffuseDirections(root, origin, self.remaining)

    def unobserved(self) -> Bool[Tensor, "#b 1 1"]:
        """Whether all directions are diffuse."""
        return (self.remaining == self.root.shape[-1])[:, None, None]

    def updated(self, row: Float[Tensor, "#b n"]) -> tuple[Tensor, Tensor, "DiffuseDirections"]:
        """What a component `h x` shows of the diffuse directions, with `a = L^T h`.

        Returns:
            Whether it shows a part of them, `(b, 1)`; the gain `L a / a^T a`, `(b, n)`; the directions that remain.
        """
        shown = (self.root.mT @ row[..., None])[..., 0]
        most = (row.abs() * self.scales()).sum(-1, keepdim=True)
        size = shown.square().sum(-1, keepdim=True)
        shows = size > (_NO_PART * most).square()
        direction = shown / torch.where(shows, size, 1.0)
        gain = (self.root @ direction[..., None])[..., 0] * shows
        remaining = self.remaining - shows[..., 0].to(self.remaining.dtype)
        root = (self.root - gain[..., :, None] * shown[..., None, :]) * (remaining > 0)[..., None, None]
        return shows, gain, DiffuseDirections(root, self.origin, remaining)

    def scales(self) -> Float[Tensor, "#b n"]:
        """The size of each state's variation without observations."""
        return self.origin.square().sum(-1).sqrt()


class Gaussian(NamedTuple):
    """A state `x ~ N(mean, covariance + c L L^T)` for `c -> infinity`.

    Covariances do not depend on observed values. Where series share a model, their covariances have a batch of one.

    Args:
        mean: `(b, n)`.
        covariance: `(b or 1, n, n)`.
        diffuse: the directions L, or None where every direction is known.
        least_squares: `(b,)`: the smallest sum of squared residuals that any state can have, given the observations.
    """

    mean: Float[Tensor, "b n"]
    covariance: Float[Tensor, "#b n n"]
    diffuse: DiffuseDirections | None
    least_squares: Float[Tensor, " b"]

    def repeated(self, count: int) -> "Gaussian":
        """For `count` series, each with its own covariance."""

        def each(x: Tensor) -> Tensor:
            return x.repeat(count // len(x), *(1,) * (x.dim() - 1))

        diffuse = None if self.diffuse is None else DiffuseDirections(*map(each, self.diffuse))
        return Gaussian(each(self.mean), each(self.covariance), diffuse, each(self.least_squares))

    def selected(self, series: Int[Tensor, " c"] | slice) -> "Gaussian":
        """Of some series, by index or slice. Each must have its own covariance."""
        diffuse = None if self.diffuse is None else DiffuseDirections(*(x[series] for x in self.diffuse))
        return Gaussian(self.mean[series], self.covariance[series], diffuse, self.least_squares[series])

    def predicted(self, transition: Float[Tensor, "#b n n"], variance: Float[Tensor, "#b n n"]) -> "Gaussian":
        """One step later: `m -> Phi m`, `P -> Phi P Phi^T + V`."""
        mean = (transition @ self.mean[..., None])[..., 0]
        covariance = symmetric(transition @ self.covariance @ transition.mT) + variance
        if self.diffuse is None:
            return Gaussian(mean, covariance, None, self.least_squares)
        covariance = torch.where(self.diffuse.unobserved(), self.covariance, covariance)
        return Gaussian(mean, covariance, self.diffuse.predicted(transition), self.least_squares)

    def updated(self, rows: Float[Tensor, "#b m n"], values: Float[Tensor, "b m"]) -> tuple["Gaussian", list[Tensor]]:
        """After an observation `z = H x + e`, `e ~ N(0, I)`, whose components are used one after another.

        Args:
            rows: H. A row of zeros stands for a missing component.
            values: z.

        Returns:
            The posterior, and the gain `(b or 1, n)` of each component.
        """
        mean, covariance, diffuse, least_squares = self
        identity = identity_like(covariance)
        gains: list[Tensor] = []
        for row, value in zip(rows.unbind(-2), values.unbind(-1), strict=True):
            spread = (covariance @ row[..., None])[..., 0]
            variance = (row * spread).sum(-1, keepdim=True) + 1
            gain = spread / variance
            innovation = value - (row * mean).sum(-1)
            residual = innovation.square() / variance[..., 0]
            if diffuse is not None:
                shows, diffuse_gain, diffuse = diffuse.updated(row)
                gain = torch.where(shows, diffuse_gain, gain)
                residual = torch.where(shows[..., 0], 0.0, residual)
            mean, least_squares = mean + gain * innovation[..., None], least_squares + residual
            factor = identity - gain[..., :, None] * row[..., None, :]  # Joseph's form: no digits cancel
            covariance = symmetric(factor @ covariance @ factor.mT) + gain[..., :, None] * gain[..., None, :]
            gains.append(gain)
        if diffuse is not None and not bool(diffuse.root.any()):
            diffuse = None
        return Gaussian(mean, covariance, diffuse, least_squares), gains

    def full_covariance(
        self, stationary: Float[Tensor, "b n n"] | None, count: Int[Tensor, " b"]
    ) -> Float[Tensor, "b n n"]:
        """The covariance, infinite in diffuse directions.

        Args:
            stationary: the stationary covariance. It is taken where there are no observations.
            count: the number of observations.
        """
        covariance = self._with_infinities().expand(*self.mean.shape, -1)
        return covariance if stationary is None else torch.where((count == 0)[:, None, None], stationary, covariance)

    def _with_infinities(self) -> Tensor:
        if self.diffuse is None:
            return self.covariance
        root, scales = self.diffuse.root, self.diffuse.scales()
        length = root.square().sum(-1).sqrt()
        is_diffuse = length > _NO_PART * scales
        correlated = (root @ root.mT).abs() > _NO_CORRELATION * length[..., :, None] * length[..., None, :]
        infinite = torch.copysign(torch.full_like(root, torch.inf), root @ root.mT)
        return torch.where(is_diffuse[..., :, None] & is_diffuse[..., None, :] & correlated, infinite, self.covariance)


class Information(NamedTuple):
    """The log-likelihood `-(x^T J x - 2 y^T x + c) / 2 + const` of a state x, for any rank of J.

    Args:
        matrix: J, `(..., n, n)`, the precision.
        vector: y, `(..., n)`.
        constant: c, `(...,)`.
    """

    matrix: Float[Tensor, "*#batch n n"]
    vector: Float[Tensor, "*batch n"]
    constant: Float[Tensor, "*batch"]

    @classmethod
    def of(cls, rows: Float[Tensor, "*#batch m n"], values: Float[Tensor, "*batch m"]) -> "Information":
        """`J = H^T H`, `y = H^T z`, `c = z^T z` of an observation with unit noise. C is not inverted."""
        return cls(rows.mT @ rows, (rows.mT @ values[..., None])[..., 0], values.square().sum(-1))

    def at(self, index: int) -> "Information":
        """At a time index, of information along a grid `(b, G)`."""
        return Information(*(part[:, index] for part in self))

    def zero(self) -> "Information":
        """No information, of the same shape as the first time index of this grid."""
        return Information(*(torch.zeros_like(part[:, 0]) for part in self))

    def weighted(self, weight: Float[Tensor, "*batch"]) -> "Information":
        """The information of the same observations with their noise divided by a weight."""
        return Information(
            self.matrix * weight[..., None, None], self.vector * weight[..., None], self.constant * weight
        )

    def shrinkage(self, variance: Float[Tensor, "*#batch n n"]) -> Float[Tensor, "*batch n n"]:
        """`(I + J V)^-1`: the factor by which J shrinks where V is added to the state."""
        return inverse(identity_like(variance) + self.matrix @ variance)

    def inflated(self, variance: Float[Tensor, "*#batch n n"]) -> "Information":
        """On `x + e`, `e ~ N(0, V)`: precision `(J^-1 + V)^-1 = (I + J V)^-1 J`."""
        factor = self.shrinkage(variance)
        vector = factor @ self.vector[..., None]
        lost = self.vector[..., None, :] @ (variance @ vector)
        return Information(symmetric(factor @ self.matrix), vector[..., 0], self.constant - lost[..., 0, 0])

    def substituted(self, matrix: Float[Tensor, "*#batch n n"]) -> "Information":
        """On x, where this is information on `M x`: `M^T J M`, `M^T y`."""
        vector = (matrix.mT @ self.vector[..., None])[..., 0]
        return Information(matrix.mT @ self.matrix @ matrix, vector, self.constant)

    def bounded(self) -> "Information":
        """Scaled down where the precision is so large that products would overflow. The estimate stays the same."""
        largest = self.matrix.detach().abs().amax((-2, -1))
        if not bool((largest > _LARGEST_PRECISION).any()):
            return self
        scale = torch.where(largest > _LARGEST_PRECISION, _LARGEST_PRECISION / largest, 1.0)
        return Information(self.matrix * scale[..., None, None], self.vector * scale[..., None], self.constant * scale)

    def where(self, condition: Bool[Tensor, "*batch"]) -> "Information":
        """Itself where a condition holds and the matrix is finite. Zero elsewhere."""
        # for a J of less than full rank, V above 1e34 / J overflows
        condition = condition & self.matrix.isfinite().all(-1).all(-1)
        if bool(condition.all()):
            return self
        return Information(
            torch.where(condition[..., None, None], self.matrix, 0.0),
            torch.where(condition[..., None], self.vector, 0.0),
            torch.where(condition, self.constant, 0.0),
        )

    def solve(self, stationary: Float[Tensor, "*batch n n"] | None) -> tuple[Tensor, Tensor]:
        """Mean `J^-1 y` and covariance `J^-1`. In unknown directions the mean is 0 and the variance infinite.

        Args:
            stationary: the stationary covariance. It is taken where J is zero.
        """
        scale, matrix = self.scaled()
        vector = self.vector * scale
        regular = _regular(matrix)
        solved = inverse(torch.where(regular[..., None, None], matrix, identity_like(matrix)))
        mean, covariance = (solved @ vector[..., None])[..., 0] * scale, _outer(scale) * symmetric(solved)
        if bool(regular.all()):
            return mean, covariance
        eigenvalues, basis = torch.linalg.eigh(matrix.detach())
        unknown = eigenvalues <= _SINGULAR * eigenvalues[..., -1:].clamp(min=1.0)
        pseudo = basis @ torch.diag_embed(torch.where(unknown, 0.0, 1 / eigenvalues)) @ basis.mT
        projector = (basis * unknown[..., None, :]) @ basis.mT
        infinite = torch.copysign(torch.full_like(projector, torch.inf), projector)
        partial = torch.where(projector.abs() > 1e-9, infinite, _outer(scale) * pseudo)
        if stationary is not None:
            partial = torch.where(self.is_zero()[..., None, None], stationary, partial)
        partial_mean = (pseudo @ vector[..., None])[..., 0] * scale
        return torch.where(regular[..., None], mean, partial_mean), torch.where(
            regular[..., None, None], covariance, partial
        )

    def is_zero(self) -> Bool[Tensor, "*batch"]:
        """Whether there is no information at all."""
        return (self.matrix.diagonal(dim1=-2, dim2=-1) <= _NO_INFORMATION).all(-1)

    def scaled(self) -> tuple[Tensor, Tensor]:
        """`d` `(..., n)` and `d J d`, whose diagonal is 1, or (all but) 0 where nothing is known.

        So the units of the states do not change results.
        """
        diagonal = self.matrix.detach().diagonal(dim1=-2, dim2=-1)
        scale = torch.where(diagonal > _NO_INFORMATION, diagonal, 1.0).rsqrt()
        return scale, symmetric(_outer(scale) * self.matrix)

    def __add__(self, other: "Information") -> "Information":  # type: ignore[override]
        return Information(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _regular(matrix: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    return eigenvalues[..., 0] > _SINGULAR * eigenvalues[..., -1].clamp(min=1.0)


def _outer(scale: Tensor) -> Tensor:
    return scale[..., :, None] * scale[..., None, :]
