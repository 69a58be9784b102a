"""The robust estimator: transport, weigh, average, and again."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from .dense import dense_rows
from .fused import fused_rows
from .kalman import kalman_rows
from .linear_sde import LinearSDE
from .matrices import check_start
from .observations import Grid, make_grid
from .penalties import Belief, Number, Penalty
from .plan import Plan, Row, Start, known_start

EstimatorPrior = Literal["lyapunov", "riccati"]
Direction = Literal["filter", "smooth"]
EstimatorBackend = Literal["dense", "fused"]


class Estimate(NamedTuple):
    """What `robust_estimate` finds at each query time.

    mean: `(..., Tq, n)`.
    covariance: `(..., Tq, n, n)`; infinite where nothing is known.
    weights: w_ij, `(..., Tq, T)`: how far query i believed observation j; 0 where it did not see it.
    objective: `(iterations + 1, ...)`: the sum of all queries' penalties, at the start and after each step.
        None with `backend="fused"`: the operator sums weights, not penalties, and a pass over all pairs in PyTorch
        would take several times as long as the estimate.
    """

    mean: Tensor
    covariance: Tensor
    weights: Tensor | None
    objective: Tensor | None


def robust_estimate(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    *,
    nu: Number = 16.0,
    kappa: Number | None = 2.0,
    penalty: Penalty = "power",
    prior: EstimatorPrior = "riccati",
    iterations: int = 5,
    start: Start = "recursive",
    direction: Direction = "filter",
    query_times: Tensor | None = None,
    initial: tuple[Tensor, Tensor] | None = None,
    return_weights: bool = True,
    backend: EstimatorBackend = "dense",
) -> Estimate:
    """Robust, precision-weighted estimates of the state of a linear SDE.

    By default a robust Kalman filter that needs no tuning: outliers of any size, in bursts too, cost little, and where
    there are none the error is 1 or 2 % above the Kalman filter's. `nu=inf` is the Kalman filter itself;
    `prior="lyapunov", nu=..., kappa=None, iterations=1, start="query"` is the paper's estimator.

    Every observation that a query sees is transported to the query's time, with the uncertainty that it gathers on the
    way, and weighted by `w_ij = (1 + d_ij^2 / nu)^-kappa` at the current estimate:

        xbar_i = (sum_j w_ij N_ij)^-1 sum_j w_ij u_ij

    lyapunov (the paper's): `N_ij = (V_ij + Phi_ij (C^T R^-1 C)^-1 Phi_ij^T)^-1`, the precision of the transported
        observation alone; `d_ij^2` is measured with it. Observations count as independent, a long past is overcounted.
    riccati: `N_ij = P_i^-1 Psi_ij K_j C Phi_ij^-1` with the exact Kalman gains K: correlations through shared forcing
        are accounted for. `d_ij^2` is measured with `Sigma_ij + P_i`. With `nu = inf` this is the Kalman filter, with
        `direction="smooth"` the two-filter smoother. A source whose share has grown beyond ten standard deviations
        (coupled modes of very different decay) always counts as the filter counts it.

    No inverse of C is taken, so it may have any shape; what is missing (NaN) says nothing. Time is quadratic in T,
    except that the Kalman filter (`prior="riccati"`, `nu=inf`, `return_weights=False`) is linear.

    Args:
        sde: of n states seen through m components.
        times: `(T,)` or `(..., T)`, strictly increasing; any intervals.
        observations: `(..., T, m)`, NaN where a component is missing. In smoothing, fill values among the first rows
            that lie 1e7 times further off than the others count as missing (`rfa.estimation.observations.plausible`).
        nu: degrees of freedom of the Student-t residual, >= 1e-6; infinite: every weight is 1.
        kappa: exponent > 0; None: the paper's, `(nu + m) / m`, with the model's m also for rows missing in part.
        penalty: "power" as above, or "welsch", `w = exp(-d^2 / m)`, which does not use nu.
        prior: "riccati" or "lyapunov".
        iterations: steps of EM, or of iteratively reweighted least squares, >= 1.
        start: where the first weights are taken.
            "recursive": at the estimate of a recursive robust filter (`rfa.estimation.recursion`). It judges each row
            by what has been believed before it; in smoothing, from both sides. With the Riccati prior its gains take
            the place of the Kalman filter's. With g_j the gain that it gave row j in units of the Kalman gain, N_ij
            and u_ij have the weight `w_ij / g_j`, and `d_ij^2` is measured with R times the scale of the middle row.
            "leave_one_out": at the Gaussian estimate without the query's own observation. Outliers far off, or many,
            throw that about.
            "query" (the paper's): at the observation of the query's own moment. An outlier vouches for itself.
            Where nothing was seen at the query's time both of these start at the Gaussian estimate; so does
            "leave_one_out" where the prediction has more than a hundred times the measurement's variance.
        direction: "filter" uses the past and the present, "smooth" the future too.
        query_times: `(Tq,)` or `(..., Tq)` in any order; later than all observations is a forecast. `times` by default.
        initial: mean `(..., n)` and covariance `(..., n, n)` of the state at the first moment of all; by default
            nothing is known of it (a diffuse start). Its leading dimensions broadcast with those of the series: one
            series with three starts has three estimates.
        return_weights: off, `weights` is None.
        backend: "dense": any model, float64. "fused": isotropic models (`A = -mu I` and rotations of pairs of states,
            mu >= 0; Q, C and R multiples of the identity), `direction="filter"`, `return_weights=False`, another start
            than "recursive", whole rows missing or none, an isotropic `initial` covariance. The attention operator
            computes the same, in O(T) memory a series, in float32 where it has a kernel (`rfa doctor`), else in
            float64. Gradients, once only there, are those of the isotropic family and flow to the observations, times,
            initial state and matrices.

    Returns:
        An `Estimate`. Where a query sees nothing it is the stationary distribution, or, where there is none, zero with
        an infinite variance; where it sees too little, the variance of what is unknown is infinite. The covariance is
        `(sum_j w_ij N_ij)^-1`, with weights over their mean and over the M-estimator's variance if all is Gaussian
        (`Belief.consistency`), both for as many components as each row shows. So where rows are missing in part, in
        unlike ways, N_ij and u_ij count times the two numbers of a whole row over those of theirs. With the Riccati
        prior and several states the weighted N_ij may add up to a matrix that is not positive: as much of the
        filter's own estimate is added as makes it so, and no covariance is smaller than the largest weight allows.
        The objective is `sum_j rho(d_ij^2)`, with the same factor; with the Riccati prior each term also has the weight
        `tr P_i N_ij / tr P_i (Sigma_ij + P_i)^-1`, or 0 where that is negative, and `initial` is one more term, its
        rho the identity. With the Riccati prior and dynamics that are not isotropic a step that would raise it is
        halved until it does not, at last not taken. With the Lyapunov prior the objective leaves `initial` out, and
        does not rise without it.

    Raises:
        ValueError: naming the argument, what was given and what was expected; also `observation_noise` where the R of
            what is seen is singular, and `observations` where there is no series at all.

    Source: appendix A.3, equations `precision_weighted_average` and `conditional_objective`; the Riccati prior and the
    recursive start go beyond the paper (docs/theory.md).
    """
    for name, given, choices in (
        ("prior", prior, get_args(EstimatorPrior)),
        ("start", start, get_args(Start)),
        ("direction", direction, get_args(Direction)),
        ("backend", backend, get_args(EstimatorBackend)),
    ):
        if given not in choices:
            raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(map(repr, choices))}")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations: got {iterations!r}, expected a whole number >= 1")
    belief = Belief.of(nu, kappa, sde.observation_size, penalty)
    plan = Plan(prior == "riccati", direction == "smooth", belief, iterations, start, return_weights)
    if backend == "fused":
        _check_fused(plan)
    robust = plan.smooth and not belief.gaussian
    if initial is None:
        grid, known = make_grid(sde, times, observations, query_times, robust=robust), None
    else:
        mean, covariance = check_start(sde.state_size, initial)
        starts = (mean.shape[:-1], covariance.shape[:-2])
        grid = make_grid(sde, times, observations, query_times, starts, robust=robust)
        known = known_start(grid, mean, covariance)
    rows = fused_rows if backend == "fused" else kalman_rows if plan.kalman else dense_rows
    return _shaped(grid, rows(sde, grid, plan, known))


def _check_fused(plan: Plan) -> None:
    if plan.smooth:
        raise ValueError("direction: got 'smooth', expected 'filter' with backend='fused': its operator sees the past")
    if plan.start == "recursive" and not plan.belief.gaussian:
        raise ValueError(
            "start: got 'recursive', expected 'leave_one_out' or 'query' with backend='fused': its operator has the "
            "Kalman filter's gains"
        )
    if isinstance(plan.belief.nu, Tensor) or isinstance(plan.belief.kappa, Tensor):
        raise ValueError("nu, kappa: got a tensor that wants a gradient, expected numbers with backend='fused'")
    if plan.with_weights:
        raise ValueError("return_weights: got True, expected False with backend='fused': it keeps no weights")


def _shaped(grid: Grid, rows: Row) -> Estimate:
    """With the batch dimensions as they were given."""

    def shaped(x: Tensor) -> Tensor:
        return x.reshape(*grid.shape, *x.shape[1:])

    weights = None if rows.weights is None else shaped(rows.weights)
    total = None if rows.objective is None else rows.objective.sum(1).T
    objective = None if total is None else total.reshape(len(total), *grid.shape)
    return Estimate(shaped(rows.mean), shaped(rows.covariance), weights, objective)
