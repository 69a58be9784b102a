"""The arguments that the kernels of a call share: orders and groups, prior, block sizes."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.ops.kernel import KernelInputs
from rfa.ops.positions import numbered

_FAR = 2**31 - 1
SMALL = 2.0**-32  # the unit of gradients of variances, as in `kernels/prior.py`


class Orders(NamedTuple):
    """Order numbers and groups of keys and queries.

    Orders `(b, length)` int32, b = 1 or batch: the ranks of the times, equal where the times are equal. So a kernel
    compares pairs in 32 bits for any times. None where the positions already are such ranks.
    Groups `(batch, length)` int32 or None. `skips`: ranges of blocks are worth computing.
    """

    key_order: Tensor | None
    query_order: Tensor | None
    key_groups: Tensor | None
    query_groups: Tensor | None
    causal: bool
    skips: bool


def time_order(key_times: Tensor, query_times: Tensor) -> tuple[Tensor, Tensor]:
    """The rank of each time among all keys' and queries' times; equal times share one. Without a device sync."""
    batch = max(key_times.shape[0], query_times.shape[0])
    times = torch.cat([key_times.expand(batch, -1), query_times.expand(batch, -1)], dim=-1)
    ranks = numbered(times).to(torch.int32)
    keys, queries = ranks.split([key_times.shape[-1], query_times.shape[-1]], dim=-1)
    return keys.contiguous(), queries.contiguous()


def block_ranges(order: Orders, queries: int, keys: int, rows: int, columns: int, by_key: bool) -> Tensor | None:
    """For each block of queries the first and last (exclusive) block of keys that it may see, or the other way round.

    `(b, blocks, 2)` int32, or None for uniform times without groups, where the kernels find the blocks themselves. A
    pair of blocks is worth a visit if some query is as late as some present key and their ranges of groups overlap. So
    the acausal half, padding and other packed sequences are skipped.
    """
    if not order.skips:
        return None
    device = next(t.device for t in (order.key_order, order.key_groups) if t is not None)
    key_order, query_order = order.key_order, order.query_order
    if key_order is None or query_order is None:
        key_order = torch.arange(keys, dtype=torch.int32, device=device)[None]
        query_order = key_order[:, keys - queries :]
    batch = max(key_order.shape[0], 1 if order.key_groups is None else order.key_groups.shape[0])
    present = None if order.key_groups is None else order.key_groups >= 0
    earliest = key_order if present is None else torch.where(present, key_order, _FAR)
    worth = torch.ones(batch, -(-queries // rows), -(-keys // columns), dtype=torch.bool, device=device)
    if order.causal:
        worth = worth & (_least(earliest, columns)[:, None, :] <= _greatest(query_order, rows)[:, :, None])
    if order.key_groups is not None and order.query_groups is not None:
        lowest = _least(torch.where(order.key_groups >= 0, order.key_groups, _FAR), columns)
        worth = worth & (lowest[:, None, :] <= _greatest(order.query_groups, rows)[:, :, None])
        highest = _greatest(order.key_groups, columns)
        worth = worth & (highest[:, None, :] >= _least(order.query_groups, rows)[:, :, None])
    return _span(worth.mT if by_key else worth)


def _least(x: Tensor, block: int) -> Tensor:
    return _in_blocks(x, block, _FAR).amin(-1)


def _greatest(x: Tensor, block: int) -> Tensor:
    return _in_blocks(x, block, -_FAR).amax(-1)


def _in_blocks(x: Tensor, block: int, missing: int) -> Tensor:
    ragged = -x.shape[-1] % block
    return (F.pad(x, (0, ragged), value=missing) if ragged else x).unflatten(-1, (-1, block))


def _span(worth: Tensor) -> Tensor:
    """The index of the first True of each row and the one after the last; first > last where there is none."""
    indices = torch.arange(worth.shape[-1], dtype=torch.int32, device=worth.device)
    first = torch.where(worth, indices, worth.shape[-1]).amin(-1)
    last = torch.where(worth, indices + 1, 0).amax(-1)
    return torch.stack([first, last], dim=-1).to(torch.int32).contiguous()


def unit(inputs: KernelInputs) -> float:
    """The unit of w in the kernels; see `kernels/pairs.py`."""
    return 2.0**-40 if inputs.score_kind == "student_t" else 1.0


def orders(inputs: KernelInputs) -> Orders:
    """Orders where times are not uniform, and groups of the whole batch."""
    batch, uniform = inputs.query.shape[0], inputs.tables is not None
    key_order = query_order = None
    if not uniform:
        key_order, query_order = time_order(inputs.key_times, inputs.query_times)
    key_groups, query_groups = (
        x if x is None else x.expand(batch, -1).contiguous() for x in (inputs.key_groups, inputs.query_groups)
    )
    skips = key_groups is not None or not uniform
    return Orders(key_order, query_order, key_groups, query_groups, inputs.causal, skips)


def prior_arguments(inputs: KernelInputs) -> tuple[Tensor | None, ...]:
    """Tables, paths at keys and queries, key bias and scalars, contiguous.

    Paths become pairs of float32, high and low: `(b, heads, rows, 2, length)`. A difference of such pairs is as good as
    float64 for small lags, and as good as float32 relative to the lag for large ones. Most GPUs compute float64 at 1/64
    of the speed. No block needs its own origin, and gaps within a block do no harm.
    """
    paths, scalars = (_split(inputs.key_path), _split(inputs.query_path)), inputs.scalars
    if inputs.tables is None:
        scalars = torch.cat([scalars[:1], unit(inputs) * scalars[1:2], scalars[2:]])
    parts = (inputs.tables, *paths, inputs.key_bias, scalars.to(torch.float32))
    return tuple(part if part is None else part.contiguous() for part in parts)


def _split(path: Tensor | None) -> Tensor | None:
    if path is None:
        return None
    path = path.permute(1, 2, 0, 3)
    high = path.to(torch.float32)
    return torch.stack([high, (path - high.to(path.dtype)).to(torch.float32)], dim=3)


def choices(inputs: KernelInputs, order: Orders, ranges: Tensor | None) -> dict[str, Any]:
    """The compile-time choices that the three attention kernels share."""
    query = inputs.query
    return {
        "CHANNELS": query.shape[-1],
        "VALUE_CHANNELS": inputs.value.shape[-1],
        "SCORE": inputs.score_kind,
        "CAUSAL": inputs.causal,
        "GATE": inputs.gate,
        "UNIFORM": inputs.tables is not None,
        "RICCATI": inputs.key_bias is not None,
        "GROUPS": order.key_groups is not None,
        "RANGES": ranges is not None,
        "FAST_LOG": query.dtype != torch.float32 and query.is_cuda and torch.version.cuda is not None,
        "PRECISION": "interpreted" if not query.is_cuda else "ieee" if query.dtype == torch.float32 else "tf32",
    }


def batched(inputs: KernelInputs, order: Orders) -> tuple[int, int]:
    """Whether the path, and the orders, differ between the rows of the batch, as 0 or 1."""
    path = inputs.key_path is not None and inputs.key_path.shape[1] > 1
    ordered = order.key_order is not None and order.key_order.shape[0] > 1
    return int(path), int(ordered)


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of prefetch in its loop, the most registers of a thread.

    Each kernel, head size and precision has one choice, which is not searched at run time. The arithmetic of pairs is
    the bottleneck, not memory: a pair holds a dozen float32 values in the forward kernel and some thirty in the
    gradients. Folded tiles have 64 rows and 64 keys.

    The choices were measured on an H200 with 2,048 tokens, those in float32 with up to 64 channels, the others with 64
    and 128 (`docs/record/performance.md`). 8 warps take twice the time of 4. Prefetching costs more registers than it
    saves time, but for estimates at irregular times. With at most 128 registers estimates at uniform times take
    three quarters of the time, gradients more than twice as much. In float32 the products are exact ("ieee"; TF32 would
    cost three digits). They do not run on tensor cores and hold both factors in registers, hence narrower tiles.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """How a kernel is compiled."""
        found = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers is not None and _is_hopper_or_later():
            found["maxnreg"] = self.registers
        return found


def _is_hopper_or_later() -> bool:
    """Where the most registers were measured. By the count of instructions sm_80 would spill them in its inner loop."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (9, 0)


