"""Filter, smoother and likelihood of readings in PyTorch, where there is no compiler: one reading after another.

`readings_filter` has the same on compiled code. Tests hold one against the other.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from .gaussian import Gaussian, Information
from .grid import ObservationGrid, Transitions
from .kalman import backward_information, combined, kalman_filter
from .readings_problem import Carried, FilteredReadings, ReadingsProblem, StateMoments
from .recursive_filter import Recursion, resumed_filter, robust_smoother

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
