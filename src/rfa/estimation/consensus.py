"""One moment's estimate: iteratively reweighted least squares over its sources."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .gaussian import Gaussian
from .information import Information, Measurement
from .matrices import inverse, positive, symmetric
from .observations import Grid
from .penalties import FAINTEST
from .plan import VAGUEST, Plan, Row
from .shares import Shares, units_of
from .sources import Sources

_LEAST = 1e-2  # eigenvalue of the weighted information, in units of their mean
_FLAT = 1e-12  # eigenvalue of a covariance, in units of the largest
_FURTHEST = 1e200  # a squared distance that has overflown
_HALVINGS = 6
_SAME = 1e-12  # relative: a rise of rounding


class Consensus(Protocol):
    """What a prior makes of weighted sources."""

    def mean(self, weight: Tensor) -> Tensor:
        """`(b, n)` for weights `(b, j)`."""

    def covariance(self, weight: Tensor) -> Tensor:
        """`(b, n, n)` for weights `(b, j)`."""

    def others(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of all weights 1 without what is seen at the moment."""

    def judged(self, alone: Measurement) -> tuple[Measurement, Tensor]:
        """By what distances are measured, and each source's weight in the objective, `(b, j)`."""

    def start_cost(self, state: Tensor) -> Tensor | float:
        """What is known from before adds to the objective, `(b,)`."""


@dataclass(frozen=True)
class Independent:
    """The Lyapunov prior: `(J_0 + sum_j w_ij N_ij)^-1 (y_0 + sum_j w_ij u_ij)`, N_ij a source's own precision.

    Args:
        start: what is known from before, J_0 and y_0.
        sources: all that is seen.
        moment: the place of the present.
        settled: the stationary covariance, where it stands for nothing seen.
    """

    start: Information
    sources: Sources
    moment: int
    settled: Tensor | None

    def mean(self, weight: Tensor) -> Tensor:
        """As `Consensus`."""
        return self._sum(self.sources.alone, weight).solved(self.settled)[0]

    def covariance(self, weight: Tensor) -> Tensor:
        """As `Consensus`."""
        return self._sum(self.sources.alone, weight).solved(self.settled)[1]

    def others(self) -> tuple[Tensor, Tensor]:
        """As `Consensus`."""
        alone = self.sources.without(self.moment).alone
        return self._sum(alone, torch.ones_like(alone.values[..., 0])).solved(self.settled)

    def judged(self, alone: Measurement) -> tuple[Measurement, Tensor]:
        """As `Consensus`."""
        return alone, torch.ones_like(alone.values[..., 0])

    def start_cost(self, state: Tensor) -> Tensor | float:
        """Nothing: no step of independent sources is cut short."""
        return 0.0

    def _sum(self, alone: Measurement, weight: Tensor) -> Information:
        each = alone.information()
        return Information(
            self.start.matrix + (weight[..., None, None] * each.matrix).sum(1),
            self.start.vector + (weight[..., None] * each.vector).sum(1),
            self.start.constant,
        )


