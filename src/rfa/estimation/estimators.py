"""`robust_estimate` and `recursive_estimate`: the state of a linear SDE from observations with gaps and outliers."""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from rfa.checks import require
from rfa.ops.problem import Prior

from .consensus import EstimatorOptions, QueryEstimate, Start, dense_estimate
from .linear_sde import LinearSDE
from .matrices import InitialMoments, check_covariance, real
from .problem import EstimationProblem, ObservationGrid, along_grid, make_problem
from .robust_weight import Number, Penalty, RobustWeight, check_choice
from .row_filters import FilteredRows, filter_rows

Direction = Literal["filter", "smooth"]
PRIORS = ("lyapunov", "riccati")  # that `robust_estimate` has; the operator's may be more


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
    nu: Number = 16.0,
    kappa: Number | None = 2.0,
    penalty: Penalty = "power",
    prior: Prior = "riccati",
    iterations: int = 5,
    start: Start = "recursive",
    direction: Direction = "filter",
    query_times: Real[Tensor, "*#batch queries"] | None = None,
    initial: InitialMoments | None = None,
    query_noise: Number | Real[Tensor, "n n"] = 0.0,
    noise_floor: Number | Real[Tensor, "n n"] = 0.0,
    return_weights: bool = True,
) -> Estimate:
    """Robust, precision-weighted estimates of the state of a linear SDE.

    The default is a robust Kalman filter that needs no tuning. Outliers of any size and in bursts cost little. Without
    outliers its error is 1 or 2 % above the Kalman filter's. `nu=inf` is the Kalman filter itself.
    `prior="lyapunov", kappa=None, iterations=1, start="query", query_noise=R_c` is the paper's estimator (section 3.1),
    `R_c = C^-1 R C^-T`.

    Every observation that a query uses is transported to the query's time, with the uncertainty of that lag. Its robust
    weight `w_ij = (1 + d_ij^2 / nu)^-kappa` is computed at the current estimate, and the estimate is

        xbar_i = (sum_j w_ij N_ij)^-1 sum_j w_ij u_ij

    lyapunov (the paper's): `N_ij = (V_ij + Phi_ij (C^T R^-1 C)^-1 Phi_ij^T + noise_floor)^-1`, the precision of the
        transported observation alone. `d_ij^2` is measured with `(N_ij^-1 + query_noise)^-1`. Observations count as
        independent, so many old ones count too much.
    riccati: `N_ij = P_i^-1 Psi_ij K_j C Phi_ij^-1` with the exact Kalman gains K, so that correlations by shared
        process noise are included. `d_ij^2` is measured with `Sigma_ij + P_i`. With `nu = inf` this is the Kalman
        filter, with `direction="smooth"` the two-filter smoother. An observation whose contribution exceeds ten
        standard deviations (coupled modes of very different decay) always keeps its Kalman weight.

    C is not inverted, so it may have any shape. A missing component (NaN) contributes nothing.

    Time and memory are quadratic in T, because each query weights every observation anew. They are linear for the
    Kalman filter and smoother (`prior="riccati"`, `nu=inf`) with `return_weights=False`, and for `recursive_estimate`.
    Both are compiled code: the Kalman filter takes about 10 ms for 10,000 readings of 4 states. Where gradients are
    wanted, under `torch.func`, off the CPU or without a C++ compiler they run in PyTorch, which takes seconds. The
    results are the same but for rounding.

    Args:
        sde: of n states, observed through m components.
        times: `(T,)` or `(..., T)`, strictly increasing, with any intervals.
        observations: `(..., T, m)`, NaN where a component is missing. In robust smoothing, fill values among the first
            rows count as missing, where they lie 1e7 times further off than the others
            (`rfa.estimation.problem.without_fill_values`).
        nu: degrees of freedom of the Student-t residual, >= 1e-6. Infinite with a kappa: every weight is 1.
        kappa: exponent > 0. None: the paper's, `(nu + m) / m`. m is the model's, also where components are missing.
            With `nu=inf` that is the penalty "welsch".
        penalty: "power": the weight above. "welsch": `w = exp(-d^2 / m)`, which does not use nu.
        prior: "riccati" or "lyapunov".
        iterations: number of iterations of reweighted least squares (EM), >= 1.
        start: where the first weights are taken.
            "recursive": at the estimate of the recursive robust filter (`rfa.estimation.recursive_filter`). It weighs
            each row by its prediction from earlier rows, in smoothing also from later ones. With the Riccati prior its
            gains replace the Kalman filter's. With g_j the gain of row j over its Kalman gain, N_ij and u_ij have the
            weight `w_ij / g_j`, and `d_ij^2` is measured with R times the median scale of the noise.
            "leave_one_out": at the Gaussian estimate without the query's own observation. Far or frequent outliers
            make that estimate useless.
            "query" (the paper's): at the observation of the query's own time, so that an outlier supports itself.
            Where nothing is observed at the query's time, the last two start at the Gaussian estimate. So does
            "leave_one_out" where the prediction has more than 100 times the variance of the observation.
        direction: "filter" uses observations up to the query's time, "smooth" later ones too.
        query_times: `(Tq,)` or `(..., Tq)` in any order. A time after all observations is a forecast. Default: `times`.
        initial: mean `(..., n)` and covariance `(..., n, n)` of the state at the first time of all. By default nothing
            is known of it (a diffuse start). Its leading dimensions broadcast with those of the series: one series with
            three initial states has three estimates.
        query_noise: with the Lyapunov prior, the variance of the state at which distances are measured: `R_c` where
            it is the query's observation. A variance of each state, or a covariance `(n, n)`.
        noise_floor: with the Lyapunov prior, a variance, or a covariance, that each transported observation has beside
            its own.
        return_weights: whether to return the weights, a `(Tq, T)` matrix of each series. Otherwise `weights` is None.

    Returns:
        An `Estimate`. A query without observations gets the stationary distribution. Where there is none, it gets zero
        with an infinite variance. A direction that the observations do not show has an infinite variance.
        The covariance is `(sum_j w_ij N_ij)^-1`, with each weight divided by the mean weight and by the variance of the
        M-estimator for Gaussian errors (`RobustWeight.consistency`). Both are those of the components that a row has.
        So in the mean, too, N_ij and u_ij of a row with missing components are scaled by these numbers, relative to a
        complete row.
        With the Riccati prior and several states the weighted sum of N_ij may have a negative eigenvalue. Then enough
        of the filter's own estimate is added to make it positive. No covariance is smaller than the largest weight
        allows.
        The objective is `sum_j rho(d_ij^2)`, with the same factor. With the Riccati prior each term has the weight
        `tr P_i N_ij / tr P_i (Sigma_ij + P_i)^-1`, or 0 where that is negative, and `initial` is one more term, with
        the identity as its rho. A step that would raise the objective is then halved until it does not, or at last not
        taken. With the Lyapunov prior the objective does not contain `initial`; without `initial` and `query_noise` it
        never rises.

    Raises:
        ValueError: naming the argument, what was given and what was expected. Also `observation_noise` where the R of
            the observed components is singular, and `observations` where there is no series at all.

    Source: appendix A.3, equations `precision_weighted_average` and `conditional_objective`. The Riccati prior and the
    recursive start go beyond the paper (docs/theory.md).
    """
    check_choice("prior", prior, PRIORS)
    check_choice("start", start, get_args(Start))
    check_choice("direction", direction, get_args(Direction))
    whole = isinstance(iterations, int) and not isinstance(iterations, bool) and iterations >= 1
    require(whole, "iterations", iterations, "a whole number >= 1")
    robust_weight = RobustWeight.of(nu, kappa, sde.observation_size, penalty)
    given = {"query_noise": query_noise, "noise_floor": noise_floor}
    noises = {name: _variance(name, value, sde.state_size) for name, value in given.items()}
    for name, value in noises.items():
        if value is not None and prior != "lyapunov":
            raise ValueError(f"{name}: got prior={prior!r}, expected 'lyapunov', which has it")
    options = EstimatorOptions(prior == "riccati", robust_weight, iterations, start, return_weights, **noises)
    smooth, robust = direction == "smooth", not robust_weight.gaussian
    problem = make_problem(sde, times, observations, query_times, initial, robust=robust, smooth=smooth)
    found = (dense_estimate if robust or not options.riccati else _kalman_estimate)(problem, options)
    shape = problem.grid.batch_shape
    weights = None if found.weights is None else _of_series(found.weights, shape)
    objective = _of_series(found.objective.sum(1), shape).movedim(-1, 0)
    return Estimate(_of_series(found.mean, shape), _of_series(found.covariance, shape), weights, objective)


