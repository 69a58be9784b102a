"""What a backend receives: the operator's arguments, checked and put in one form."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import TimeDependentNoise, covariance, time_dependent_variance, time_dtype

_SCORES = 2**24  # held at once where no gradient needs them: 64 MB in float32

Weight = Literal["student_t", "exponential"]
Prior = Literal["lyapunov", "riccati"]


class Parameters(NamedTuple):
    """The dynamics and noises of each head, `(heads,)`; `frequency` is `(heads, modes)`.

    `noise` is what the process noise has beside its white part, None for nothing.
    """

    decay: Tensor
    frequency: Tensor
    process_noise: Tensor
    key_noise: Tensor
    query_noise: Tensor
    noise_floor: Tensor
    robustness: Tensor
    inverse_temperature: Tensor
    horizon: Tensor | None = None
    noise: TimeDependentNoise | None = None

    def to(self, dtype: torch.dtype) -> "Parameters":
        """The same in another dtype, save `noise`: its phases are formed before rounding."""
        return Parameters(*(p.to(dtype) if isinstance(p, Tensor) else p for p in self))  # type: ignore[arg-type]

    def unsqueezed(self, dimensions: int) -> "Parameters":
        """The same with so many dimensions of size 1 behind the heads, save `frequency`: to go with lags."""
        index = (..., *(None,) * dimensions)
        changed: dict[str, Any] = {name: p[index] for name, p in self._asdict().items() if isinstance(p, Tensor)}
        changed["frequency"] = self.frequency
        if self.noise is not None:
            changed["noise"] = TimeDependentNoise(*(p[index] for p in self.noise))
        return self._replace(**changed)

    def variance(self, lag: Tensor) -> Tensor:
        """`Sigma(tau)`, how uncertain a key is after a lag that goes with the parameters."""
        if self.noise is None:
            return covariance(self.decay, self.process_noise, self.key_noise, self.noise_floor, lag)
        accumulated = time_dependent_variance(self.decay, self.process_noise, self.noise, lag)
        none = torch.zeros_like(self.process_noise)
        return accumulated + covariance(self.decay, none, self.key_noise, self.noise_floor, lag)

    def tensors(self) -> dict[str, Tensor]:
        """All that are given, by name, those of the noise in one row with the others."""
        named = {name: given for name, given in self._asdict().items() if name != "noise" and given is not None}
        return named | ({} if self.noise is None else self.noise._asdict())


class Options(NamedTuple):
    """The choices that select a variant of the operator."""

    causal: bool
    weight: Weight
    rotate_values: bool
    prior: Prior
    gate: bool
    query_noise_in_bias: bool
    log_precision: bool
    in_frame: bool = False  # states stand in the common frame already, and the estimate stays in it


class Positions(NamedTuple):
    """Where keys and queries stand in time, and which keys take part.

    `key_times` `(b, keys)` and `query_times` `(b, queries)` count from a common origin, with one b, 1 or batch;
    `key_mask` `(batch, keys)` and both segment tensors are None where everything takes part. `uniform`: the keys
    stand at 0, 1, 2, ... and the queries at the last of these.
    """

    key_times: Tensor
    query_times: Tensor
    key_mask: Tensor | None
    key_segments: Tensor | None
    query_segments: Tensor | None
    uniform: bool = False

    def visible(self, causal: bool) -> Tensor:
        """`(b, queries, keys)`, True where a key takes part in a query's estimate."""
        lag = self.query_times[:, :, None] - self.key_times[:, None, :]
        seen = lag >= 0 if causal else torch.ones_like(lag, dtype=torch.bool)
        if self.key_mask is not None:
            seen = seen & self.key_mask[:, None, :]
        if self.key_segments is not None and self.query_segments is not None:
            seen = seen & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
        return seen

    def present(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, zero where a key takes no part: it may hold anything, NaN for a missing row."""
        if self.key_mask is None:
            return key, value
        absent = ~self.key_mask[:, None, :, None]
        return key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)

    def rows(self, rows: slice) -> "Positions":
        """The same for some of the queries."""
        segments = None if self.query_segments is None else self.query_segments[:, rows]
        return self._replace(query_times=self.query_times[:, rows], query_segments=segments)

    def keys(self, keys: slice) -> "Positions":
        """The same for some of the keys."""
        mask = None if self.key_mask is None else self.key_mask[:, keys]
        segments = None if self.key_segments is None else self.key_segments[:, keys]
        return self._replace(key_times=self.key_times[:, keys], key_mask=mask, key_segments=segments)


def times_dtype(times: Tensor, query_times: Tensor | None) -> torch.dtype:
    """Of differences of times: int64 where all are whole; nanoseconds since 1970 do not fit into a float."""
    given = (times,) if query_times is None else (times, query_times)
    return time_dtype(times.device) if any(t.is_floating_point() for t in given) else torch.int64


def locate(
    queries: int,
    keys: int,
    device: torch.device,
    times: Tensor | None,
    query_times: Tensor | None,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
) -> Positions:
    """Positions from the operator's arguments.

    Times count from the first key that takes part, in `time_dtype`: far-off origins would cancel badly later. A
    key that takes no part stands at that origin, for padding may carry any time.
    """
    dtype = time_dtype(device)
    query_segments = None if segment_ids is None else segment_ids[:, keys - queries :]
    if times is None and query_times is None:
        key_times = torch.arange(keys, device=device, dtype=dtype)[None]
        return Positions(key_times, key_times[:, keys - queries :], key_mask, segment_ids, query_segments, uniform=True)
    given = torch.arange(keys, device=device) if times is None else times
    common = times_dtype(given, query_times)
    key_times = torch.atleast_2d(given.to(common))
    query_times = key_times[:, keys - queries :] if query_times is None else torch.atleast_2d(query_times.to(common))
    origin = (key_times if keys else query_times)[:, :1].detach()
    padding = None if times is None or key_mask is None or not keys else ~key_mask
    if padding is not None:
        first = padding.int().argmin(-1, keepdim=True)
        origin = key_times.detach().expand(padding.shape).gather(-1, first)
    key_times, query_times = (key_times - origin).to(dtype), (query_times - origin).to(dtype)
    if padding is not None:
        key_times = key_times.masked_fill(padding, 0.0)
    batch = max(key_times.shape[0], query_times.shape[0])
    key_times, query_times = key_times.expand(batch, -1), query_times.expand(batch, -1)
    return Positions(key_times, query_times, key_mask, segment_ids, query_segments)


def by_segment(times: Tensor, key_mask: Tensor | None, segment_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in their own order, but segment after segment, those that take no part in front.

    Returns:
        The times, whether each key follows the one before it within its segment (both `(b, keys)`), and the
        order that was taken.
    """
    shape = torch.broadcast_shapes(times.shape, *(t.shape for t in (key_mask, segment_ids) if t is not None))
    group = torch.zeros(shape, dtype=torch.long, device=times.device)
    if segment_ids is not None:
        group = numbered(segment_ids).expand(shape)
    if key_mask is not None:
        group = group.masked_fill(~key_mask, -1)
    group, order = group.sort(dim=-1, stable=True)
    joined = (group[:, 1:] == group[:, :-1]) & (group[:, 1:] >= 0)
    follows = torch.cat([torch.zeros_like(group[:, :1], dtype=torch.bool), joined], dim=-1)
    return times.expand(shape).gather(-1, order), follows, order


def numbered(ids: Tensor) -> Tensor:
    """Numbers 0, 1, 2, ... for what a row `(b, length)` holds, in its order, equal ones the same.

    As `torch.unique` has them, row by row; it has no rule for `torch.vmap`, and waits for a GPU.
    """
    order = ids.argsort(dim=-1, stable=True)
    ordered = ids.gather(-1, order)
    steps = F.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(-1), (1, 0))
    return steps.gather(-1, order.argsort(dim=-1))


def row_blocks(batch: int, heads: int, queries: int, keys: int) -> list[slice]:
    """The query rows to compute at a time: all for autograd, blocks of bounded memory without it."""
    rows = queries if torch.is_grad_enabled() else _SCORES // max(1, batch * heads * keys)
    rows = max(1, rows)
    return [slice(start, min(start + rows, queries)) for start in range(0, max(1, queries), rows)]
