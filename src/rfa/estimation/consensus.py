"""The estimate at one time index: iteratively reweighted least squares over all observations.

    d_ij^2 = |z_j - H_ij x|^2,    w_ij = w(d_ij^2),    x <- the weighted mean, until the last iteration

    Lyapunov: (J_0 + sum_j w_ij N_ij)^-1 (y_0 + sum_j w_ij u_ij)
    Riccati:  (M_0 + sum_j w_ij M_ij)^-1 (v_0 + sum_j w_ij v_ij)

Source: appendix A.3, equations `precision_weighted_average` and `conditional_objective`; docs/theory.md for Riccati.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .contributions import Contributions, ForwardTransitions, TransportedObservations, deviation_ratios
from .gaussian import AffineUpdate, Gaussian, Information, mapped
from .matrices import identity_like, inverse, positive, symmetric, trace
from .problem import EstimationProblem, ObservationGrid, Transitions, along_grid, each_step
from .recursive_filter import FilterPass, Recursion, backward_information, diffuse_start, kalman_pass, robust_pass
from .robust_weight import LOWEST_LOG_WEIGHT, RobustWeight

Start = Literal["recursive", "leave_one_out", "query"]

_SMALLEST_EIGENVALUE = 1e-2  # of the weighted information, over the mean of its eigenvalues
_REGULAR = 1e-12  # smallest eigenvalue of a covariance, over the largest
_LARGEST_DISTANCE = 1e200  # stands for a squared distance that overflows
_HALVINGS = 6
_SAME = 1e-12  # relative: a rise of the objective by rounding
_LARGEST_VARIANCE = 100.0  # of a prediction, in units of the noise: a less certain one weights nothing


@dataclass(frozen=True)
class EstimatorOptions:
    """What to estimate, and how, as `robust_estimate` says."""

    riccati: bool
    robust_weight: RobustWeight
    iterations: int
    start: Start
    with_weights: bool
    query_noise: Float[Tensor, "n n"] | None = None  # of the state at which distances are measured
    noise_floor: Float[Tensor, "n n"] | None = None  # of each transported observation


class QueryEstimate(NamedTuple):
    """The estimate at one query; of many, each part has a second dimension, `(b, queries, ...)`."""

    mean: Tensor  # (b, n)
    covariance: Tensor  # (b, n, n)
    weights: Tensor | None  # (b, T)
    objective: Tensor  # (b, iterations + 1)


@dataclass(frozen=True)
class LyapunovConsensus:
    """`(J_0 + sum_j w_ij N_ij)^-1 (y_0 + sum_j w_ij u_ij)`, with N_ij the precision of each observation alone."""

    initial: TransportedObservations | None  # the initial state, as an observation of all states
    observations: TransportedObservations  # transported to this time
    index: int  # this time
    stationary: Float[Tensor, "b n n"] | None  # the covariance where nothing is observed
    query_noise: Float[Tensor, "n n"] | None

    def mean(self, weight: Float[Tensor, "b j"]) -> Float[Tensor, "b n"]:
        """The weighted mean."""
        return self._solve(self.observations, weight)[0]

    def covariance(self, weight: Float[Tensor, "b j"]) -> Float[Tensor, "b n n"]:
        """Its covariance."""
        return self._solve(self.observations, weight)[1]

    def leave_one_out(self) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
        """Mean and covariance for weights 1, without the observation at this time."""
        others = self.observations.without(self.index)
        return self._solve(others, torch.ones_like(others.values[..., 0]))

    def effective(self, observations: TransportedObservations) -> tuple[TransportedObservations, Float[Tensor, "b j"]]:
        """With the variance `Sigma_ij + query_noise`. All have weight 1 in the objective."""
        ones = torch.ones_like(observations.values[..., 0])
        return observations if self.query_noise is None else observations.inflated(self.query_noise[None]), ones

    def initial_cost(self, state: Float[Tensor, "b n"]) -> Float[Tensor, " b"] | float:
        """Zero. No step is halved here, so the objective needs no term of the initial state."""
        return 0.0

    def _solve(self, observations: TransportedObservations, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = mapped(observations.information().weighted(weight), lambda x: x.sum(1))
        if self.initial is not None:
            total = mapped(self.initial.information(), lambda x: x[:, 0]) + total
        return total.solve(self.stationary)


@dataclass(frozen=True)
class RiccatiConsensus:
    """`W^-1 (v_0 + sum_j w_ij v_ij)` with `W = M_0 + sum_j w_ij M_ij`. For weights 1 it is the Kalman filter."""

    predicted: Gaussian  # the Kalman filter (or smoother) without the observation at this time
    state: Gaussian  # with it
    contributions: Contributions  # M_ij and v_ij of the observations in `state`
    remainder: tuple[Tensor, Tensor]  # M_0 and v_0
    stationary: Float[Tensor, "b n n"] | None  # the covariance where nothing is observed
    count: Int[Tensor, " b"]  # how many observations there are
    others: Int[Tensor, " b"]  # how many at other times
    unobserved: Gaussian | None  # the state without any observation, or None where nothing is known of it

    def mean(self, weight: Float[Tensor, "b j"]) -> Float[Tensor, "b n"]:
        """The weighted mean."""
        mean = self._solve(weight)[0]
        return torch.where(mean.isfinite().all(-1, keepdim=True), mean, self.state.mean)  # where it overflows

    def covariance(self, weight: Float[Tensor, "b j"]) -> Float[Tensor, "b n n"]:
        """Its covariance, `W^-1 P`."""
        factor = self._bounded(self._solve(weight)[1], weight)
        state = self.state._replace(covariance=symmetric(factor @ self.state.covariance))
        return self._full_covariance(state, self.count)

    def _full_covariance(self, state: Gaussian, count: Tensor) -> Tensor:
        covariance = state.full_covariance()
        if self.stationary is None:
            return covariance
        return torch.where((count == 0)[:, None, None], self.stationary, covariance)

    def _bounded(self, factor: Tensor, weight: Tensor) -> Tensor:
        """`W^-1` with enough of the identity that `W^-1 P` is at least P divided by the largest weight."""
        least = 1 / weight.amax(-1).clamp(min=1.0) if weight.shape[-1] else weight.new_ones(len(weight))
        return _plus_identity(factor, (least - self._least_eigenvalue(factor, least)).clamp(min=0.0))

    def _solve(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`W^-1 (v_0 + sum_j w_ij v_ij)` and `W^-1`."""
        matrix, vector = self.remainder
        matrix = matrix + (weight[..., None, None] * self.contributions.matrix).sum(1)
        vector = vector + (weight[..., None] * self.contributions.vector).sum(1)
        added = self._added_identity(matrix)
        factor = inverse(_plus_identity(matrix, added))
        return (factor @ (vector + added[:, None] * self.state.mean)[..., None])[..., 0], factor

    def _added_identity(self, matrix: Tensor) -> Tensor:
        """How much of the filter's own estimate makes the weighted information positive, `(b,)`.

        For unequal weights `W P^-1` may have an eigenvalue <= 0. Contributions times 1 add up to the identity.
        """
        least = _SMALLEST_EIGENVALUE * trace(matrix) / matrix.shape[-1]
        return ((least - self._least_eigenvalue(matrix, least)) / (1 - _SMALLEST_EIGENVALUE)).clamp(min=0.0)

    def _least_eigenvalue(self, matrix: Tensor, below: Tensor) -> Tensor:
        """`(b,)`: of the symmetric part of `L^-1 W L`, `P = L L^T`. It has a gradient only where it is too low."""
        if matrix.shape[-1] == 1:
            return matrix[:, 0, 0]
        similar = symmetric(torch.linalg.solve_triangular(self._root, matrix @ self._root, upper=False))
        finite = similar.isfinite().all(-1).all(-1)  # a matrix that overflows stays as it is
        found = torch.linalg.eigvalsh(torch.where(finite[:, None, None], similar.detach(), 0.0))[..., 0]
        found = torch.where(finite, found, 1.0)
        low = finite & (found < below)
        if not bool(low.any()):
            return found
        # Equal eigenvalues have no second derivative. So where none is needed, a diagonal with unequal ones is used.
        unequal = torch.diag(torch.arange(1.0, matrix.shape[-1] + 1)).to(similar)
        least = torch.linalg.eigvalsh(torch.where(low[:, None, None], similar, unequal))[..., 0]
        return torch.where(low, least, found)

    @functools.cached_property
    def _root(self) -> Tensor:
        """L with `L L^T = P`, made regular. Where rounding makes P indefinite, L loses the correlations."""
        covariance = self.state.covariance
        identity = identity_like(covariance)
        units = deviation_ratios(covariance)[..., :1]  # of each state, the first is 1
        scaled = covariance / units / units.mT
        size = scaled.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        size = torch.where((size > 0) & size.isfinite(), size, 1.0)
        factor, failed = torch.linalg.cholesky_ex(scaled / size + _REGULAR * identity)
        return units * size.sqrt() * torch.where((failed > 0)[..., None, None], identity, factor)

    def leave_one_out(self) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
        """Mean and covariance for weights 1, without the observation at this time."""
        return self.predicted.mean, self._full_covariance(self.predicted, self.others)

    def effective(self, observations: TransportedObservations) -> tuple[TransportedObservations, Float[Tensor, "b j"]]:
        """With the variance `Sigma_ij + P_i`, and the weights `tr M_ij / tr P_i (Sigma_ij + P_i)^-1`, at least 0."""
        effective, own = observations.inflated(self.state.covariance), self.state.covariance[:, None]
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
        return share * distance.nan_to_num(nan=_LARGEST_DISTANCE)