def _variance(name: str, given: object, size: int) -> Float[Tensor, "n n"] | None:
    """A covariance of the state, given by one variance or as it is. None: zero."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    require(number or isinstance(given, Tensor), name, given, "a variance, or a covariance of the state")
    found = real(name, torch.tensor(given, dtype=torch.float64) if number else given)
    found = found if found.dim() else found * torch.eye(size, dtype=torch.float64, device=found.device)
    check_covariance(name, found, size)
    return found if found.requires_grad or bool(found.any()) else None


def _of_series(x: Float[Tensor, "b ..."], batch_shape: torch.Size) -> Tensor:
    """With the caller's dimensions of series."""
    return x.reshape(*batch_shape, *x.shape[1:])


def _kalman_estimate(problem: EstimationProblem, options: EstimatorOptions) -> QueryEstimate:
    """The Kalman filter or smoother at every query, `(b, queries, ...)`. Its objective is constant."""
    grid, weights = problem.grid, None
    found, covariance = _filtered(problem)
    assert found.least_squares is not None
    parts = found.estimates.mean, covariance, found.least_squares.clamp(min=0.0)
    mean, covariance, least_squares = (along_grid(x, grid.query_index) for x in parts)
    if options.with_weights:
        indices = grid.query_index[: grid.models].unique()
        weights = _unit_weights(grid, indices, problem.smooth)
        weights = along_grid(weights, torch.searchsorted(indices, grid.query_index.contiguous()))
    objective = least_squares[..., None].expand(*mean.shape[:2], options.iterations + 1)
    return QueryEstimate(mean, covariance, weights, objective)


