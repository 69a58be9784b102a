"""Filter, smoother and likelihood of the readings of a series, on compiled code, in linear time and memory.

Where there is no compiler they run in PyTorch (`readings_loop`).
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .compiled import FilterProblem, Lags, LikelihoodProblem, can_run, run, threads_for, transitions
from .gaussian import Gaussian, Information
from .grid import ObservationGrid, Transitions, bounded_values
from .kalman import backward_information, combined, kalman_filter, overflow_error, unit_weights
from .linear_sde import LinearSDE
from .problem import EstimationProblem, QueryEstimate, along_grid
from .readings_problem import Carried, FilteredReadings, ReadingsProblem, StateMoments
from .recursive_filter import NoiseScale, Recursion, resumed_filter, robust_smoother

# The Kalman filter and smoother of a problem, and the recursive robust filter, on compiled code


def compiled_kalman_estimate(problem: EstimationProblem) -> QueryEstimate | None:
    """What `kalman.kalman_estimate` gives at every query, `(b, queries, ...)`.

    None where compiled code cannot give it: gradients are wanted, a device other than the CPU, no compiler.
    """
    if not can_compile(problem):
        return None
    grid, options, index, weights = problem.grid, problem.options, problem.grid.query_index, None
    with torch.no_grad():
        mean, covariance, least_squares = compiled_filter(problem, "filter")
        objective = least_squares.clamp(min=0.0)[..., None].expand(*mean.shape[:2], options.iterations + 1)
        if options.with_weights:
            indices = index[: grid.models].unique()
            weights = unit_weights(grid, indices, options.smooth)
            weights = along_grid(weights, torch.searchsorted(indices, index.contiguous()))
        if grid.length != grid.observation_count or index.shape[1] != grid.length:  # there are queries of their own
            mean, covariance, objective = (along_grid(x, index) for x in (mean, covariance, objective))
    return QueryEstimate(mean, covariance, weights, objective)


def can_compile(problem: EstimationProblem) -> bool:
    """Whether compiled code takes a problem: on the CPU, with a compiler, without gradients."""
    grid, initial, sde = problem.grid, problem.initial, problem.sde
    matrices = sde.dynamics, sde.diffusion, sde.observation, sde.observation_noise
    given = (*matrices, grid.times, grid.rows, grid.values, *(initial or ()))
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given)) and can_run(*given)


def compiled_filter(
    problem: EstimationProblem, entry: Literal["filter", "robust_filter"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance at each time index, `(b, G, ...)`, and the least squares, or the weights, of each row.

    In smoothing "robust_filter" gives the weights by past and future; mean and covariance are the filter's.

    Raises:
        ValueError: where the covariance overflows.
    """
    grid, initial = problem.grid, problem.initial
    (b, length, m), n = grid.values.shape, grid.rows.shape[-1]
    transition, variance, lag_index = _compiled_transitions(problem.sde, grid)
    start_mean = grid.values.new_zeros(b, n) if initial is None else initial.mean
    start_covariance = grid.values.new_zeros(grid.models, n, n) if initial is None else initial.covariance
    robust = entry == "robust_filter"
    covariances = b if robust else max(grid.models, len(start_covariance))
    threads = threads_for(covariances, m * length, n)
    found = FilterProblem(b, covariances, grid.models, length, m, n, threads, problem.options.smooth, initial is None)
    mean, of_rows = grid.values.new_empty(b, length, n), grid.values.new_empty(b, length)
    covariance, overflow = mean.new_empty(covariances, length, n, n), torch.full((covariances,), -1)
    predicted = robust and problem.options.smooth
    run(
        entry,
        found,
        rows=grid.rows.reshape(-1, m, n).contiguous(),
        row_index=torch.arange(grid.models * length),
        values=grid.values.contiguous(),
        transition=transition.contiguous(),
        variance=variance.contiguous(),
        lag_index=lag_index.contiguous(),
        start_mean=start_mean.contiguous(),
        start_covariance=start_covariance.expand(covariances, n, n).contiguous(),
        mean=mean,
        covariance=covariance,
        least_squares=None if robust else of_rows,
        weight=of_rows if robust else None,
        predicted_mean=torch.empty_like(mean) if predicted else None,
        predicted_covariance=torch.empty_like(covariance) if predicted else None,
        overflow=overflow,
    )
    if bool((overflow >= 0).any()):
        raise overflow_error(int(overflow[overflow >= 0].min()))
    covariance, stationary = covariance.expand(b, length, n, n), problem.stationary
    if stationary is not None and bool((unseen := problem.observation_counts() == 0).any()):
        covariance = torch.where(unseen[..., None, None], stationary[:, None], covariance)
    return mean, covariance, of_rows


