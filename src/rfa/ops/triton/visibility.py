"""Who sees whom, as a kernel reads it: whole numbers in the place of times, and the blocks worth visiting."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import numbered

_FAR = 2**31 - 1


class Plan(NamedTuple):
    """Order numbers and groups of keys and queries.

    Orders `(b, length)` int32, b = 1 or batch: equal where the times are equal, else in their order, so that a kernel
    compares pairs in 32 bits whatever the times are. None where positions say the same.
    Groups `(batch, length)` int32 or None. `skips`: ranges of blocks are worth computing.
    """

    key_order: Tensor | None
    query_order: Tensor | None
    key_groups: Tensor | None
    query_groups: Tensor | None
    causal: bool
    skips: bool


def visibility_plan(
    key_times: Tensor,
    query_times: Tensor,
    key_groups: Tensor | None,
    query_groups: Tensor | None,
    batch: int,
    causal: bool,
    uniform: bool,
) -> Plan:
    """Orders where times are not uniform, and groups of the whole batch."""
    key_order = query_order = None
    if not uniform:
        key_order, query_order = time_order(key_times, query_times)
    if key_groups is not None and query_groups is not None:
        key_groups, query_groups = (g.expand(batch, -1).contiguous() for g in (key_groups, query_groups))
    return Plan(key_order, query_order, key_groups, query_groups, causal, key_groups is not None or not uniform)


def time_order(key_times: Tensor, query_times: Tensor) -> tuple[Tensor, Tensor]:
    """The rank of each time among all keys' and queries' times; equal times share one. Without a device sync."""
    batch = max(key_times.shape[0], query_times.shape[0])
    times = torch.cat([key_times.expand(batch, -1), query_times.expand(batch, -1)], dim=-1)
    ranks = numbered(times).to(torch.int32)
    keys, queries = ranks.split([key_times.shape[-1], query_times.shape[-1]], dim=-1)
    return keys.contiguous(), queries.contiguous()


def block_ranges(plan: Plan, queries: int, keys: int, rows: int, columns: int) -> tuple[Tensor, Tensor] | None:
    """For each block of queries the first and last (exclusive) block of keys that it may see, and the other way round.

    Both `(b, blocks, 2)` int32, or None where the kernels know better: uniform times without groups. A pair of blocks
    is worth a visit if some query is as late as some key that takes part, and their ranges of groups meet: causal
    halves, padding and packed sequences are passed over.
    """
    if not plan.skips:
        return None
    device = next(t.device for t in (plan.key_order, plan.key_groups) if t is not None)
    key_order, query_order = plan.key_order, plan.query_order
    if key_order is None or query_order is None:
        key_order = torch.arange(keys, dtype=torch.int32, device=device)[None]
        query_order = key_order[:, keys - queries :]
    batch = max(key_order.shape[0], 1 if plan.key_groups is None else plan.key_groups.shape[0])
    present = None if plan.key_groups is None else plan.key_groups >= 0
    earliest = key_order if present is None else torch.where(present, key_order, _FAR)
    worth = torch.ones(batch, -(-queries // rows), -(-keys // columns), dtype=torch.bool, device=device)
    if plan.causal:
        worth = worth & (_least(earliest, columns)[:, None, :] <= _greatest(query_order, rows)[:, :, None])
    if plan.key_groups is not None and plan.query_groups is not None:
        lowest = _least(torch.where(plan.key_groups >= 0, plan.key_groups, _FAR), columns)
        worth = worth & (lowest[:, None, :] <= _greatest(plan.query_groups, rows)[:, :, None])
        highest = _greatest(plan.key_groups, columns)
        worth = worth & (highest[:, None, :] >= _least(plan.query_groups, rows)[:, :, None])
    return _span(worth), _span(worth.mT)


def _least(x: Tensor, block: int) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % block), value=_FAR).unflatten(-1, (-1, block)).amin(-1)


def _greatest(x: Tensor, block: int) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % block), value=-_FAR).unflatten(-1, (-1, block)).amax(-1)


def _span(worth: Tensor) -> Tensor:
    """The first True of each row and the place after the last; first > last where there is none."""
    places = torch.arange(worth.shape[-1], dtype=torch.int32, device=worth.device)
    first = torch.where(worth, places, worth.shape[-1]).amin(-1)
    last = torch.where(worth, places + 1, 0).amax(-1)
    return torch.stack([first, last], dim=-1).to(torch.int32).contiguous()
