"""The Gaussian estimate with the Riccati prior, that is, the Kalman filter: all that is known, in linear time."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .information import Information
from .linear_sde import LinearSDE
from .observations import Grid, Steps
from .plan import Plan, Row, settled, unknown_start


def kalman_rows(sde: LinearSDE, grid: Grid, plan: Plan, known: Information | None) -> Row:
    """Every query's row, `(b, queries, ...)`; there is nothing to iterate."""
    start = unknown_start(grid, sde.state_size) if known is None else known
    moments = grid.wanted[: grid.models].unique()
    said = kalman_information(grid, Steps.of(sde, grid), start, plan.smooth)
    said = Information(*(part[:, moments] for part in said))
    prior = settled(sde, grid, known)
    mean, covariance = said.solved(None if prior is None else prior[:, None])
    cost = said.distance(mean)[..., None].expand(*mean.shape[:2], plan.iterations + 1)
    weights = _believed(grid, moments, plan.smooth) if plan.with_weights else None
    rows = Row(mean, covariance.expand(*mean.shape, mean.shape[-1]), weights, cost)
    return rows.gathered(torch.searchsorted(moments, grid.wanted.contiguous()))


def kalman_information(grid: Grid, steps: Steps, start: Information, smooth: bool) -> Information:
    """What the past and the present, and with `smooth` the future, say of every moment: `(b, G, ...)`.

    Where series differ in their measurements only, the precision is found once for all: its batch is 1.

    Args:
        start: what is known of the first moment.
    """
    steps = steps.first(grid.models)
    seen = [Information(*parts) for parts in zip(*(part.unbind(1) for part in grid.seen), strict=True)]
    known, past = start, []
    for k, here in enumerate(seen):
        known = (steps.forward(k - 1, known) if k else known) + here
        past.append(known)
    if not smooth:
        return _stacked(past)
    known, future = Information(*(torch.zeros_like(part) for part in seen[-1])), []
    for k in reversed(range(len(seen))):
        known = steps.backward(k, known + seen[k + 1]) if k + 1 < len(seen) else known
        future.append(known)
    return _stacked(past) + _stacked(reversed(future))


def _stacked(moments: Iterable[Information]) -> Information:
    return Information(*(torch.stack(parts, dim=1) for parts in zip(*moments, strict=True)))


def _believed(grid: Grid, moments: Tensor, smooth: bool) -> Tensor:
    """`(b, rows, T)`: 1 for all that a row sees."""
    count, observations = grid.key.shape[1], int(grid.key.max()) + 1
    place = torch.arange(count, device=grid.key.device).expand_as(grid.key).masked_fill(~grid.present, count)
    at = grid.key.masked_fill(grid.key < 0, observations)  # the last: nobody's
    seen_at = place.new_full((len(at), observations + 1), count).scatter(1, at, place)[:, :observations]
    last = moments.new_full(moments.shape, count - 1) if smooth else moments
    return (seen_at[:, None, :] <= last[:, None]).to(torch.float64)
