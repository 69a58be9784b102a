"""The Riccati prior along a path of times, in the separable form that a blocked kernel can use."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import riccati_log_gain, time_dtype

from .inputs import Parameters, Positions, by_segment


class RiccatiPath(NamedTuple):
    """`log c_ij = log K_j - |C_i - C_j|` (SPEC section 7): both `(b, heads, keys)`.

    `cumulative` is C, in `time_dtype` and right up to a constant within each segment.
    """

    log_gain: Tensor
    cumulative: Tensor


def riccati_path(parameters: Parameters, positions: Positions, dtype: torch.dtype) -> RiccatiPath:
    """Steady-state Kalman gains of each local interval, and the sums of `log(1 - K_l)` along the keys.

    Keys that take no part are as if absent: an interval runs between two that do. The first key of a segment
    takes the gain of the first interval, 1 where it is alone, and adds nothing to the sum.
    """
    times, follows, order = by_segment(positions.key_times, positions.key_mask, positions.key_segments)
    leads = F.pad(follows[:, 1:], (0, 1))
    step = times.diff(dim=-1)
    interval = torch.where(follows, F.pad(step, (1, 0)), torch.where(leads, F.pad(step, (0, 1)), 1.0))

    decay, process_noise, key_noise, noise_floor = (
        p.to(dtype)[:, None]
        for p in (parameters.decay, parameters.process_noise, parameters.key_noise, parameters.noise_floor)
    )
    log_gain, log_rest = riccati_log_gain(decay, process_noise, key_noise + noise_floor, interval[:, None, :].to(dtype))
    log_gain = log_gain.masked_fill(~(follows | leads)[:, None, :], 0.0)
    step_down = log_rest.masked_fill(~follows[:, None, :], 0.0)
    cumulative = step_down.cumsum(-1, dtype=time_dtype(times.device))
    restore = order.argsort(-1)[:, None, :].expand_as(cumulative)
    return RiccatiPath(log_gain.gather(-1, restore), cumulative.gather(-1, restore))


def latest(path: RiccatiPath, lag: Tensor, takes_part: Tensor) -> Tensor:
    """C at each query, `(b, heads, queries, 1)`: that of its last key, since C never rises along a segment.

    Args:
        path: the prior along the keys.
        lag: `(b, queries, keys)`, query time minus key time.
        takes_part: `(b, queries, keys)`, True for the keys of the query's segment that are not masked.
    """
    cumulative = path.cumulative[:, :, None, :]
    past = (takes_part & (lag >= 0))[:, None]
    last = cumulative.masked_fill(~past, torch.inf).amin(-1, keepdim=True)
    before_all = cumulative.masked_fill(~takes_part[:, None], -torch.inf).amax(-1, keepdim=True)
    return torch.where(past.any(-1, keepdim=True), last, before_all)
