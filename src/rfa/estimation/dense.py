"""Robust estimates row by row: each source of each moment is looked at by itself, with matrices of any kind."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .consensus import Consensus, Correlated, Independent, estimate_row
from .gaussian import Correction, Gaussian
from .information import Information
from .kalman import first_state, joined, kalman_future, sources_seen
from .linear_sde import LinearSDE
from .observations import Grid
from .plan import Known, Plan, Row, settled, stacked
from .recursion import Recursion, nominal, robust_filter, robust_smoother
from .shares import Shares
from .sources import Sources
from .steps import Parts, Steps


def dense_rows(sde: LinearSDE, grid: Grid, plan: Plan, known: Known | None) -> Row:
    """Every query's row, `(b, queries, ...)`."""
    if not plan.belief.gaussian:
        grid = grid.limited()
    steps, parts = Steps.of(sde, grid), Parts.of(sde, grid)
    prior, moments = settled(sde, grid, known), grid.wanted.unique()
    begin = first_state(grid, steps, known)
    recursion, states, correlated = None, None, None
    if plan.start == "recursive" and not plan.belief.gaussian:
        recursion = (robust_smoother if plan.smooth else robust_filter)(grid, steps, begin)
        states = _states(recursion, plan)
    if plan.riccati:
        recursion = recursion or nominal(grid, steps, begin)
        origins = None if known is None else _unseen(begin, steps, grid)
        correlated = _correlated(sde, grid, plan, recursion, prior, origins)
        grid = recursion.judged(grid)
    future = _futures(grid, steps) if plan.smooth else None
    start = Information(*(torch.zeros_like(part[:, 0]) for part in grid.seen)) if known is None else known.information()
    past, wanted, rows = Sources.none(grid), set(moments.tolist()), []
    guarded = plan.riccati  # else no step raises the objective
    for k in range(grid.times.shape[1]):
        if k:
            past, start = past.ahead(parts, k - 1), parts.ahead(k - 1, start)
        past = past.seen(grid, k)
        consensus: Consensus | None = None if correlated is None else next(correlated)
        if k in wanted:
            sources = past if future is None else past.beside(future[k])
            consensus = consensus or Independent(start, sources, k, prior)
            row = estimate_row(consensus, sources, grid, k, plan, guarded, None if states is None else states[k])
            weights = _by_observation(row.weights, sources, grid) if plan.with_weights else None
            rows.append(row._replace(weights=weights))
    return stacked(rows).gathered(torch.searchsorted(moments, grid.wanted.contiguous()))


def _futures(grid: Grid, steps: Steps) -> list[Sources]:
    """What stands behind each moment, seen from it."""
    future = Sources.none(grid)
    found = [future]
    for k in reversed(range(grid.times.shape[1] - 1)):
        future = future.seen(grid, k + 1).back(steps, k)
        found.append(future)
    return found[::-1]


def _states(recursion: Recursion, plan: Plan) -> list[Tensor]:
    """The robust filter's or smoother's mean at each moment, `(b, n)`."""
    states = [recursion.own(moment.after) for moment in recursion.moments]
    if plan.smooth:
        future = kalman_future(recursion.grid, recursion.steps)
        states = [joined(state, ahead)[0] for state, ahead in zip(states, future, strict=True)]
    return [state.mean for state in states]


def _unseen(state: Gaussian, steps: Steps, grid: Grid) -> list[Gaussian]:
    """The state at each moment had nothing been seen."""
    states = [state]
    for k in range(grid.times.shape[1] - 1):
        states.append(states[-1].moved(*steps[k]))
    return states


def _correlated(
    sde: LinearSDE, grid: Grid, plan: Plan, recursion: Recursion, prior: Tensor | None, origins: list[Gaussian] | None
) -> Iterator[Correlated]:
    """Moment by moment, with the Riccati prior: shares in the Kalman filter, or in the robust one."""
    weighted, steps = recursion.grid, recursion.steps
    inverse = Steps.inverse(sde, grid)
    inverse = inverse.repeat(len(steps.transition) // len(inverse), 1, 1, 1)
    ahead = _future_shares(recursion) if plan.smooth else None
    seen = sources_seen(grid, plan.smooth)
    shares = Shares.none(weighted)
    for k, moment in enumerate(recursion.moments):
        if k:
            shares = shares.ahead(steps[k - 1][0], inverse[:, k - 1], moment.before.covariance)
        if recursion.replaced is not None and recursion.challenged is not None and recursion.forgotten is not None:
            shares = shares.inherited(recursion.replaced[:, k], recursion.challenged[:, k])
            shares = shares.forgotten(recursion.forgotten[:, k])
        shares = shares.seen(weighted, k, Correction.of(weighted.whitened[0][:, k], moment.gains), recursion.gain[:, k])
        before, state, each = recursion.own(moment.before), recursion.own(moment.after), recursion.own(shares)
        if ahead is not None:
            information, future = ahead[k]
            before = joined(before, information)[0]
            state, correction = joined(state, information)
            each = shares.kept(correction.keep).beside(future.kept(correction.gain))
        elsewhere = seen[:, k] - grid.present[:, k].to(seen.dtype)
        origin = None if origins is None else origins[k]
        yield Correlated(before, state, each.whole(), each.rest(state), prior, seen[:, k], elsewhere, origin)


def _future_shares(recursion: Recursion) -> list[tuple[Information, Shares]]:
    """What all that is seen behind each moment says of it, and the parts that each has in it."""
    grid, steps = recursion.grid, recursion.steps
    totals = kalman_future(grid, steps)
    shares = Shares.none(grid)
    found = [(totals[-1], shares)]
    for k in reversed(range(len(totals) - 1)):
        seen = Information(*(part[:, k + 1] for part in grid.seen))
        shares = shares.seen_behind(grid, k + 1, recursion.gain[:, k + 1]).back(steps, k, totals[k + 1] + seen)
        found.append((totals[k], shares))
    return found[::-1]


def _by_observation(values: Tensor | None, sources: Sources, grid: Grid) -> Tensor:
    """`(b, T)`: the weights of a row's sources in the order of the observations."""
    assert values is not None
    moments = torch.tensor(sources.moments, device=grid.key.device, dtype=torch.long)
    key, observations = grid.key[:, moments], int(grid.key.max()) + 1
    at = torch.where(grid.present[:, moments] & (key >= 0), key, observations)  # the last: nobody's
    return values.new_zeros(len(key), observations + 1).scatter(1, at, values)[:, :observations]
