"""The Gaussian estimate with the Riccati prior, that is, the Kalman filter and smoother: in linear time."""

from typing import NamedTuple

import torch
from torch import Tensor

from .gaussian import Correction, Gaussian, Unknown
from .information import Information
from .linear_sde import LinearSDE
from .observations import Grid
from .plan import Known, Plan, Row, settled
from .steps import Steps

_FAINT = 1e-14  # an eigenvalue of an information matrix at a unit diagonal that is rounding


class Filtered(NamedTuple):
    """A moment: what is known before and after what is seen at it, and the gain of each component."""

    before: Gaussian
    after: Gaussian
    gains: list[Tensor]


def kalman_rows(sde: LinearSDE, grid: Grid, plan: Plan, known: Known | None) -> Row:
    """Every query's row, `(b, queries, ...)`; there is nothing to iterate."""
    steps = Steps.of(sde, grid)
    states = [moment.after for moment in kalman_filter(grid, steps, first_state(grid, steps, known))]
    if plan.smooth:
        future = kalman_future(grid, steps)
        states = [joined(state, ahead)[0] for state, ahead in zip(states, future, strict=True)]
    moments = grid.wanted[: grid.models].unique()
    wanted = [states[k] for k in moments.tolist()]
    mean, least = (torch.stack(parts, dim=1) for parts in zip(*((x.mean, x.least) for x in wanted), strict=True))
    prior, seen = settled(sde, grid, known), sources_seen(grid, plan.smooth)[:, moments].unbind(1)
    covariance = torch.stack([x.spread(prior, count) for x, count in zip(wanted, seen, strict=True)], dim=1)
    cost = least.clamp(min=0.0)[..., None].expand(*mean.shape[:2], plan.iterations + 1)
    weights = _believed(grid, moments, plan.smooth) if plan.with_weights else None
    return Row(mean, covariance, weights, cost).gathered(torch.searchsorted(moments, grid.wanted.contiguous()))


def first_state(grid: Grid, steps: Steps, known: Known | None) -> Gaussian:
    """Before anything is seen; nothing is known by default."""
    least = grid.values.new_zeros(len(grid.times))
    if known is None:
        root = torch.diag_embed(_scales(grid, steps))
        unknown = Unknown(root, root, root.new_full(root.shape[:1], root.shape[-1]))
        return Gaussian(torch.zeros_like(grid.seen.vector[:, 0]), 0 * root, unknown, least)
    return Gaussian(known.mean, known.covariance, None, least)


@torch.no_grad()
def _scales(grid: Grid, steps: Steps) -> Tensor:
    """How far each state must move for the first observations to tell, `(models, n)`: its unit while it is unknown."""
    rows, n = grid.whitened[0], grid.seen.vector.shape[-1]
    told, moved = rows.new_zeros(grid.models, n), torch.eye(n, dtype=rows.dtype, device=rows.device)[None]
    for k in range(grid.times.shape[1]):
        if k >= 4 * n and bool((told > 0).all()):
            break
        moved = steps[k - 1][0] @ moved if k else moved
        blank = ~(told > 0).any(-1)[:, None, None]
        moved = torch.where(blank, torch.eye(n, dtype=rows.dtype, device=rows.device), moved)
        told = told + (rows[:, k] @ moved).square().sum(-2)
    return torch.where((told > 0) & told.isfinite(), told, 1.0).rsqrt()


def kalman_filter(grid: Grid, steps: Steps, state: Gaussian) -> list[Filtered]:
    """Every moment from what came before it and what is seen at it."""
    rows, values = grid.whitened
    found = []
    for k in range(grid.times.shape[1]):
        before = state.moved(*steps[k - 1]) if k else state
        if not bool(before.covariance.isfinite().all()):
            raise ValueError(
                f"times: got a time by which the state overflows, moment {k} of all, expected a shorter series"
            )
        state, gains = before.corrected(rows[:, k], values[:, k])
        found.append(Filtered(before, state, gains))
    return found


def kalman_future(grid: Grid, steps: Steps) -> list[Information]:
    """What all that is seen behind each moment says of the state at it."""
    seen = [Information(*parts) for parts in zip(*(part.unbind(1) for part in grid.seen), strict=True)]
    ahead = Information(*(torch.zeros_like(part) for part in seen[-1]))
    found = [ahead]
    for k in reversed(range(len(seen) - 1)):
        ahead = steps.back(k, ahead + seen[k + 1])
        found.append(ahead)
    return found[::-1]


def joined(state: Gaussian, ahead: Information) -> tuple[Gaussian, Correction]:
    """A state corrected by what the future says of it, `m -> keep m + gain y`.

    `J = U diag(l) U^T` is what the rows `L^-1 U^T J` say through unit noise, `L L^T = U^T J U` where l > 0.
    """
    scale, matrix = ahead.scaled()
    eigenvalues, basis = torch.linalg.eigh(matrix.detach())  # equal ones would have no gradient
    seen = (eigenvalues > _FAINT * eigenvalues[..., -1:].clamp(min=torch.finfo(matrix.dtype).tiny))[..., None]
    across = basis.mT * seen
    told = across @ matrix
    factor, failed = torch.linalg.cholesky_ex(told @ across.mT + torch.diag_embed((~seen[..., 0]).to(matrix.dtype)))
    if bool((failed > 0).any()):  # by rounding, where eigenvalues differ by all digits
        diagonal = torch.diag_embed(torch.where(seen[..., 0], eigenvalues, 1.0).sqrt())
        factor = torch.where((failed > 0)[..., None, None], diagonal, factor)
    rows = torch.linalg.solve_triangular(factor, told, upper=False) / scale[..., None, :]
    back = torch.linalg.solve_triangular(factor, across * scale[..., None, :], upper=False)
    values = (back @ ahead.vector[..., None])[..., 0]
    after, gains = state.corrected(rows, values)
    keep, gain = Correction.of(rows, gains)
    least = after.least + (ahead.constant - values.square().sum(-1)).clamp(min=0.0)
    return after._replace(least=least), Correction(keep, gain @ back)


def sources_seen(grid: Grid, smooth: bool) -> Tensor:
    """`(b, G)`: how many observations each moment sees."""
    return grid.present.sum(-1, keepdim=True).expand(grid.present.shape) if smooth else grid.present.cumsum(-1)


def _believed(grid: Grid, moments: Tensor, smooth: bool) -> Tensor:
    """`(b, rows, T)`: 1 for all that a row sees."""
    count, observations = grid.key.shape[1], int(grid.key.max()) + 1
    place = torch.arange(count, device=grid.key.device).expand_as(grid.key).masked_fill(~grid.present, count)
    at = grid.key.masked_fill(grid.key < 0, observations)  # the last: nobody's
    seen_at = place.new_full((len(at), observations + 1), count).scatter(1, at, place)[:, :observations]
    last = moments.new_full(moments.shape, count - 1) if smooth else moments
    return (seen_at[:, None, :] <= last[:, None]).to(torch.float64)
