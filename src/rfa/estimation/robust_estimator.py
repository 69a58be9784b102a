"""`robust_estimate`: iteratively reweighted averages of all observations, each carried to the query's time.

    d_ij^2 = |z_j - H_ij x|^2,    w_ij = w(d_ij^2),    x <- (M_0 + sum_j w_ij M_ij)^-1 (v_0 + sum_j w_ij v_ij)

Lyapunov: M_ij is the precision N_ij of observation j alone, carried to time i. Riccati: `M_ij = P_i N_ij`, the part of
observation j in the Kalman filter. `rfa.estimation.contributions` has both.

Source: appendix A.3, equations `precision_weighted_average` and `conditional_objective`; docs/theory.md for Riccati.
"""

import functools
import math
import numbers
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from rfa.checks import check_choice, require

from .contributions import LARGEST_DISTANCE, Average, carried_observations, lyapunov_averages, riccati_averages
from .linear_model import LinearKernel, Rows
from .linear_sde import InitialMoments, LinearSDE, check_covariance, identity_like, real, symmetric, trace
from .problem import EstimationProblem, ObservationGrid, Transitions, along_grid, make_problem
from .recursive_filter import (
    Recursion,
    diffuse_start,
    kalman_pass,
    moments,
    overflow_error,
    resumed_filter,
    robust_smoother,
)

Direction = Literal["filter", "smooth"]
Penalty = Literal["power", "welsch"]
EstimatorPrior = Literal["lyapunov", "riccati"]  # the operator's may be more
Start = Literal["recursive", "leave_one_out", "query"]

_HALVINGS = 6
_SAME = 1e-12  # relative: a rise of the objective by rounding
_LARGEST_VARIANCE = 100.0  # of a prediction, in units of the noise: a less certain one weights nothing
_LEAST_EIGENVALUE = 1e-9  # of a covariance, over the largest: what is less comes from rounding
_LOWEST_LOG_WEIGHT = -69.0  # log 1e-30: a row's largest weight is at least this, so that its variance is finite
_SMALLEST_NU = 1e-6  # below, all weight lies within sqrt(nu) of the estimate and is lost to rounding
_SMALLEST_MEAN = 1e-30  # mean weight: quotients by it stay finite
_CHI_RANGE = 12.0  # chi_m lies within that distance of sqrt(m): its deviation is about 0.7 for any m