def _filtered(problem: EstimationProblem, robust: bool = False) -> tuple[FilteredRows, Float[Tensor, "b grid n n"]]:
    """The filter or the smoother, and its covariance: the stationary one where nothing is observed."""
    options = {"compiled": problem.compiled, "robust": robust, "smooth": problem.smooth}
    found = filter_rows(problem.grid, problem.transitions, problem.initial, **options)
    covariance, stationary = found.estimates.covariance, problem.stationary
    if stationary is not None and bool((unseen := problem.observation_counts() == 0).any()):
        covariance = torch.where(unseen[..., None, None], stationary[:, None], covariance)
    return found, covariance


def _unit_weights(grid: ObservationGrid, indices: Int[Tensor, " queries"], smooth: bool) -> Tensor:
    """`(b, queries, T)`: 1 for every observation that a query uses, else 0."""
    length, index = grid.length, grid.observation_index
    position = torch.arange(length, device=index.device).expand_as(index).masked_fill(~grid.present, length)
    at = index.masked_fill(index < 0, grid.observation_count)  # queries go to a column that is cut off
    first_use = position.new_full((len(at), grid.observation_count + 1), length).scatter(1, at, position)
    first_use = first_use[:, : grid.observation_count]
    last = indices.new_full(indices.shape, length - 1) if smooth else indices
    return (first_use[:, None, :] <= last[:, None]).to(torch.float64)


class RecursiveEstimate(NamedTuple):
    """What `recursive_estimate` finds.

    Args:
        mean: `(..., Tq, n)`, in units of the state.
        covariance: `(..., Tq, n, n)`. Infinite where nothing is known.
        weights: `(..., T)`: the weight of each row, 1 where it has no prediction or is missing. In filtering it is the
            weight by earlier rows. Rows of a new level get theirs only once the level is accepted.
    """

    mean: Float[Tensor, "*batch queries n"]
    covariance: Float[Tensor, "*batch queries n n"]
    weights: Float[Tensor, "*batch T"]


def recursive_estimate(
    sde: LinearSDE,
    times: Real[Tensor, "*#batch T"],
    observations: Real[Tensor, "*#batch T m"],
    *,
    direction: Direction = "filter",
    query_times: Real[Tensor, "*#batch queries"] | None = None,
    initial: InitialMoments | None = None,
) -> RecursiveEstimate:
    """The recursive robust filter or smoother, at which `robust_estimate` starts: time and memory are linear in T.

    Each row is weighted by its prediction from earlier rows, once. The error of a row comes from `N(0, s R)`, and the
    filter learns how often each scale s occurs. With w the mean weight over s (`rfa.estimation.recursive_filter`):

        m = m- + K_w (z - C m-),    K_w the Kalman gain with noise R / w

    In smoothing a row is weighted by the filter's prediction or by past and future together, whichever expects the row
    more. Then the Kalman smoother runs with noises R / w.

    Args, and errors, are those of `robust_estimate`. It is compiled code where that is.

    Source: `rfa.estimation.recursive_filter`; beyond the paper (docs/theory.md).
    """
    check_choice("direction", direction, get_args(Direction))
    smooth = direction == "smooth"
    problem = make_problem(sde, times, observations, query_times, initial, robust=True, smooth=smooth)
    grid = problem.grid
    found, covariance = _filtered(problem, robust=True)
    mean, covariance = (along_grid(x, grid.query_index) for x in (found.estimates.mean, covariance))
    order = torch.where(grid.observation_index < 0, grid.length, grid.observation_index).argsort(dim=-1)
    weights = along_grid(found.weights, order[:, : grid.observation_count])
    return RecursiveEstimate(*(_of_series(x, grid.batch_shape) for x in (mean, covariance, weights)))
