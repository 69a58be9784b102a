"""The paper's robust estimator: transport, weigh, average, and again."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .consensus import Row, estimate_row
from .fused import fused_estimate
from .information import Information
from .isotropic import Isotropic
from .kalman import kalman_information
from .linear_sde import LinearSDE
from .matrices import check_covariance, real
from .observations import Grid, Steps, flat, make_grid
from .penalties import Belief, Penalty
from .sources import Sources, nothing

EstimatorPrior = Literal["lyapunov", "riccati"]
Start = Literal["query", "leave_one_out"]
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


@dataclass(frozen=True)
class _Plan:
    riccati: bool
    smooth: bool
    belief: Belief
    iterations: int
    leave_one_out: bool


def robust_estimate(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    *,
    nu: float = torch.inf,
    kappa: float | None = None,
    penalty: Penalty = "power",
    prior: EstimatorPrior = "lyapunov",
    iterations: int = 1,
    start: Start = "query",
    direction: Direction = "filter",
    query_times: Tensor | None = None,
    initial: tuple[Tensor, Tensor] | None = None,
    return_weights: bool = True,
    backend: EstimatorBackend = "dense",
) -> Estimate:
    """Robust, precision-weighted estimates of the state of a linear SDE (appendix A.3, SPEC section 7).

    Every observation that a query sees is transported to the query's time, with the uncertainty that it gathers on the
    way, and weighted by `w_ij = (1 + d_ij^2 / nu)^-kappa` at the current estimate:

        xbar_i = (sum_j w_ij N_ij)^-1 sum_j w_ij u_ij

    lyapunov (the paper's): `N_ij = (V_ij + Phi_ij (C^T R^-1 C)^-1 Phi_ij^T)^-1`, the precision of the transported
        observation alone; `d_ij^2` is measured with it. Observations count as independent, a long past is overcounted.
    riccati: `N_ij = P_i^-1 Psi_ij K_j C Phi_ij^-1` with the exact Kalman gains K: correlations through shared forcing
        are accounted for. `d_ij^2` is measured with `Sigma_ij + P_i`. With `nu = inf` this is the Kalman filter, with
        `direction="smooth"` the two-filter smoother.

    No inverse of C is taken, so it may have any shape; what is missing (NaN) says nothing. Time is quadratic in T,
    except that the Kalman filter (`prior="riccati"`, `nu=inf`, `return_weights=False`) is linear.

    Args:
        sde: of n states seen through m components.
        times: `(T,)` or `(..., T)`, strictly increasing; any intervals.
        observations: `(..., T, m)`, NaN where a component is missing.
        nu: degrees of freedom of the Student-t residual, > 0; infinite: every weight is 1.
        kappa: exponent, by default `(nu + m) / m`.
        penalty: "power" as above, or "welsch", `w = exp(-d^2 / m)`, which does not use nu.
        prior: "lyapunov" or "riccati".
        iterations: steps of EM, or of iteratively reweighted least squares, >= 1.
        start: where the first weights are taken: "query", at the observation of the query's own moment, or
            "leave_one_out", at the Gaussian estimate without it, so that an outlier does not vouch for itself. Where
            nothing was seen at the query's time both start at the Gaussian estimate.
        direction: "filter" uses the past and the present, "smooth" the future too.
        query_times: `(Tq,)` or `(..., Tq)` in any order; later than all observations is a forecast. `times` by default.
        initial: mean `(..., n)` and covariance `(..., n, n)` of the state at the first moment of all; by default
            nothing is known of it (a diffuse start).
        return_weights: off, `weights` is None.
        backend: "dense": any model, float64. "fused": isotropic models (`A = -mu I` and rotations of pairs of states,
            mu >= 0; Q, C and R multiples of the identity), `direction="filter"`, `return_weights=False`, whole rows
            missing or none, an isotropic `initial` covariance. The attention operator computes the same, in O(T) memory
            a series, in float32 where it has a kernel (`rfa doctor`), else in float64. Gradients, once only there, are
            those of the isotropic family and flow to the observations, times, initial state and matrices.

    Returns:
        An `Estimate`. Where a query sees nothing it is the stationary distribution, or, where there is none, zero with
        an infinite variance. The covariance is `(sum_j w_ij N_ij)^-1`, with weights over their mean and over the
        M-estimator's variance if all is Gaussian (`Belief.consistency`). The objective, of observations alone, is
        `sum_j rho(d_ij^2)`; with the Riccati prior each term has the weight `tr N_ij / tr (Sigma_ij + P_i)^-1`.
        Neither rises without `initial`, except that with the Riccati prior and dynamics that are not isotropic it may,
        by a little.

    Raises:
        ValueError: naming the argument, what was given and what was expected.

    Source: equations `precision_weighted_average` and `conditional_objective`; the Riccati prior is SPEC's section 7.
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
    plan = _Plan(
        prior == "riccati",
        direction == "smooth",
        Belief(float(nu), None if kappa is None else float(kappa), sde.observation_size, penalty),
        iterations,
        start == "leave_one_out",
    )
    if backend == "fused":
        _check_fused(plan, return_weights)
    grid = make_grid(sde, times, observations, query_times)
    if backend == "fused":
        known = None if initial is None else _known(sde, grid, *initial)
        mean, covariance = fused_estimate(
            Isotropic.of(sde, grid.shape), grid, plan.belief, riccati=plan.riccati, iterations=iterations,
            leave_one_out=plan.leave_one_out, known=known,
        )  # fmt: skip
        mean, covariance = (x.reshape(*grid.shape, *x.shape[1:]) for x in (mean, covariance))
        return Estimate(mean, covariance, None, None)
    start_ = _unknown(grid, sde.state_size) if initial is None else _known(sde, grid, *initial)
    settled = _settled(sde, grid) if initial is None else None
    steps, moments = Steps.of(sde, grid), grid.wanted[: grid.models].unique()
    if plan.riccati and plan.belief.gaussian:
        rows = _kalman(grid, steps, plan, moments, start_, settled, return_weights)
    else:
        rows = _weighed(grid, steps, plan, moments, start_, settled, return_weights)
    return _collected(grid, moments, rows)


def _check_fused(plan: _Plan, return_weights: bool) -> None:
    if plan.smooth:
        raise ValueError("direction: got 'smooth', expected 'filter' with backend='fused': its operator sees the past")
    if return_weights:
        raise ValueError("return_weights: got True, expected False with backend='fused': it keeps no weights")


def _known(sde: LinearSDE, grid: Grid, mean: Tensor, covariance: Tensor) -> Information:
    mean, covariance = real("initial", mean), real("initial", covariance)
    check_covariance("initial", covariance, sde.state_size)
    if mean.shape[-1:] != (sde.state_size,) or not bool(mean.isfinite().all()):
        raise ValueError(f"initial: got a mean of shape {tuple(mean.shape)}, expected {sde.state_size} finite numbers")
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool((failed > 0).any()):
        raise ValueError("initial: got a singular covariance, expected a positive definite one")
    precision = torch.cholesky_inverse(factor)
    alike = covariance.shape[:-2].numel() == 1
    precision = precision.reshape(1, *precision.shape[-2:]) if alike else flat(precision, grid.shape, 2)
    mean = flat(mean, grid.shape, 1)
    vector = (precision @ mean[..., None])[..., 0]
    return Information(precision, vector, (vector * mean).sum(-1))


def _unknown(grid: Grid, states: int) -> Information:
    zeros = torch.zeros(len(grid.times), states, states, dtype=torch.float64, device=grid.times.device)
    return Information(zeros[:1], zeros[..., 0], zeros[..., 0, 0])


def _settled(sde: LinearSDE, grid: Grid) -> Tensor | None:
    """The stationary covariance, `(b, n, n)`, where there is one."""
    try:
        return flat(sde.stationary_covariance().detach(), grid.shape, 2)
    except ValueError:
        return None


def _kalman(
    grid: Grid,
    steps: Steps,
    plan: _Plan,
    moments: Tensor,
    start: Information,
    settled: Tensor | None,
    with_weights: bool,
) -> Row:
    """All rows at once; there is nothing to iterate."""
    known = Information(*(part[:, moments] for part in kalman_information(grid, steps, start, plan.smooth)))
    mean, covariance = known.solved(None if settled is None else settled[:, None])
    cost = known.distance(mean)[..., None].expand(*mean.shape[:2], plan.iterations + 1)
    weights = _believed(grid, moments, plan.smooth) if with_weights else None
    return Row(mean, covariance.expand(*mean.shape, mean.shape[-1]), weights, cost)


def _weighed(
    grid: Grid,
    steps: Steps,
    plan: _Plan,
    moments: Tensor,
    start: Information,
    settled: Tensor | None,
    with_weights: bool,
) -> Row:
    """Row by row: each source of each moment by itself."""
    wanted = set(moments.tolist())
    future = _futures(grid, steps, plan) if plan.smooth else {}
    past, observations = nothing(start), int(grid.key.max()) + 1
    rows = []
    for k in range(grid.times.shape[1]):
        if k:
            past = past.moved(steps, k - 1, True, plan.riccati)
        before, past = past, past.with_source(grid, k, plan.riccati)
        if k not in wanted:
            continue
        sides, others = ([past, future[k]], [before, future[k]]) if plan.smooth else ([past], [before])
        row = estimate_row(
            sides, others, grid, k, plan.belief, plan.iterations, plan.riccati, plan.leave_one_out, settled
        )
        weights = _by_observation(row.weights, sides, grid, observations) if with_weights else None
        rows.append(row._replace(weights=weights))
    mean, covariance, _, objective = zip(*rows, strict=True)
    weights = torch.stack([row.weights for row in rows if row.weights is not None], dim=1) if with_weights else None
    return Row(torch.stack(mean, dim=1), torch.stack(covariance, dim=1), weights, torch.stack(objective, dim=1))


def _futures(grid: Grid, steps: Steps, plan: _Plan) -> dict[int, Sources]:
    """What stands behind each moment, seen from it."""
    ahead = nothing(_unknown(grid, grid.seen.vector.shape[-1]))
    found = {}
    for k in reversed(range(grid.times.shape[1])):
        if k + 1 < grid.times.shape[1]:
            ahead = ahead.moved(steps, k, False, plan.riccati)
        found[k] = ahead
        ahead = ahead.with_source(grid, k, plan.riccati)
    return found


def _by_observation(values: Tensor | None, sides: list[Sources], grid: Grid, observations: int) -> Tensor:
    """`(b, T)`: the weights of a row's sources in the order of the observations."""
    moments = torch.tensor([m for side in sides for m in side.moments], device=grid.key.device, dtype=torch.long)
    assert values is not None
    key = grid.key[:, moments]
    at = torch.where(grid.present[:, moments] & (key >= 0), key, observations)  # the last: nobody's
    return values.new_zeros(len(key), observations + 1).scatter(1, at, values)[:, :observations]


def _believed(grid: Grid, moments: Tensor, smooth: bool) -> Tensor:
    """`(b, rows, T)`: the Kalman filter believes all that it sees."""
    places = torch.arange(grid.times.shape[1], device=grid.key.device).expand_as(grid.key)
    at = grid.key.masked_fill(grid.key < 0, int(grid.key.max()) + 1)  # the last: nobody's
    blank = torch.full((len(at), int(at.max()) + 1), grid.times.shape[1], device=at.device)
    latest = places.masked_fill(~grid.present, grid.times.shape[1])
    seen_at = blank.scatter(1, at, latest)[:, : int(grid.key.max()) + 1]
    limit = torch.full_like(moments, grid.times.shape[1] - 1) if smooth else moments
    return (seen_at[:, None, :] <= limit[:, None]).to(torch.float64)


def _collected(grid: Grid, moments: Tensor, rows: Row) -> Estimate:
    """Rows `(b, rows, ...)` in the order of the queries."""
    at = torch.searchsorted(moments, grid.wanted.contiguous())  # (b, queries)

    def gathered(values: Tensor) -> Tensor:
        index = at.reshape(*at.shape, *(1,) * (values.dim() - 2)).expand(*at.shape, *values.shape[2:])
        return values.gather(1, index)

    def shaped(x: Tensor) -> Tensor:
        return x.reshape(*grid.shape, *x.shape[1:])

    weights = None if rows.weights is None else shaped(gathered(rows.weights))
    objective = gathered(rows.objective).sum(1).T
    total = objective.reshape(len(objective), *grid.shape)
    return Estimate(shaped(gathered(rows.mean)), shaped(gathered(rows.covariance)), weights, total)
