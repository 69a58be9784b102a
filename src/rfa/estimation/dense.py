"""Robust estimates row by row: each source of each moment is looked at by itself, with matrices of any kind."""

import torch
from torch import Tensor

from .consensus import estimate_row
from .information import Information
from .linear_sde import LinearSDE
from .observations import Grid, Steps
from .plan import Plan, Row, settled, stacked, unknown_start
from .sources import Sources, nothing


def dense_rows(sde: LinearSDE, grid: Grid, plan: Plan, known: Information | None) -> Row:
    """Every query's row, `(b, queries, ...)`."""
    steps, prior = Steps.of(sde, grid), settled(sde, grid, known)
    unknown = unknown_start(grid, sde.state_size)
    past, future = nothing(unknown if known is None else known), _futures(grid, steps, plan, unknown)
    moments = grid.wanted.unique()
    wanted, rows = set(moments.tolist()), []
    for k in range(grid.times.shape[1]):
        if k:
            past = past.moved(steps, k - 1, True, plan.riccati)
        before, past = past, past.with_source(grid, k, plan.riccati)
        if k in wanted:
            sides, others = [past, *future[k]], [before, *future[k]]
            row = estimate_row(sides, others, grid, k, plan, prior)
            rows.append(row._replace(weights=_by_observation(row.weights, sides, grid) if plan.with_weights else None))
    return stacked(rows).gathered(torch.searchsorted(moments, grid.wanted.contiguous()))


def _futures(grid: Grid, steps: Steps, plan: Plan, unknown: Information) -> list[list[Sources]]:
    """What stands behind each moment, seen from it, where it counts."""
    count = grid.times.shape[1]
    if not plan.smooth:
        return [[]] * count
    ahead, found = nothing(unknown), []
    for k in reversed(range(count)):
        if k + 1 < count:
            ahead = ahead.with_source(grid, k + 1, plan.riccati).moved(steps, k, False, plan.riccati)
        found.append([ahead])
    return found[::-1]


def _by_observation(values: Tensor | None, sides: list[Sources], grid: Grid) -> Tensor:
    """`(b, T)`: the weights of a row's sources in the order of the observations."""
    moments = torch.tensor([m for side in sides for m in side.moments], device=grid.key.device, dtype=torch.long)
    assert values is not None
    key, observations = grid.key[:, moments], int(grid.key.max()) + 1
    at = torch.where(grid.present[:, moments] & (key >= 0), key, observations)  # the last: nobody's
    return values.new_zeros(len(key), observations + 1).scatter(1, at, values)[:, :observations]
