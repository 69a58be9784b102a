"""What each observation says of a state at another time: by itself, and in the Kalman filter's mean.

By itself (the Lyapunov prior), observation j says of the state at time i

    z_j = H_ij x_i + e,  e ~ N(0, I),    H_ij = S_ij^-1/2 C Phi_ij^-1,    S_ij = R + C Phi_ij^-1 V_ij Phi_ij^-T C^T

and its precision is `N_ij = H_ij^T H_ij`. In the filter (the Riccati prior), it contributes

    M_ij = P_i N_ij = Psi_ij K_j C Phi_ij^-1,    v_ij = Psi_ij K_j z_j,    Psi_ij = prod_{l=j+1..i} (I - K_l C) Phi_l

to the mean `m_i = v_i0 + sum_j v_ij`, with `I = M_i0 + sum_j M_ij`. The index 0 is the initial state.

Source: appendix A.3 for the first; the second goes beyond the paper (docs/theory.md).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .gaussian import AffineUpdate, Gaussian, Information, mapped
from .linear_sde import identity_like, inverse, symmetric, trace
from .problem import EstimationProblem, ObservationGrid, Transitions, each_step
from .recursive_filter import FilterPass, backward_information

_LONGEST_DECAY, _MOST_PARTS = 4.0, 1024  # decay over one part of a step, and how many parts it has
_LARGEST_DECAY = 200.0  # over one part, where 1,024 parts are not enough: exp(2 * 200) times 1e100 is finite
_LARGEST_ROW = 1e50  # entry of H: products of squares of larger ones overflow
_LARGEST_CONTRIBUTION = 10.0  # in standard deviations: without a larger one the estimate would be unstable
_ROUNDING = 1e-14  # relative: a few times what a product loses
_REGULAR = 1e-12  # smallest eigenvalue of a covariance, over the largest
_SMALLEST_EIGENVALUE = 1e-2  # of the weighted information, over the mean of its eigenvalues
LARGEST_DISTANCE = 1e200  # stands for a squared distance that overflows


class CarriedObservations(NamedTuple):
    """Observations `z_j = H_j x + e_j`, `e_j ~ N(0, I)`, all of the state x at one time. A missing one has H = 0.

    `|z - H x|^2` keeps its digits however far the state is from zero. `x^T J x - 2 y^T x + c` does not.
    """

    rows: Float[Tensor, "#b j m n"]  # H
    values: Float[Tensor, "b j m"]  # z

    def distance(self, state: Float[Tensor, "b n"]) -> Float[Tensor, "b j"]:
        """`d^2 = |z - H x|^2`, the squared Mahalanobis distance of each observation from a state."""
        return (self.values - (self.rows * state[:, None, None, :]).sum(-1)).square().sum(-1)

    def inflated(self, variance: Float[Tensor, "#b n n"]) -> "CarriedObservations":
        """Of `x + e`, `e ~ N(0, V)`: rows and values times `L^-1`, `L L^T = I + H V H^T`. Zero where V overflows."""
        identity = identity_like(self.rows.mT)
        total = identity + symmetric(self.rows @ variance[:, None] @ self.rows.mT)
        factor, failed = torch.linalg.cholesky_ex(torch.where(total.isfinite(), total, 0.0))
        known = self
        if bool((failed > 0).any()):
            factor = torch.where((failed > 0)[..., None, None], identity, factor)
            known = self._where(failed == 0)
        rows = torch.linalg.solve_triangular(factor, known.rows, upper=False)
        values = torch.linalg.solve_triangular(factor, known.values[..., None], upper=False)[..., 0]
        return CarriedObservations(rows, values)

    def substituted(self, matrix: Float[Tensor, "#b n n"]) -> "CarriedObservations":
        """Of x, where these are observations of `M x`: `H M`."""
        return self._replace(rows=self.rows @ matrix[:, None])

    def forward(
        self,
        inverse: Float[Tensor, "#b n n"],
        variance: Float[Tensor, "#b n n"],
        parts: int,
        crossed: Bool[Tensor, "#b"],
    ) -> "CarriedObservations":
        """Over a step in some parts, each with `Phi^-1` and V. Nothing is left where the step is not `crossed`.

        Scaled down where the precision is so large that products would overflow: the estimate stays the same.
        """
        known = self
        for _ in range(parts):
            known = known.substituted(inverse)
            largest = known.rows.detach().abs().amax((-2, -1)) if known.rows.numel() else known.rows.new_zeros(1, 0)
            if bool((largest > _LARGEST_ROW).any()):
                scale = torch.where(largest > _LARGEST_ROW, _LARGEST_ROW / largest, 1.0)
                known = CarriedObservations(known.rows * scale[..., None, None], known.values * scale[..., None])
            known = known.inflated(variance)
        return known._where(crossed[:, None] & known.rows.isfinite().all(-1).all(-1))

    def _where(self, condition: Bool[Tensor, "#b j"]) -> "CarriedObservations":
        """Zero elsewhere."""
        rows = torch.where(condition[..., None, None], self.rows, 0.0)
        return CarriedObservations(rows, torch.where(condition[..., None], self.values, 0.0))


class Contributions(NamedTuple):
    """M_ij and v_ij of each observation; of later ones, before they join the filter, parts of the information."""

    matrix: Float[Tensor, "#b j n n"]  # M
    vector: Float[Tensor, "b j n"]  # v
    gain_ratio: Float[Tensor, "b j"]  # of each observation over its Kalman gain; 1 but in the robust filter

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
        return matrix, vector - torch.where(matrix.any(-1), 0.0, vector.detach())


T = TypeVar("T", CarriedObservations, Contributions)


def joined(some: T, others: T) -> T:
    """These and others, in this order."""
    return type(some)(*(torch.cat(parts, dim=1) for parts in zip(some, others, strict=True)))


def carried_observations(
    problem: EstimationProblem, grid: ObservationGrid, transitions: Transitions
) -> Iterator[tuple[CarriedObservations, CarriedObservations | None]]:
    """The observations of `grid.used_rows`, and the initial state as one, carried to each time index.

    Phi^-1 multiplies a precision by up to `exp(2 mu dt)`, and digits are lost until V is added. So a long step is
    divided into parts. Beyond 200,000 time constants of the fastest mode an observation says nothing of the state.
    """
    sde, lags = problem.sde, problem.grid.lags[: problem.grid.models]
    fastest = max(0.0, -torch.linalg.eigvals(sde.dynamics.detach()).real.min().item())
    counts = (lags.detach().amax(0) * fastest / _LONGEST_DECAY).ceil().clamp(1, _MOST_PARTS)
    crossed = lags * fastest <= counts * _LARGEST_DECAY
    parts = torch.where(crossed, lags / counts, 0.0)
    back = each_step(sde.transition, sde, problem.grid, -parts)
    variance = each_step(sde.covariance, sde, problem.grid, parts)

    def at(k: int) -> CarriedObservations:
        own = slice(k, k + bool(grid.present[:, k].any()))
        return CarriedObservations(grid.rows[:, own], grid.values[:, own])

    later = [CarriedObservations(grid.rows[:, :0], grid.values[:, :0])]
    earlier = later[0]
    if problem.smooth:
        for k in range(grid.length - 1, 0, -1):
            transition, gained = transitions.steps[k - 1]
            later.append(joined(later[-1], at(k)).inflated(gained).substituted(transition))
    initial = None
    if problem.initial is not None:  # a state with a regular covariance is an observation of itself
        root = torch.linalg.cholesky(problem.initial.covariance)
        rows = torch.linalg.solve_triangular(root, identity_like(root), upper=False)
        initial = CarriedObservations(rows[:, None], (rows @ problem.initial.mean[..., None])[:, None, :, 0])
    for k in range(grid.length):
        if k:
            step = back[:, k - 1], variance[:, k - 1], int(counts[k - 1]), crossed[:, k - 1]
            earlier, initial = earlier.forward(*step), None if initial is None else initial.forward(*step)
        earlier = joined(earlier, at(k))
        yield joined(earlier, later[grid.length - 1 - k]) if problem.smooth else earlier, initial


@dataclass(frozen=True)
class LyapunovAverage:
    """`(N_0 + sum_j w_ij N_ij)^-1 (u_0 + sum_j w_ij u_ij)`, with the information of `initial` as N_0 and u_0."""

    observations: CarriedObservations  # carried to this time
    initial: CarriedObservations | None
    others: Tensor  # `(j,)`: which are of other times
    stationary: Float[Tensor, "b n n"] | None  # the covariance where nothing is observed
    query_noise: Float[Tensor, "n n"] | None

    def solve(self, weight: Float[Tensor, "b j"]) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
        """Mean and covariance."""
        total = mapped(Information.of(*self.observations).weighted(weight), lambda x: x.sum(1))
        if self.initial is not None:
            total = mapped(Information.of(*self.initial), lambda x: x[:, 0]) + total
        return total.solve(self.stationary)

    def mean(self, weight: Float[Tensor, "b j"]) -> Float[Tensor, "b n"]:
        """The weighted mean."""
        return self.solve(weight)[0]

    def leave_one_out(self) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
        """Mean and covariance for weights 1, without the observation at this time."""
        others = CarriedObservations(*(x[:, self.others] for x in self.observations))
        return replace(self, observations=others).solve(torch.ones_like(others.values[..., 0]))

    def effective(self) -> tuple[CarriedObservations, Float[Tensor, "b j"]]:
        """With the variance `Sigma_ij + query_noise`, and their weights in the objective: 1."""
        known = self.observations
        known = known if self.query_noise is None else known.inflated(self.query_noise[None])
        return known, torch.ones_like(known.values[..., 0])

    def initial_cost(self, state: Float[Tensor, "b n"]) -> Float[Tensor, " b"] | float:
        """Zero. No step is halved here, so the objective needs no term of the initial state."""
        return 0.0


def lyapunov_averages(
    problem: EstimationProblem,
    carried: Iterator[tuple[CarriedObservations, CarriedObservations | None]],
    query_noise: Float[Tensor, "n n"] | None,
    noise_floor: Float[Tensor, "n n"] | None,
) -> "Iterator[Average]":
    """At each time index. `noise_floor` is beside each observation's own variance."""
    for k, (observations, initial) in enumerate(carried):
        others = problem.grid.used_rows(k, problem.smooth) != k
        known = observations if noise_floor is None else observations.inflated(noise_floor[None])
        yield LyapunovAverage(known, initial, others, problem.stationary, query_noise)