Consensus = LyapunovConsensus | RiccatiConsensus


def reweighted_estimate(
    consensus: Consensus,
    observations: TransportedObservations,
    grid: ObservationGrid,
    index: int,
    options: EstimatorOptions,
    state: Float[Tensor, "b n"] | None,
) -> QueryEstimate:
    """The estimate at a time index. The first weights are taken at `state`, or where it is None, by `options.start`.

    With the Riccati prior a step that would raise the objective is halved. With the Lyapunov prior no step raises it.
    """
    weight = torch.ones_like(observations.values[..., 0])
    if state is None:
        state = consensus.mean(weight)
        if options.start == "query":
            state = _at_observation(state, consensus.covariance(weight), grid, index)
        elif options.start == "leave_one_out":
            state = _left_out(state, *consensus.leave_one_out(), grid, index)
    effective, share = consensus.effective(observations)
    present = grid.present[:, observations.indices]
    calibration = options.robust_weight.calibration(grid.observed_components[:, observations.indices])
    # A row with missing components has smaller distances, so its weights are nearer 1. The calibration undoes that.
    complete = math.prod(options.robust_weight.consistency())
    share = share * complete / calibration

    def measure(at: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances `(b, j)` from a state, and its objective `(b,)`."""
        distance = effective.distance(at).nan_to_num(nan=_LARGEST_DISTANCE, posinf=_LARGEST_DISTANCE)
        cost = (share * options.robust_weight.cost(distance) * present).sum(-1)
        return distance, cost + complete * consensus.initial_cost(at)

    distance, cost = measure(state)
    costs = [cost]
    for _ in range(options.iterations):
        weight = options.robust_weight.log_weight(distance).masked_fill(~present, -torch.inf)
        best = weight.detach().amax(-1, keepdim=True) if observations.indices else weight
        raised = torch.where(best.isfinite(), best - best.clamp(min=LOWEST_LOG_WEIGHT), 0.0)
        weight = torch.exp(weight - raised)
        step = consensus.mean(weight / calibration)
        if options.riccati:
            state, distance, cost = _halved_until_lower(measure, state, step, cost)
        else:
            state, (distance, cost) = step, measure(step)
        costs.append(cost)
    covariance = consensus.covariance(weight / calibration)
    covariance = positive(torch.where(covariance.isnan(), torch.inf, covariance))
    weights = _by_observation(weight, observations, grid) if options.with_weights else None
    return QueryEstimate(state, covariance, weights, torch.stack(costs, dim=-1))


def _halved_until_lower(
    measure: Callable[[Tensor], tuple[Tensor, Tensor]], state: Tensor, step: Tensor, before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A step, its distances and its objective. It is halved until the objective does not rise, at last not taken."""
    distance, cost = measure(step)
    for halving in range(_HALVINGS + 1):
        higher = ~(cost <= before * (1 + _SAME))
        if not bool(higher.any()):
            break
        shorter = (state + step) / 2 if halving < _HALVINGS else state
        step = torch.where(higher[:, None], shorter, step)
        distance, cost = measure(step)
    return step, distance, cost


def _left_out(mean: Tensor, other: Tensor, covariance: Tensor, grid: ObservationGrid, index: int) -> Tensor:
    """The Gaussian estimate without this time's observation, where that prediction is certain enough to weight it."""
    rows = grid.rows[:, index]
    finite = covariance.isfinite().all(-1).all(-1)
    variance = (rows @ torch.where(finite[:, None, None], covariance, 0.0) @ rows.mT).diagonal(dim1=-2, dim2=-1)
    certain = finite & (variance.amax(-1) <= _LARGEST_VARIANCE) & grid.present[:, index]
    return torch.where(certain[:, None], other, mean)


def _at_observation(mean: Tensor, covariance: Tensor, grid: ObservationGrid, index: int) -> Tensor:
    """The Gaussian estimate, moved so that its observed components are those of this time's observation."""
    rows, values = grid.at(index)
    spread = torch.where(covariance.isfinite(), covariance, 0.0)
    spread = torch.where(trace(spread)[:, None, None] > 0, spread, identity_like(covariance))
    innovation = values[..., None] - rows @ mean[..., None]
    gain = spread @ rows.mT @ torch.linalg.pinv(rows @ spread @ rows.mT, hermitian=True, rtol=1e-12)
    return torch.where(grid.present[:, index, None], mean + (gain @ innovation)[..., 0], mean)


def _plus_identity(matrix: Float[Tensor, "b n n"], factor: Float[Tensor, " b"]) -> Float[Tensor, "b n n"]:
    """`M + factor I`."""
    return matrix + torch.diag_embed(factor[:, None].expand(-1, matrix.shape[-1]))


# The dense estimator: every observation is transported to every query. Any linear SDE, in float64, quadratic in T


def dense_estimate(problem: EstimationProblem, options: EstimatorOptions) -> QueryEstimate:
    """The estimate at every query, `(b, queries, ...)`."""
    grid, smooth, robust = problem.grid, problem.smooth, not options.robust_weight.gaussian
    transitions, forward = Transitions.of(problem.sde, grid), ForwardTransitions.of(problem.sde, grid)
    first = diffuse_start(grid, transitions) if problem.initial is None else problem.initial
    filtered, states, riccati = None, None, None
    if options.start == "recursive" and robust:
        filtered, _ = robust_pass(grid, transitions, Recursion.first(first), smooth)
        states = [state.mean for state in filtered.estimates(smooth)]
    if options.riccati:
        if filtered is None:
            filtered = kalman_pass(grid, transitions, first)
        riccati = _riccati(problem, filtered)
        grid = filtered.with_median_noise(grid)
    later = _later_observations(grid, transitions) if smooth else None
    initial = None if problem.initial is None else TransportedObservations.of_state(problem.initial)
    earlier, estimates = TransportedObservations.none(grid), []
    indices = grid.query_index.unique()
    wanted = set(indices.tolist())
    for k in range(grid.length):
        if k:
            earlier = forward.forward(k - 1, earlier)
            initial = None if initial is None else forward.forward(k - 1, initial)
        earlier = earlier.with_observation(grid, k)
        own = None if riccati is None else next(riccati)
        if k in wanted:
            observations = earlier if later is None else earlier.concatenated(later[k])
            if options.noise_floor is not None:
                observations = observations.inflated(options.noise_floor[None])
            noise = options.query_noise
            consensus = LyapunovConsensus(initial, observations, k, problem.stationary, noise) if own is None else own
            state = None if states is None else states[k]
            estimates.append(reweighted_estimate(consensus, observations, grid, k, options, state))
    at = torch.searchsorted(indices, grid.query_index.contiguous())
    parts = zip(*estimates, strict=True)
    return QueryEstimate._make(None if x[0] is None else along_grid(torch.stack(x, dim=1), at) for x in parts)


def _later_observations(grid: ObservationGrid, transitions: Transitions) -> list[TransportedObservations]:
    """All later observations, transported back to each time index."""
    later = TransportedObservations.none(grid)
    found = [later]
    for k in reversed(range(grid.length - 1)):
        transition, variance = transitions.steps[k]
        later = later.with_observation(grid, k + 1).inflated(variance).substituted(transition)
        found.append(later)
    return found[::-1]


def _riccati(problem: EstimationProblem, filtered: FilterPass) -> Iterator[RiccatiConsensus]:
    """The consensus at each time index, with the contributions to the Kalman filter or to the robust one."""
    grid, weighted, steps = problem.grid, filtered.grid, filtered.transitions.steps
    inverse = each_step(problem.sde.transition, problem.sde, grid, -grid.lags)  # not finite where it overflows
    inverse = inverse.repeat(len(filtered.transitions.index) // len(inverse), 1, 1, 1)
    own_steps = [tuple(x[: len(grid.times)] for x in step) for step in steps]  # without challengers
    later = _later_contributions(filtered) if problem.smooth else None
    counts, unobserved = problem.observation_counts(), problem.initial
    contributions = Contributions.none(weighted)
    for k, state in enumerate(filtered.states):
        if k:
            contributions = contributions.predicted(steps[k - 1][0], inverse[:, k - 1], state.predicted.covariance)
            unobserved = None if unobserved is None else unobserved.predicted(*own_steps[k - 1])
        contributions = filtered.inherited(contributions, k)
        update = AffineUpdate.of_components(weighted.rows[:, k], state.gains)
        contributions = contributions.updated(weighted, k, update, filtered.gain_ratio[:, k])
        predicted = filtered.without_challengers(state.predicted)
        posterior = filtered.without_challengers(state.posterior)
        all_contributions = filtered.without_challengers(contributions)
        if later is not None:
            information, later_contributions = later[k]
            predicted = predicted.informed(information)[0]
            posterior, update = posterior.informed(information)
            all_contributions = contributions.multiplied(update.factor).concatenated(
                later_contributions.multiplied(update.gain)
            )
        yield RiccatiConsensus(
            predicted,
            posterior,
            all_contributions.with_kalman_gains(),
            all_contributions.remainder(posterior),
            problem.stationary,
            counts[:, k],
            counts[:, k] - grid.present[:, k].to(counts.dtype),
            unobserved,
        )


def _later_contributions(filtered: FilterPass) -> list[tuple[Information, Contributions]]:
    """The backward information at each time index, and the part of each later observation in it."""
    grid, transitions = filtered.grid, filtered.transitions
    totals = backward_information(grid, transitions)
    contributions = Contributions.none(grid)
    found = [(totals[-1], contributions)]
    for k in reversed(range(grid.length - 1)):
        contributions = contributions.with_later_observation(grid, k + 1, filtered.gain_ratio[:, k + 1])
        contributions = contributions.backward(transitions, k, totals[k + 1] + grid.information.at(k + 1))
        found.append((totals[k], contributions))
    return found[::-1]


def _by_observation(weights: Tensor, observations: TransportedObservations, grid: ObservationGrid) -> Tensor:
    """`(b, T)`: the weights in the order of the observations as given."""
    indices = torch.tensor(observations.indices, device=weights.device, dtype=torch.long)
    column, count = grid.observation_index[:, indices], grid.observation_count
    at = torch.where(grid.present[:, indices] & (column >= 0), column, count)  # the last column is cut off
    return weights.new_zeros(len(column), count + 1).scatter(1, at, weights)[:, :count]
