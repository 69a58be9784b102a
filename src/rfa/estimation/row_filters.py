"""Filters and smoothers of the rows of a grid, compiled or in PyTorch with the same results; `recursive_estimate`."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Real
from torch import Tensor

from rfa.checks import check_choice

from .compiled import FilterProblem, run, threads_for
from .gaussian import Gaussian
from .linear_sde import LinearSDE
from .matrices import InitialMoments
from .problem import EstimationProblem, ObservationGrid, Transitions, along_grid, make_problem
from .recursive_filter import Recursion, diffuse_start, kalman_pass, overflow_error, robust_pass
from .robust_weight import SCALES, NoiseScale

Direction = Literal["filter", "smooth"]
Carried = Gaussian | Recursion  # what the Kalman filter and the robust filter carry from one row to the next


class StateMoments(NamedTuple):
    """Mean and covariance of the state at each row. The covariance is infinite in diffuse directions."""

    mean: Float[Tensor, "b grid n"]
    covariance: Float[Tensor, "b grid n n"]


class FilteredRows(NamedTuple):
    """What a filter or a smoother finds at each row of b series."""

    estimates: StateMoments  # after each row in a filter, given all rows in a smoother
    predicted: StateMoments | None  # before each row is used, by the filter. None unless asked for
    weights: Float[Tensor, "b grid"]  # of each row, in (0, 1]
    least_squares: Float[Tensor, "b grid"] | None  # of the Kalman filter: the smallest sum of squares so far
    carried: Carried  # what the filter carries on from the last row


def filter_rows(
    grid: ObservationGrid,
    transitions: Transitions,
    start: Carried | None,
    *,
    compiled: bool,
    robust: bool = False,
    smooth: bool = False,
    predict: bool = False,
) -> FilteredRows:
    """The Kalman filter, the robust filter, or their smoothers. The rows of a robust one must be bounded.

    Args:
        start: the state before the first row, or what earlier rows carry on, predicted to it. None: a diffuse start.
        compiled: whether compiled code does it, without gradients.
        predict: whether to give what is predicted too. Series must not share a covariance then.
    """
    if not compiled:
        return _looped(grid, transitions, start, robust, smooth, predict)
    if robust and smooth:
        weights = _compiled("robust_filter", grid, transitions, start, True, False).weights
        found = _compiled("filter", grid.weighted(weights), transitions, start, True, predict)
        return found._replace(weights=weights, least_squares=None)
    return _compiled("robust_filter" if robust else "filter", grid, transitions, start, smooth, predict)


def _looped(
    grid: ObservationGrid, transitions: Transitions, start: Carried | None, robust: bool, smooth: bool, predict: bool
) -> FilteredRows:
    """By loops in PyTorch, with gradients."""
    start = diffuse_start(grid, transitions) if start is None else start
    carried: Carried
    if robust:
        start = Recursion.first(start) if isinstance(start, Gaussian) else start
        passed, carried = robust_pass(grid, transitions, start, smooth)
    else:
        assert isinstance(start, Gaussian)
        passed = kalman_pass(grid, transitions, start)
        carried = passed.states[-1].posterior
    states = passed.estimates(smooth)
    predicted, least_squares = None, None
    if predict:
        predicted = _moments([passed.without_challengers(state.predicted) for state in passed.states])
    if not robust:
        least_squares = torch.stack([state.least_squares for state in states], dim=1)
    return FilteredRows(_moments(states), predicted, passed.weight[: len(grid.times)], least_squares, carried)


def _moments(states: list[Gaussian]) -> StateMoments:
    mean = torch.stack([state.mean for state in states], dim=1)
    return StateMoments(mean, torch.stack([state.full_covariance() for state in states], dim=1))


@torch.no_grad()
def _compiled(
    entry: Literal["filter", "robust_filter"],
    grid: ObservationGrid,
    transitions: Transitions,
    start: Carried | None,
    smooth: bool,
    predict: bool,
) -> FilteredRows:
    """By compiled code. In smoothing "robust_filter" gives weights by past and future beside the filter."""
    (b, length, m), n = grid.values.shape, grid.rows.shape[-1]
    robust, resumed = entry == "robust_filter", None
    if start is None:
        start_mean, start_covariance = grid.values.new_zeros(b, n), grid.values.new_zeros(grid.models, n, n)
    else:
        state = start if isinstance(start, Gaussian) else start.state
        start_mean, start_covariance = state.mean[:b], state.covariance[:b]
        resumed = None if isinstance(start, Gaussian) else packed(start)
    covariances = b if robust else max(grid.models, len(start_covariance))
    threads = threads_for(covariances, m * length, n)
    mean, of_rows = grid.values.new_empty(b, length, n), grid.values.new_empty(b, length)
    covariance, overflow = mean.new_empty(covariances, length, n, n), torch.full((covariances,), -1)
    needed = predict or (robust and smooth)  # the compiled smoother goes back over the predictions
    predicted = StateMoments(torch.empty_like(mean), torch.empty_like(covariance)) if needed else None
    carried = mean.new_empty(b, 2 * (n + n * n + 2 * SCALES) + 2) if robust else None
    run(
        entry,
        FilterProblem(b, covariances, grid.models, length, m, n, threads, smooth, start is None),
        rows=grid.rows.contiguous(),
        values=grid.values.contiguous(),
        transition=transitions.transition.contiguous(),
        variance=transitions.variance.contiguous(),
        lag_index=transitions.index.expand(grid.models, -1).contiguous(),
        start_mean=start_mean.contiguous(),
        start_covariance=start_covariance.expand(covariances, n, n).contiguous(),
        mean=mean,
        covariance=covariance,
        least_squares=None if robust else of_rows,
        weight=of_rows if robust else None,
        predicted_mean=None if predicted is None else predicted.mean,
        predicted_covariance=None if predicted is None else predicted.covariance,
        resumed=resumed,
        carried=carried,
        overflow=overflow,
    )
    if bool((overflow >= 0).any()):
        raise overflow_error(int(overflow[overflow >= 0].min()))
    estimates = StateMoments(mean, covariance.expand(b, length, n, n))
    predicted = predicted if predict else None
    if carried is not None:
        return FilteredRows(estimates, predicted, of_rows, None, _unpacked(carried, n))
    last = Gaussian(mean[:, -1], covariance[:, -1], None, of_rows[:, -1])
    return FilteredRows(estimates, predicted, torch.ones_like(of_rows), of_rows, last)


def packed(carried: Carried) -> Float[Tensor, "b numbers"]:
    """As robust.cpp has it: of each series the filter and its challenger, then `trusted` and the odds.

    Of the Kalman filter: mean and covariance.
    """
    if isinstance(carried, Gaussian):
        return torch.cat([carried.mean, carried.covariance.flatten(1)], dim=1)
    state, scale, trusted, log_odds = carried
    each = torch.cat([state.mean, state.covariance.flatten(1), scale.counts, scale.last], dim=1)
    filters, challengers = each.chunk(2)
    return torch.cat([filters, challengers, trusted[:, None], log_odds[:, None]], dim=1)


def _unpacked(numbers: Float[Tensor, "b numbers"], n: int) -> Recursion:
    """What `packed` has packed, of states of n entries."""
    each = torch.cat(numbers[:, :-2].chunk(2, dim=1))
    mean, covariance, counts, last = each.split([n, n * n, SCALES, SCALES], dim=1)
    state = Gaussian(mean, covariance.unflatten(1, (n, n)), None, mean.new_zeros(len(mean)))
    return Recursion(state, NoiseScale(counts, last), numbers[:, -2], numbers[:, -1])


def filter_problem(problem: EstimationProblem, robust: bool) -> tuple[FilteredRows, Float[Tensor, "b grid n n"]]:
    """The filter or the smoother of a problem, and its covariance: the stationary one where nothing is observed."""
    options = {"compiled": problem.compiled, "robust": robust, "smooth": problem.smooth}
    found = filter_rows(problem.grid, problem.transitions, problem.initial, **options)
    covariance, stationary = found.estimates.covariance, problem.stationary
    if stationary is not None and bool((unseen := problem.observation_counts() == 0).any()):
        covariance = torch.where(unseen[..., None, None], stationary[:, None], covariance)
    return found, covariance


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
    check_choice("direction", direction, Direction)
    smooth = direction == "smooth"
    problem = make_problem(sde, times, observations, query_times, initial, robust=True, smooth=smooth)
    grid = problem.grid
    found, covariance = filter_problem(problem, robust=True)
    mean, covariance = (along_grid(x, grid.query_index) for x in (found.estimates.mean, covariance))
    weights = along_grid(found.weights, grid.observation_rows)
    return RecursiveEstimate(*(grid.by_series(x) for x in (mean, covariance, weights)))
