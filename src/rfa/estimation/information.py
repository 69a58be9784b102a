"""What observations say of a state, as a quadratic in it, and how that changes as the state moves."""

from typing import NamedTuple

import torch
from torch import Tensor

from .matrices import inverse, symmetric

_MOST = 1e100  # a state known as well as that is known; beyond, products overflow
_LARGEST_ROW = _MOST**0.5
_SINGULAR = 1e-13  # smallest eigenvalue over the largest, at a unit diagonal, below which a direction is unknown


def masked(observation: Tensor, noise: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """C and R with a missing component as one seen through nothing with noise 1."""
    both = here[..., :, None] & here[..., None, :]
    alone = torch.diag_embed((~here).to(noise.dtype))
    return torch.where(here[..., None], observation, 0.0), torch.where(both, noise, 0.0) + alone


def whitened(rows: Tensor, noise: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`L^-1 C` and `L^-1 z` with `R = L L^T`: the same, seen through noise of unit covariance.

    Raises:
        ValueError: where the noise of what is seen is singular.
    """
    factor, failed = torch.linalg.cholesky_ex(noise)
    if bool((failed > 0).any()):
        raise ValueError(
            "observation_noise: got a singular observation noise, expected a positive definite R for what is seen"
        )
    identity = torch.eye(noise.shape[-1], dtype=noise.dtype, device=noise.device)
    whiten = torch.linalg.solve_triangular(factor, identity, upper=False)
    return whiten @ rows, (whiten @ values[..., None])[..., 0]


class Measurement(NamedTuple):
    """`z = H x + e`, `e ~ N(0, I)`: the square root of an `Information`.

    A distance from it keeps its digits however far the states are from zero. `x^T J x - 2 y^T x + c` does not.

    rows: H, `(..., m, n)`. values: z, `(..., m)`.
    """

    rows: Tensor
    values: Tensor

    def information(self) -> "Information":
        """The same as a quadratic."""
        return Information.of(self.rows, self.values)

    def widened(self, variance: Tensor) -> "Measurement":
        """Of `x + e`, `e ~ N(0, V)`: rows and values times `L^-1`, `L L^T = I + H V H^T`."""
        identity = torch.eye(self.rows.shape[-2], dtype=variance.dtype, device=variance.device)
        total = identity + symmetric(self.rows @ variance @ self.rows.mT)
        factor, failed = torch.linalg.cholesky_ex(torch.where(total.isfinite(), total, 0.0))
        if bool((failed > 0).any()):  # by overflow: nothing is left to say
            lost = (failed > 0)[..., None, None]
            factor = torch.where(lost, identity, factor)
            rows = torch.where(lost, 0.0, self.rows.expand(*factor.shape[:-2], *self.rows.shape[-2:]))
            return Measurement(rows, torch.where(lost[..., 0], 0.0, self.values))._divided(factor)
        return self._divided(factor)

    def _divided(self, factor: Tensor) -> "Measurement":
        rows = torch.linalg.solve_triangular(factor, self.rows, upper=False)
        return Measurement(rows, torch.linalg.solve_triangular(factor, self.values[..., None], upper=False)[..., 0])

    def pulled(self, matrix: Tensor) -> "Measurement":
        """Of x, where this one is of `M x`: `H M`."""
        return Measurement(self.rows @ matrix, self.values)

    def bounded(self) -> "Measurement":
        """As `Information.bounded`."""
        largest = self.rows.detach().abs().amax((-2, -1))
        if not bool((largest > _LARGEST_ROW).any()):
            return self
        share = torch.where(largest > _LARGEST_ROW, _LARGEST_ROW / largest, 1.0)
        return Measurement(self.rows * share[..., None, None], self.values * share[..., None])

    def kept(self, where: Tensor) -> "Measurement":
        """Where a condition `(models, 1 or j)` holds and the rows are numbers; nothing elsewhere."""
        where = where & self.rows.isfinite().all(-1).all(-1)
        if bool(where.all()):
            return self
        return Measurement(
            torch.where(where[..., None, None], self.rows, 0.0), torch.where(where[..., None], self.values, 0.0)
        )

    def distance(self, state: Tensor) -> Tensor:
        """`d^2 = |z - H x|^2`, the squared Mahalanobis distance of what was seen."""
        return (self.values - (self.rows * state[..., None, :]).sum(-1)).square().sum(-1)


class Information(NamedTuple):
    """The log-likelihood `-(x^T J x - 2 y^T x + c) / 2 + const` of a state x, for any rank of J.

    matrix: J, `(..., n, n)`, the precision. vector: y, `(..., n)`. constant: c, `(...,)`.
    """

    matrix: Tensor
    vector: Tensor
    constant: Tensor

    @classmethod
    def of(cls, rows: Tensor, values: Tensor) -> "Information":
        """`J = H^T H`, `y = H^T z`, `c = z^T z` of whitened rows and values: no inverse of C."""
        return cls(rows.mT @ rows, (rows.mT @ values[..., None])[..., 0], values.square().sum(-1))

    def weighted(self, weight: Tensor) -> "Information":
        """What the same observations say with their noise divided by a weight `(...,)`."""
        return Information(
            self.matrix * weight[..., None, None], self.vector * weight[..., None], self.constant * weight
        )

    def gain(self, variance: Tensor) -> Tensor:
        """`(I + J V)^-1`: by this much information shrinks where V is added to what it is about."""
        identity = torch.eye(variance.shape[-1], dtype=variance.dtype, device=variance.device)
        return inverse(identity + self.matrix @ variance)

    def widened(self, variance: Tensor) -> "Information":
        """Of `x + e`, `e ~ N(0, V)`: precision `(J^-1 + V)^-1 = (I + J V)^-1 J`."""
        gain = self.gain(variance)
        vector = gain @ self.vector[..., None]
        taken = self.vector[..., None, :] @ (variance @ vector)
        return Information(symmetric(gain @ self.matrix), vector[..., 0], self.constant - taken[..., 0, 0])

    def pulled(self, matrix: Tensor) -> "Information":
        """Of x, where this one is of `M x`: `M^T J M`, `M^T y`."""
        vector = (matrix.mT @ self.vector[..., None])[..., 0]
        return Information(matrix.mT @ self.matrix @ matrix, vector, self.constant)

    def bounded(self) -> "Information":
        """The same estimate with finite confidence, where a state without noise has become known beyond all measure."""
        largest = self.matrix.detach().abs().amax((-2, -1))
        if not bool((largest > _MOST).any()):
            return self
        share = torch.where(largest > _MOST, _MOST / largest, 1.0)
        return Information(self.matrix * share[..., None, None], self.vector * share[..., None], self.constant * share)

    def kept(self, where: Tensor) -> "Information":
        """Where a condition `(models,)` holds and the matrix is finite; nothing elsewhere."""
        where = where & self.matrix.isfinite().all(-1).all(-1)  # beyond 1e34 times V, J of less than full rank is lost
        if bool(where.all()):
            return self
        return Information(
            torch.where(where[..., None, None], self.matrix, 0.0),
            torch.where(where[..., None], self.vector, 0.0),
            torch.where(where, self.constant, 0.0),
        )

    def solved(self, settled: Tensor | None) -> tuple[Tensor, Tensor]:
        """`J^-1 y` and `J^-1`, symmetric; zero with infinite variance in directions that are unknown.

        Args:
            settled: the stationary covariance, which stands for what is known where nothing is said at all.
        """
        scale, matrix = self.scaled()
        vector = self.vector * scale
        known = _regular(matrix)
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        solved = inverse(torch.where(known[..., None, None], matrix, identity))
        mean, covariance = (solved @ vector[..., None])[..., 0] * scale, _outer(scale) * symmetric(solved)
        if bool(known.all()):
            return mean, covariance
        eigenvalues, basis = torch.linalg.eigh(matrix.detach())
        blank = eigenvalues <= _SINGULAR * eigenvalues[..., -1:]
        pseudo = basis @ torch.diag_embed(torch.where(blank, 0.0, 1 / eigenvalues)) @ basis.mT
        lost = (basis * blank[..., None, :]) @ basis.mT  # the projector on what is unknown
        infinite = torch.copysign(torch.full_like(lost, torch.inf), lost)
        unsure = torch.where(lost.abs() > 1e-9, infinite, _outer(scale) * pseudo)
        if settled is not None:
            unsure = torch.where(self.empty()[..., None, None], settled, unsure)
        filled = (pseudo @ vector[..., None])[..., 0] * scale
        return torch.where(known[..., None], mean, filled), torch.where(known[..., None, None], covariance, unsure)

    def empty(self) -> Tensor:
        """Whether nothing is said, `(...)`."""
        return ~self.matrix.any(-1).any(-1)

    def scaled(self) -> tuple[Tensor, Tensor]:
        """`d`, `(..., n)`, and `d J d`, whose diagonal is 1 or 0, so that the units of the states do not matter."""
        diagonal = self.matrix.detach().diagonal(dim1=-2, dim2=-1)
        scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        return scale, symmetric(_outer(scale) * self.matrix)

    def __add__(self, other: "Information") -> "Information":  # type: ignore[override]
        return Information(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _regular(matrix: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    return (eigenvalues[..., -1] > 0) & (eigenvalues[..., 0] > _SINGULAR * eigenvalues[..., -1])


def _outer(scale: Tensor) -> Tensor:
    return scale[..., :, None] * scale[..., None, :]


def together(parts: list[Measurement]) -> Measurement:
    """Several along the last batch dimension, the one of sources."""
    rows, values = zip(*parts, strict=True)
    return Measurement(torch.cat(rows, dim=-3), torch.cat(values, dim=-2))
