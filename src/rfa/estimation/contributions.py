"""What each observation contributes to an estimate: by itself, and in the Kalman filter's mean.

By itself (the Lyapunov prior), observation j says of the state at time i

    z_j = H_ij x_i + e,  e ~ N(0, I),    H_ij = S_ij^-1/2 C Phi_ij^-1,    S_ij = R + C Phi_ij^-1 V_ij Phi_ij^-T C^T

and its precision is `N_ij = H_ij^T H_ij`. In the filter (the Riccati prior), it contributes

    M_ij = P_i N_ij = Psi_ij K_j C Phi_ij^-1,    v_ij = Psi_ij K_j z_j,    Psi_ij = prod_{l=j+1..i} (I - K_l C) Phi_l

to the mean `m_i = v_i0 + sum_j v_ij`, with `I = M_i0 + sum_j M_ij`. The index 0 is the initial state.

Source: appendix A.3 for the first; the second goes beyond the paper (docs/theory.md).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .gaussian import AffineUpdate, Gaussian, Information
from .linear_sde import LinearSDE
from .matrices import identity_like, symmetric
from .problem import ObservationGrid, Transitions, each_step

_LONGEST_DECAY = 4.0  # decay over one part of a step
_MOST_PARTS = 1024
_LARGEST_DECAY = 200.0  # decay over one part, where 1,024 parts are not enough: exp(2 * 200) times 1e100 is finite
_LARGEST_ROW = 1e50  # entry of H: products of squares of larger ones overflow
_LARGEST_CONTRIBUTION = 10.0  # in standard deviations: without a larger one the estimate would be unstable
_ROUNDING = 1e-14  # relative: a few times what a product loses


@dataclass(frozen=True)
class TransportedObservations:
    """Observations `z_j = H_j x + e_j`, `e_j ~ N(0, I)`, all of the state x at one time.

    `|z - H x|^2` keeps its digits however far the state is from zero. `x^T J x - 2 y^T x + c` does not.
    """

    rows: Float[Tensor, "#b j m n"]  # H
    values: Float[Tensor, "b j m"]  # z
    indices: list[int]  # the time index at which each was observed

    @classmethod
    def none(cls, grid: ObservationGrid) -> "TransportedObservations":
        """Before the first observation."""
        return cls(grid.rows[:, :0], grid.values[:, :0], [])

    @classmethod
    def of_state(cls, state: Gaussian) -> "TransportedObservations":
        """A state that is known, with a regular covariance, as an observation of itself."""
        root = torch.linalg.cholesky(state.covariance)
        rows = torch.linalg.solve_triangular(root, identity_like(root), upper=False)
        return cls(rows[:, None], (rows @ state.mean[..., None])[:, None, :, 0], [])

    def with_observation(self, grid: ObservationGrid, index: int) -> "TransportedObservations":
        """With the observations of all series at a time index. A missing one has zero rows."""
        if not bool(grid.present[:, index].any()):
            return self
        at = slice(index, index + 1)
        return self.concatenated(TransportedObservations(grid.rows[:, at], grid.values[:, at], [index]))

    def concatenated(self, other: "TransportedObservations") -> "TransportedObservations":
        """These and others, in this order."""
        rows, values = torch.cat([self.rows, other.rows], dim=1), torch.cat([self.values, other.values], dim=1)
        return TransportedObservations(rows, values, [*self.indices, *other.indices])

    def without(self, index: int) -> "TransportedObservations":
        """All but the one of a time index."""
        kept = [place for place, each in enumerate(self.indices) if each != index]
        return TransportedObservations(self.rows[:, kept], self.values[:, kept], [self.indices[j] for j in kept])

    def information(self) -> Information:
        """Of each observation, `(b, j, ...)`."""
        return Information.of(self.rows, self.values)

    def distance(self, state: Float[Tensor, "b n"]) -> Float[Tensor, "b j"]:
        """`d^2 = |z - H x|^2`, the squared Mahalanobis distance of each observation from a state."""
        return (self.values - (self.rows * state[:, None, None, :]).sum(-1)).square().sum(-1)

    def inflated(self, variance: Float[Tensor, "#b n n"]) -> "TransportedObservations":
        """Of `x + e`, `e ~ N(0, V)`: rows and values times `L^-1`, `L L^T = I + H V H^T`."""
        variance = variance[:, None]
        identity = identity_like(self.rows.mT)
        total = identity + symmetric(self.rows @ variance @ self.rows.mT)
        factor, failed = torch.linalg.cholesky_ex(torch.where(total.isfinite(), total, 0.0))
        rows, values = self.rows, self.values
        if bool((failed > 0).any()):  # V overflows: the observation says nothing
            lost = (failed > 0)[..., None, None]
            factor = torch.where(lost, identity, factor)
            rows = torch.where(lost, 0.0, rows.expand(*factor.shape[:-2], *rows.shape[-2:]))
            values = torch.where(lost[..., 0], 0.0, values)
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
        values = torch.linalg.solve_triangular(factor, values[..., None], upper=False)[..., 0]
        return TransportedObservations(rows, values, self.indices)

    def substituted(self, matrix: Float[Tensor, "#b n n"]) -> "TransportedObservations":
        """Of x, where these are observations of `M x`: `H M`."""
        return TransportedObservations(self.rows @ matrix[:, None], self.values, self.indices)

    def bounded(self) -> "TransportedObservations":
        """Scaled down where the precision is so large that products would overflow. The estimate stays the same."""
        largest = self.rows.detach().abs().amax((-2, -1))
        if not bool((largest > _LARGEST_ROW).any()):
            return self
        scale = torch.where(largest > _LARGEST_ROW, _LARGEST_ROW / largest, 1.0)
        rows, values = self.rows * scale[..., None, None], self.values * scale[..., None]
        return TransportedObservations(rows, values, self.indices)

    def where(self, condition: Bool[Tensor, "#b"]) -> "TransportedObservations":
        """Where a condition holds and the rows are finite. Zero elsewhere."""
        condition = condition[:, None] & self.rows.isfinite().all(-1).all(-1)
        rows, values = torch.where(condition[..., None, None], self.rows, 0.0), self.values
        return TransportedObservations(rows, torch.where(condition[..., None], values, 0.0), self.indices)


@dataclass(frozen=True)
class ForwardTransitions:
    """`Phi^-1` and `V` of the parts of each step, by which knowledge of a state is carried forward.

    Phi^-1 multiplies a precision by up to `exp(2 mu dt)`, and digits are lost until V is added. So a long step is
    divided into parts. Beyond 200,000 time constants of the fastest mode an observation says nothing of the state.
    """

    inverse: Float[Tensor, "#b steps n n"]
    variance: Float[Tensor, "#b steps n n"]
    counts: list[int]
    crossed: Bool[Tensor, "#b steps"]

    @classmethod
    def of(cls, sde: LinearSDE, grid: ObservationGrid) -> "ForwardTransitions":
        """Of a grid."""
        fastest = max(0.0, -torch.linalg.eigvals(sde.dynamics.detach()).real.min().item())
        lags = grid.lags[: grid.models]
        counts = (lags.detach().amax(0) * fastest / _LONGEST_DECAY).ceil().clamp(1, _MOST_PARTS)
        crossed = lags * fastest <= counts * _LARGEST_DECAY
        parts = torch.where(crossed, lags / counts, 0.0)
        inverse = each_step(sde.transition, sde, grid, -parts)
        variance = each_step(sde.covariance, sde, grid, parts)
        return cls(inverse, variance, [int(count) for count in counts.tolist()], crossed)

    def forward(self, index: int, known: TransportedObservations) -> TransportedObservations:
        """Knowledge of the state at `index`, as knowledge of the state at `index + 1`."""
        for _ in range(self.counts[index]):
            known = known.substituted(self.inverse[:, index]).bounded().inflated(self.variance[:, index])
        return known.where(self.crossed[:, index])


class Contributions(NamedTuple):
    """M_ij and v_ij of each observation; of later ones, before they join the filter, parts of the information."""

    matrix: Float[Tensor, "#b j n n"]  # M
    vector: Float[Tensor, "b j n"]  # v
    gain_ratio: Float[Tensor, "b j"]  # of each observation over its Kalman gain; 1 but in the robust filter

    @classmethod
    def none(cls, grid: ObservationGrid) -> "Contributions":
        """Before the first observation."""
        return cls(*(part[:, :0] for part in grid.information))

    def updated(
        self, grid: ObservationGrid, index: int, update: AffineUpdate, gain_ratio: Float[Tensor, " b"]
    ) -> "Contributions":
        """After the observation at a time index, `m -> factor m + gain z`: it joins, and the others shrink."""
        rows, values = grid.at(index)
        shrunk = self.multiplied(update.factor)
        if not bool(grid.present[:, index].any()):
            return shrunk
        vector = (update.gain @ values[..., None])[:, None, :, 0]
        return shrunk.concatenated(Contributions((update.gain @ rows)[:, None], vector, gain_ratio[:, None]))

    def concatenated(self, other: "Contributions") -> "Contributions":
        """These and others, in this order."""
        return Contributions(*(torch.cat(parts, dim=1) for parts in zip(self, other, strict=True)))

    def with_kalman_gains(self) -> "Contributions":
        """As they would be if each observation had its Kalman gain."""
        ratio = self.gain_ratio[..., None]
        return self._replace(matrix=self.matrix / ratio[..., None], vector=self.vector / ratio)

    def cleared(self, series: Bool[Tensor, " b"]) -> "Contributions":
        """With zeros in some series, whose filter has started without a mean."""
        matrix = torch.where(series[:, None, None, None], 0.0, self.matrix)
        return self._replace(matrix=matrix, vector=torch.where(series[:, None, None], 0.0, self.vector))

    def multiplied(self, factor: Float[Tensor, "#b n n"]) -> "Contributions":
        """`F M` and `F v`."""
        vector = (factor[:, None] @ self.vector[..., None])[..., 0]
        return Contributions(factor[:, None] @ self.matrix, vector, self.gain_ratio)

    def predicted(
        self, transition: Float[Tensor, "#b n n"], inverse: Float[Tensor, "#b n n"], covariance: Float[Tensor, "#b n n"]
    ) -> "Contributions":
        """One step later, to a state of a given covariance: `M -> Phi M Phi^-1`, `v -> Phi v`.

        A contribution of more than ten standard deviations, as coupled modes of very different decay have it, would
        make the estimate unstable. It joins M_0 and v_0, and keeps its Kalman weight.
        """
        matrix, vector, gain_ratio = self.multiplied(transition)
        finite = inverse.isfinite().all(-1).all(-1)
        matrix = matrix @ torch.where(finite[:, None, None], inverse, 0.0)[:, None]
        relative = matrix.detach().abs() / deviation_ratios(covariance)[:, None]
        stable = (relative.amax((-2, -1)) <= _LARGEST_CONTRIBUTION) & finite[:, None]
        matrix = torch.where(stable[..., None, None], matrix, 0.0)
        return Contributions(matrix, torch.where(stable[..., None], vector, 0.0), gain_ratio)

    def remainder(self, state: Gaussian) -> tuple[Tensor, Tensor]:
        """M_0 and v_0: of the initial state, and of observations that keep their weight. Rounding counts as zero."""
        identity = identity_like(self.matrix)
        matrix, ratios = identity - self.matrix.sum(1), deviation_ratios(state.covariance)
        rounding = _ROUNDING * (identity + self.matrix.detach().abs().sum(1) + ratios)
        matrix = matrix - torch.where(matrix.detach().abs() <= rounding, matrix.detach(), 0.0)  # its gradient stays
        vector = state.mean - self.vector.sum(1)
        vector = vector - torch.where(matrix.any(-1), 0.0, vector.detach())
        return matrix, vector

    def with_later_observation(
        self, grid: ObservationGrid, index: int, gain_ratio: Float[Tensor, " b"]
    ) -> "Contributions":
        """With the information of the observation at a time index."""
        if not bool(grid.present[:, index].any()):
            return self
        matrix, vector, _ = (part[:, index : index + 1] for part in grid.information)
        return self.concatenated(Contributions(matrix, vector, gain_ratio[:, None]))

    def backward(self, transitions: Transitions, index: int, total: Information) -> "Contributions":
        """Parts of the backward information, from `index + 1` to `index`. `total` is their sum at `index + 1`."""
        transition, variance = transitions.steps[index]
        matrix, vector, gain_ratio = self.multiplied(transition.mT @ total.shrinkage(variance))
        return Contributions(matrix @ transition[:, None], vector, gain_ratio)


def deviation_ratios(covariance: Float[Tensor, "#b n n"]) -> Float[Tensor, "#b n n"]:
    """The ratio of two states' standard deviations, the unit of an entry of M. It is 1 where there are none."""
    size = covariance.detach().diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    size = torch.where(size > 0, size, size.amax(-1, keepdim=True))
    size = torch.where(size > 0, size, 1.0)
    return size[..., :, None] / size[..., None, :]