def forward_blocks(inputs: KernelInputs) -> Blocks:
    """Of the forward kernel."""
    wide, uniform = _channels(inputs) > 64, inputs.tables is not None
    if inputs.query.dtype == torch.float32:
        return Blocks(32, 32, 8, 1) if wide else Blocks(64, 32, 4, 1)
    return Blocks(64, 32, 4, 1 if uniform else 3, 128 if uniform and not wide else None)


def query_blocks(inputs: KernelInputs) -> Blocks:
    """Of the kernel of sums over keys; as many rows as columns, or twice as many: see `diagonal_sums`."""
    if inputs.query.dtype == torch.float32:
        return Blocks(32, 32, 8 if _channels(inputs) > 64 else 4, 1)
    return Blocks(64, 32, 4, 1)


def key_blocks(inputs: KernelInputs) -> Blocks:
    """Of the kernel of sums over queries."""
    if inputs.query.dtype == torch.float32:
        return Blocks(32, 32, 8 if _channels(inputs) > 64 else 4, 1)
    return Blocks(32, 64, 4, 1)


def _channels(inputs: KernelInputs) -> int:
    """Those of a head, of keys or of values."""
    return max(inputs.query.shape[-1], inputs.value.shape[-1])


def row_ranges(inputs: KernelInputs, order: Orders, blocks: Blocks) -> Tensor | None:
    """`block_ranges` of the blocks of queries, of every batch."""
    return _ranges(inputs, order, blocks, by_key=False)


def column_ranges(inputs: KernelInputs, order: Orders, blocks: Blocks) -> Tensor | None:
    """`block_ranges` of the blocks of keys, of every batch."""
    return _ranges(inputs, order, blocks, by_key=True)


def _ranges(inputs: KernelInputs, order: Orders, blocks: Blocks, by_key: bool) -> Tensor | None:
    ranges = block_ranges(order, inputs.query.shape[2], inputs.key.shape[2], blocks.rows, blocks.columns, by_key)
    return None if ranges is None else ranges.expand(inputs.query.shape[0], -1, -1).contiguous()
