"""`recursive_estimate`: the recursive robust filter by itself, in linear time."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Real
from torch import Tensor

from .compiled_kalman import can_compile, compiled_filter
from .grid import Transitions
from .kalman import initial_gaussian
from .linear_sde import LinearSDE
from .matrices import InitialMoments
from .problem import EstimationProblem, EstimatorOptions, along_grid, make_problem
from .recursive_filter import robust_filter
from .robust_weight import RobustWeight


class RecursiveEstimate(NamedTuple):
    """What `recursive_estimate` finds.

    Args:
        mean: `(..., Tq, n)`, in units of the state.
        covariance: `(..., Tq, n, n)`. Infinite where nothing is known.
        weights: `(..., T)`: the weight of each row as the filter used it, 1 where a row has no prediction or is missing.
    """

    mean: Float[Tensor, "*batch queries n"]
    covariance: Float[Tensor, "*batch queries n n"]
    weights: Float[Tensor, "*batch T"]


def recursive_estimate(
    sde: LinearSDE,
    times: Real[Tensor, "*#batch T"],
    observations: Real[Tensor, "*#batch T m"],
    *,
    query_times: Real[Tensor, "*#batch queries"] | None = None,
    initial: InitialMoments | None = None,
) -> RecursiveEstimate:
    """The recursive robust filter, at which `robust_estimate` starts: time and memory are linear in T.

    Each row is weighted by its prediction from earlier rows, once. The error of a row comes from `N(0, s R)`, and the
    filter learns how often each scale s occurs. With w the mean weight over s (`rfa.estimation.noise_scale`):

        m = m- + K_w (z - C m-),    K_w the Kalman gain with noise R / w

    `robust_estimate` then reweights all rows at every query, which takes quadratic time. It is compiled code, or
    PyTorch where there is no C++ compiler or gradients are wanted.

    Args: as `robust_estimate`.

    Returns:
        Mean and covariance at the queries, and the weight of each row.

    Raises:
        ValueError: as `robust_estimate`.

    Source: `rfa.estimation.recursive_filter`; beyond the paper (docs/theory.md).
    """
    options = EstimatorOptions(True, False, RobustWeight(torch.inf, 1.0, sde.observation_size), 1, "recursive", False)
    problem = make_problem(sde, times, observations, options, query_times, initial)
    problem = EstimationProblem(sde, problem.grid.bounded(), options, problem.initial)
    if can_compile(problem):
        with torch.no_grad():
            mean, covariance, weights = compiled_filter(problem, "robust_filter")
    else:
        mean, covariance, weights = _in_torch(problem)
    grid = problem.grid
    mean, covariance = (along_grid(x, grid.query_index) for x in (mean, covariance))
    order = torch.where(grid.observation_index < 0, grid.length, grid.observation_index).argsort(dim=-1)
    weights = along_grid(weights, order[:, : grid.observation_count])
    return RecursiveEstimate(*(x.reshape(*grid.batch_shape, *x.shape[1:]) for x in (mean, covariance, weights)))


def _in_torch(problem: EstimationProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance at each time index, and the weight of each row, by a loop over times."""
    grid = problem.grid
    transitions, b = Transitions.of(problem.sde, grid), len(grid.times)
    found = robust_filter(grid, transitions, initial_gaussian(problem.initial, grid, transitions))
    counts = problem.observation_counts().unbind(1)
    states = [found.without_challengers(state.posterior) for state in found.states]
    mean = torch.stack([state.mean for state in states], dim=1)
    covariance = torch.stack(
        [state.full_covariance(problem.stationary, count) for state, count in zip(states, counts, strict=True)], dim=1
    )
    information = problem.grid.information.matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    weighted = found.grid.information.matrix[:b].diagonal(dim1=-2, dim2=-1).sum(-1)
    seen = (information > 0).expand_as(weighted)
    return mean, covariance, torch.where(seen, weighted / torch.where(seen, information, 1.0), 1.0)