@dataclass(frozen=True)
class Correlated:
    """The Riccati prior: `(M_0 + sum_j w_ij M_ij)^-1 (v_0 + sum_j w_ij v_ij)`.

    `M_ij = P_i N_ij` and `v_ij = P_i u_ij` are each source's share in the Kalman filter's mean, M_0 and v_0 what is
    left of the identity and of the mean: with all weights 1 this is the filter, whatever the shares are.

    Args:
        before: the Kalman filter (or smoother) without what is seen at the moment.
        state: with it.
        shares: of the sources in `state`.
        rest: M_0 and v_0.
        settled: the stationary covariance, where it stands for nothing seen.
        seen, elsewhere: how many observations count, `(b,)`; and how many of them at other moments.
        origin: the state had nothing been seen; None where nothing is known of it.
    """

    before: Gaussian
    state: Gaussian
    shares: Shares
    rest: tuple[Tensor, Tensor]
    settled: Tensor | None
    seen: Tensor
    elsewhere: Tensor
    origin: Gaussian | None

    def mean(self, weight: Tensor) -> Tensor:
        """As `Consensus`."""
        mean = self._solved(weight)[0]
        return torch.where(mean.isfinite().all(-1, keepdim=True), mean, self.state.mean)  # not where it has overflown

    def covariance(self, weight: Tensor) -> Tensor:
        """As `Consensus`."""
        gain = self._bounded(self._solved(weight)[1], weight)
        state = self.state._replace(covariance=symmetric(gain @ self.state.covariance))
        return state.spread(self.settled, self.seen)

    def _bounded(self, gain: Tensor, weight: Tensor) -> Tensor:
        """G with so much of the identity that no `G P` is smaller than if all sources had the largest weight.

        Shares need not be positive, so their weighted sum alone may claim a direction to be known far too well.
        """
        least = 1 / weight.amax(-1).clamp(min=1.0) if weight.shape[-1] else weight.new_ones(len(weight))
        return _with_identity(gain, (least - self._least_eigenvalue(gain, least)).clamp(min=0.0))

    def _solved(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`G (v_0 + sum_j w_ij v_ij)` and `G = (M_0 + sum_j w_ij M_ij)^-1`."""
        matrix, vector = self.rest
        matrix = matrix + (weight[..., None, None] * self.shares.matrix).sum(1)
        vector = vector + (weight[..., None] * self.shares.vector).sum(1)
        missing = self._missing(matrix)
        gain = inverse(_with_identity(matrix, missing))
        return (gain @ (vector + missing[:, None] * self.state.mean)[..., None])[..., 0], gain

    def _missing(self, matrix: Tensor) -> Tensor:
        """How much of the filter's own estimate makes the information positive, `(b,)`.

        Shares are matrices: weights that differ may leave a sum `M P^-1` that is no information, for it has a negative
        or vanishing eigenvalue. All of them times 1 are the identity, so some of it keeps the estimate at the filter's.
        """
        least = _LEAST * _trace(matrix) / matrix.shape[-1]
        return ((least - self._least_eigenvalue(matrix, least)) / (1 - _LEAST)).clamp(min=0.0)

    def _least_eigenvalue(self, matrix: Tensor, below: Tensor) -> Tensor:
        """`(b,)`: of the symmetric part of `L^-1 W L`, P = L L^T; its gradient only where too low."""
        if matrix.shape[-1] == 1:
            return matrix[:, 0, 0]
        across = symmetric(torch.linalg.solve_triangular(self._root, matrix @ self._root, upper=False))
        finite = across.isfinite().all(-1).all(-1)  # what has overflown is left as it is
        found = torch.linalg.eigvalsh(torch.where(finite[:, None, None], across.detach(), 0.0))[..., 0]
        found = torch.where(finite, found, 1.0)
        low = finite & (found < below)
        if not bool(low.any()):
            return found
        # equal eigenvalues have no second derivative, and only what is too low needs any
        apart = torch.diag(torch.arange(1.0, matrix.shape[-1] + 1)).to(across)
        least = torch.linalg.eigvalsh(torch.where(low[:, None, None], across, apart))[..., 0]
        return torch.where(low, least, found)

    @functools.cached_property
    def _root(self) -> Tensor:
        """L with `L L^T` the covariance, but regular; without correlations where rounding has cost them their sign."""
        covariance = self.state.covariance
        identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        units = units_of(covariance)[..., :1]  # of each state, whose first is 1
        scaled = covariance / units / units.mT
        size = scaled.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        size = torch.where((size > 0) & size.isfinite(), size, 1.0)
        factor, failed = torch.linalg.cholesky_ex(scaled / size + _FLAT * identity)
        return units * size.sqrt() * torch.where((failed > 0)[..., None, None], identity, factor)

    def others(self) -> tuple[Tensor, Tensor]:
        """As `Consensus`."""
        return self.before.mean, self.before.spread(self.settled, self.elsewhere)

    def judged(self, alone: Measurement) -> tuple[Measurement, Tensor]:
        """As `Consensus`."""
        own = self.state.covariance[:, None]
        judged = alone.widened(own)
        told = ((judged.rows @ own) * judged.rows).sum((-2, -1))
        share = _trace(self.shares.matrix) / told.clamp(min=torch.finfo(torch.float64).tiny)
        return judged, share.clamp(min=0.0)

    def start_cost(self, state: Tensor) -> Tensor | float:
        """`d^2` of the start, measured with its covariance and P_i, times its share as of any other source."""
        if self.origin is None:
            return 0.0
        missed, own = (state - self.origin.mean)[..., None], self.state.covariance
        variance = self.origin.covariance + own
        told = torch.linalg.solve_ex(variance, own)[0].diagonal(dim1=-2, dim2=-1).sum(-1)
        share = (_trace(self.rest[0]) / told.clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0.0)
        return share * (missed * torch.linalg.solve_ex(variance, missed)[0]).sum((-2, -1)).nan_to_num(nan=_FURTHEST)


def estimate_row(
    consensus: Consensus, sources: Sources, grid: Grid, k: int, plan: Plan, guarded: bool, state: Tensor | None = None
) -> Row:
    """The estimate at moment k; `guarded`, a step that would raise the objective is cut short."""
    ones = torch.ones_like(sources.alone.values[..., 0])
    if state is None:
        mean = consensus.mean(ones)
        if plan.start == "query":
            state = _at_observation(mean, consensus.covariance(ones), grid, k)
        else:
            state = _left_out(mean, *consensus.others(), grid, k) if plan.start == "leave_one_out" else mean
    judged, share = consensus.judged(sources.alone)
    present = grid.present[:, sources.moments]
    calibration = plan.belief.calibration(grid.seen_components[:, sources.moments])
    # a row counts by what was seen of it: rows that show less have smaller distances, and weights nearer 1
    whole = math.prod(plan.belief.consistency())
    share = share * whole / calibration

    def measured(state: Tensor) -> tuple[Tensor, Tensor]:
        distance = judged.distance(state[:, None]).nan_to_num(nan=_FURTHEST, posinf=_FURTHEST)
        return distance, (share * plan.belief.cost(distance) * present).sum(-1) + whole * consensus.start_cost(state)

    weight = ones
    distance, cost = measured(state)
    costs = [cost]
    for _ in range(plan.iterations):
        weight = plan.belief.log_weight(distance).masked_fill(~present, -torch.inf)
        best = weight.detach().amax(-1, keepdim=True) if sources.moments else weight
        weight = torch.exp(weight - torch.where(best.isfinite(), best - best.clamp(min=FAINTEST), 0.0))
        step = consensus.mean(weight / calibration)
        state, distance, cost = _no_dearer(measured, state, step, cost) if guarded else (step, *measured(step))
        costs.append(cost)
    covariance = consensus.covariance(weight / calibration if plan.iterations else ones)
    return Row(
        state, positive(torch.where(covariance.isnan(), torch.inf, covariance)), weight, torch.stack(costs, dim=-1)
    )


def _no_dearer(
    measured: Callable[[Tensor], tuple[Tensor, Tensor]], state: Tensor, step: Tensor, before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The step, its distances and objective; halved until that is no higher than before, at last no step at all."""
    distance, cost = measured(step)
    for halving in range(_HALVINGS + 1):
        dearer = ~(cost <= before * (1 + _SAME))
        if not bool(dearer.any()):
            break
        shorter = (state + step) / 2 if halving < _HALVINGS else state
        step = torch.where(dearer[:, None], shorter, step)
        distance, cost = measured(step)
    return step, distance, cost


def _left_out(mean: Tensor, other: Tensor, spread: Tensor, grid: Grid, k: int) -> Tensor:
    """The Gaussian estimate without what is seen at the moment, where it is fit to judge that."""
    rows = grid.whitened[0][:, k]
    finite = spread.isfinite().all(-1).all(-1)
    predicted = (rows @ torch.where(finite[:, None, None], spread, 0.0) @ rows.mT).diagonal(dim1=-2, dim2=-1)
    fit = finite & (predicted.amax(-1) <= VAGUEST) & grid.present[:, k]
    return torch.where(fit[:, None], other, mean)


def _at_observation(mean: Tensor, covariance: Tensor, grid: Grid, k: int) -> Tensor:
    """The Gaussian estimate, moved so that its seen components are those of the observation."""
    rows, values = (part[:, k] for part in grid.whitened)
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    spread = torch.where(covariance.isfinite(), covariance, 0.0)
    spread = torch.where(_trace(spread)[:, None, None] > 0, spread, identity)
    missed = values[..., None] - rows @ mean[..., None]
    back = spread @ rows.mT @ torch.linalg.pinv(rows @ spread @ rows.mT, hermitian=True, rtol=1e-12)
    return torch.where(grid.present[:, k, None], mean + (back @ missed)[..., 0], mean)


def _with_identity(matrix: Tensor, share: Tensor) -> Tensor:
    """`W + share I`, `(b, n, n)`."""
    return matrix + torch.diag_embed(share[:, None].expand(-1, matrix.shape[-1]))


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
