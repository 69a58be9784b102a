"""The Kalman filter and smoother: the Gaussian estimate with the Riccati prior, in linear time.

    predicted:  m- = Phi m, P- = Phi P Phi^T + V
    posterior:  m = m- + K (z - H m-), P = (I - K H) P-, K = P- H^T (H P- H^T + I)^-1
    backward:   J_k, y_k: the information of all later observations on the state at time index k

The smoother combines the posterior with the backward information (a two-filter smoother).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .gaussian import AffineUpdate, DiffuseDirections, Gaussian, Information
from .grid import ObservationGrid, Transitions
from .matrices import identity_like
from .problem import EstimationProblem, InitialState, QueryEstimate

_ROUNDING = 1e-14  # an eigenvalue of an information matrix at a unit diagonal that comes from rounding


class FilteredState(NamedTuple):
    """The filter at one time index: the state before and after its observation, and the gain of each component."""

    predicted: Gaussian
    posterior: Gaussian
    gains: list[Tensor]


def kalman_estimate(problem: EstimationProblem) -> QueryEstimate:
    """The estimate at every query, `(b, queries, ...)`. It needs no iteration, so the objective is constant."""
    grid, options = problem.grid, problem.options
    transitions = Transitions.of(problem.sde, grid)
    states = [
        state.posterior
        for state in kalman_filter(grid, transitions, initial_gaussian(problem.initial, grid, transitions))
    ]
    if options.smooth:
        backward = backward_information(grid, transitions)
        states = [combined(state, later)[0] for state, later in zip(states, backward, strict=True)]
    indices = grid.query_index[: grid.models].unique()
    wanted = [states[k] for k in indices.tolist()]
    mean = torch.stack([state.mean for state in wanted], dim=1)
    least_squares = torch.stack([state.least_squares for state in wanted], dim=1)
    counts = problem.observation_counts()[:, indices].unbind(1)
    covariance = torch.stack(
        [state.full_covariance(problem.stationary, count) for state, count in zip(wanted, counts, strict=True)], dim=1
    )
    objective = least_squares.clamp(min=0.0)[..., None].expand(*mean.shape[:2], options.iterations + 1)
    weights = unit_weights(grid, indices, options.smooth) if options.with_weights else None
    estimates = QueryEstimate(mean, covariance, weights, objective)
    return estimates.gathered(torch.searchsorted(indices, grid.query_index.contiguous()))


def initial_gaussian(initial: InitialState | None, grid: ObservationGrid, transitions: Transitions) -> Gaussian:
    """The state before any observation. By default all directions are diffuse."""
    least_squares = grid.values.new_zeros(len(grid.times))
    if initial is not None:
        return Gaussian(initial.mean, initial.covariance, None, least_squares)
    root = torch.diag_embed(_diffuse_scales(grid, transitions))
    diffuse = DiffuseDirections(root, root, root.new_full(root.shape[:1], root.shape[-1]))
    return Gaussian(torch.zeros_like(grid.information.vector[:, 0]), 0 * root, diffuse, least_squares)


@torch.no_grad()
def _diffuse_scales(grid: ObservationGrid, transitions: Transitions) -> Tensor:
    """The unit of each state while it is diffuse, `(b or 1, n)`: the change that the first observations would show."""
    n, identity = grid.rows.shape[-1], identity_like(grid.rows)
    shown, moved = grid.rows.new_zeros(grid.models, n), identity[None]
    for k in range(grid.length):
        if k >= 4 * n and bool((shown > 0).all()):
            break
        moved = transitions[k - 1][0] @ moved if k else moved
        nothing_yet = ~(shown > 0).any(-1)[:, None, None]
        moved = torch.where(nothing_yet, identity, moved)
        shown = shown + (grid.rows[:, k] @ moved).square().sum(-2)
    return torch.where((shown > 0) & shown.isfinite(), shown, 1.0).rsqrt()


def kalman_filter(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> list[FilteredState]:
    """The filter at every time index, from the state before the first one.

    Raises:
        ValueError: where the covariance overflows.
    """
    found = []
    for k in range(grid.length):
        predicted = state.predicted(*transitions[k - 1]) if k else state
        check_finite(predicted.covariance, k)
        state, gains = predicted.updated(*grid.at(k))
        found.append(FilteredState(predicted, state, gains))
    return found


def check_finite(covariance: Float[Tensor, "_ n n"], index: int) -> None:
    """Raise `ValueError` unless a predicted covariance is finite."""
    if not bool(covariance.isfinite().all()):
        raise overflow_error(index)


def overflow_error(index: int) -> ValueError:
    """Of a predicted covariance that is not finite."""
    return ValueError(
        f"times: got a time by which the state overflows (number {index} of all times), expected a shorter series"
    )


def backward_information(grid: ObservationGrid, transitions: Transitions) -> list[Information]:
    """The information of all later observations on the state at each time index."""
    later = grid.information.zero()
    found = [later]
    for k in reversed(range(grid.length - 1)):
        later = transitions.backward(k, later + grid.information.at(k + 1))
        found.append(later)
    return found[::-1]


def combined(state: Gaussian, information: Information) -> tuple[Gaussian, AffineUpdate]:
    """A state updated by information on it. The mean becomes `factor m + gain y`.

    `J = U diag(l) U^T` is the information of an observation with unit noise and rows `L^-1 U^T J`,
    where `L L^T = U^T J U` for the eigenvalues l > 0.
    """
    scale, matrix = information.scaled()
    eigenvalues, basis = torch.linalg.eigh(matrix.detach())  # equal eigenvalues have no gradient
    informative = (eigenvalues > _ROUNDING * eigenvalues[..., -1:].clamp(min=1.0))[..., None]
    projection = basis.mT * informative
    projected = projection @ matrix
    missing = torch.diag_embed((~informative[..., 0]).to(matrix.dtype))
    factor, failed = torch.linalg.cholesky_ex(projected @ projection.mT + missing)
    if bool((failed > 0).any()):  # rounding, where the eigenvalues differ by more than the digits of float64
        diagonal = torch.diag_embed(torch.where(informative[..., 0], eigenvalues, 1.0).sqrt())
        factor = torch.where((failed > 0)[..., None, None], diagonal, factor)
    rows = torch.linalg.solve_triangular(factor, projected, upper=False) / scale[..., None, :]
    to_values = torch.linalg.solve_triangular(factor, projection * scale[..., None, :], upper=False)
    values = (to_values @ information.vector[..., None])[..., 0]
    posterior, gains = state.updated(rows, values)
    update = AffineUpdate.of_components(rows, gains)
    least_squares = posterior.least_squares + (information.constant - values.square().sum(-1)).clamp(min=0.0)
    return posterior._replace(least_squares=least_squares), AffineUpdate(update.factor, update.gain @ to_values)


def unit_weights(grid: ObservationGrid, indices: Int[Tensor, " queries"], smooth: bool) -> Tensor:
    """`(b, queries, T)`: 1 for every observation that a query uses, else 0."""
    length, index = grid.length, grid.observation_index
    position = torch.arange(length, device=index.device).expand_as(index).masked_fill(~grid.present, length)
    at = index.masked_fill(index < 0, grid.observation_count)  # queries go to a column that is cut off
    first_use = position.new_full((len(at), grid.observation_count + 1), length).scatter(1, at, position)
    first_use = first_use[:, : grid.observation_count]
    last = indices.new_full(indices.shape, length - 1) if smooth else indices
    return (first_use[:, None, :] <= last[:, None]).to(torch.float64)
