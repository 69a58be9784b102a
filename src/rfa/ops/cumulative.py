"""Sums along a sequence in O(N): linear recurrences; decay, variance and phase under changing dynamics (E.6)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import accumulated_variance, time_dtype

from .positions import Positions, by_group


def linear_scan(factor: Tensor, term: Tensor) -> Tensor:
    """`h_i = factor_i h_{i-1} + term_i` along the last dimension, with `h_{-1} = 0`.

    Pairs of neighbours are joined into one step, the sequence of half the length is solved the same way, and the steps
    in between follow: O(N) work in O(log N) steps, all of them differentiable. Nothing is divided: factors in [0, 1]
    with terms >= 0 lose no digits.

    Args:
        factor: `(..., length)`; broadcasts against `term` in all but the last dimension.
        term: `(..., length)`.

    Returns:
        `(..., length)`.
    """
    length = term.shape[-1]
    if length < 2:
        return term
    pairs = length // 2 * 2
    first, second = factor[..., 0:pairs:2], factor[..., 1:pairs:2]
    odd = linear_scan(second * first, second * term[..., 0:pairs:2] + term[..., 1:pairs:2])
    before = F.pad(odd, (1, 0))[..., : (length + 1) // 2]  # h at the odd index before each even one
    even = factor[..., 0::2] * before + term[..., 0::2]
    joined = torch.stack([even[..., : length // 2], odd], dim=-1).flatten(-2)
    return torch.cat([joined, even[..., -1:]], dim=-1) if length % 2 else joined


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
    """The sums at the keys and at the queries, which are the same tokens, and the times of the queries.

    An absent key does not count: the dynamics of the key before it last until the next one. As a query it lies in that
    interval, at its own time, or at the nearer end where its time lies outside. Each group has its own sums, in any
    order of the groups. The first key of a group has u = 0.
    """
    times, present, groups = positions.query_times, positions.present(), positions.query_groups
    if groups is None:
        first = torch.zeros_like(times, dtype=torch.bool)
        first[..., :1] = True
        return _sums(dynamics, times, present, first)
    order, restore, follows = positions.once("queries", lambda: by_group(groups))
    first = ~follows
    dynamics = TokenDynamics(*(_take(x, order) for x in dynamics))
    present = None if present is None else present.gather(-1, order)
    key, query, times = _sums(dynamics, times.expand(order.shape).gather(-1, order), present, first)
    key, query = (CumulativeDynamics(*(_take(x, restore) for x in sums)) for sums in (key, query))
    return key, query, times.expand(order.shape).gather(-1, restore)


def _sums(
    dynamics: TokenDynamics, times: Tensor, present: Tensor | None, first: Tensor
) -> tuple[CumulativeDynamics, CumulativeDynamics, Tensor]:
    """`cumulative_dynamics` of tokens group after group; `first`, `(b, length)`, is True where a group begins."""
    dtype = time_dtype(times.device)
    times = times.to(dtype)
    rate, process_noise, frequency = (_before(x.to(dtype), present, first) for x in dynamics)
    before = _before(times[:, None], present, first)[:, 0]
    follows = _before(torch.ones_like(before)[:, None], present, first)[:, 0] > 0
    if present is not None:
        after = _before(times[:, None].flip(-1), present.flip(-1), F.pad(first[:, 1:], (0, 1), value=True).flip(-1))
        last = _before(torch.ones_like(after), present.flip(-1), F.pad(first[:, 1:], (0, 1), value=True).flip(-1)) == 0
        after = after.masked_fill(last, torch.inf).flip(-1)[:, 0]
        between = torch.minimum(torch.where(follows, torch.maximum(times, before), times), after)
        times = torch.where(present, times, between)
    elapsed = torch.where(follows, times - before, 0.0)[:, None]

    decay, phase = rate * elapsed, frequency * elapsed[:, None]
    remaining = torch.exp(-2 * decay) * follows[:, None]
    added = process_noise * accumulated_variance(rate, elapsed)
    if present is None:
        sums = CumulativeDynamics(decay.cumsum(-1), linear_scan(remaining, added), phase.cumsum(-1))
        return sums, sums, times
    absent = ~present[:, None]
    steps = CumulativeDynamics(
        decay.masked_fill(absent, 0.0), added.masked_fill(absent, 0.0), phase.masked_fill(absent[:, None], 0.0)
    )
    variance = linear_scan(remaining.masked_fill(absent, 1.0), steps.variance)
    key = CumulativeDynamics(steps.decay.cumsum(-1), variance, steps.phase.cumsum(-1))
    ahead = torch.where(absent, remaining * key.variance + added, key.variance)
    query = CumulativeDynamics(key.decay + (decay - steps.decay), ahead, key.phase + (phase - steps.phase))
    return key, query, times


def _before(x: Tensor, present: Tensor | None, first: Tensor) -> Tensor:
    """The value of x at the last present token before each token in its group; 0 where there is none.

    `x` is `(b, ..., length)`, the flags are `(b, length)`.
    """
    index = (slice(None), *(None,) * (x.dim() - 2))
    if present is not None:
        holds = (~present & ~first)[index].to(x.dtype)
        x = linear_scan(holds, x.masked_fill(~present[index], 0.0))
    return F.pad(x[..., :-1], (1, 0)).masked_fill(first[index], 0.0)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """`x` `(batch, ..., length)` in the order `(batch, length)`."""
    return torch.take_along_dim(x, order.view(order.shape[0], *(1,) * (x.dim() - 2), -1), dim=-1)
