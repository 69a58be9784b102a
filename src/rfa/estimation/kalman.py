"""The Kalman filter and the backward information in PyTorch: loops over the rows of a grid.

    predicted:  m- = Phi m, P- = Phi P Phi^T + V
    posterior:  m = m- + K (z - H m-), P = (I - K H) P-, K = P- H^T (H P- H^T + I)^-1
    backward:   J_k, y_k: the information of all later observations on the state at time index k

The smoother combines the posterior with the backward information (a two-filter smoother).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .gaussian import DiffuseDirections, Gaussian, Information
from .matrices import identity_like
from .problem import ObservationGrid, Transitions


class FilteredState(NamedTuple):
    """The filter at one time index: the state before and after its observation, and the gain of each component."""

    predicted: Gaussian
    posterior: Gaussian
    gains: list[Tensor]


def diffuse_start(grid: ObservationGrid, transitions: Transitions) -> Gaussian:
    """The state before any observation, of which nothing is known."""
    root = torch.diag_embed(_diffuse_scales(grid, transitions.steps))
    diffuse = DiffuseDirections(root, root, root.new_full(root.shape[:1], root.shape[-1]))
    values = grid.values
    return Gaussian(values.new_zeros(len(values), root.shape[-1]), 0 * root, diffuse, values.new_zeros(len(values)))


@torch.no_grad()
def _diffuse_scales(grid: ObservationGrid, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The unit of each state while it is diffuse, `(b or 1, n)`: the change that the first observations would show."""
    n, identity = grid.rows.shape[-1], identity_like(grid.rows)
    shown, moved = grid.rows.new_zeros(grid.models, n), identity[None]
    for k in range(grid.length):
        if k >= 4 * n and bool((shown > 0).all()):
            break
        moved = steps[k - 1][0] @ moved if k else moved
        nothing_yet = ~(shown > 0).any(-1)[:, None, None]
        moved = torch.where(nothing_yet, identity, moved)
        shown = shown + (grid.rows[:, k] @ moved).square().sum(-2)
    return torch.where((shown > 0) & shown.isfinite(), shown, 1.0).rsqrt()


def kalman_filter(grid: ObservationGrid, transitions: Transitions, state: Gaussian) -> list[FilteredState]:
    """The filter at every time index, from the state before the first one."""
    found = []
    for k in range(grid.length):
        predicted = state.predicted(*transitions.steps[k - 1]) if k else state
        check_finite(predicted.covariance, k)
        state, gains = predicted.updated(*grid.at(k))
        found.append(FilteredState(predicted, state, gains))
    return found


def check_finite(covariance: Float[Tensor, "_ n n"], index: int) -> None:
    """Raise `ValueError` for a predicted covariance that is not finite."""
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
        transition, variance = transitions.steps[k]
        later = (later + grid.information.at(k + 1)).inflated(variance).substituted(transition)
        found.append(later)
    return found[::-1]
