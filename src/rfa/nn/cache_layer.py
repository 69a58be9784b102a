"""The cache of one decoder layer: keys and values that were turned into the common frame when they entered."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rfa.checks import installed, require
from rfa.dynamics import rotation_of_heads
from rfa.ops.backends import compiled_decoding
from rfa.ops.positions import Positions
from rfa.ops.prior import BITS, DecodingCache, certified_tail, eps_of_dtype, misses_dropped, reach_of
from rfa.ops.problem import Certified, Options
from rfa.ops.transforms import transformed

from .projections import HeadStates

# A tensor that grows token by token without being copied each time

_SPARE = 64  # entries that a growing buffer leaves room for at least


class Buffer:
    """A tensor that grows along its third dimension, with spare room behind its entries.

    How many entries it has is the owner's to know, who may have several buffers that grow together. So entries are
    written first and counted last, and a call that is broken off in between has changed nothing.

    The room grows by half at a time, so that all writes together copy each entry a constant number of times. Tensors
    that are given are copied, never kept. Storage is written in place only if it was made here without gradients.
    With gradients a graph may hold the earlier entries, so every write makes a new tensor.

    Args:
        room: the most entries, for which room is made at the first write; None for no limit.
    """

    def __init__(self, room: int | None = None):
        self.room = room
        self._storage: Tensor | None = None
        self._owned = False

    def first(self, length: int) -> Tensor | None:
        """A view of the first `length` entries; None before the first write."""
        return None if self._storage is None else self._storage.narrow(2, 0, length)

    def fits(self, new: Tensor) -> bool:
        """Whether there are entries, and `new` differs from them in nothing but their number."""
        held = self._storage
        if held is None or held.dtype != new.dtype or held.device != new.device:
            return False
        return held.shape[:2] == new.shape[:2] and held.shape[3:] == new.shape[3:]

    def write(self, length: int, new: Tensor) -> Tensor:
        """Write `new` behind the first `length` entries, and return all of them; at first that is `new` itself.

        Raises:
            ValueError: for more entries than there is room for.
        """
        added = new.shape[2]
        if torch.is_grad_enabled():
            self._check_room(length + added)
            earlier = self.first(length) if length else None
            both = [new[:, :, :0] if earlier is None else earlier, new]
            self._storage, self._owned = torch.cat(both, dim=2), False
            return self._storage
        storage = self.reserve(length, new.shape, new)
        storage.narrow(2, length, added).copy_(new)
        return storage.narrow(2, 0, length + added) if length else new

    def reserve(self, length: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All of the storage, with room behind the first `length` entries for new ones of this shape.

        The caller writes them, without gradients. They are of `like`'s dtype or another.

        Raises:
            ValueError: for more entries than there is room for.
        """
        needed = length + shape[2]
        self._check_room(needed)
        storage = self._storage
        if storage is None or length == 0:
            empty = (*shape[:2], 0, *shape[3:])
            storage, self._owned = like.new_empty(empty, dtype=dtype), False
        # a compiler can ask neither, and a compiled function keeps to one mode
        same_mode = torch.compiler.is_compiling() or storage.is_inference() == torch.is_inference_mode_enabled()
        if not (self._owned and same_mode and needed <= storage.shape[2]):
            storage = self._with_room(storage.narrow(2, 0, length), needed)
            self._storage, self._owned = storage, True
        return storage

    def _check_room(self, length: int) -> None:
        if self.room is not None and length > self.room:
            raise ValueError(f"past_key_values: got {length} tokens, expected at most {self.room}, its max_length")

    def _with_room(self, written: Tensor, needed: int) -> Tensor:
        room = needed + max(_SPARE, needed // 2) if self.room is None else self.room
        storage = written.new_empty((*written.shape[:2], room, *written.shape[3:]))
        storage.narrow(2, 0, written.shape[2]).copy_(written)
        return storage

    def drop(self, length: int, count: int) -> None:
        """Forget the first `count` of `length` entries."""
        if self._storage is not None:
            kept = self._storage.narrow(2, count, length - count)
            self._storage, self._owned = self._with_room(kept, length - count), True

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor, its room included, by a function of it that keeps the growing dimension."""
        if self._storage is not None:
            self._storage = function(self._storage)


# The turns of decoding: phases of the next tokens, made for many at a time, and applied in few operations

AHEAD = 64  # tokens whose phases are made at once: in float64 they cost more than one token's attention to few keys
FEW = 8  # new tokens, up to which the phases are looked up


class Turns(NamedTuple):
    """Phases of tokens as factors of their channels, real parts first, `(b, heads, length, 2 d)` each."""

    cos: Tensor  # twice side by side
    sin: Tensor  # negative, then positive

    def forward(self, states: Float[Tensor, "*batch heads length channels"]) -> Tensor:
        """`exp(+i omega t) x` in the dtype of x; half precision is rounded once."""
        return self._applied(states, torch.add)

    def backward(self, states: Float[Tensor, "*batch heads length channels"]) -> Tensor:
        """`exp(-i omega t) x`, which brings states into the common frame."""
        return self._applied(states, torch.sub)

    def _applied(self, states: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = states.to(self.cos.dtype)
        return combine(x * self.cos, x.roll(x.shape[-1] // 2, -1) * self.sin).to(states.dtype)


class TurnTable:
    """Turns of the tokens at 0, 1, 2, ... of one layer, valid while its frequencies do not change."""

    def __init__(self) -> None:
        self._start = 0
        self._turns: Turns | None = None
        self._each: list[Turns] = []  # the same, token by token

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy or a pickle: an empty table. Each token's views would be stored with all phases."""
        return vars(TurnTable())

    def at(self, frequency: Float[Tensor, "heads modes"], positions: Positions, dtype: torch.dtype) -> Turns:
        """The turns of the queries, in a dtype; looked up for a few tokens at 0, 1, 2, ..."""
        length = positions.query_times.shape[-1]
        start = positions.key_times.shape[-1] - length
        known = positions.uniform and positions.clock is None and length <= FEW
        if not known or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
            return turns(frequency, positions.times_of_heads()[1], dtype)
        held, first = self._turns, start - self._start
        fits = held is not None and held.cos.dtype == dtype and first >= 0 and first + length <= AHEAD
        if held is None or not fits:
            times = positions.query_times
            ahead = torch.arange(start, start + AHEAD, device=times.device, dtype=times.dtype)
            held, first = turns(frequency, ahead[None, None], dtype), 0
            self._start, self._turns = start, held
            self._each = list(map(Turns, held.cos.split(1, dim=2), held.sin.split(1, dim=2)))
        if length == 1:
            return self._each[first]
        return Turns(held.cos.narrow(2, first, length), held.sin.narrow(2, first, length))


def turns(frequency: Float[Tensor, "heads modes"], times: Float[Tensor, "b h length"], dtype: torch.dtype) -> Turns:
    """The turns of tokens at any times; phases are formed in float64."""
    cos, sin = (part.to(dtype) for part in rotation_of_heads(frequency, times))
    return Turns(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


if TYPE_CHECKING or installed("transformers"):
    from transformers.cache_utils import CacheLayerMixin
else:  # layers work without a cache
    CacheLayerMixin = object


class FilterLayer(CacheLayerMixin):
    """The cache of one layer: keys and values of earlier tokens in the frame, and squared norms of the keys.

    A state that enters at time t has been turned by `exp(-i omega (t - t_0))` for good; `FilterCache` knows t_0. Marks
    are what each token says about the time after it: a forget gate, the rate of a clock, or dynamics. The layer may
    keep its dynamics here, and the operator its tables. Parameters may change only while the cache is empty.

    Keys, values, norms and marks of new tokens are all written before the tokens count. So a call that is refused or
    broken off leaves the layer as it was.

    Args:
        max_length: the most tokens, for which memory is reserved when the first one enters; None for no limit.
        certified, reserve: as of `FilterCache`.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(  # the base class would set what are properties here
        self, max_length: int | None = None, certified: Certified = "auto", reserve: float = 20.0
    ) -> None:
        self.max_length, self.certified, self.reserve = max_length, certified, reserve
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._length = 0  # what buffers hold behind it does not count
        self.dropped = 0  # the tokens before the ones that are held
        self._keys, self._values, self._key_norms = (Buffer(self.max_length) for _ in range(3))
        self._marks: dict[str, Buffer] = {}
        self.forget_parameters()

    def forget_parameters(self) -> None:
        """Drop what follows from the layer's parameters: its dynamics, phases of tokens and the operator's tables."""
        self.decoding = DecodingCache()
        self.dynamics: dict[str, Any] | None = None
        self.turns = TurnTable()

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """`(batch, heads, keys, 2 d)`, in the frame."""
        return self._keys.first(self._length)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """`(batch, heads, keys, 2 d)`, in the frame where values turn."""
        return self._values.first(self._length)

    @property
    def key_norms(self) -> Tensor | None:
        """`|k|^2` of the keys as they are stored, `(batch, heads, keys)` in float32 or float64."""
        return self._key_norms.first(self._length)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether there are tokens."""
        return self._length > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first states that enter become the buffers."""

    def enter(
        self, query: HeadStates, key: HeadStates, value: HeadStates, turns: Turns, turn_values: bool, backend: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turn new states into the frame and let keys and values enter: the query, all keys and all values there.

        Raises as `check_fit`.
        """
        compiled = compiled_decoding(backend, query, key, value)
        if compiled is None:
            states = torch.stack((query, key, value) if turn_values else (query, key))
            query, key, *turned = turns.backward(states).unbind()
            return query, *self.update(key, turned[0] if turn_values else value)
        self.check_fit(key, value)
        start, added = self._length, key.shape[2]
        room = [storage.narrow(2, start, added) for storage in self._reserve(key, value)]
        query = compiled.enter((query, key, value), turns, room, turn_values)
        self._length = start + added
        self.decoding.key_norm = self.key_norms
        return query, cast(Tensor, self.keys), cast(Tensor, self.values)

    def decode_token(
        self,
        query: HeadStates,
        key: HeadStates,
        value: HeadStates,
        turns: Turns,
        positions: Positions,
        options: Options,
        backend: str,
    ) -> Tensor | None:
        """`enter`, the operator and `turns.forward` by one call of compiled code, for one token at uniform times.

        None, and nothing has entered, where it does not serve these states or the tables of the prior are too short.
        Raises as `check_fit`.
        """
        tables = self.decoding.tables
        plain = positions.uniform and positions.key_groups is None and not (options.log_precision or options.dropout)
        if tables is None or not plain or query.shape[2] != 1 or tables.tables.shape[-1] <= self._length:
            return None
        compiled = compiled_decoding(backend, query, key, value)
        if compiled is None:
            return None
        self.check_fit(key, value)
        keys, storages, kind = self._length + 1, self._reserve(key, value), (options.weight, options.rotate_values)
        self._make_tail(eps_of_dtype(options.certified, query.dtype), positions)
        estimate = compiled.decode_token((query, key, value), turns, storages, keys, self.decoding, *kind)
        self._length = keys
        return estimate

    def _make_tail(self, eps: float | None, positions: Positions) -> Tensor | None:
        """What the tables of the prior say of old keys, once for the tables."""
        if self.decoding.tail is None and self.decoding.tables is not None:
            self.decoding.tail = certified_tail(self.decoding.tables, positions, eps)
        return self.decoding.tail

    def _reserve(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """The storages of keys, values and norms, with room for new ones behind those so far."""
        start, norms = self._length, key.shape[:3]
        storages = [self._keys.reserve(start, key.shape, key), self._values.reserve(start, value.shape, value)]
        return [*storages, self._key_norms.reserve(start, norms, key, torch.float32)]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Let states in the frame enter, and return all keys and values. Raises as `check_fit`."""
        self.check_fit(key_states, value_states)
        start, states = self._length, key_states.to(torch.promote_types(key_states.dtype, torch.float32))
        norms = self._key_norms.write(start, states.square().sum(-1))
        keys, values = self._keys.write(start, key_states), self._values.write(start, value_states)
        self._length, self.decoding.key_norm = start + key_states.shape[2], norms
        return keys, values

    def check_fit(self, key: Tensor, value: Tensor) -> None:
        """Raise `ValueError` for new states whose shape, dtype or device is another than the cache's."""
        self._check_fit("keys", key, self._keys)
        self._check_fit("values", value, self._values)

    def _check_fit(self, name: str, new: Tensor, held: Buffer) -> None:
        if self._length and not held.fits(new):
            kept = held.first(self._length)
            given = f"no {name}" if kept is None else f"{name} of {_kind(kept)}"
            raise ValueError(f"past_key_values: got {given}, expected {_kind(new)}, the input's")

    def check_positions(self, positions: Positions, length: int) -> None:
        """Raise `ValueError` unless positions are those of the layer's tokens and of `length` more."""
        keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
        if keys != self.get_seq_length() + length or queries != length:
            raise ValueError(
                f"past_key_values: got a layer with {self.get_seq_length()} tokens, expected {keys - queries}: a "
                "call was broken off between layers, or positions were located without this cache; use `reset` and "
                "read all tokens again, or locate them with the cache"
            )

    def kept(self, positions: Positions) -> Positions:
        """Positions without the tokens that were dropped."""
        return positions.keys(slice(self.dropped, None)) if self.dropped else positions

    def eps(self, certified: Certified, dtype: torch.dtype) -> float | None:
        """What keys that are left out may weigh, for a layer with this option: the cache's, or the layer's."""
        return eps_of_dtype(certified if self.certified == "auto" else self.certified, dtype)

    def count_uncertified(self, log_precision: Tensor, eps: float | None, positions: Positions) -> None:
        """Count the rows to which keys that were dropped might matter.

        Args:
            log_precision: of the last rows.
            eps: what keys that are left out may weigh.
            positions: of all tokens, those that were dropped included.
        """
        tables, counts, tail = self.decoding.tables, self.decoding.uncertified, self._make_tail(eps, positions)
        if counts is not None and tables is not None and tail is not None:
            missed = misses_dropped(tables, tail, log_precision * BITS, self._length)
            if positions.key_groups is not None:  # a group's keys stand together
                own = 0 if positions.query_groups is None else positions.query_groups
                missed &= (positions.key_groups[:, self.dropped - 1 : self.dropped] == own)[:, None]
            self.decoding.uncertified = counts + missed.sum(-1)

    def drop_old(self, eps: float | None, positions: Positions) -> None:
        """Drop the keys that can count for no head, as soon as they are a third of those that are held.

        The proof is of steps of one: at times of their own, over gaps or where segments interleave, all are kept.
        """
        tables, keys = self.decoding.tables, self.keys
        fixed = self.max_length is not None or self._marks or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not eps or tables is None or keys is None or fixed:
            return
        if self.decoding.reach is None:
            self.decoding.reach = reach_of(tables, eps, self.reserve)
        count = self._length - self.decoding.reach
        if count < max(_SPARE, self.decoding.reach // 2) or not (positions.uniform and positions.rising()):
            return
        for buffer in (self._keys, self._values, self._key_norms):
            buffer.drop(self._length, int(count))
        self._length, self.dropped = self._length - int(count), self.dropped + int(count)
        self.decoding.key_norm = self.key_norms
        if self.decoding.uncertified is None:
            self.decoding.uncertified = torch.zeros(keys.shape[:2], dtype=torch.int64, device=keys.device)

    def update_marks(self, marks: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the marks of new tokens, `(batch, heads, length, ...)` each, and return those of all keys.

        They count as soon as the keys and values of these tokens have entered. Raises as `check_fit`.
        """
        for name, mark in marks.items():
            self._check_fit(name, mark, self._marks.setdefault(name, Buffer(self.max_length)))
        return {name: self._marks[name].write(self._length, mark) for name, mark in marks.items()}

    def get_seq_length(self) -> int:
        """The number of tokens, those that were dropped included."""
        return self.dropped + self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that this number of further queries sees, and the first one's index."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """The most tokens; -1 for no limit, as in transformers."""
        return -1 if self.max_length is None else self.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` keys; if none is left, this is `reset`.

        Raises:
            ValueError: for a positive number, as transformers' own caches do, and where the tokens that would be left
                were dropped.
        """
        self.check_crop(tokens_to_remove)
        self._length += tokens_to_remove
        if self._length <= 0:
            self.reset()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `ValueError` where `crop` would."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected a number <= 0: -2 removes two tokens")
        length = self._length + tokens_to_remove
        held = f"fewer than the {self._length} tokens that are held, all of them, or FilterCache(certified=None)"
        require(not 0 < length + self.dropped <= self.dropped, "tokens_to_remove", tokens_to_remove, held)

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Row i becomes what row `beam_idx[i]` was."""

        def take(x: Tensor) -> Tensor:
            return x.index_select(0, beam_idx.to(x.device))

        for buffer in (self._keys, self._values, self._key_norms, *self._marks.values()):
            buffer.change(take)
        counts = self.decoding.uncertified
        self.decoding.uncertified = None if counts is None else take(counts)


def _kind(x: Tensor) -> str:
    batch, heads, _, *channels = x.shape
    sizes = [f"batch {batch}", f"{heads} heads", *(f"{number} channels" for number in channels)]
    return f"{', '.join(sizes)}, {x.dtype} on {x.device}"
