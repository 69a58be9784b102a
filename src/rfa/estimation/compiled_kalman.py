"""The Kalman filter and smoother of a problem, and the recursive robust filter, on compiled code."""

from typing import Literal

import torch
from torch import Tensor

from .compiled import FilterProblem, Lags, can_run, run, threads_for, transitions
from .grid import ObservationGrid, Transitions
from .kalman import overflow_error, unit_weights
from .linear_sde import LinearSDE
from .problem import EstimationProblem, QueryEstimate, along_grid


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
    transition, variance, lag_index = _transitions(problem.sde, grid)
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


def _transitions(sde: LinearSDE, grid: ObservationGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Phi and V of each different lag, `(lags, n, n)`, and which of them each step has, `(models, G - 1)`."""
    if sde.batch_shape.numel() == 1:
        lags = Lags.of(grid.times[: grid.models])
        return *transitions(sde, lags.lags), lags.index
    each, n = Transitions.of(sde, grid), sde.state_size
    transition, variance = (x.reshape(-1, n, n) for x in (each.transition, each.variance))
    return transition, variance, torch.arange(len(transition))
