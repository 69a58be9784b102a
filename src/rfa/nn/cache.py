"""The cache of a decoder: states as they stand in the common frame, turned once, when they enter."""

from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rfa.dynamics import time_dtype
from rfa.ops.fused import Kept
from rfa.ops.inputs import Positions, times_dtype
from rfa.ops.transforms import readable
from rfa.ops.validation import validate_positions

from .buffer import Buffer


class FilterLayer(CacheLayerMixin):
    """One layer's past: keys and values in the frame, squared norms of the keys, and when the keys were seen.

    A state that enters at time t has been turned by `exp(-i omega (t - t_0))` for good. Times, and with them all
    phases and lags, count from the origin t_0 in float64: the first key of a row that takes part. `kept` is the
    operator's: the norms, tables of the prior, the dynamics. Parameters may change only while the cache is empty.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:  # the base class would make attributes of what are properties here
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._keys, self._values, self._key_norms, self._times = Buffer(2), Buffer(2), Buffer(2), Buffer(1)
        self._log_gates = Buffer(2)
        self.origin: Tensor | None = None
        self.uniform = False
        self.kept = Kept()

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
    def times(self) -> Tensor | None:
        """Since the origin, `(1, keys)` or `(batch, keys)` in `time_dtype`; padding has times too."""
        return self._times.filled

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether anything has entered since the last reset."""
        return self.keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first states that enter become the buffers."""

    def place(
        self,
        batch: int,
        length: int,
        device: torch.device,
        times: Tensor | None,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
    ) -> Positions:
        """Where new tokens and all keys, theirs included, stand; their states must enter by `update` next.

        Args:
            batch, length, device: of the new tokens.
            times: of all keys, `(keys,)` or `(batch, keys)`, those in the cache as before; 0, 1, 2, ...
            key_mask: `(batch, keys)`, True for those that take part.
            segment_ids: `(batch, keys)`, attend within equal ids only.

        Returns:
            Positions since the origin, with the new tokens as the queries.

        Raises:
            ValueError: for times, a mask or segments that do not fit, or times that differ from those in the cache.
        """
        cached = self.get_seq_length()
        keys, dtype = cached + length, time_dtype(device)
        validate_positions(batch, length, keys, device, times, None, key_mask, segment_ids)
        query_segments = None if segment_ids is None else segment_ids[:, cached:]
        if times is None and (self.uniform or not cached):  # one token more costs no look at all the others
            new = torch.arange(cached, keys, device=device, dtype=dtype)[None]
            if not cached:
                self.origin, self.uniform = torch.zeros(1, 1, dtype=torch.int64, device=device), True
            return Positions(self._keep_times(new, cached), new, key_mask, segment_ids, query_segments, uniform=True)
        padding = None if times is None or key_mask is None else ~key_mask
        given = torch.arange(keys, device=device) if times is None else times
        given = torch.atleast_2d(given.to(times_dtype(given, None)))
        origin = self._origin(given, padding, cached)
        elapsed = (given - origin).to(dtype)
        if cached:
            self._check_past(elapsed[:, :cached], key_mask)
        self.origin, self.uniform = origin, False
        known = cached if self.times is None or self.times.shape[0] >= elapsed.shape[0] else 0  # rows may part
        key_times = self._keep_times(elapsed[:, known:], known)
        if padding is not None:
            key_times = key_times.masked_fill(padding, 0.0)
        return Positions(key_times, elapsed[:, cached:], key_mask, segment_ids, query_segments)

    def _origin(self, given: Tensor, padding: Tensor | None, cached: int) -> Tensor:
        """`(b, 1)`: the first key that takes part; once there is one, its row's origin stays."""
        given = given.detach()
        if padding is None:
            return given[:, :1] if self.origin is None or cached == 0 else self.origin
        first = given.expand(padding.shape).gather(-1, padding.int().argmin(-1, keepdim=True))
        if self.origin is None or cached == 0:
            return first
        return torch.where(padding[:, :cached].all(-1, keepdim=True), first, self.origin)

    def _check_past(self, elapsed: Tensor, key_mask: Tensor | None) -> None:
        assert self.times is not None
        kept = self.times[:, : elapsed.shape[1]]
        other = elapsed != kept
        if key_mask is not None:
            other = other & key_mask[:, : kept.shape[1]]
        if readable(other) and bool(other.any()):
            row, at = other.nonzero()[0].tolist()
            given, held = (t.expand(other.shape)[row, at].item() for t in (elapsed, kept))
            raise ValueError(
                f"times: got key {at} at {given!r} after the first (batch row {row}), "
                f"expected {held!r}, as the cache holds it: times of cached keys do not change"
            )

    def _keep_times(self, new: Tensor, known: int) -> Tensor:
        """All times: the first `known` that are here, then the new ones."""
        rows = 1 if self.times is None or not known else self.times.shape[0]
        self._times.crop(known)
        return self._times.append(new.expand(max(rows, new.shape[0]), -1))

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Let states in the frame enter, and return all keys and values.

        Raises:
            ValueError: for a shape, dtype or device other than the cache's.
        """
        for name, new, kept in (("keys", key_states, self.keys), ("values", value_states, self.values)):
            if kept is not None and kept.shape[2] and _kind(new) != _kind(kept):
                raise ValueError(f"past_key_values: got {name} of {_kind(kept)}, expected {_kind(new)}, the input's")
        norms = key_states.to(torch.promote_types(key_states.dtype, torch.float32)).square().sum(-1)
        self.kept.key_norm = self._key_norms.append(norms)
        return self._keys.append(key_states), self._values.append(value_states)

    def forget(self, log_gate: Tensor) -> Tensor:
        """Let the log forget gates of new tokens enter, `(batch, heads, length)`, and return those of all keys."""
        return self._log_gates.append(log_gate)

    def get_seq_length(self) -> int:
        """The number of keys."""
        return self._keys.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that so many more queries see, and the first one's index."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit: -1 in transformers' words."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` keys; with the last of all everything, as `reset` does.

        Raises:
            ValueError: for a positive number, as transformers' own caches do.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected a number <= 0: -2 removes two tokens")
        length = self.get_seq_length() + tokens_to_remove
        if length <= 0:
            return self.reset()
        for buffer in (self._keys, self._values, self._key_norms, self._log_gates, self._times):
            buffer.crop(length)

    def offload(self) -> None:
        """Move keys and values to the CPU; `prefetch` them before more enter."""
        for buffer in (self._keys, self._values):
            buffer.change(Tensor.cpu)

    def prefetch(self) -> None:
        """Move keys and values back to where the norms stayed."""
        for buffer in (self._keys, self._values):
            buffer.change(lambda x: x.to(cast(Tensor, self.key_norms).device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.keys is not None:
            self._select(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows at these indices, or where a mask is True."""
        if self.keys is not None:
            self._select(torch.arange(self.keys.shape[0], device=indices.device)[indices])

    def _select(self, rows: Tensor) -> None:
        def take(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        for buffer in (self._keys, self._values, self._key_norms, self._log_gates):
            buffer.change(take)
        if self.times is not None and self.times.shape[0] > 1:  # one row of times is everyone's
            self._times.change(take)
        if self.origin is not None and self.origin.shape[0] > 1:
            self.origin = take(self.origin)


class FilterCache(Cache):
    """What a decoder keeps of the tokens it has read; `past_key_values` of the model and of the attention layers.

    One `FilterLayer` a decoder layer, made when it is first needed. A new token costs a rotation of its own query,
    key and value and one pass over the keys; the past is neither turned again nor copied.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=FilterLayer)

    def layer(self, index: int) -> FilterLayer:
        """The past of the decoder layer at `index`."""
        while len(self.layers) <= index:
            self.layers.append(FilterLayer())
        return cast(FilterLayer, self.layers[index])


def check_cache(given: Cache | None) -> FilterCache | None:
    """Raise `ValueError` for any other cache: one of raw keys would have to be turned again at every token."""
    if given is not None and not isinstance(given, FilterCache):
        raise ValueError(f"past_key_values: got {type(given).__name__}, expected a FilterCache")
    return given


def _kind(x: Tensor) -> str:
    batch, heads, _, channels = x.shape
    return f"batch {batch}, {heads} heads, {channels} channels, {x.dtype} on {x.device}"
