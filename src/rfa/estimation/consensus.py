"""One moment's estimate: iteratively reweighted least squares over its sources."""

import math

import torch
from torch import Tensor

from .information import Information, determined, joined
from .observations import Grid
from .plan import Plan, Row
from .sources import Sources

_FAINTEST = -69.0  # log 1e-30: the best weight of a row counts as no less, so that none believes nobody


def estimate_row(
    sides: list[Sources],
    others: list[Sources],
    grid: Grid,
    k: int,
    plan: Plan,
    settled: Tensor | None,
) -> Row:
    """The estimate at moment k.

    Args:
        sides: the past with the present, and the future where it counts.
        others: the same without what was seen at this moment.
        settled: the stationary covariance, the prior where nothing else is known, if there is one.
    """
    total = gaussian(sides, plan.riccati)
    mean, covariance = total.solved(settled)
    first = (
        _left_out(gaussian(others, plan.riccati), mean, grid, k, settled)
        if plan.leave_one_out
        else _at_observation(mean, covariance, grid, k)
    )
    judged = joined([side.alone for side in sides])
    matrix = torch.cat([side.matrix for side in sides], dim=1)
    vector = torch.cat([side.vector for side in sides], dim=1)
    base = sides[0].base
    share = torch.ones_like(judged.constant)
    if plan.riccati:
        finite = torch.where(covariance.isfinite(), covariance, 0.0)
        judged = judged.widened(finite[:, None])
        share = _trace(matrix) / _trace(judged.matrix).clamp(min=torch.finfo(torch.float64).tiny)
    moments = [m for side in sides for m in side.moments]
    present = grid.present[:, moments]
    calibration = plan.belief.calibration(grid.seen_components[:, moments])
    # a row counts by what was seen of it: rows that show less have smaller distances, and weights nearer 1
    share = share * math.prod(plan.belief.consistency()) / calibration
    state, costs, weight = first, [], torch.ones_like(share)
    for step in range(plan.iterations + 1):
        distance = judged.distance(state[:, None])
        costs.append((share * plan.belief.cost(distance) * present).sum(-1))
        if step == plan.iterations:
            break
        weight = plan.belief.log_weight(distance).masked_fill(~present, -torch.inf)
        best = weight.detach().amax(-1, keepdim=True) if moments else weight
        weight = torch.exp(weight - torch.where(best.isfinite(), best - best.clamp(min=_FAINTEST), 0.0))
        scaled = weight / calibration
        believed = Information(
            base.matrix + (scaled[..., None, None] * matrix).sum(1),
            base.vector + (scaled[..., None] * vector).sum(1),
            base.constant,
        )
        state, covariance = believed.solved(settled)
    return Row(state, _positive(covariance), weight, torch.stack(costs, dim=-1))


def gaussian(sides: list[Sources], riccati: bool) -> Information:
    """All of what the sources say, each with weight 1."""
    if riccati:
        return sides[0].total if len(sides) == 1 else sides[0].total + sides[1].total
    total = sides[0].base
    for side in sides:
        total = total + Information(side.alone.matrix.sum(1), side.alone.vector.sum(1), side.alone.constant.sum(1))
    return total


def _left_out(other: Information, mean: Tensor, grid: Grid, k: int, settled: Tensor | None) -> Tensor:
    """The Gaussian estimate from the others alone, where they say enough."""
    own = grid.present[:, k]
    known = own if settled is not None else own & determined(other.matrix)
    return torch.where(known[:, None], other.solved(settled)[0], mean)


def _at_observation(mean: Tensor, covariance: Tensor, grid: Grid, k: int) -> Tensor:
    """The Gaussian estimate, moved so that its seen components are those of the observation."""
    rows, values = grid.rows[:, k], grid.values[:, k, :, None]
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    spread = torch.where(covariance.isfinite(), covariance, 0.0)
    spread = torch.where(_trace(spread)[:, None, None] > 0, spread, identity)
    missed = values - rows @ mean[..., None]
    back = spread @ rows.mT @ torch.linalg.pinv(rows @ spread @ rows.mT, hermitian=True, rtol=1e-12)
    return torch.where(grid.present[:, k, None], mean + (back @ missed)[..., 0], mean)


def _positive(covariance: Tensor) -> Tensor:
    """Itself where it is infinite or positive semi-definite; weights that differ may make it slightly not."""
    finite = covariance.isfinite().all(-1).all(-1)
    eigenvalues, basis = torch.linalg.eigh(torch.where(finite[:, None, None], covariance.detach(), 0.0))
    if bool((eigenvalues[..., 0] >= 0).all()):
        return covariance
    fixed = (basis * eigenvalues.clamp(min=0.0)[..., None, :]) @ basis.mT
    return torch.where((eigenvalues[..., 0] < 0)[:, None, None], fixed, covariance)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