@dataclass(frozen=True)
class RobustWeight:
    """`w(s) = rho'(s)` of a squared distance s of m dimensions (appendix A.3).

    power: `w = (1 + s / nu)^-kappa`, `rho = nu / (kappa - 1) (1 - (1 + s / nu)^(1 - kappa))`. With `kappa = 1` the
        weight is, up to `(nu + m) / nu`, the posterior mean of the inverse scale of a Student-t residual.
    welsch: `w = exp(-s / m)`, `rho = m (1 - exp(-s / m))`, the limit of `kappa = (nu + m) / m` for large nu. With an
        infinite nu and a finite kappa all weights are 1.
    """

    nu: float | int  # degrees of freedom >= 1e-6
    kappa: float | int | None  # exponent > 0
    size: int  # m
    penalty: Penalty = "power"

    def __post_init__(self):
        good = [isinstance(x, numbers.Real) and not isinstance(x, bool) for x in (self.nu, self.kappa)]
        expected = f"degrees of freedom > 0, at least {_SMALLEST_NU}"
        require(good[0] and self.nu >= _SMALLEST_NU, "nu", self.nu, expected)
        finite = self.kappa is None or (good[1] and 0 < self.kappa < math.inf)
        require(finite, "kappa", self.kappa, "a finite exponent > 0, a number")
        check_choice("penalty", self.penalty, Penalty)

    @property
    def gaussian(self) -> bool:
        """Whether all weights are 1."""
        return self.penalty == "power" and math.isinf(self.nu)

    @property
    def exponent(self) -> float:
        """kappa, by default `(nu + m) / m` with the model's m: logits do not grow with the dimension."""
        return (self.nu + self.size) / self.size if self.kappa is None else self.kappa

    def log_weight(self, distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`log w` of squared distances."""
        if self.gaussian:
            return torch.zeros_like(distance)
        if self.penalty == "welsch":
            return -distance / self.size
        return -self.exponent * torch.log1p(distance / self.nu)

    def cost(self, distance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The penalty rho of squared distances."""
        if self.gaussian:
            return distance
        if self.penalty == "welsch":
            return -self.size * torch.expm1(-distance / self.size)
        if self.exponent == 1:
            return self.nu * torch.log1p(distance / self.nu)
        return self.nu / (self.exponent - 1) * -torch.expm1((1 - self.exponent) * torch.log1p(distance / self.nu))

    @functools.cache  # noqa: B019 - the cache holds a few numbers only
    def consistency(self, observed: int | None = None) -> tuple[float, float]:
        """For `s ~ chi^2_k`, that is, a right model: the mean weight, and the variance over that of all weights 1.

        They are `E w` and `(E[w^2 s] / k) / (E w + 2 E[w' s] / k)^2`, the asymptotic variance of an M-estimator of
        location. k is how many of the m components a row has.
        """
        k = self.size if observed is None else observed
        if self.gaussian or not k:
            return 1.0, 1.0
        # chi_k, the root of s, has a density without a singularity. Powers of large k overflow, so logarithms are used.
        low, high = max(0.0, math.sqrt(k) - _CHI_RANGE), math.sqrt(k) + _CHI_RANGE
        root = low + (high - low) * (torch.arange(2**17, dtype=torch.float64) + 0.5) / 2**17
        density = torch.softmax((k - 1) * torch.log(root) - root.square() / 2, dim=0)
        s = root.square()
        log_weight = self.log_weight(s)
        largest = log_weight.max()
        weight = torch.exp(log_weight - largest)  # both ratios do not depend on this scale
        slope = -weight / self.size if self.penalty == "welsch" else -self.exponent * weight / (self.nu + s)
        spread = (density * weight.square() * s).sum() / k
        mean = (density * weight).sum()
        sensitivity = torch.maximum(mean + 2 * (density * slope * s).sum() / k, 1e-4 * mean)
        return (mean * largest.exp()).clamp(min=_SMALLEST_MEAN).item(), (spread / sensitivity.square()).item()

    def calibration(self, observed: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The product of both numbers of `consistency` for each row's components: weights are divided by it."""
        if not observed.numel():
            return observed.to(torch.float64)
        counts, position = observed.unique(return_inverse=True)
        table = [math.prod(self.consistency(k)) for k in counts.tolist()]
        return torch.tensor(table, dtype=torch.float64, device=observed.device)[position]


class Estimate(NamedTuple):
    """What `robust_estimate` finds at each query time.

    Args:
        mean: `(..., Tq, n)`, in units of the state.
        covariance: `(..., Tq, n, n)`. Infinite where nothing is known.
        weights: the robust weight w_ij of observation j at query i, `(..., Tq, T)`. 0 where the query does not use it.
        objective: `(iterations + 1, ...)`: the sum of all queries' penalties, at the start and after each iteration.
    """

    mean: Float[Tensor, "*batch queries n"]
    covariance: Float[Tensor, "*batch queries n n"]
    weights: Float[Tensor, "*batch queries T"] | None
    objective: Float[Tensor, "steps *batch"]


def robust_estimate(
    sde: LinearSDE,
    times: Real[Tensor, "*#batch T"],
    observations: Real[Tensor, "*#batch T m"],
    *,
    nu: float | int = 16.0,
    kappa: float | int | None = 2.0,
    penalty: Penalty = "power",
    prior: EstimatorPrior = "riccati",
    iterations: int = 5,
    start: Start = "recursive",
    direction: Direction = "filter",
    query_times: Real[Tensor, "*#batch queries"] | None = None,
    initial: InitialMoments | None = None,
    query_noise: float | int | Real[Tensor, "*covariance"] = 0.0,
    noise_floor: float | int | Real[Tensor, "*covariance"] = 0.0,
    return_weights: bool = True,
) -> Estimate:
    """Robust, precision-weighted estimates of the state of a linear SDE, by the formulas of this file.

    The default is a robust Kalman filter that needs no tuning; `nu=inf` is the Kalman filter itself, in linear time.
    `prior="lyapunov", kappa=None, iterations=1, start="query", query_noise=R_c` is the paper's estimator (section 3.1),
    `R_c = C^-1 R C^-T`. Otherwise time and memory are quadratic in T: each query weights every observation anew.
    `RobustFilter(sde)` is linear.

    C is not inverted, so it may have any shape. A missing component (NaN) contributes nothing.

    Args:
        sde: of n states, observed through m components.
        times: `(T,)` or `(..., T)`, strictly increasing, with any intervals.
        observations: `(..., T, m)`, NaN where a component is missing. In robust smoothing, fill values among the first
            rows count as missing (`rfa.estimation.problem.without_fill_values`).
        nu: degrees of freedom of the Student-t residual, >= 1e-6. Infinite with a kappa: every weight is 1.
        kappa: exponent > 0. None: the paper's, `(nu + m) / m`, with the model's m; with `nu=inf` that is "welsch".
        penalty: "power": `w = (1 + d^2 / nu)^-kappa`. "welsch": `w = exp(-d^2 / m)`, which does not use nu.
        prior: "riccati", or the paper's "lyapunov", for which observations count as independent, so that many old ones
            count too much. d^2 is measured with `Sigma_ij + P_i`, or with `N_ij^-1 + query_noise`.
        iterations: number of iterations of reweighted least squares (EM), >= 1.
        start: where the first weights are taken.
            "recursive": at the estimate of the recursive robust filter or smoother (`rfa.estimation.recursive_filter`).
            With the Riccati prior its gains replace the Kalman filter's: with g_j the gain of row j over its Kalman
            gain, the weight is `w_ij / g_j`, and R has the median scale of the noise.
            "leave_one_out": at the Gaussian estimate without the query's own observation, if that prediction has at
            most 100 times the variance of the observation. Far or frequent outliers make that estimate useless.
            "query" (the paper's): at the observation of the query's own time, so that an outlier supports itself.
        direction: "filter" uses observations up to the query's time, "smooth" later ones too.
        query_times: `(Tq,)` or `(..., Tq)` in any order. A time after all observations is a forecast. Default: `times`.
        initial: mean `(..., n)` and covariance `(..., n, n)` of the state at the first time of all. By default nothing
            is known of it (a diffuse start). Leading dimensions broadcast with those of the series.
        query_noise, noise_floor: with the Lyapunov prior, the variance of the state at which distances are measured
            (`R_c` where it is the query's observation), and one that each carried observation has beside its own. A
            variance of each state, or a covariance `(n, n)`.
        return_weights: whether to return the weights, a `(Tq, T)` matrix of each series.

    Returns:
        An `Estimate`. A query without observations gets the stationary distribution. Where there is none, it gets zero
        with an infinite variance. A direction that the observations do not show has an infinite variance.
        The covariance is that of the sum, with each weight divided by `RobustWeight.consistency` of its components.
        With the Riccati prior enough of the filter's own estimate is added to make it positive. The objective is
        `sum_j rho(d_ij^2)`, with the Riccati prior each term times `tr M_ij / tr P_i (Sigma_ij + P_i)^-1` (at least 0),
        and one term for `initial`. A step that would raise it is halved, at last not taken. With the Lyapunov prior it
        never rises, but for `initial` and `query_noise`, which it does not contain.

    Raises:
        ValueError: naming the argument, what was given and what was expected. Also `observation_noise` where the R of
            the observed components is singular, and `observations` where there is no series at all.

    Source: appendix A.3. The Riccati prior and the recursive start go beyond the paper (docs/theory.md).
    """
    check_choice("prior", prior, EstimatorPrior)
    check_choice("start", start, Start)
    check_choice("direction", direction, Direction)
    whole = isinstance(iterations, int) and not isinstance(iterations, bool) and iterations >= 1
    require(whole, "iterations", iterations, "a whole number >= 1")
    weight = RobustWeight(nu, kappa, sde.observation_size, penalty)
    weight = replace(weight, penalty="welsch") if kappa is None and weight.gaussian else weight
    noises = _noise("query_noise", query_noise, sde, prior), _noise("noise_floor", noise_floor, sde, prior)
    options = _Options(prior == "riccati", weight, iterations, start, *noises)
    robust, smooth = not weight.gaussian, direction == "smooth"
    problem = make_problem(sde, times, observations, query_times, initial, robust=robust, smooth=smooth)
    found = (_dense_estimates if robust or not options.riccati else _kalman_estimates)(problem, options, return_weights)
    mean, covariance, objective = (problem.grid.by_series(x) for x in found[:3])
    weights = None if found[3] is None else problem.grid.by_series(found[3])
    return Estimate(mean, covariance, weights, objective.sum(-2).movedim(-1, 0))


class _Options(NamedTuple):
    riccati: bool
    robust_weight: RobustWeight
    iterations: int
    start: Start
    query_noise: Float[Tensor, "n n"] | None
    noise_floor: Float[Tensor, "n n"] | None


_AtQueries = tuple[Tensor, Tensor, Tensor, Tensor | None]  # mean, covariance, objective, weights, `(b, queries, ...)`


def _noise(name: str, given: object, sde: LinearSDE, prior: str) -> Float[Tensor, "n n"] | None:
    """A covariance of the state, given by one variance or as it is. None: zero."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    require(number or isinstance(given, Tensor), name, given, "a variance, or a covariance of the state")
    found = real(name, torch.tensor(given, dtype=torch.float64) if number else given)
    found = found if found.dim() else found * torch.eye(sde.state_size, dtype=torch.float64, device=found.device)
    check_covariance(name, found, sde.state_size)
    if not (found.requires_grad or bool(found.any())):
        return None
    if prior != "lyapunov":
        raise ValueError(f"{name}: got prior={prior!r}, expected 'lyapunov', which has it")
    return found


def _kalman_estimates(problem: EstimationProblem, options: _Options, with_weights: bool) -> _AtQueries:
    """The Kalman filter or smoother. Its weights are 1, its objective is constant."""
    grid = problem.grid
    if problem.compiled:
        mean, covariance, least_squares = _compiled_kalman(problem)
    else:
        transitions = Transitions.of(problem.sde, grid)
        first = diffuse_start(grid, transitions) if problem.initial is None else problem.initial
        states = kalman_pass(grid, transitions, first).estimates(problem.smooth)
        (mean, covariance), least_squares = moments(states), torch.stack([x.least_squares for x in states], dim=1)
    stationary = problem.stationary
    if stationary is not None and bool((unseen := problem.observation_counts() == 0).any()):
        covariance = torch.where(unseen[..., None, None], stationary[:, None], covariance)
    parts = mean, covariance, least_squares.clamp(min=0.0)
    mean, covariance, cost = (along_grid(x, grid.query_index) for x in parts)
    objective = cost[..., None].expand(*cost.shape, options.iterations + 1)
    if not with_weights:
        return mean, covariance, objective, None
    rows = grid.observation_rows[:, None]
    used = (rows <= grid.query_index[..., None]) | problem.smooth
    return mean, covariance, objective, (used & along_grid(grid.present, rows[:, 0])[:, None]).to(mean.dtype)


@torch.no_grad()
def _compiled_kalman(problem: EstimationProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, covariance and least squares at each row of the grid, by compiled code, of one model."""
    grid, initial, (b, length, m) = problem.grid, problem.initial, problem.grid.values.shape
    sde, n, eye = problem.sde, problem.sde.state_size, torch.eye(m, dtype=torch.float64)
    dynamics, diffusion, observation = (x.reshape(x.shape[-2:]) for x in (sde.dynamics, sde.diffusion, sde.observation))
    model = LinearSDE(dynamics, diffusion, observation, eye)
    kernel = LinearKernel(model, ("",) * n, robust=False, by_component=True)
    rows, noise = grid.rows.expand(b, -1, -1, -1), eye.expand(b, length, m, m)
    seen = grid.values.where(rows.any(-1), torch.nan)
    times, readings, *matrices = (x.contiguous().numpy() for x in (grid.times, seen, rows, noise))
    given = Rows(times, readings, None, None, *matrices)
    if initial is None:
        start = kernel.diffuse_start(b, times)
    else:
        start = kernel.start(initial.mean.numpy(), initial.covariance.expand(b, n, n).numpy(), np.full(b, np.nan))
    found, fault = kernel.run(given, start.copy())
    if fault is not None:
        Transitions.of(sde, grid)  # raises where one gap alone does it
        raise overflow_error(fault[2])
    least_squares = np.nan_to_num((readings - found.predicted) ** 2 / found.variance).sum(-1).cumsum(-1)
    if problem.smooth:
        found, _ = kernel.run(given, start, smooth=True)
        least_squares = np.broadcast_to(least_squares[:, -1:], times.shape).copy()
    return torch.from_numpy(found.mean), torch.from_numpy(found.covariance), torch.from_numpy(least_squares)


def _dense_estimates(problem: EstimationProblem, options: _Options, with_weights: bool) -> _AtQueries:
    """The estimates by weights that every query has of its own."""
    grid, transitions = problem.grid, Transitions.of(problem.sde, problem.grid)
    first = diffuse_start(grid, transitions) if problem.initial is None else problem.initial
    passed, states = None, None
    if options.start == "recursive" and not options.robust_weight.gaussian:
        robust_pass = robust_smoother if problem.smooth else resumed_filter
        passed, _ = robust_pass(grid, transitions, Recursion.first(first))
        states = [state.mean for state in passed.estimates(problem.smooth)]
    if options.riccati:
        passed = kalman_pass(grid, transitions, first) if passed is None else passed
        if not bool((passed.median_scale == 1).all()):  # distances are measured with the median scale of the noise
            grid = grid.weighted(1 / passed.median_scale)
        averages = riccati_averages(problem, passed, carried_observations(problem, grid, transitions))
    else:
        noises = options.query_noise, options.noise_floor
        averages = lyapunov_averages(problem, carried_observations(problem, grid, transitions), *noises)
    wanted, found = grid.query_index.unique(), []
    for k, average in enumerate(averages):
        if bool((wanted == k).any()):
            indices, state = grid.used_rows(k, problem.smooth), None if states is None else states[k]
            found.append(_reweighted_estimate(average, grid, k, indices, options, state))
    at = torch.searchsorted(wanted, grid.query_index.contiguous())
    mean, covariance, objective, weights = (along_grid(torch.stack(x, dim=1), at) for x in zip(*found, strict=True))
    if not with_weights:
        return mean, covariance, objective, None
    return mean, covariance, objective, torch.take_along_dim(weights, grid.observation_rows[:, None], dim=-1)


def _reweighted_estimate(
    average: Average,
    grid: ObservationGrid,
    index: int,
    indices: Int[Tensor, " j"],
    options: _Options,
    state: Float[Tensor, "b n"] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, covariance, objective and weights `(b, G)` at a time index that uses the observations at `indices`.

    The first weights are taken at `state`, or where it is None, by `options.start`. With the Riccati prior a step that
    would raise the objective is halved. With the Lyapunov prior no step raises it.
    """
    robust_weight, present = options.robust_weight, grid.present[:, indices]
    if state is None:
        state, covariance = average.solve(torch.ones_like(present, dtype=torch.float64))
        if options.start == "query":
            state = _at_observation(state, covariance, grid, index)
        elif options.start == "leave_one_out":
            state = _left_out(state, *average.leave_one_out(), grid, index)
    effective, share = average.effective()
    calibration = robust_weight.calibration(grid.observed_components[:, indices])
    # A row with missing components has smaller distances, so its weights are nearer 1. The calibration undoes that.
    complete = math.prod(robust_weight.consistency())
    share = share * complete / calibration

    def measure(at: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances `(b, j)` from a state, and its objective `(b,)`."""
        distance = effective.distance(at).nan_to_num(nan=LARGEST_DISTANCE, posinf=LARGEST_DISTANCE)
        cost = (share * robust_weight.cost(distance) * present).sum(-1)
        return distance, cost + complete * average.initial_cost(at)

    distance, cost = measure(state)
    costs = [cost]
    for _ in range(options.iterations):
        weight = robust_weight.log_weight(distance).masked_fill(~present, -torch.inf)
        best = weight.detach().amax(-1, keepdim=True) if len(indices) else weight
        raised = torch.where(best.isfinite(), best - best.clamp(min=_LOWEST_LOG_WEIGHT), 0.0)
        weight = torch.exp(weight - raised)
        step = average.mean(weight / calibration)
        distance, cost = measure(step)
        for halving in range(_HALVINGS + 1 if options.riccati else 0):
            higher = ~(cost <= costs[-1] * (1 + _SAME))
            if not bool(higher.any()):
                break
            shorter = (state + step) / 2 if halving < _HALVINGS else state  # at last not taken
            step = torch.where(higher[:, None], shorter, step)
            distance, cost = measure(step)
        state = step
        costs.append(cost)
    covariance = average.solve(weight / calibration)[1]
    covariance = positive(torch.where(covariance.isnan(), torch.inf, covariance))
    weights = weight.new_zeros(grid.times.shape).index_copy(1, indices, weight)
    return state, covariance, torch.stack(costs, dim=-1), weights


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


def positive(covariance: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The symmetric part, with its negative eigenvalues raised to small positive ones: they come from rounding.

    An infinite matrix stays as it is. The gradient is that of the covariance as given.
    """
    covariance = symmetric(covariance)
    given = covariance.detach()
    finite = given.isfinite().all(-1).all(-1)[..., None, None]
    units = given.diagonal(dim1=-2, dim2=-1).abs().sqrt()  # the units of the states must not change the result
    units = torch.where((units > 0) & units.isfinite(), units, 1.0)[..., None]
    eigenvalues, basis = torch.linalg.eigh(torch.where(finite, given / units / units.mT, 0.0))
    negative = (eigenvalues[..., :1] < 0)[..., None]
    if not bool(negative.any()):
        return covariance
    raised = torch.maximum(eigenvalues, _LEAST_EIGENVALUE * eigenvalues.abs().amax(-1, keepdim=True))
    rebuilt = units * symmetric((basis * raised[..., None, :]) @ basis.mT) * units.mT
    return torch.where(negative, rebuilt + (covariance - given), covariance)
