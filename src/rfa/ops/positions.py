"""Times and groups of keys and queries: checked and located once, then shared by all layers of a forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rfa.dynamics import time_dtype

from .transforms import values_at_hand


class Positions:
    """Where keys and queries stand in time, and which keys a query may see.

    It is no tuple and no dataclass: FSDP 2 casts the floating tensors in those that a module is given, by default.

    Attributes:
        key_times: `(b, keys)` since a common origin, in `time_dtype`; b is 1 or batch.
        query_times: `(b, queries)` since the same origin.
        key_groups: `(batch, keys)` int32. A query sees the keys of its own group. -1 marks an absent key, which no
            query sees. None where all keys take part in one group.
        query_groups: `(batch, queries)` int32, 0 or more. None where every query belongs to group 0.
        uniform: the keys stand at 0, 1, 2, ... and the queries at the last of these times.
        complete: no key is absent.
        clock: times of each head at keys and at queries, `(batch, heads, length)`, from which its lags are formed; None
            where all heads share `key_times` and `query_times`. Those always say which keys a query sees.
        orders: what layers sort by, kept under its name by the first that needs it; None keeps nothing.
        shards: where the tokens of other processes are, which `rfa.parallel` fills in; None where there are none.
    """

    def __init__(
        self,
        key_times: Tensor,
        query_times: Tensor,
        key_groups: Tensor | None = None,
        query_groups: Tensor | None = None,
        uniform: bool = False,
        complete: bool = False,
        clock: tuple[Tensor, Tensor] | None = None,
        orders: dict[str, tuple[Tensor, ...]] | None = None,
        shards: Any = None,
    ):
        self.key_times, self.query_times = key_times, query_times
        self.key_groups, self.query_groups = key_groups, query_groups
        self.uniform, self.complete, self.clock, self.orders, self.shards = uniform, complete, clock, orders, shards

    def replace(self, **changes: Any) -> "Positions":
        """The same with other values of some attributes."""
        return Positions(**{**self.__dict__, **changes})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Positions":
        """The same on another device: where accelerate spreads a model, it calls this between two devices."""
        moved = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), self.__dict__)
        if moved["key_times"] is self.key_times:
            return self
        if self.query_times is self.key_times:  # one tensor, which stays one
            moved["query_times"] = moved["key_times"]
        return Positions(**moved)

    def once(self, name: str, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `compute` returns, computed once for all layers. Integers, or numbers without a gradient."""
        if self.orders is None:
            return compute()
        if name not in self.orders:
            self.orders[name] = compute()
        return self.orders[name]

    def times_of_heads(self) -> tuple[Tensor, Tensor]:
        """Times from which lags are formed, at keys and at queries, `(b, 1 or heads, length)`; or one tensor twice."""
        if self.clock is not None:
            return self.clock
        key_times = self.key_times[:, None]
        return key_times, key_times if self.query_times is self.key_times else self.query_times[:, None]

    def visible(self, causal: bool) -> Tensor:
        """`(b, queries, keys)`, True where a key takes part in a query's estimate."""
        lag = self.query_times[:, :, None] - self.key_times[:, None, :]
        seen = lag >= 0 if causal else torch.ones_like(lag, dtype=torch.bool)
        if self.key_groups is not None:
            own = 0 if self.query_groups is None else self.query_groups[:, :, None]
            seen = seen & (self.key_groups[:, None, :] == own)
        return seen

    def lags(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """`|t_i - t_j|` by the clock of each head, `(b, 1 or heads, queries, keys)`; 0 for keys that are not seen."""
        of_keys, of_queries = self.times_of_heads()
        lag = (of_queries[..., None] - of_keys[..., None, :]).abs()
        return lag.masked_fill(~visible[:, None], 0.0).to(dtype)

    def present(self) -> Tensor | None:
        """`(batch, keys)`, True where a key takes part; None where all do."""
        return None if self.key_groups is None or self.complete else self.key_groups >= 0

    def without_absent(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `(batch, heads, keys, channels)`, zero where a key is absent: it may hold anything."""
        if self.key_groups is None or self.complete:
            return key, value
        absent = (self.key_groups < 0)[:, None, :, None]
        return key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)

    def rising(self) -> bool:
        """Whether the keys of each group stand together, and absent keys before them all. It is read, once."""
        groups = self.key_groups
        if groups is None:
            return True
        return bool(self.once("rising", lambda: ((groups[:, 1:] >= groups[:, :-1]).all(),))[0])

    def rows(self, rows: slice) -> "Positions":
        """The same for some of the queries."""
        groups = None if self.query_groups is None else self.query_groups[:, rows]
        clock = None if self.clock is None else (self.clock[0], self.clock[1][..., rows])
        return self.replace(query_times=self.query_times[:, rows], query_groups=groups, clock=clock, orders=None)

    def keys(self, keys: slice | Tensor) -> "Positions":
        """The same for some of the keys."""
        groups = None if self.key_groups is None else self.key_groups[:, keys]
        clock = None if self.clock is None else (self.clock[0][..., keys], self.clock[1])
        return self.replace(key_times=self.key_times[:, keys], key_groups=groups, clock=clock, orders=None)


def checked_positions(
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
    times: Tensor | None,
    query_times: Tensor | None = None,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    origin: Callable[[Tensor], Tensor] | None = None,
    check_values: bool | None = None,
) -> Positions:
    """Positions from arguments as users give them.

    Args:
        batch, queries, keys, device: of the states.
        times: of the keys, `(keys,)` or `(batch, keys)`; 0, 1, 2, ... by default.
        query_times: of the queries, `(queries,)` or `(batch, queries)`; by default the last of `times`.
        key_mask: `(batch, keys)`, True for keys that take part.
        segment_ids: `(batch, keys)`, queries see keys of their own segment only.
        origin: gives the time `(b, 1)` that times count from for the given ones `(b, keys)`; by default that of
            the first key that takes part.
        check_values: whether times are read and checked, see `values_at_hand`.

    Raises:
        ValueError: where times, mask and segments do not fit queries and keys of these numbers.
    """
    for name, given, length in (("times", times, keys), ("query_times", query_times, queries)):
        if given is not None:
            check_given(name, given, "real numbers", device, (length,), (batch, length))
    check_flags("key_mask", key_mask, batch, keys, device, integer=False)
    check_flags("segment_ids", segment_ids, batch, keys, device, integer=True)
    if queries > keys and (query_times is None or segment_ids is not None):
        raise ValueError(
            f"query_times: got {queries} queries for {keys} keys, expected query_times without segment_ids: "
            "by default the queries stand at the last times"
        )
    groups = group_numbers(key_mask, segment_ids, queries)
    orders: dict[str, tuple[Tensor, ...]] = {}  # compilers cannot call `dict[...]`
    if times is not None and values_at_hand(times, query_times, key_mask, segment_ids, check=check_values):
        if groups[0] is not None:
            orders["keys"] = by_group(groups[0])
        _check_increasing(times.to(times_dtype(times, query_times)), orders.get("keys"))
    read = query_times is not None and values_at_hand(query_times, check=check_values)
    if query_times is not None and read and not bool(query_times.isfinite().all()):
        raise ValueError("query_times: got NaN or infinite values, expected finite numbers")
    dtype, complete = time_dtype(device), key_mask is None
    if times is None and query_times is None:
        key_times = torch.arange(keys, device=device, dtype=dtype)[None]
        return Positions(key_times, key_times[:, keys - queries :], *groups, True, complete, orders=orders)
    given = torch.arange(keys, device=device) if times is None else times
    common = times_dtype(given, query_times)
    key_times = torch.atleast_2d(given.to(common))
    if query_times is None:
        query_times = key_times if queries == keys else key_times[:, keys - queries :]
    else:
        query_times = torch.atleast_2d(query_times.to(common))
    absent = None if times is None or key_mask is None or not keys else ~key_mask
    shared = query_times is key_times and absent is None  # what depends on times is then computed once
    if origin is not None:
        start = origin(key_times)
    elif absent is not None:
        start = first_time(key_times, absent)
    else:  # a large common offset would cost digits later
        start = (key_times if keys else query_times)[:, :1].detach()
    key_times = (key_times - start).to(dtype)
    if shared:
        return Positions(key_times, key_times, *groups, False, complete, orders=orders)
    query_times = (query_times - start).to(dtype)
    if absent is not None:
        key_times = key_times.masked_fill(absent, 0.0)  # padding may carry any time
    (batch,) = torch.broadcast_shapes(key_times.shape[:1], query_times.shape[:1])
    times_of = key_times.expand(batch, -1), query_times.expand(batch, -1)
    return Positions(*times_of, *groups, False, complete, orders=orders)


def first_time(times: Tensor, absent: Tensor) -> Tensor:
    """The time `(batch, 1)` of the first key of each row that takes part, of its first key where none does."""
    if not absent.shape[-1]:
        return times.new_zeros(absent.shape[0], 1)
    first = absent.int().argmin(-1, keepdim=True)
    return times.detach().expand(absent.shape).gather(-1, first)


def times_dtype(times: Tensor, query_times: Tensor | None) -> torch.dtype:
    """The dtype of differences of times: int64 where all are whole; nanoseconds since 1970 do not fit into a float."""
    given = (times,) if query_times is None else (times, query_times)
    return time_dtype(times.device) if any(t.is_floating_point() for t in given) else torch.int64


def group_numbers(
    key_mask: Tensor | None, segment_ids: Tensor | None = None, queries: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and segments as `Positions.key_groups` and `Positions.query_groups`; the queries are the last tokens."""
    if segment_ids is None:
        return (None if key_mask is None else key_mask.to(torch.int32) - 1), None
    groups = numbered(segment_ids).to(torch.int32)
    of_queries = groups[:, groups.shape[-1] - queries :]
    return (groups if key_mask is None else groups.masked_fill(~key_mask, -1)), of_queries


def numbered(ids: Tensor) -> Tensor:
    """The ids of each row `(batch, length)` as numbers 0, 1, 2, ..., in the order of the ids.

    `torch.unique` would do the same, but it has no rule for `torch.vmap`, and a GPU has to wait for it.
    """
    order = ids.argsort(dim=-1, stable=True)
    ordered = ids.gather(-1, order)
    return (run_starts(ordered).cumsum(-1) - 1).gather(-1, order.argsort(dim=-1))


def run_starts(numbers: Tensor) -> Tensor:
    """Where a run of equal numbers begins, in rows `(batch, length)`. An export of slices would need 3 tokens."""
    begins = numbers != numbers.roll(1, -1)
    begins[:, :1] = True
    return begins


def token_groups(positions: Positions) -> Tensor:
    """The groups of the keys' tokens, `(batch, keys)`, the last of which are the queries and have one even if absent.

    Positions without groups have no such numbers.
    """
    keys, queries = positions.key_groups, positions.query_groups
    assert keys is not None
    assert queries is not None
    return torch.cat([keys[:, : keys.shape[-1] - queries.shape[-1]], queries], dim=-1)


def by_group(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys group after group, absent keys first; within a group they keep their order.

    Args:
        groups: `(batch, keys)` as in `Positions.key_groups`.

    Returns:
        The order, the order that takes it back, and whether each key follows, in this order, one of its own group;
        all `(batch, keys)`.
    """
    order = groups.argsort(dim=-1, stable=True)
    ordered = groups.gather(-1, order)
    return order, order.argsort(-1), ~run_starts(ordered) & (ordered >= 0)


def beside(x: Tensor, tokens: Tensor) -> Tensor:
    """Numbers of tokens `(b, length)` with dimensions of size 1 in between, as many as `x` `(b, ..., length)` has."""
    return tokens[(slice(None), *(None,) * (x.dim() - 2))]


def take(x: Tensor, order: Tensor) -> Tensor:
    """`x` `(b, ..., length)` in the order `(b, length)`; a batch of one serves all samples."""
    index = beside(x, order)
    x = x.expand(torch.broadcast_shapes(x.shape[:-1], index.shape[:-1]) + x.shape[-1:])
    return x.gather(-1, index.expand(*x.shape[:-1], -1))  # an export of `take_along_dim` has one length only


def cumulative_at_queries(cumulative: Tensor, positions: Positions) -> Tensor:
    """C at each query, `(b, heads, queries)`: that of the last key of its group, or of the first where none is earlier.

    It is 0 where no key of the group takes part.
    """
    keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
    if not keys:
        return cumulative.new_zeros(*cumulative.shape[:2], queries)
    if positions.uniform and positions.key_groups is None:  # the queries stand at the last keys
        return cumulative[..., keys - queries :]
    key, found = positions.once("last keys", lambda: _last_keys(positions))
    (batch,) = torch.broadcast_shapes(key.shape[:1], cumulative.shape[:1])
    index = key[:, None, :].expand(batch, cumulative.shape[1], -1)
    of_queries = cumulative.expand(batch, -1, -1).gather(-1, index)
    return torch.where(found[:, None, :], of_queries, 0.0)


def _last_keys(positions: Positions) -> tuple[Tensor, Tensor]:
    """The index `(batch, queries)` of the last key of each query's group up to its time, or of the first key.

    The second tensor is False where no key of the group takes part. Keys and queries are sorted together: O(N log N).
    """
    keys = positions.key_times.shape[-1]
    times = torch.cat([positions.key_times, positions.query_times], dim=-1).detach()
    groups = (x for x in (positions.key_groups, positions.query_groups) if x is not None)
    (batch,) = torch.broadcast_shapes(times.shape[:1], *(x.shape[:1] for x in groups))
    times = times.expand(batch, -1)
    group = torch.zeros(times.shape, dtype=torch.int32, device=times.device)
    if positions.key_groups is not None:
        own = group[:, keys:] if positions.query_groups is None else positions.query_groups.expand(batch, -1)
        group = torch.cat([positions.key_groups.expand(batch, -1), own], dim=-1)
    by_time = times.argsort(dim=-1, stable=True)  # a key stands before a query of the same time
    order = by_time.gather(-1, group.gather(-1, by_time).argsort(dim=-1, stable=True))
    group = group.gather(-1, order)
    index, is_key = torch.arange(times.shape[-1], device=times.device).expand(batch, -1), order < keys
    before = torch.where(is_key, index, -1).cummax(-1).values
    after = torch.where(is_key, index, times.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    chosen, found = torch.zeros_like(index), torch.zeros_like(is_key)
    for candidate in (after, before):  # the earlier key is preferred, so it comes last
        inside = candidate.clamp(0, max(0, times.shape[-1] - 1))
        same = (candidate == inside) & (group.gather(-1, inside) == group)
        chosen, found = torch.where(same, inside, chosen), found | same
    restore = order.argsort(-1)[:, keys:]
    found = found.gather(-1, restore)
    return order.gather(-1, chosen.gather(-1, restore)).masked_fill(~found, 0), found


def check_given(name: str, given: object, kind: str, device: torch.device, *shapes: tuple[int, ...]) -> None:
    """Raise `ValueError` unless this is a tensor of one of these shapes, on the query's device, of this kind.

    The kind is "a floating-point dtype", "real numbers", "an integer dtype" or "torch.bool".
    """
    tensor = given if isinstance(given, Tensor) else check_tensor(name, given)
    floating, boolean = tensor.dtype.is_floating_point, tensor.dtype == torch.bool
    if kind in ("real numbers", "an integer dtype"):
        fits = not boolean and not tensor.is_complex() and (kind == "real numbers" or not floating)
    else:
        fits = boolean if kind == "torch.bool" else floating
    if not fits:
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {kind}")
    if kind == "real numbers" and tensor.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}: got dtype {tensor.dtype}, which rounds times, expected integers, float32 or float64; "
            "FSDP casts them without MixedPrecisionPolicy(cast_forward_inputs=False)"
        )
    # ranks first: an export would else demand that the batch is not the length
    if not any(tensor.dim() == len(shape) and tuple(tensor.shape) == shape for shape in shapes):
        expected = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.device != device:
        check_device(name, tensor, device)


def check_flags(name: str, given: Tensor | None, batch: int, length: int, device: torch.device, integer: bool) -> None:
    """Raise `ValueError` unless `given` is None or `(batch, length)`, of integers or of booleans."""
    if given is not None:
        check_given(name, given, "an integer dtype" if integer else "torch.bool", device, (batch, length))


def check_tensor(name: str, given: object) -> Tensor:
    """The tensor that is given.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, expected a tensor")
    return given


def check_device(name: str, given: Tensor, device: torch.device) -> None:
    """Raise `ValueError` unless `given` is on the device of the query."""
    if given.device != device:
        raise ValueError(f"{name}: got device {given.device}, expected {device}, the query's")


def _check_increasing(times: Tensor, groups: tuple[Tensor, ...] | None) -> None:
    """Times are finite and increase strictly among the keys of a group; padding may carry any time."""
    times = torch.atleast_2d(times.detach())
    finite = times.isfinite().all()
    wrong = times[:, 1:] <= times[:, :-1]
    if groups is not None:
        order, _, follows = groups
        times = times.expand(order.shape).gather(-1, order)
        wrong = follows[:, 1:] & (times[:, 1:] <= times[:, :-1])
    if bool(finite & ~wrong.any()):  # one look for both: a GPU has to finish its work first
        return
    if not bool(finite):
        raise ValueError("times: got NaN or infinite values, expected finite numbers")
    row, at = wrong.nonzero()[0].tolist()
    pair = times[row, at : at + 2].tolist()
    raise ValueError(
        f"times: got {pair[0]!r} followed by {pair[1]!r} (batch row {row}), "
        "expected strictly increasing times within a segment"
    )
