"""The recursive robust filter: each row is judged by a filter that has itself been robust so far.

A row's error is taken to come from `N(0, s R)`, with a scale s that is 1 for most rows and anything above for the others.
The filter keeps one Gaussian: a row counts with the gain that is the mean over s, and what s leaves open widens the
covariance (moment matching, as for a Gaussian sum). How often each s occurs is learned on the way.

Source: Masreliez, Approximate non-Gaussian filtering with linear state and observation relations (1975), with a scale
mixture for the density of the errors; for smoothing, one pass of expectation propagation over the rows' scales.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .gaussian import Gaussian
from .information import Information
from .kalman import Filtered, joined, kalman_filter
from .observations import Grid
from .shares import Shares
from .steps import Steps

_SCALES = 18  # multiples of R: 1 and half decades above it; the last grows with the row
_ABOVE = 0.25  # prior probability of a scale above 1
_FALL = 0.6  # of that probability from one scale to the next
_ROWS = 5.0  # that the prior of the scales counts for
_PERSISTENCE = 0.3  # probability that a row has the scale of the row before: errors come in bursts
_REJECTED = 0.1  # a weight below which a row starts a challenger
_ODDS = 7.0  # against a challenger, at its start, as a logarithm: 1,000 to 1
_BEHIND = 2.0  # a challenger that has fallen so far back is given up
_VAGUEST = 100.0  # variance, in units of the noise, up to which a vaguer prediction makes a row less certain


Part = TypeVar("Part", Gaussian, Shares)


class NoiseScale(NamedTuple):
    """What is known of the scales s of a series.

    counts: `(b, scales)`: of rows with each scale so far, and of the prior (the parameter of a Dirichlet distribution).
    last: `(b, scales)`: the probability of each scale for the last row.
    """

    counts: Tensor
    last: Tensor

    @classmethod
    def prior(cls, like: Tensor) -> "NoiseScale":
        """Before any row of series `(b, ...)`."""
        falling = _FALL ** torch.arange(_SCALES - 1, dtype=like.dtype, device=like.device)
        above = _ABOVE * falling / falling.sum()
        probability = torch.cat([1 - above.sum(dim=0, keepdim=True), above]).expand(len(like), -1)
        return cls(_ROWS * probability, probability)

    def expected(self) -> Tensor:
        """The probability of each scale for the next row."""
        learned = self.counts / self.counts.sum(-1, keepdim=True)
        return (1 - _PERSISTENCE) * learned + _PERSISTENCE * self.last

    def typical(self) -> Tensor:
        """The scale of the middle row, `(b,)`: 1 where R is right."""
        share = (self.counts / self.counts.sum(-1, keepdim=True)).detach().cumsum(-1)
        return _scales(share)[(share < 0.5).sum(-1)]

    def seen(self, row: "Judged") -> "NoiseScale":
        """After a row."""
        told = row.told[:, None]
        return NoiseScale(self.counts + row.probability * told, torch.where(told, row.probability, self.last))


class Judged(NamedTuple):
    """What a prediction says of a row. Where it says nothing, the row counts in full.

    weight: w, `(b,)`, in (0, 1]: the row counts as if its noise were R / w.
    gain: `(h + 1) / (h + 1 / w)`, `(b,)`, in (0, 1]: the row's gain, in units of the gain with w = 1.
    scatter: `(b, m, m)`: how far the whitened correction differs between scales.
    probability: `(b, scales)`: of each scale.
    evidence: `(b,)`: the log density of the row, 0 where nothing is said.
    told: `(b,)`: whether there is a row, and a prediction of it.
    """

    weight: Tensor
    gain: Tensor
    scatter: Tensor
    probability: Tensor
    evidence: Tensor
    told: Tensor

    def where(self, condition: Tensor, other: "Judged") -> "Judged":
        """Itself in the series where the condition holds, the other one elsewhere."""
        pairs = zip(self, other, strict=True)
        return Judged(*(torch.where(_wide(condition, mine), mine, theirs) for mine, theirs in pairs))


class Recursion(NamedTuple):
    """The robust filter of b series, or of 2 b: each one's own and, behind these, each one's challenger.

    grid: the rows with their weights.
    steps: as the series.
    moments: the state before and after each moment.
    gain: `(b or 2 b, G)`: the gain of each row in units of the Kalman filter's; 1 where nothing was seen.
    typical: `(b, G)`: the multiple of R that the middle row has, as known at each moment.
    replaced: `(b, G)`: where the challenger has taken over, before the row is seen.
    challenged: `(b, G)`: where a new challenger begins, before the row is seen. Both None where there are none.
    """

    grid: Grid
    steps: Steps
    moments: list[Filtered]
    gain: Tensor
    typical: Tensor
    replaced: Tensor | None = None
    challenged: Tensor | None = None

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

    A run of rows that are all rejected may be right: the state has jumped, or the filter began with an outlier. So a row
    that is rejected starts a challenger, a filter whose covariance has been widened until the row fits. The challenger
    takes over when the rows behind that one are a thousand times as likely under it.
    """
    return _filtered(grid, steps, state)[0]


