"""The recursive robust filter: each row is judged by a filter that has itself been robust so far.

The filter keeps one Gaussian. A row counts with the mean of its gains over the scales that its error may have, and what
they leave open widens the covariance (moment matching, as for a Gaussian sum).
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .gaussian import Gaussian
from .information import Information
from .kalman import Filtered, joined, kalman_filter
from .noise_scale import Judged, NoiseScale, weigh
from .observations import Grid
from .shares import Shares, parents
from .steps import Steps

_REJECTED = 0.1  # a weight below which a row starts a challenger
_ODDS = 7.0  # against a challenger, at its start, as a logarithm: 1,000 to 1
_LOST = 1e14  # a squared distance from a mean beside which the row loses its digits
_ALIKE = 0.05  # a row that challenger and filter expect as much: they have become one, and another may begin
_BEHIND = 2.0  # a challenger that has fallen so far back is given up

Part = TypeVar("Part", Gaussian, Shares)


class Recursion(NamedTuple):
    """The robust filter of b series, or of 2 b: each one's own and, behind these, each one's challenger.

    grid: the rows with their weights.
    steps: as the series.
    moments: the state before and after each moment.
    gain: `(b or 2 b, G)`: the gain of each row in units of the Kalman filter's; 1 where nothing was seen.
    typical: `(b, G)`: the multiple of R that the middle row has, as known at each moment.
    replaced: `(b, G)`: where the challenger has taken over, before the row is seen.
    challenged: `(b, G)`: where a new challenger begins, before the row is seen.
    forgotten: `(b, G)`: where it begins without a mean. All three None where there are no challengers.
    """

    grid: Grid
    steps: Steps
    moments: list[Filtered]
    gain: Tensor
    typical: Tensor
    replaced: Tensor | None = None
    challenged: Tensor | None = None
    forgotten: Tensor | None = None

    def own(self, of: Part) -> Part:
        """Of a state or shares, without those of the challengers."""
        return of if self.replaced is None else of.first(len(self.replaced))

    def judged(self, grid: Grid) -> Grid:
        """The rows with the noise that the middle row has, by which distances are measured."""
        return grid if bool((self.typical == 1).all()) else grid.weighted(1 / self.typical)


def nominal(grid: Grid, steps: Steps, state: Gaussian) -> Recursion:
    """The Kalman filter: every row counts in full."""
    ones = torch.ones_like(grid.times)
    return Recursion(grid, steps, kalman_filter(grid, steps, state), ones, ones)


def robust_filter(grid: Grid, steps: Steps, state: Gaussian) -> Recursion:
    """The filter in which each row is judged by its prediction.

    A run of rejected rows may be right: the state has jumped, or the filter began with an outlier. So a rejected row
    starts a challenger, a filter whose covariance has been widened until the row fits. The challenger takes over when
    the rows behind that one have become a thousand times as likely under it.
    """
    return _filtered(grid, steps, state)[0]


def robust_smoother(grid: Grid, steps: Steps, state: Gaussian) -> Recursion:
    """The filter in which each row is judged from both sides: joined to `kalman_future`, it is the robust smoother.

    From the last row back, each is judged twice: by the filter's prediction, and by that together with the future. The
    one that expects the row more has the say. The scales are those learned from the whole series.
    """
    forward, scale = _filtered(grid, steps, state)
    ahead = Information(*(torch.zeros_like(part[:, 0]) for part in grid.seen))
    rows: list[Judged] = []
    for k in reversed(range(grid.times.shape[1])):
        before = forward.own(forward.moments[k].before)
        past, both = (_judged(scale.expected(), without, grid, k) for without in (before, joined(before, ahead)[0]))
        row = past.where(past.told & (~both.told | (past.evidence > both.evidence)), both)
        scale = scale._replace(last=torch.where(row.told[:, None], row.probability, scale.last))
        rows.append(row)
        if k:
            seen = Information(*(part[:, k] for part in grid.seen)).weighted(row.weight)
            ahead = steps.back(k - 1, ahead + seen)
    weight, gain = _weights(rows[::-1])
    weighted, typical = grid.weighted(weight), scale.typical()[:, None].expand_as(gain)
    return Recursion(weighted, steps, kalman_filter(weighted, steps, state), gain, typical)


def _filtered(grid: Grid, steps: Steps, state: Gaussian) -> tuple[Recursion, NoiseScale]:
    """The filter, with what it has learned of the scales."""
    b = len(grid.values)
    own, challenger = slice(0, b), slice(b, 2 * b)
    grid, steps, state = grid.twice(), steps.twice(), state.expanded(2 * b)
    scale = NoiseScale.prior(grid.values)
    undetermined = -(-state.mean.shape[-1] // grid.values.shape[-1]) - 1  # rows beside the first that fix a state
    trust = torch.zeros_like(grid.times[own, 0])  # rows that a new challenger believes in full
    odds = torch.full_like(grid.times[own, 0], -torch.inf)  # of the challenger, as a logarithm; none without one
    moments, rows, typical, replaced, challenged, forgotten = [], [], [], [], [], []
    for k in range(grid.times.shape[1]):
        before = state.moved(*steps[k - 1]) if k else state
        if not bool(before.covariance[own].isfinite().all()):
            raise ValueError(
                f"times: got a time by which the state overflows, moment {k} of all, expected a shorter series"
            )
        row = _judged(scale.expected(), before, grid, k)
        row = _trusted(row, torch.cat([torch.zeros_like(trust), trust]) > 0)
        told = row.told[own] & row.told[challenger]
        likelier = torch.where(told, row.evidence[challenger] - row.evidence[own], 0.0).detach()
        alike = told & (likelier.abs() < _ALIKE)
        odds = odds + likelier
        replaces = odds > 0
        gone = replaces | ~(odds > -_ODDS - _BEHIND)
        before, scale, row = _inherited(before, scale, row, replaces, torch.zeros_like(replaces))
        begins = (gone | alike) & row.told[own] & (row.weight[own] < _REJECTED)
        forgets = torch.zeros_like(begins)
        odds = torch.where(begins, -_ODDS, torch.where(gone, -torch.inf, odds))
        if bool(begins.any()):
            before, scale, row = _inherited(before, scale, row, torch.zeros_like(begins), begins)
            fresh = torch.cat([torch.zeros_like(begins), begins])
            begun, forgets = _begun(before, grid, k)
            before = before._replace(
                mean=torch.where(fresh[:, None], begun.mean, before.mean),
                covariance=torch.where(fresh[:, None, None], begun.covariance, before.covariance),
            )
            forgets = forgets[challenger] & begins
            row = _accepted(scale.expected(), grid, k).where(fresh, row)
        trust = torch.where(begins, 2.0 * undetermined, (trust - told.to(trust.dtype)).clamp(min=0.0))
        scale = scale.seen(row)
        state, gains = _corrected(before, grid, k, row)
        moments.append(Filtered(before, state, gains))
        rows.append(row)
        typical.append(scale.typical()[own])
        replaced.append(replaces)
        challenged.append(begins)
        forgotten.append(forgets)
    weight, gain = _weights(rows)
    marks = [torch.stack(marks, dim=1) for marks in (typical, replaced, challenged, forgotten)]
    return Recursion(grid.weighted(weight), steps, moments, gain, *marks), NoiseScale(*(x[own] for x in scale))


def _inherited(
    before: Gaussian, scale: NoiseScale, row: Judged, replaced: Tensor, challenged: Tensor
) -> tuple[Gaussian, NoiseScale, Judged]:
    """Of series and their challengers, where those take over and where they begin anew, `(b,)` each."""
    index = parents(replaced, challenged)
    return before.taken(index), NoiseScale(*(x[index] for x in scale)), Judged(*(x[index] for x in row))


def _weights(rows: list[Judged]) -> tuple[Tensor, Tensor]:
    """Weight and gain of each row, `(b, G)`."""
    return torch.stack([row.weight for row in rows], dim=1), torch.stack([row.gain for row in rows], dim=1)


def _begun(before: Gaussian, grid: Grid, k: int) -> tuple[Gaussian, Tensor]:
    """The challengers that row k begins, `(b, ...)`; and where they forget their mean.

    The covariance is widened until it expects the row. A mean beside which the row would lose its digits, of a fill
    value say, is forgotten.
    """
    forgets = _misfit(before, grid, k) > _LOST
    before = before._replace(mean=torch.where(forgets[:, None], 0.0, before.mean))
    return before._replace(covariance=before.covariance * _misfit(before, grid, k)[:, None, None]), forgets


def _trusted(row: Judged, trusted: Tensor) -> Judged:
    """With rows that count in full where they are trusted, `(b,)`, and would be rejected.

    A challenger's first row may have moved the wrong state: a velocity, where the position has jumped. The rows behind
    it mend that, if they are not rejected in turn.
    """
    trusted = trusted & (row.weight < _REJECTED)
    ones, scatter = torch.ones_like(row.weight), torch.where(trusted[:, None, None], 0.0, row.scatter)
    weight, gain = (torch.where(trusted, ones, x) for x in (row.weight, row.gain))
    return row._replace(weight=weight, gain=gain, scatter=scatter)


def _misfit(before: Gaussian, grid: Grid, k: int) -> Tensor:
    """`d^2 / m` of a row, `(b,)`, at least 1: a covariance so many times as large expects it."""
    rows, values = (part[:, k] for part in grid.whitened)
    missed = values - (rows @ before.mean[..., None])[..., 0]
    variance = rows @ before.covariance @ rows.mT
    variance = variance + torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    solved, singular = torch.linalg.solve_ex(variance, missed[..., None])  # by rounding, beside two rows that are one
    distance = (missed * solved[..., 0]).sum(-1).masked_fill(singular > 0, 1.0)
    return (distance / rows.any(-1).sum(-1).clamp(min=1)).clamp(min=1.0)


def _corrected(before: Gaussian, grid: Grid, k: int, row: Judged) -> tuple[Gaussian, list[Tensor]]:
    """After a row with its weight; `P H^T scatter H P` widens the covariance."""
    rows, values = (part[:, k] for part in grid.whitened)
    root = row.weight.sqrt()
    after, gains = before.corrected(rows * root[:, None, None], values * root[:, None])
    across = before.covariance @ rows.mT
    return after._replace(covariance=after.covariance + across @ row.scatter @ across.mT), gains


def _accepted(expected: Tensor, grid: Grid, k: int) -> Judged:
    """A row that counts in full, of which nothing is said."""
    b, m = grid.values[:, k].shape
    ones = grid.values.new_ones(b)
    never = torch.zeros_like(grid.present[:, k])
    return Judged(ones, ones, grid.values.new_zeros(b, m, m), expected, 0 * ones, never)


def _judged(expected: Tensor, without: Gaussian, grid: Grid, k: int) -> Judged:
    """The row of moment k, judged by the state without it."""
    rows, values = (part[:, k] for part in grid.whitened)
    b, m = values.shape
    told, nothing = grid.present[:, k], _accepted(expected, grid, k)
    if without.unknown is not None:  # a row that shows what is unknown has no prediction
        unknown = without.unknown
        for shown in rows.unbind(-2):
            first, _, unknown = unknown.seen(shown)
            told = told & ~first[..., 0]
    if not bool(told.any()):
        return nothing
    missed = values - (rows @ without.mean[..., None])[..., 0]
    variance = (rows @ without.covariance @ rows.mT).expand(b, m, m)
    finite = missed.isfinite().all(-1) & variance.isfinite().all(-1).all(-1)  # what has overflown judges nothing
    if not bool(finite.all()):
        told, missed = told & finite, torch.where(finite[:, None], missed, 0.0)
        variance = torch.where(finite[:, None, None], variance, 0.0)
    return weigh(expected, missed, variance, rows.any(-1).expand(b, m)).where(told, nothing)
