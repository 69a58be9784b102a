"""`recursive_estimate`: the recursive robust filter by itself, in linear time."""

from dataclasses import replace
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float, Real
from torch import Tensor

from .grid import Transitions
from .kalman import backward_information, combined, initial_gaussian
from .linear_sde import LinearSDE
from .matrices import InitialMoments
from .problem import EstimationProblem, EstimatorOptions, along_grid, make_problem
from .readings_filter import can_compile, compiled_filter
from .recursive_filter import robust_filter, robust_smoother
from .robust import Direction
from .robust_weight import RobustWeight


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

    `robust_estimate` then reweights all rows at every query, which takes quadratic time. It is compiled code, or
    PyTorch where there is no C++ compiler or gradients are wanted.

    Args: as `robust_estimate`.

    Returns:
        Mean and covariance at the queries, and the weight of each row.

    Raises:
        ValueError: as `robust_estimate`.

    Source: `rfa.estimation.recursive_filter`; beyond the paper (docs/theory.md).
    """
    if direction not in get_args(Direction):
        raise ValueError(f"direction: got {direction!r}, expected one of {', '.join(map(repr, get_args(Direction)))}")
    size, smooth = sde.observation_size, direction == "smooth"
    options = EstimatorOptions(True, smooth, RobustWeight(1.0, 1.0, size), 1, "recursive", False)
    problem = make_problem(sde, times, observations, options, query_times, initial)
    problem = replace(problem, grid=problem.grid.bounded())
    mean, covariance, weights = (_compiled if can_compile(problem) else _in_torch)(problem)
    grid = problem.grid
    mean, covariance = (along_grid(x, grid.query_index) for x in (mean, covariance))
    order = torch.where(grid.observation_index < 0, grid.length, grid.observation_index).argsort(dim=-1)
    weights = along_grid(weights, order[:, : grid.observation_count])
    return RecursiveEstimate(*(x.reshape(*grid.batch_shape, *x.shape[1:]) for x in (mean, covariance, weights)))


@torch.no_grad()
def _compiled(problem: EstimationProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance at each time index, and the weight of each row."""
    mean, covariance, weights = compiled_filter(problem, "robust_filter")
    if problem.options.smooth:
        mean, covariance, _ = compiled_filter(replace(problem, grid=problem.grid.weighted(weights)), "filter")
    return mean, covariance, weights


def _in_torch(problem: EstimationProblem) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a loop over times."""
    grid, smooth = problem.grid, problem.options.smooth
    transitions, b = Transitions.of(problem.sde, grid), len(grid.times)
    start = initial_gaussian(problem.initial, grid, transitions)
    found = (robust_smoother if smooth else robust_filter)(grid, transitions, start)
    states = [found.without_challengers(state.posterior) for state in found.states]
    if smooth:
        backward = backward_information(found.grid, found.transitions)
        states = [combined(state, later)[0] for state, later in zip(states, backward, strict=True)]
    counts = problem.observation_counts().unbind(1)
    mean = torch.stack([state.mean for state in states], dim=1)
    covariance = torch.stack(
        [state.full_covariance(problem.stationary, count) for state, count in zip(states, counts, strict=True)], dim=1
    )
    given, weighted = (x.information.matrix.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (grid, found.grid))
    seen = (given > 0).expand(b, -1)
    return mean, covariance, torch.where(seen, weighted[:b] / torch.where(seen, given, 1.0), 1.0)