def robust_smoother(grid: Grid, steps: Steps, state: Gaussian) -> Recursion:
    """The filter in which each row is judged from both sides: joined to `kalman_future`, it is the robust smoother.

    From the last row back, each is judged by the filter's prediction, by the future's and by both together; the one that
    expects the row most has the say. The scales are those learned from the whole series.
    """
    forward, scale = _filtered(grid, steps, state)
    nothing = Information(*(torch.zeros_like(part[:, 0]) for part in grid.seen))
    ahead, rows = nothing, list[Judged]()
    for k in reversed(range(grid.times.shape[1])):
        before = forward.moments[k].before.first(len(grid.values))
        row = _judged(scale.expected(), joined(before, ahead)[0], grid, k)
        for alone in (before,):
            other = _judged(scale.expected(), alone, grid, k)
            row = other.where(other.told & (other.evidence > row.evidence), row)
        scale = scale._replace(last=torch.where(row.told[:, None], row.probability, scale.last))
        rows.append(row)
        if k:
            seen = Information(*(part[:, k] for part in grid.seen)).weighted(row.weight)
            ahead = steps.back(k - 1, ahead + seen)
    rows = rows[::-1]
    weighted = grid.weighted(torch.stack([row.weight for row in rows], dim=1))
    gain = torch.stack([row.gain for row in rows], dim=1)
    typical = scale.typical()[:, None].expand_as(gain)
    return Recursion(weighted, steps, kalman_filter(weighted, steps, state), gain, typical)


def _filtered(grid: Grid, steps: Steps, state: Gaussian) -> tuple[Recursion, NoiseScale]:
    """The filter, with what it has learned of the scales."""
    b = len(grid.values)
    own, challenger = slice(0, b), slice(b, 2 * b)
    grid, steps, state = grid.twice(), steps.twice(), state.expanded(2 * b)
    scale = NoiseScale.prior(grid.values)
    odds = torch.full_like(grid.times[own, 0], -torch.inf)  # of the challenger, as a logarithm; none without one
    moments, rows, typical, replaced, challenged = [], [], [], [], []
    for k in range(grid.times.shape[1]):
        before = state.moved(*steps[k - 1]) if k else state
        if not bool(before.covariance.isfinite().all()):
            raise ValueError(f"times: got times up to number {k}, by which the state of an unstable model overflows")
        row = _judged(scale.expected(), before, grid, k)
        odds = odds + (row.evidence[challenger] - row.evidence[own]).detach()
        replaces = odds > 0
        parent = torch.arange(2 * b, device=odds.device)
        parent[own] += b * replaces
        before, scale, row = (
            before.taken(parent),
            NoiseScale(*(x[parent] for x in scale)),
            Judged(*(x[parent] for x in row)),
        )
        begins = ~(odds > -_ODDS - _BEHIND) | replaces
        odds = torch.where(begins, -torch.inf, odds)
        begins = begins & row.told[own] & (row.weight[own] < _REJECTED)
        if bool(begins.any()):
            odds = torch.where(begins, -_ODDS, odds)
            parent = torch.arange(2 * b, device=odds.device)
            parent[challenger] -= b * begins
            before, scale, row = (
                before.taken(parent),
                NoiseScale(*(x[parent] for x in scale)),
                Judged(*(x[parent] for x in row)),
            )
            fresh = torch.cat([torch.zeros_like(begins), begins])
            before = before._replace(
                covariance=before.covariance * torch.where(fresh, _misfit(before, grid, k), 1.0)[:, None, None]
            )
            row = _accepted(scale.expected(), grid, k).where(fresh, row)
        scale = scale.seen(row)
        state, gains = _corrected(before, grid, k, row)
        moments.append(Filtered(before, state, gains))
        rows.append(row)
        typical.append(scale.typical()[own])
        replaced.append(replaces)
        challenged.append(begins)
    weighted = grid.weighted(torch.stack([row.weight for row in rows], dim=1))
    gain = torch.stack([row.gain for row in rows], dim=1)
    flags = (torch.stack(flags, dim=1) for flags in (replaced, challenged))
    found = Recursion(weighted, steps, moments, gain, torch.stack(typical, dim=1), *flags)
    return found, NoiseScale(*(x[own] for x in scale))


