"""What all kernels of a call share, and states in the common frame."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .visibility import Plan, visibility_plan

_ROWS = 64  # of the linear kernels
SMALL = 2.0**-32  # the unit of gradients of variances, as in `kernels/prior.py`


class Call(NamedTuple):
    """The arguments of the operators, by name; see `operator.py`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cos: Tensor | None
    key_sin: Tensor | None
    query_cos: Tensor | None
    query_sin: Tensor | None
    tables: Tensor | None
    key_path: Tensor | None
    query_path: Tensor | None
    key_bias: Tensor | None
    scalars: Tensor
    bound: Tensor
    key_times: Tensor
    query_times: Tensor
    key_groups: Tensor | None
    query_groups: Tensor | None
    causal: bool
    score: str
    gate: bool
    rotate_values: bool

    @property
    def empty(self) -> bool:
        """Whether there is no pair to visit."""
        return 0 in (*self.query.shape[:3], self.key.shape[2])

    @property
    def unit(self) -> float:
        """What the kernels' w is in units of; see `kernels/pairs.py`."""
        return 2.0**-40 if self.score == "student_t" else 1.0

    @property
    def lags(self) -> int:
        """Of the tables, which a cache makes for more keys than it holds yet; 0 along a path."""
        return 0 if self.tables is None else self.tables.shape[-1]

    @property
    def plan(self) -> Plan:
        """Orders and groups."""
        batch, uniform = self.query.shape[0], self.tables is not None
        return visibility_plan(
            self.key_times, self.query_times, self.key_groups, self.query_groups, batch, self.causal, uniform
        )


class Frame(NamedTuple):
    """Queries, keys and values in the common frame, contiguous, and the squared norms of queries and keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_norm: Tensor
    key_norm: Tensor


def to_frame(call: Call) -> Frame:
    """The states as the kernels read them.

    A pass of its own: rotating within the kernels would read eight bytes of phases for every two of a half-precision
    state, once for each tile instead of once.
    """
    query, query_norm = turned(call.query, call.query_cos, call.query_sin, None, inverse=True)
    key, key_norm = turned(call.key, call.key_cos, call.key_sin, call.key_groups, inverse=True)
    cos, sin = (call.key_cos, call.key_sin) if call.rotate_values else (None, None)
    value, value_norm = turned(call.value, cos, sin, call.key_groups, inverse=True)
    key_norm = torch.where(value_norm.isnan(), value_norm, key_norm)  # who sees the key sees that
    return Frame(query, key, value, query_norm, key_norm)


def turned(
    states: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    groups: Tensor | None,
    *,
    inverse: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """States rotated into the frame (`inverse`) or out of it, contiguous, and squared norms.

    Those of group -1 become zero, and so do those that are no numbers on the way into the frame; their norm is NaN.
    """
    from .kernels.frame import frame_kernel

    batch, heads, length, channels = states.shape
    target = states.new_empty(states.shape, dtype=dtype or states.dtype)
    norm = states.new_empty(states.shape[:3], dtype=torch.float32)
    if groups is not None:
        groups = groups.expand(batch, -1).contiguous()
    phase: Any = (0, 0, 0, 0)
    if cos is not None and sin is not None:
        cos, sin = cos.expand(batch, heads, -1, -1), sin.expand(batch, heads, -1, -1)
        sin = sin if sin.stride() == cos.stride() else sin.contiguous()
        cos = cos if sin.stride() == cos.stride() else cos.contiguous()
        phase = cos.stride()
    blocks = -(-length // _ROWS)
    with torch.cuda.device_of(states):
        frame_kernel[(blocks * batch * heads,)](
            states,
            target,
            norm,
            cos,
            sin,
            groups,
            *states.stride(),
            *phase,
            heads,
            length,
            blocks,
            MODES=channels // 2,
            BLOCK=_ROWS,
            ROTATE=cos is not None,
            INVERSE=inverse,
            NORM=inverse,
            GROUPS=groups is not None,
        )
    return target, norm


def prior_arguments(call: Call) -> tuple[Tensor | None, ...]:
    """Tables, paths at keys and queries, key bias and scalars, contiguous.

    Paths become pairs of float32, high and low: `(b, heads, rows, 2, length)`. Differences of such pairs are as good as
    float64's where the lag is small and as float32's relative to the lag where it is large, on any GPU, while most do
    float64 at 1/64 of the speed; no block needs an origin of its own, and gaps within a block do no harm.
    """
    paths = (_split(call.key_path), _split(call.query_path))
    tables = None if call.tables is None else torch.cat([call.tables[:2], call.unit * call.tables[2:]])
    scalars = torch.cat([call.scalars[:1], call.unit * call.scalars[1:2], call.scalars[2:]])  # c alone beside tables
    parts = (tables, *paths, call.key_bias, scalars.to(torch.float32))
    return tuple(part if part is None else part.contiguous() for part in parts)


def _split(path: Tensor | None) -> Tensor | None:
    if path is None:
        return None
    path = path.permute(1, 2, 0, 3)
    high = path.to(torch.float32)
    return torch.stack([high, (path - high.to(path.dtype)).to(torch.float32)], dim=3)


def choices(call: Call, plan: Plan, ranges: Tensor | None) -> dict[str, Any]:
    """The compile-time choices that the three attention kernels share."""
    query = call.query
    return {
        "CHANNELS": query.shape[-1],
        "VALUE_CHANNELS": call.value.shape[-1],
        "SCORE": call.score,
        "CAUSAL": call.causal,
        "GATE": call.gate,
        "UNIFORM": call.tables is not None,
        "RICCATI": call.key_bias is not None,
        "GROUPS": plan.key_groups is not None,
        "RANGES": ranges is not None,
        "FAST_LOG": query.dtype != torch.float32 and query.is_cuda and torch.version.cuda is not None,
        "PRECISION": "interpreted" if not query.is_cuda else "ieee" if query.dtype == torch.float32 else "tf32",
    }


def batched(call: Call, plan: Plan) -> tuple[int, int]:
    """Whether paths, and orders, differ along the batch."""
    path = call.key_path is not None and call.key_path.shape[1] > 1
    order = plan.key_order is not None and plan.key_order.shape[0] > 1
    return int(path), int(order)


def whole_ranges(ranges: Tensor, batch: int) -> Tensor:
    """Ranges of blocks of every batch."""
    return ranges.expand(batch, -1, -1).contiguous()
