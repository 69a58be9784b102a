"""The Riccati prior along a path of times, in the separable form that a blocked kernel can use."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import riccati_log_gain, time_dtype

from .inputs import Parameters, Positions, by_segment, numbered


class RiccatiPath(NamedTuple):
    """`log c_ij = log K_j - |C_i - C_j|` (SPEC section 7): both `(b, heads, keys)`.

    `cumulative` is C, in `time_dtype` and right up to a constant within each segment.
    """

    log_gain: Tensor
    cumulative: Tensor


def riccati_path(
    parameters: Parameters, positions: Positions, dtype: torch.dtype, smallest: float | None = None
) -> RiccatiPath:
    """Steady-state Kalman gains of each local interval, and the sums of `log(1 - K_l)` along the keys.

    Keys that take no part are as if absent: an interval runs between two that do. The first key of a segment
    takes the gain of the first interval, 1 where it is alone, and adds nothing to the sum. `smallest` as for
    `riccati_log_gain`.
    """
    times, follows, order = by_segment(positions.key_times, positions.key_mask, positions.key_segments)
    leads = F.pad(follows[:, 1:], (0, 1))
    step = times.diff(dim=-1)
    interval = torch.where(follows, F.pad(step, (1, 0)), torch.where(leads, F.pad(step, (0, 1)), 1.0))

    decay, process_noise, key_noise, noise_floor = (
        p.to(dtype)[:, None]
        for p in (parameters.decay, parameters.process_noise, parameters.key_noise, parameters.noise_floor)
    )
    log_gain, log_rest = riccati_log_gain(
        decay, process_noise, key_noise + noise_floor, interval[:, None, :].to(dtype), smallest
    )
    log_gain = log_gain.masked_fill(~(follows | leads)[:, None, :], 0.0)
    step_down = log_rest.masked_fill(~follows[:, None, :], 0.0)
    cumulative = step_down.cumsum(-1, dtype=time_dtype(times.device))
    restore = order.argsort(-1)[:, None, :].expand_as(cumulative)
    return RiccatiPath(log_gain.gather(-1, restore), cumulative.gather(-1, restore))


def latest(path: RiccatiPath, positions: Positions) -> Tensor:
    """C at each query, `(b, heads, queries)`: that of the last key of its segment, of the first one before all keys.

    0 where no key of the segment takes part. Keys and queries are sorted together, so that it costs O(N log N).
    """
    keys = positions.key_times.shape[-1]
    if not keys:
        return path.cumulative.new_zeros(*path.cumulative.shape[:2], positions.query_times.shape[-1])
    times = torch.cat([positions.key_times, positions.query_times], dim=-1).detach()
    flags = [t for t in (positions.key_mask, positions.key_segments) if t is not None]
    batch = max(times.shape[0], *(t.shape[0] for t in flags)) if flags else times.shape[0]
    times = times.expand(batch, -1)
    group = torch.zeros(times.shape, dtype=torch.long, device=times.device)
    if positions.key_segments is not None and positions.query_segments is not None:
        segments = torch.cat([positions.key_segments, positions.query_segments], dim=-1)
        group = numbered(segments).expand(batch, -1)
    if positions.key_mask is not None:
        group = torch.cat([group[:, :keys].masked_fill(~positions.key_mask, -1), group[:, keys:]], dim=-1)
    by_time = times.argsort(dim=-1, stable=True)  # a key stands before a query of the same time
    order = by_time.gather(-1, group.gather(-1, by_time).argsort(dim=-1, stable=True))
    group = group.gather(-1, order)

    place = torch.arange(times.shape[-1], device=times.device).expand(batch, -1)
    is_key = order < keys
    before = torch.where(is_key, place, -1).cummax(-1).values
    after = torch.where(is_key, place, times.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    found = torch.zeros_like(is_key)
    at = torch.zeros_like(place)
    for candidate in (after, before):  # the earlier key, where there is one, has the last word
        inside = candidate.clamp(0, max(0, times.shape[-1] - 1))
        same = (candidate == inside) & (group.gather(-1, inside) == group)
        at, found = torch.where(same, inside, at), found | same
    restore = order.argsort(-1)[:, keys:]
    found = found.gather(-1, restore)
    key = order.gather(-1, at.gather(-1, restore)).masked_fill(~found, 0)
    heads = path.cumulative.shape[1]
    cumulative = path.cumulative.expand(batch, -1, -1)
    chosen = cumulative.gather(-1, key[:, None, :].expand(-1, heads, -1))
    return torch.where(found[:, None, :], chosen, 0.0)