def _compiled_transitions(sde: LinearSDE, grid: ObservationGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Phi and V of each different lag, `(lags, n, n)`, and which of them each step has, `(models, G - 1)`."""
    if sde.batch_shape.numel() == 1:
        lags = Lags.of(grid.times[: grid.models])
        return *transitions(sde, lags.lags), lags.index
    each, n = Transitions.of(sde, grid), sde.state_size
    transition, variance = (x.reshape(-1, n, n) for x in (each.transition, each.variance))
    return transition, variance, torch.arange(len(transition))


# Filter, smoother and likelihood of readings in PyTorch, where there is no compiler: one reading after another

_NO_PART = 1e-12  # relative: a direction of which the readings show less is not shown


def looped_filter(problem: ReadingsProblem, first: Carried, robust: bool) -> FilteredReadings:
    """As `readings_filter.filter_readings`."""
    grid, transitions = _grid(problem), _transitions(problem)
    if not robust:
        assert isinstance(first, Gaussian)
        states = kalman_filter(grid, transitions, first)
        ones = torch.ones(grid.length, dtype=torch.float64)
        predicted, found = [state.predicted for state in states], [state.posterior for state in states]
        return FilteredReadings(_moments(predicted), _moments(found), ones, found[-1])
    grid = grid.bounded()
    start = Recursion.first(first) if isinstance(first, Gaussian) else first
    passed, recursion = resumed_filter(grid, transitions, start)
    predicted = [passed.without_challengers(state.predicted) for state in passed.states]
    estimates = [passed.without_challengers(state.posterior) for state in passed.states]
    return FilteredReadings(_moments(predicted), _moments(estimates), _weights(passed.grid, grid), recursion)


def looped_smoother(problem: ReadingsProblem, first: Gaussian, robust: bool) -> tuple[StateMoments, Tensor]:
    """The states given all readings, and the weights of the readings."""
    grid, transitions = _grid(problem), _transitions(problem)
    weights = torch.ones(grid.length, dtype=torch.float64)
    if robust:
        bounded = grid.bounded()
        passed = robust_smoother(bounded, transitions, first)
        grid, weights, states = passed.grid, _weights(passed.grid, bounded), passed.states
    else:
        states = kalman_filter(grid, transitions, first)
    later = backward_information(grid, transitions)
    both = zip(states, later, strict=True)
    return _moments([combined(state.posterior, information)[0] for state, information in both]), weights


def looped_log_likelihood(problem: ReadingsProblem) -> Float[Tensor, " b"]:
    """As `readings_filter.exact_log_likelihood`."""
    grid, transitions = _grid(problem), _transitions(problem)
    zero = problem.covariance.new_zeros(problem.covariance.shape[:-1])
    states = kalman_filter(grid, transitions, Gaussian(zero, problem.covariance, None, zero[:, 0]))
    mean = torch.stack([state.predicted.mean for state in states], dim=1)
    covariance = torch.stack([state.predicted.covariance for state in states], dim=1)
    row = grid.rows[:, :, 0]
    deviation = (1 + (row * (covariance @ row[..., None])[..., 0]).sum(-1)).sqrt()
    residual = (grid.values[..., 0] - (row * mean).sum(-1)) / deviation
    columns = torch.diag(problem.units)[:, problem.units > 0].expand(len(zero), -1, -1)
    shown = []
    for k, state in enumerate(states):
        columns = transitions[k - 1][0] @ columns if k else columns
        shown.append(row[:, k, None, :] @ columns)
        columns = columns - state.gains[0][..., None] * shown[-1]
    design = torch.cat(shown, dim=-2) / deviation[..., None]
    reduced = torch.linalg.qr(torch.cat([design, residual[..., None]], dim=-1), mode="r").R.diagonal(dim1=-2, dim2=-1)
    count = min(design.shape[-1], reduced.shape[-1])
    sizes, lengths = reduced[:, :count].abs(), design[..., :count].square().sum(-2).sqrt()
    determined = (
        torch.where(sizes > _NO_PART * lengths, sizes, 1.0).log().sum(-1) - problem.units[problem.units > 0].log().sum()
    )
    rest = reduced[:, count:].square().sum(-1)
    logarithms = torch.where(grid.present, deviation.log() + (problem.noise.log() + math.log(2 * math.pi)) / 2, 0.0)
    return -rest / 2 - determined - logarithms.sum(-1)


def _grid(problem: ReadingsProblem) -> ObservationGrid:
    """The readings in units of their noise."""
    rows, values = problem.whitened()
    rows, values = rows[:, :, None, :], values[..., None]
    b, length = values.shape[:2]
    times = torch.from_numpy(problem.table.readings.times).expand(b, -1)
    index, present = torch.arange(length).expand(b, -1), problem.present.expand(b, -1)
    information, counts, lags = Information.of(rows, values), present.to(torch.long), times.diff(dim=-1)
    return ObservationGrid(
        times, rows, values, values, information, index, index, present, counts, lags, torch.Size([b])
    )


def _transitions(problem: ReadingsProblem) -> Transitions:
    """Of each step."""
    return Transitions(*(x[:, problem.table.lag_index] for x in (problem.transition, problem.variance)))


def _moments(states: list[Gaussian]) -> StateMoments:
    """Of one series."""
    return StateMoments(
        torch.stack([state.mean[0] for state in states]), torch.stack([state.covariance[0] for state in states])
    )


def _weights(weighted: ObservationGrid, grid: ObservationGrid) -> Float[Tensor, " T"]:
    """The weights by which the rows of one series were multiplied. 1 where nothing was read."""
    before, after = (x.rows[0].square().sum((-2, -1)) for x in (grid, weighted))
    return torch.where(before > 0, after / torch.where(before > 0, before, 1.0), 1.0)


@torch.no_grad()
def filter_readings(problem: ReadingsProblem, first: Carried, robust: bool) -> FilteredReadings:
    """The Kalman filter, or the robust filter, of one series.

    Args:
        problem: with b = 1.
        first: the state before the first reading, or what earlier readings carry on, predicted to it.
        robust: which of the two.

    Raises:
        ValueError: where the covariance overflows.
    """
    if not can_run():
        return looped_filter(problem, first, robust)
    found = _compiled(problem, "robust_filter" if robust else "filter", first)
    predicted = StateMoments(found["predicted_mean"][0], found["predicted_covariance"][0])
    estimates = StateMoments(found["mean"][0], found["covariance"][0])
    if robust:
        carried: Carried = _unpacked(found["carried"], predicted.mean.shape[-1])
    else:
        carried = Gaussian(found["mean"][:, -1], found["covariance"][:, -1], None, found["least_squares"][:, -1])
    return FilteredReadings(predicted, estimates, found["weight"][0], carried)


@torch.no_grad()
def smooth_readings(
    problem: ReadingsProblem, first: Gaussian, filtered: FilteredReadings, robust: bool
) -> FilteredReadings:
    """The Kalman smoother, or the robust smoother, of one series, its start and its filter."""
    if not can_run():
        estimates, weights = looped_smoother(problem, first, robust)
        return filtered._replace(estimates=estimates, weights=weights)
    weight = _compiled(problem, "robust_filter", first, smooth=True)["weight"] if robust else None
    found = _compiled(problem, "filter", first, smooth=True, weight=weight)
    return filtered._replace(
        estimates=StateMoments(found["mean"][0], found["covariance"][0]), weights=found["weight"][0]
    )


@torch.no_grad()
def exact_log_likelihood(problem: ReadingsProblem) -> Float[Tensor, " b"]:
    """`log p` of all readings by the Kalman filter with an exact diffuse start, in nats.

    With e the innovations from a start at zero and W the innovations from a start at each diffuse direction alone, both
    over their standard deviations s:

        -(N log 2 pi + log det W^T W + min_d |e - W d|^2) / 2 - sum_k log s_k

    This is the value of the diffuse recursion. It keeps its digits where many readings are needed to tell the diffuse
    directions from each other.

    Source: De Jong, The diffuse Kalman filter (1991).
    """
    if not can_run():
        return looped_log_likelihood(problem)
    table = problem.table
    b, lags, n, _ = problem.transition.shape
    found = problem.covariance.new_empty(b)
    sizes = b, len(problem), n, problem.sensor_noise.shape[1], lags, threads_for(b, len(problem), n)
    run(
        "likelihood",
        LikelihoodProblem(*sizes),
        rows=table.rows,
        values=table.values,
        sensor=table.sensor,
        noise=table.noise,
        sensor_noise=problem.sensor_noise.contiguous(),
        lag_index=table.lag_index,
        transition=problem.transition.contiguous(),
        variance=problem.variance.contiguous(),
        covariance=problem.covariance.contiguous(),
        units=problem.units,
        log_likelihood=found,
    )
    return found


def _compiled(
    problem: ReadingsProblem,
    entry: Literal["filter", "robust_filter"],
    first: Carried,
    *,
    smooth: bool = False,
    weight: Float[Tensor, "1 T"] | None = None,
) -> dict[str, Tensor]:
    """What the kernels write, each with a dimension for one series. `weight`: of the readings, for "filter"."""
    rows, values = problem.whitened()
    (_, length, n), robust = rows.shape, entry == "robust_filter"
    if robust or weight is not None:
        values = bounded_values(rows, values)
    if weight is not None:
        rows, values = rows * weight.sqrt()[..., None], values * weight.sqrt()
    start = Recursion.first(first) if isinstance(first, Gaussian) else first
    mean, covariance = start.state.mean[:1], start.state.covariance[:1]
    written = {"mean": values.new_empty(1, length, n), "covariance": values.new_empty(1, length, n, n)}
    written |= {f"predicted_{name}": torch.empty_like(x) for name, x in written.items()}
    overflow = torch.full((1,), -1)
    others: dict[str, Any] = {}
    if robust:
        others["resumed"] = packed = _packed(start)
        written |= {"weight": torch.empty_like(values), "carried": torch.empty_like(packed)}
    else:
        written["least_squares"] = torch.empty_like(values)
    run(
        entry,
        FilterProblem(1, 1, 1, length, 1, n, 1, smooth, False),
        rows=rows.contiguous(),
        row_index=torch.arange(length),
        values=values.contiguous(),
        transition=problem.transition[0].contiguous(),
        variance=problem.variance[0].contiguous(),
        lag_index=problem.table.lag_index,
        start_mean=mean.contiguous(),
        start_covariance=covariance.contiguous(),
        overflow=overflow,
        **written,
        **others,
    )
    if overflow >= 0:
        raise overflow_error(int(overflow))
    if not robust:
        written["weight"] = torch.ones_like(values) if weight is None else weight
    return written


def _packed(carried: Recursion) -> Tensor:
    """As robust.cpp has it, of one filter and its challenger."""
    state, scale, trusted, log_odds = carried
    each = [state.mean, state.covariance.flatten(1), scale.counts, scale.last]
    return torch.cat([torch.cat(each, dim=1).flatten(), trusted, log_odds])


def _unpacked(carried: Tensor, n: int) -> Recursion:
    """What `_packed` has packed, of states of n entries."""
    scales = NoiseScale.prior(carried[:1]).counts.shape[1]
    mean, covariance, counts, last = carried[:-2].reshape(2, -1).split([n, n * n, scales, scales], dim=1)
    state = Gaussian(mean, covariance.reshape(2, n, n), None, mean.new_zeros(2))
    return Recursion(state, NoiseScale(counts, last), carried[-2:-1], carried[-1:])