@dataclass(frozen=True)
class RiccatiAverage:
    """`W^-1 (v_0 + sum_j w_ij v_ij)` with `W = M_0 + sum_j w_ij M_ij`. For weights 1 it is the Kalman filter."""

    observations: CarriedObservations  # carried to this time
    predicted: Gaussian  # the Kalman filter (or smoother) without the observation at this time
    state: Gaussian  # with it
    contributions: Contributions  # M_ij and v_ij of the observations in `state`
    remainder: tuple[Tensor, Tensor]  # M_0 and v_0
    stationary: Float[Tensor, "b n n"] | None  # the covariance where nothing is observed
    count: Int[Tensor, " b"]  # how many observations there are
    others: Int[Tensor, " b"]  # how many at other times
    unobserved: Gaussian | None  # the state without any observation, or None where nothing is known of it

    def solve(self, weight: Float[Tensor, "b j"]) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
        """Mean and covariance `W^-1 P`.

        For unequal weights `W P^-1` may have an eigenvalue <= 0. Then enough of the filter's own estimate makes it
        positive: contributions times 1 add up to the identity. No covariance is below P over the largest weight.
        """
        mean, factor = self._mean_and_factor(weight)
        least = 1 / weight.amax(-1).clamp(min=1.0) if weight.shape[-1] else weight.new_ones(len(weight))
        factor = plus_identity(factor, (least - least_eigenvalue(factor, self._root, least)).clamp(min=0.0))
        state = self.state._replace(covariance=symmetric(factor @ self.state.covariance))
        return mean, self._full_covariance(state, self.count)

    def mean(self, weight: Float[Tensor, "b j"]) -> Float[Tensor, "b n"]:
        """The weighted mean; the filter's where it overflows."""
        return self._mean_and_factor(weight)[0]

    def _mean_and_factor(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`W^-1 (v_0 + sum_j w_ij v_ij)` and `W^-1`."""
        matrix, vector = self.remainder
        matrix = matrix + (weight[..., None, None] * self.contributions.matrix).sum(1)
        vector = vector + (weight[..., None] * self.contributions.vector).sum(1)
        least = _SMALLEST_EIGENVALUE * trace(matrix) / matrix.shape[-1]
        added = ((least - least_eigenvalue(matrix, self._root, least)) / (1 - _SMALLEST_EIGENVALUE)).clamp(min=0.0)
        factor = inverse(plus_identity(matrix, added))
        mean = (factor @ (vector + added[:, None] * self.state.mean)[..., None])[..., 0]
        return torch.where(mean.isfinite().all(-1, keepdim=True), mean, self.state.mean), factor

    def _full_covariance(self, state: Gaussian, count: Tensor) -> Tensor:
        if self.stationary is None:
            return state.full_covariance()
        return torch.where((count == 0)[:, None, None], self.stationary, state.full_covariance())

    @functools.cached_property
    def _root(self) -> Tensor:
        return regular_root(self.state.covariance)

    def leave_one_out(self) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
        """Mean and covariance for weights 1, without the observation at this time."""
        return self.predicted.mean, self._full_covariance(self.predicted, self.others)

    def effective(self) -> tuple[CarriedObservations, Float[Tensor, "b j"]]:
        """With the variance `Sigma_ij + P_i`, and the weights `tr M_ij / tr P_i (Sigma_ij + P_i)^-1`, at least 0."""
        effective, own = self.observations.inflated(self.state.covariance), self.state.covariance[:, None]
        precision = ((effective.rows @ own) * effective.rows).sum((-2, -1))
        share = trace(self.contributions.matrix) / precision.clamp(min=torch.finfo(torch.float64).tiny)
        return effective, share.clamp(min=0.0)

    def initial_cost(self, state: Float[Tensor, "b n"]) -> Float[Tensor, " b"] | float:
        """What the initial state adds to the objective: its `d^2`, with variance and weight as of an observation."""
        if self.unobserved is None:
            return 0.0
        residual, own = (state - self.unobserved.mean)[..., None], self.state.covariance
        variance = self.unobserved.covariance + own
        precision = torch.linalg.solve_ex(variance, own)[0].diagonal(dim1=-2, dim2=-1).sum(-1)
        share = (trace(self.remainder[0]) / precision.clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0.0)
        distance = (residual * torch.linalg.solve_ex(variance, residual)[0]).sum((-2, -1))
        return share * distance.nan_to_num(nan=LARGEST_DISTANCE)


Average = LyapunovAverage | RiccatiAverage


def riccati_averages(
    problem: EstimationProblem,
    passed: FilterPass,
    carried: Iterator[tuple[CarriedObservations, CarriedObservations | None]],
) -> "Iterator[Average]":
    """At each time index, of what the observations contribute to the Kalman filter or to the robust one."""
    sde, grid, steps = problem.sde, passed.grid, passed.transitions.steps
    back = each_step(sde.transition, sde, problem.grid, -problem.grid.lags)  # not finite where it overflows
    back = back.repeat(len(passed.transitions.index) // len(back), 1, 1, 1)
    later = _later_contributions(passed) if problem.smooth else None
    counts, unobserved = problem.observation_counts(), problem.initial
    contributions = Contributions(*(part[:, :0] for part in grid.information))
    for k, (state, (observations, _)) in enumerate(zip(passed.states, carried, strict=True)):
        if k:
            contributions = contributions.predicted(steps[k - 1][0], back[:, k - 1], state.predicted.covariance)
            own_step = (x[: len(counts)] for x in steps[k - 1])  # without challengers
            unobserved = None if unobserved is None else unobserved.predicted(*own_step)
        if passed.origin is not None and passed.cleared is not None:  # challengers take over, or start without a mean
            lost = passed.cleared[k]
            matrix, vector, gain_ratio = (x[passed.origin[k]] for x in contributions)
            matrix = torch.where(lost[:, None, None, None], 0.0, matrix)
            contributions = Contributions(matrix, torch.where(lost[:, None, None], 0.0, vector), gain_ratio)
        update = AffineUpdate.of_components(grid.rows[:, k], state.gains)
        contributions = contributions.multiplied(update.factor)
        if bool(grid.present[:, k].any()):
            vector = (update.gain @ grid.values[:, k, :, None])[:, None, :, 0]
            own = (update.gain @ grid.rows[:, k])[:, None], vector, passed.gain_ratio[:, k, None]
            contributions = joined(contributions, Contributions(*own))
        predicted, posterior = (passed.without_challengers(x) for x in (state.predicted, state.posterior))
        found = passed.without_challengers(contributions)
        if later is not None:
            information, later_contributions = later[k]
            predicted = predicted.informed(information)[0]
            posterior, update = posterior.informed(information)
            found = joined(contributions.multiplied(update.factor), later_contributions.multiplied(update.gain))
        ratio = found.gain_ratio[..., None]  # contributions are those of Kalman gains
        kalman = found._replace(matrix=found.matrix / ratio[..., None], vector=found.vector / ratio)
        parts = kalman, found.remainder(posterior), problem.stationary
        others = counts[:, k] - problem.grid.present[:, k].to(counts.dtype)
        yield RiccatiAverage(observations, predicted, posterior, *parts, counts[:, k], others, unobserved)


def _later_contributions(passed: FilterPass) -> list[tuple[Information, Contributions]]:
    """The backward information at each time index, and the part of each later observation in it."""
    grid, steps, totals = passed.grid, passed.transitions.steps, backward_information(passed.grid, passed.transitions)
    parts = Contributions(*(part[:, :0] for part in grid.information))
    found = [(totals[-1], parts)]
    for k in range(grid.length - 1, 0, -1):
        own = slice(k, k + bool(grid.present[:, k].any()))
        matrix, vector, _ = (part[:, own] for part in grid.information)
        parts = joined(parts, Contributions(matrix, vector, passed.gain_ratio[:, own]))
        transition, variance = steps[k - 1]
        factor = transition.mT @ (totals[k] + grid.information.at(k)).shrinkage(variance)
        matrix, vector, gain_ratio = parts.multiplied(factor)
        parts = Contributions(matrix @ transition[:, None], vector, gain_ratio)
        found.append((totals[k - 1], parts))
    return found[::-1]


def plus_identity(matrix: Float[Tensor, "b n n"], factor: Float[Tensor, " b"]) -> Float[Tensor, "b n n"]:
    """`M + factor I`."""
    return matrix + torch.diag_embed(factor[:, None].expand(-1, matrix.shape[-1]))


def deviation_ratios(covariance: Float[Tensor, "#b n n"]) -> Float[Tensor, "#b n n"]:
    """The ratio of two states' standard deviations, the unit of an entry of M. It is 1 where there are none."""
    size = covariance.detach().diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    size = torch.where(size > 0, size, size.amax(-1, keepdim=True))
    size = torch.where(size > 0, size, 1.0)
    return size[..., :, None] / size[..., None, :]


def regular_root(covariance: Float[Tensor, "#b n n"]) -> Float[Tensor, "#b n n"]:
    """L with `L L^T = P`, made regular. Where rounding makes P indefinite, L loses the correlations."""
    identity = identity_like(covariance)
    units = deviation_ratios(covariance)[..., :1]  # of each state, the first is 1
    scaled = covariance / units / units.mT
    size = scaled.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    size = torch.where((size > 0) & size.isfinite(), size, 1.0)
    factor, failed = torch.linalg.cholesky_ex(scaled / size + _REGULAR * identity)
    return units * size.sqrt() * torch.where((failed > 0)[..., None, None], identity, factor)


def least_eigenvalue(
    matrix: Float[Tensor, "b n n"], root: Float[Tensor, "#b n n"], below: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Of the symmetric part of `L^-1 M L`, with the root L. It has a gradient only where it is below a bound."""
    if matrix.shape[-1] == 1:
        return matrix[:, 0, 0]
    similar = symmetric(torch.linalg.solve_triangular(root, matrix @ root, upper=False))
    finite = similar.isfinite().all(-1).all(-1)  # a matrix that overflows stays as it is
    least = torch.linalg.eigvalsh(torch.where(finite[:, None, None], similar.detach(), 0.0))[..., 0]
    least = torch.where(finite, least, 1.0)
    low = finite & (least < below)
    if not bool(low.any()):
        return least
    # Equal eigenvalues have no second derivative. So where none is needed, a diagonal with unequal ones is used.
    unequal = torch.diag(torch.arange(1.0, matrix.shape[-1] + 1)).to(similar)
    with_slope = torch.linalg.eigvalsh(torch.where(low[:, None, None], similar, unequal))[..., 0]
    return torch.where(low, with_slope, least)
