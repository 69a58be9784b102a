"""Damping, variance and phases along a path whose dynamics change from token to token (appendix E.6), in O(N)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import accumulated_variance, time_dtype

from .inputs import Positions
from .scan import linear_scan


class TokenDynamics(NamedTuple):
    """What rules from each token to the next one: mu and sigma^2 `(batch, heads, length)`, per unit of time, and omega
    `(batch, heads, modes, length)`, radians per unit of time.
    """

    decay: Tensor
    process_noise: Tensor
    frequency: Tensor


class Along(NamedTuple):
    """From the origin up to each token: damping M and variance u `(batch, heads, length)`, phases W `(batch, heads,
    modes, length)`, in `time_dtype`.

    Between a token j and a later token i: `E = exp(-(M_i - M_j))`, `V = u_i - E^2 u_j`, and the phase `W_i - W_j`.
    """

    damping: Tensor
    variance: Tensor
    phase: Tensor


def content_path(dynamics: TokenDynamics, positions: Positions) -> tuple[Along, Along, Tensor]:
    """The path at the keys and at the queries, which are the same tokens, and the times of the queries.

    A key that takes no part is as if absent: the dynamics of the one before it rule on to the next. As a query it
    stands on that way, at its own time, or at the nearer end where that lies outside. Segments are paths of their own,
    whatever their order. The first key of a path has u = 0.
    """
    times, present, segments = positions.query_times, positions.key_mask, positions.query_segments
    if segments is None:
        first = torch.zeros_like(times, dtype=torch.bool)
        first[..., :1] = True
        return _path(dynamics, times, present, first)
    segments, order = segments.sort(dim=-1, stable=True)
    first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    dynamics = TokenDynamics(*(_take(x, order) for x in dynamics))
    present = None if present is None else present.gather(-1, order)
    key, query, times = _path(dynamics, times.expand(order.shape).gather(-1, order), present, first)
    restore = order.argsort(dim=-1)
    key, query = (Along(*(_take(x, restore) for x in along)) for along in (key, query))
    return key, query, times.expand(order.shape).gather(-1, restore)


def _path(dynamics: TokenDynamics, times: Tensor, present: Tensor | None, first: Tensor) -> tuple[Along, Along, Tensor]:
    """`content_path` of tokens segment after segment; `first`, `(b, length)`, is True where one begins."""
    dtype = time_dtype(times.device)
    times = times.to(dtype)
    decay, process_noise, frequency = (_before(x.to(dtype), present, first) for x in dynamics)
    before = _before(times[:, None], present, first)[:, 0]
    follows = _before(torch.ones_like(before)[:, None], present, first)[:, 0] > 0
    if present is not None:
        after = _before(times[:, None].flip(-1), present.flip(-1), F.pad(first[:, 1:], (0, 1), value=True).flip(-1))
        last = _before(torch.ones_like(after), present.flip(-1), F.pad(first[:, 1:], (0, 1), value=True).flip(-1)) == 0
        after = after.masked_fill(last, torch.inf).flip(-1)[:, 0]
        between = torch.minimum(torch.where(follows, torch.maximum(times, before), times), after)
        times = torch.where(present, times, between)
    elapsed = torch.where(follows, times - before, 0.0)[:, None]

    damping, phase = decay * elapsed, frequency * elapsed[:, None]
    left = torch.exp(-2 * damping) * follows[:, None]
    grown = process_noise * accumulated_variance(decay, elapsed)
    if present is None:
        along = Along(damping.cumsum(-1), linear_scan(left, grown), phase.cumsum(-1))
        return along, along, times
    absent = ~present[:, None]
    steps = Along(
        damping.masked_fill(absent, 0.0), grown.masked_fill(absent, 0.0), phase.masked_fill(absent[:, None], 0.0)
    )
    kept = left.masked_fill(absent, 1.0)
    key = Along(steps.damping.cumsum(-1), linear_scan(kept, steps.variance), steps.phase.cumsum(-1))
    ahead = torch.where(absent, left * key.variance + grown, key.variance)
    query = Along(key.damping + (damping - steps.damping), ahead, key.phase + (phase - steps.phase))
    return key, query, times


def _before(x: Tensor, present: Tensor | None, first: Tensor) -> Tensor:
    """What the last token that takes part, before each token and in its segment, holds; 0 where there is none.

    `x` `(b, ..., length)`, the flags `(b, length)`.
    """
    index = (slice(None), *(None,) * (x.dim() - 2))
    if present is not None:
        holds = (~present & ~first)[index].to(x.dtype)
        x = linear_scan(holds, x.masked_fill(~present[index], 0.0))
    return F.pad(x[..., :-1], (1, 0)).masked_fill(first[index], 0.0)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """`x` `(batch, ..., length)` in the order `(batch, length)`."""
    return torch.take_along_dim(x, order.view(order.shape[0], *(1,) * (x.dim() - 2), -1), dim=-1)
