"""The cache of a decoder: states in the common frame, turned once when they enter, and the times of all tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rfa.dynamics import time_dtype
from rfa.ops.positions import Positions, checked_positions, first_time
from rfa.ops.prior import DecodingCache
from rfa.ops.transforms import readable

from .buffer import Buffer


class FilterLayer(CacheLayerMixin):
    """The cache of one layer: keys and values of earlier tokens in the frame, and squared norms of the keys.

    A state that enters at time t has been turned by `exp(-i omega (t - t_0))` for good; `FilterCache` knows t_0. Marks
    are what each token says about the time after it: a forget gate, the rate of a clock, or dynamics. The layer may
    keep its dynamics here, and the operator its tables. Parameters may change only while the cache is empty.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:  # the base class would set attributes that are properties here
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._keys, self._values, self._key_norms = Buffer(2), Buffer(2), Buffer(2)
        self._marks: dict[str, Buffer] = {}
        self.decoding = DecodingCache()
        self.dynamics: dict[str, Any] | None = None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """`(batch, heads, keys, 2 d)`, in the frame."""
        return self._keys.filled

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """`(batch, heads, keys, 2 d)`, in the frame where values turn."""
        return self._values.filled

    @property
    def key_norms(self) -> Tensor | None:
        """`|k|^2` of the keys as they are stored, `(batch, heads, keys)` in float32 or float64."""
        return self._key_norms.filled

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether anything has entered since the last reset."""
        return self.keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first states that enter become the buffers."""

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Let states in the frame enter, and return all keys and values.

        Raises:
            ValueError: for a shape, dtype or device other than the cache's.
        """
        for name, new, held in (("keys", key_states, self.keys), ("values", value_states, self.values)):
            if held is not None and held.shape[2] and _kind(new) != _kind(held):
                raise ValueError(f"past_key_values: got {name} of {_kind(held)}, expected {_kind(new)}, the input's")
        norms = key_states.to(torch.promote_types(key_states.dtype, torch.float32)).square().sum(-1)
        self.decoding.key_norm = self._key_norms.append(norms)
        return self._keys.append(key_states), self._values.append(value_states)

    def update_marks(self, marks: dict[str, Tensor]) -> dict[str, Tensor]:
        """Let the marks of new tokens enter, `(batch, heads, length, ...)` each, and return those of all keys."""
        return {name: self._marks.setdefault(name, Buffer(2)).append(mark) for name, mark in marks.items()}

    def _buffers(self) -> list[Buffer]:
        return [self._keys, self._values, self._key_norms, *self._marks.values()]

    def get_seq_length(self) -> int:
        """The number of keys."""
        return self._keys.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that this number of further queries sees, and the first one's index."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit: -1 in transformers' words."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` keys; if none is left, this is `reset`.

        Raises:
            ValueError: for a positive number, as transformers' own caches do.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected a number <= 0: -2 removes two tokens")
        length = self.get_seq_length() + tokens_to_remove
        if length <= 0:
            return self.reset()
        for buffer in self._buffers():
            buffer.crop(length)

    def offload(self) -> None:
        """Move keys and values to the CPU; call `prefetch` before more tokens enter."""
        for buffer in (self._keys, self._values):
            buffer.change(Tensor.cpu)

    def prefetch(self) -> None:
        """Move keys and values back to the device of the norms."""
        for buffer in (self._keys, self._values):
            buffer.change(lambda x: x.to(cast(Tensor, self.key_norms).device))

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.keys is not None:
            self._select(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " rows"] | Bool[Tensor, " rows"]) -> None:
        """Only the rows at these indices, or where a mask is True."""
        if self.keys is not None:
            self._select(torch.arange(self.keys.shape[0], device=indices.device)[indices])

    def _select(self, rows: Tensor) -> None:
        def take(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        for buffer in self._buffers():
            buffer.change(take)


class FilterCache(Cache):
    """The cache of a decoder, `past_key_values` of the model and of the attention layers.

    It has one `FilterLayer` for each decoder layer, made when it is first needed. All layers share the times of the
    tokens: they count from one origin, the first key of a row that takes part, in float64. A new token costs a rotation
    of its own query, key and value and one pass over the keys. Earlier states are neither turned again nor copied.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=FilterLayer)
        self._forget_times()

    def _forget_times(self) -> None:
        self.uniform = True  # the tokens stand at 0, 1, 2, ...; otherwise their times are kept
        self.origin: Tensor | None = None  # `(1 or batch, 1)`, as the times were given
        self.times: Tensor | None = None  # of the keys since the origin, `(1 or batch, keys)`; padding has times too

    def layer(self, index: int) -> FilterLayer:
        """The cache of the decoder layer at `index`."""
        while len(self.layers) <= index:
            self.layers.append(FilterLayer())
        return cast(FilterLayer, self.layers[index])

    def locate(
        self,
        batch: int,
        length: int,
        device: torch.device,
        times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None,
        key_mask: Bool[Tensor, "batch keys"] | None,
        segment_ids: Int[Tensor, "batch keys"] | None,
        layer_index: int = 0,
    ) -> Positions:
        """Positions of new tokens, the queries, and of all keys, theirs included.

        Args:
            batch, length, device: of the new tokens.
            times: of all keys, `(keys,)` or `(batch, keys)`, those in the cache as before; 0, 1, 2, ...
            key_mask: `(batch, keys)`, True for those that take part.
            segment_ids: `(batch, keys)`, attend within equal ids only.
            layer_index: the tokens follow those that this layer holds.

        Raises:
            ValueError: for times, a mask or segments that do not fit, or times that differ from those in the cache.
        """
        keys = self.get_seq_length(layer_index) + length
        cached = max([0, *(self.get_seq_length(index) for index in range(len(self.layers)))])
        if not cached:
            self._forget_times()
        given, origin = times, None
        if times is not None or not self.uniform:
            given = torch.arange(keys, device=device) if times is None else times
            origin = partial(self._shared_origin, key_mask=None if times is None else key_mask, cached=cached)
        elif self.origin is None:
            self.origin = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return checked_positions(batch, length, keys, device, given, None, key_mask, segment_ids, origin)

    def _shared_origin(self, given: Tensor, key_mask: Tensor | None, cached: int) -> Tensor:
        """The origin `(b, 1)` of all keys at the times `(b, keys)`, the first `cached` of which are in use already.

        Raises:
            ValueError: where those are not as the cache holds them.
        """
        given, dtype = given.detach(), time_dtype(given.device)
        absent = None if key_mask is None else ~key_mask
        origin = given[:, :1] if absent is None else first_time(given, absent)
        if cached and self.origin is not None:
            unseen = None if absent is None else absent[:, :cached].all(-1, keepdim=True)  # rows of padding alone
            origin = self.origin if unseen is None else torch.where(unseen, origin, self.origin)
        elapsed = (given - origin).to(dtype)
        if cached:
            before = torch.arange(cached, device=given.device, dtype=dtype)[None] if self.times is None else self.times
            self._check_times(elapsed, before[:, :cached], key_mask)
        if self.times is None or elapsed.shape[1] >= cached:
            self.origin, self.uniform, self.times = origin, False, elapsed
        return origin

    @staticmethod
    def _check_times(elapsed: Tensor, held: Tensor, key_mask: Tensor | None) -> None:
        common = min(elapsed.shape[1], held.shape[1])
        elapsed, held = elapsed[:, :common], held[:, :common]
        other = elapsed != held
        if key_mask is not None:
            other = other & key_mask[:, :common]
        if readable(other) and bool(other.any()):
            row, at = other.nonzero()[0].tolist()
            given, kept = (t.expand(other.shape)[row, at].item() for t in (elapsed, held))
            raise ValueError(
                f"times: got key {at} at {given!r} after the first (batch row {row}), "
                f"expected {kept!r}, as the cache holds it: times of cached keys do not change"
            )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._forget_times()

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        super().reorder_cache(cast(Any, beam_idx))
        self._select(lambda rows, device: beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._select(lambda rows, device: torch.arange(rows, device=device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " rows"] | Bool[Tensor, " rows"]) -> None:
        """Only the rows at these indices, or where a mask is True."""
        super().batch_select_indices(indices)
        self._select(lambda rows, device: torch.arange(rows, device=indices.device)[indices])

    def _select(self, chosen: Callable[[int, torch.device], Tensor]) -> None:
        """Rows of origin and times; one row serves all."""
        for name in ("origin", "times"):
            x: Tensor | None = getattr(self, name)
            if x is not None and x.shape[0] > 1:
                setattr(self, name, x.index_select(0, chosen(x.shape[0], x.device).to(x.device)))


def locate_tokens(
    batch: int,
    length: int,
    device: torch.device,
    times: Tensor | None,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    cache: FilterCache | None = None,
    layer_index: int = 0,
) -> Positions:
    """Positions of tokens as queries and keys, after those of a cache if there is one; see `FilterCache.locate`."""
    if cache is None:
        return checked_positions(batch, length, length, device, times, None, key_mask, segment_ids)
    return cache.locate(batch, length, device, times, key_mask, segment_ids, layer_index)


def check_cache(given: Cache | None) -> FilterCache | None:
    """The cache, or a `ValueError` for any other one: raw keys would have to be turned again at every token."""
    if given is not None and not isinstance(given, FilterCache):
        raise ValueError(f"past_key_values: got {type(given).__name__}, expected a FilterCache")
    return given


def _kind(x: Tensor) -> str:
    batch, heads, _, channels = x.shape
    return f"batch {batch}, {heads} heads, {channels} channels, {x.dtype} on {x.device}"
