"""Sums along a sequence in O(N): decay, variance and phase where each token sets the dynamics (appendix E.6)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import accumulated_variance, time_dtype

from .dense import linear_scan
from .positions import Positions, beside, by_group, take, token_groups


class TokenDynamics(NamedTuple):
    """The dynamics from each token to the next one.

    Fields:
        decay: mu, `(batch, heads, length)`, per unit of time.
        process_noise: sigma^2, `(batch, heads, length)`, variance per unit of time.
        frequency: omega, `(batch, heads, modes, length)`, radians per unit of time.
    """

    decay: Tensor
    process_noise: Tensor
    frequency: Tensor


class CumulativeDynamics(NamedTuple):
    """Sums from the origin of a group up to each token, in `time_dtype`.

    Between a token j and a later token i: `E = exp(-(M_i - M_j))`, `V = u_i - E^2 u_j`, and the phase `W_i - W_j`.

    Fields:
        decay: the cumulative decay M, `(batch, heads, length)`.
        variance: the accumulated variance u, `(batch, heads, length)`.
        phase: the cumulative phase W, `(batch, heads, modes, length)`.
    """

    decay: Tensor
    variance: Tensor
    phase: Tensor


def cumulative_dynamics(
    dynamics: TokenDynamics, positions: Positions
) -> tuple[CumulativeDynamics, CumulativeDynamics, Tensor]:
    """The sums at the keys and at the queries, which are the last of the keys' tokens, and the times of the queries.

    An absent key does not count: the dynamics of the key before it last until the next one. As a query it lies in that
    interval, at its own time, or at the nearer end where its time lies outside. Each group has its own sums, in any
    order of the groups. The first key of a group has u = 0.
    """
    tokens = _tokens(positions)
    elapsed = tokens.elapsed[:, None]
    rate, process_noise, frequency = map(tokens.before, dynamics)
    decay, phase = rate * elapsed, frequency * elapsed[:, None]
    remaining = torch.exp(-2 * decay) * tokens.follows[:, None]
    added = process_noise * accumulated_variance(rate, elapsed)
    queries = positions.query_times.shape[-1]
    sums = tokens.sums(decay), tokens.growth(remaining, added), tokens.sums(phase)
    at_keys, at_queries = zip(*(tokens.placed(each, queries) for each in sums), strict=True)
    times = _last(tokens.restored(tokens.times), queries)
    return CumulativeDynamics(*at_keys), CumulativeDynamics(*at_queries), times


def clocked(positions: Positions, rate: Tensor) -> Positions:
    """Positions with the clock of each head, `t_i = sum_{l < i} rate_l (t_{l+1} - t_l)`.

    The rate of a token `(batch, heads, keys)`, the head's time per unit of the common time, holds until the next token.
    The queries are the last of the keys' tokens. Absent keys and groups count as in `cumulative_dynamics`.
    """
    tokens = _tokens(positions)
    sums = tokens.sums(tokens.before(rate) * tokens.elapsed[:, None])
    return positions.replace(clock=tokens.placed(sums, positions.query_times.shape[-1]), uniform=False)


class _Tokens(NamedTuple):
    """The tokens of a sequence, group after group, `(b, length)` each.

    Fields:
        times: in `time_dtype`, those of absent tokens moved between the present ones before and after them.
        elapsed: the time since the last present token of the group, 0 where there is none.
        follows: 1 where there is one, else 0.
        first: True where a group begins.
        present: True where a token takes part; None where all do.
        order, restore: the order of the tokens and the one that takes it back; None where they stand as they came.
    """

    times: Tensor
    elapsed: Tensor
    follows: Tensor
    first: Tensor
    present: Tensor | None
    order: Tensor | None
    restore: Tensor | None

    def sorted(self, x: Tensor) -> Tensor:
        """`x` `(b, ..., length)` of the sequence, group after group."""
        return x if self.order is None else take(x, self.order)

    def restored(self, x: Tensor) -> Tensor:
        """`x` `(b, ..., length)` in the order of the sequence."""
        return x if self.restore is None else take(x, self.restore)

    def placed(self, sums: tuple[Tensor, Tensor], queries: int) -> tuple[Tensor, Tensor]:
        """Sums at all keys and at the last tokens, the queries, in the order of the sequence; one tensor if alike."""
        key = self.restored(sums[0])
        return key, _last(key if sums[1] is sums[0] else self.restored(sums[1]), queries)

    def before(self, x: Tensor) -> Tensor:
        """`x` `(b, ..., length)` of the sequence at the last present token before each token in its group, sorted."""
        return _before(self.sorted(x.to(self.times.dtype)), self.present, self.first)

    def sums(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the steps at the tokens as keys and as queries: the step to an absent token is its own only."""
        if self.present is None:
            total = self._cumulative(step)
            return total, total
        counted = step.masked_fill(~beside(step, self.present), 0.0)
        total = self._cumulative(counted)
        return total, total + (step - counted)

    def _cumulative(self, step: Tensor) -> Tensor:
        """Sums that begin at 0 in each group. So a group that is read later changes no sum of the others."""
        total = step.cumsum(-1)
        if self.order is None:
            return total
        start = torch.where(self.first, torch.arange(self.first.shape[-1], device=step.device), 0).cummax(-1).values
        return total - take(total, start)

    def growth(self, remaining: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """`u_{l+1} = remaining_l u_l + added_l` at the tokens as keys and as queries, as `sums`."""
        if self.present is None:
            total = linear_scan(remaining, added)
            return total, total
        absent = ~beside(added, self.present)
        total = linear_scan(remaining.masked_fill(absent, 1.0), added.masked_fill(absent, 0.0))
        return total, torch.where(absent, remaining * total + added, total)


def _tokens(positions: Positions) -> _Tokens:
    """The tokens of the keys. The last of them are the queries, which have a time and a group even where absent."""
    keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
    times = torch.cat([positions.key_times[:, : keys - queries], positions.query_times], dim=-1)
    times, present, order, restore = times.to(time_dtype(times.device)), positions.present(), None, None
    first = torch.zeros_like(times, dtype=torch.bool)
    first[..., :1] = True
    if positions.query_groups is not None:
        order, restore, joined = positions.once("tokens", lambda: by_group(token_groups(positions)))
        times, first = times.expand(order.shape).gather(-1, order), ~joined
        present = None if present is None else present.gather(-1, order)
    before = _before(times[:, None], present, first)[:, 0]
    follows = _before(torch.ones_like(times)[:, None], present, first)[:, 0]
    if present is not None:
        backwards = present.flip(-1), F.pad(first[:, 1:], (0, 1), value=True).flip(-1)
        after = _before(times[:, None].flip(-1), *backwards)
        last = _before(torch.ones_like(after), *backwards) == 0
        after = after.masked_fill(last, torch.inf).flip(-1)[:, 0]
        between = torch.minimum(torch.where(follows > 0, torch.maximum(times, before), times), after)
        times = torch.where(present, times, between)
    return _Tokens(times, torch.where(follows > 0, times - before, 0.0), follows, first, present, order, restore)


def _before(x: Tensor, present: Tensor | None, first: Tensor) -> Tensor:
    """The value of x `(b, ..., length)` at the last present token before each token in its group; 0 without one."""
    if present is not None:
        holds = beside(x, ~present & ~first).to(x.dtype)
        x = linear_scan(holds, x.masked_fill(~beside(x, present), 0.0))
    return x.roll(1, -1).masked_fill(beside(x, first), 0.0)  # the first token of a row is the first of its group


def _last(x: Tensor, length: int) -> Tensor:
    return x if x.shape[-1] == length else x[..., x.shape[-1] - length :]