def _misfit(before: Gaussian, grid: Grid, k: int) -> Tensor:
    """`d^2 / m` of a row, `(b,)`, at least 1: a covariance so many times as large expects it."""
    rows, values = (part[:, k] for part in grid.whitened)
    missed = values - (rows @ before.mean[..., None])[..., 0]
    variance = rows @ before.covariance @ rows.mT
    variance = variance + torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    distance = (missed * torch.linalg.solve(variance, missed)).sum(-1)
    return (distance / rows.any(-1).sum(-1).clamp(min=1)).clamp(min=1.0).detach()


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


def weigh(expected: Tensor, missed: Tensor, variance: Tensor, here: Tensor) -> Judged:
    """A row, judged by its innovation e.

        p(s | e) ~ p(s) N(e; 0, H + s I)
        w = sum_s p / (h + s) / sum_s p s / (h + s),    h = tr H / m
        scatter = Cov_s[(H + s I)^-1 e]

    With w the Kalman gain is the mean of the gains over s, exactly where H is a multiple of I. The larger h, the less can
    be said of s, up to the mean of all s, which is so large that a row would count for nothing: h is capped.

    Args:
        expected: p(s), `(b, scales)`.
        missed: e in units of the noise, `(b, m)`; 0 where a component is missing.
        variance: H, of the prediction of e, `(b, m, m)`; 0 there.
        here: `(b, m)`: which components are seen.
    """
    seen = here.sum(-1).clamp(min=1)
    scale = _scales(missed).expand(len(missed), -1)
    last = torch.maximum(scale[:, -1], missed.detach().square().sum(-1) / seen)  # no row lies beyond it
    scale = torch.cat([scale[:, :-1], last[:, None]], dim=-1)
    noise = torch.diag_embed(torch.where(here[:, None, :], scale[..., None], 1.0))
    variance, factor = _factored(variance, noise)
    correction = torch.cholesky_solve(missed[:, None, :, None].expand(*scale.shape, -1, 1), factor)[..., 0]
    log_density = -(correction * missed[:, None]).sum(-1) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    joint = expected.log() + log_density
    probability = torch.softmax(joint, dim=-1)
    spread = variance.diagonal(dim1=-2, dim2=-1).sum(-1) / seen
    capped = spread.clamp(max=_VAGUEST)
    share = probability / (capped[:, None] + scale)
    weight = share.sum(-1) / (share * scale).sum(-1)
    gain = weight * (spread + 1) / (weight * spread + 1)
    apart = correction - (probability[..., None] * correction).sum(1, keepdim=True)
    scatter = (probability[..., None, None] * apart[..., :, None] * apart[..., None, :]).sum(1)
    vague = torch.where(spread > _VAGUEST, capped / torch.where(spread > _VAGUEST, spread, 1.0), 1.0)
    scatter = scatter * vague[:, None, None].square()
    return Judged(weight, gain, scatter, probability, torch.logsumexp(joint, dim=-1), here.any(-1))


def _factored(variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """H, and the Cholesky factors of `H + s I`; where rounding has cost H its sign, without its correlations."""
    factor, failed = torch.linalg.cholesky_ex(variance[:, None] + noise)
    lost = (failed > 0).any(-1)
    if not bool(lost.any()):
        return variance, factor
    alone = torch.diag_embed(variance.diagonal(dim1=-2, dim2=-1).abs())
    variance = torch.where(lost[:, None, None], alone, variance)
    return variance, torch.linalg.cholesky(variance[:, None] + noise)


def _wide(condition: Tensor, like: Tensor) -> Tensor:
    """`(b,)`, with as many dimensions as another."""
    return condition.reshape(-1, *(1,) * (like.dim() - 1))


def _scales(like: Tensor) -> Tensor:
    """Of R, `(scales,)`."""
    return 10.0 ** (torch.arange(_SCALES, dtype=like.dtype, device=like.device) / 2)
