"""The cache of a decoder: a `FilterLayer` for each of its layers, and the times of all tokens."""

import copy
import math
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rfa.checks import check_range, installed, needs, require
from rfa.dynamics import time_dtype
from rfa.ops.positions import Positions, checked_positions, first_time
from rfa.ops.problem import Certified
from rfa.ops.transforms import readable, values_at_hand

from .cache_layer import FilterLayer
from .checks import check_certified

if TYPE_CHECKING or installed("transformers"):
    from transformers.cache_utils import Cache, DynamicCache, StaticCache
else:  # layers work without a cache
    Cache = DynamicCache = StaticCache = object


class FilterCache(Cache):
    """The cache of a decoder, `past_key_values` of the model and of the attention layers.

    It has one `FilterLayer` for each decoder layer, made when it is first needed. All layers share the times of the
    tokens: they count from one origin, the first key of a row that takes part, in float64. A new token costs a rotation
    of its own query, key and value and one pass over the keys. Earlier states are neither turned again nor copied.

    Keys and values of a token take `4 hidden_size` numbers in each layer. Where memory does not suffice, PyTorch raises
    a `RuntimeError` that names the bytes it wanted; the cache is then to be reset. Reading a prompt in chunks, by
    `generate(prefill_chunk_size=...)`, leaves little to hold beside the cache.

    Args:
        max_length: the most tokens. Memory for all of them is reserved once, when the first token enters, and more
            tokens are refused. None for no limit: memory then grows by half at a time.
        certified: which old keys a token leaves out, and which the cache drops, where the layer's scores have a bound:
            "auto" as the layer says, an eps instead of the layer's, or None to keep and read all. Dropped are those
            beyond the reach of the slowest head, `(log(1 / eps) + reserve) / slope` tokens, as soon as the cache
            holds half as many more. So memory and the time of a token stop growing. Only filters with the Riccati prior
            drop, with a fused backend, tokens at 0, 1, 2, ..., and no content clock or `max_length`; dot products
            keep all. A layer whose scores have no bound refuses an eps.
        reserve: nats that a row's sum may lie below the largest that the prior allows. Each row is held against its
            real sum; `uncertified` counts those to which dropped keys might have mattered.

    Raises:
        ValueError: for a limit below one token, an eps outside [0, 1), or a negative reserve.
    """

    def __init__(self, max_length: int | None = None, *, certified: Certified = "auto", reserve: float = 20.0) -> None:
        needs("transformers")
        super().__init__(layer_class_to_replicate=FilterLayer)
        if max_length is not None:
            check_range("max_length", max_length, 1, 2**31 - 1)
        check_certified(certified, None)
        require(0 <= reserve < math.inf, "reserve", reserve, "a finite number >= 0, in nats")
        self.max_length, self.certified, self.reserve = max_length, certified, reserve
        self._model: weakref.ref[nn.Module] | None = None
        self._forget_times()

    def _forget_times(self) -> None:
        self._warned = False
        self.uniform = True  # the tokens stand at 0, 1, 2, ...; otherwise their times are kept
        self.origin: Tensor | None = None  # `(1 or batch, 1)`, as the times were given
        self._steps: Tensor | None = None  # 0, 1, 2, ... for more tokens than there are
        self.times: Tensor | None = None  # of the keys since the origin, `(1 or batch, keys)`; padding has times too

    def layer(self, index: int) -> FilterLayer:
        """The cache of the decoder layer at `index`."""
        while len(self.layers) <= index:
            self.layers.append(FilterLayer(self.max_length, self.certified, self.reserve))
        return cast(FilterLayer, self.layers[index])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most tokens of any layer; -1 for no limit, as in transformers."""
        return -1 if self.max_length is None else self.max_length

    @property
    def max_cache_len(self) -> int:
        """The same by the name that peft asks for."""
        return self.get_max_length()

    @property
    def uncertified(self) -> int:
        """The number of rows, of all heads and layers, to which keys that were dropped might have mattered.

        They are those of the sequences that the cache holds now.
        """
        counts = [cast(FilterLayer, layer).decoding.uncertified for layer in self.layers]
        return sum(int(count.sum()) for count in counts if count is not None)

    def warn_uncertified(self) -> None:
        """Warn once where a key that was dropped might have mattered."""
        if self._warned or torch.compiler.is_compiling() or not (rows := self.uncertified):
            return
        self._warned = True
        warnings.warn(
            f"past_key_values: {rows} rows of all heads and layers may have needed keys that were dropped; "
            f"use FilterCache(reserve=...) with more than {self.reserve:g} nats, or certified=None",
            stacklevel=2,
        )

    def hold_for(self, model: nn.Module) -> None:
        """Note whose tokens these are.

        Raises:
            ValueError: where another model has filled the cache: its states would be read with other parameters.
        """
        if self._model is None or self._model() is not model:
            if self._model is not None and self.get_seq_length():
                given = f"a cache of another model with {self.get_seq_length()} tokens"
                raise ValueError(f"past_key_values: got {given}, expected an empty one or this model's own")
            self._model = weakref.ref(model)

    def __copy__(self) -> "FilterCache":
        """Another name for the same tokens, of the same model."""
        copied = object.__new__(type(self))
        copied.__dict__ = self.__dict__  # the times too: what enters by one name is there by the other
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "FilterCache":
        """A copy that serves the same model."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """For `pickle`, which cannot store whose tokens these are."""
        return {**self.__dict__, "_model": None}

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
            times, key_mask, segment_ids: of all keys, as of a layer; times of those in the cache are as before.
            layer_index: the tokens follow those that this layer holds.

        Raises:
            ValueError: for times, a mask, segments or a batch that do not fit, or times that differ from those in the
                cache.
        """
        keys = self.get_seq_length(layer_index) + length
        if keys == length and not any(self._lengths()):
            self._forget_times()
        dropped = any(cast(FilterLayer, layer).dropped for layer in self.layers)
        expected = "none after tokens at 0, 1, 2, ... that were dropped, or FilterCache(certified=None)"
        require(times is None or not dropped, "times", "times of their own", expected)
        given, origin = times, None
        if times is not None or not self.uniform:
            given = torch.arange(keys, device=device) if times is None else times
            origin = partial(self._shared_origin, key_mask=None if times is None else key_mask)
        elif self.origin is None:
            self.origin = torch.zeros(1, 1, dtype=torch.int64, device=device)
        if given is None and key_mask is None and segment_ids is None and not torch.is_grad_enabled() and readable():
            steps = self._uniform_times(keys, device)
            last = steps.as_strided((1, length), (length, 1), keys - length)  # the fastest view
            return Positions(steps.as_strided((1, keys), (keys, 1)), last, None, None, True, True, orders={})
        self._check_rows(batch)
        positions = checked_positions(batch, length, keys, device, given, None, key_mask, segment_ids, origin)
        if dropped and readable(positions.key_groups):  # over gaps old keys count for more than over steps of one
            together = "padding before the first key and segments in one piece after tokens that were dropped"
            gaps = "absent keys in between, or interleaved segments"
            expected = f"{together}, or FilterCache(certified=None)"
            require(positions.rising(), "key_mask, segment_ids", gaps, expected)
        return positions

    def _check_rows(self, batch: int) -> None:
        """Raise `ValueError` unless layers with tokens have as many rows as the input."""
        for layer in cast(list[FilterLayer], self.layers):
            if layer.get_seq_length() and layer.keys is not None:
                rows = layer.keys.shape[0]
                if rows != batch:
                    raise ValueError(f"past_key_values: got batch {rows}, expected batch {batch}, the input's")
                return

    def _lengths(self) -> Iterator[int]:
        """The number of keys of each layer."""
        return map(self.get_seq_length, range(len(self.layers)))

    def _uniform_times(self, keys: int, device: torch.device) -> Tensor:
        """0, 1, 2, ... for this number of keys and more, `(1, ...)`: made for twice as many."""
        steps = self._steps
        if steps is None or steps.shape[1] < keys or steps.device != device:
            with torch.inference_mode(False):  # also serves where gradients are taken later
                steps = torch.arange(2 * keys, device=device, dtype=time_dtype(device))[None]
            self._steps = steps
        return steps

    def _shared_origin(self, given: Tensor, key_mask: Tensor | None) -> Tensor:
        """The origin `(b, 1)` of all keys at the times `(b, keys)`, those in the cache before the new ones.

        Raises:
            ValueError: where those in the cache are not as it holds them.
        """
        cached = max(self._lengths(), default=0)
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
        if values_at_hand(other) and bool(other.any()):
            row, at = other.nonzero()[0].tolist()
            given, kept = (t.expand(other.shape)[row, at].item() for t in (elapsed, held))
            raise ValueError(
                f"times: got key {at} at {given!r} after the first (batch row {row}), "
                f"expected {kept!r}, as the cache holds it: times of cached keys do not change"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raises as `FilterLayer.crop`; then all layers are as before."""
        for layer in self.layers:
            cast(FilterLayer, layer).check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._forget_times()

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        super().reorder_cache(cast(Any, beam_idx))
        for name in ("origin", "times"):
            x: Tensor | None = getattr(self, name)
            if x is not None and x.shape[0] > 1:  # one row serves all
                setattr(self, name, x.index_select(0, beam_idx.to(x.device)))


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
    """The cache. An empty one of transformers becomes a `FilterCache` itself, so that its owner holds the tokens.

    A `DynamicCache` gets no limit, a `StaticCache` its own.

    Raises:
        ValueError: for any other cache: raw keys would have to be turned again at every token.
    """
    if given is None or isinstance(given, FilterCache):
        return given
    expected = "a FilterCache, or an empty DynamicCache or StaticCache"
    require(isinstance(given, Cache), "past_key_values", type(given).__name__, expected)
    kind, offloaded = type(given), getattr(given, "offloading", False)
    empty = kind in (DynamicCache, StaticCache) and not offloaded and not given.get_seq_length()
    if not empty:
        held = "offloaded" if offloaded else f"{int(given.get_seq_length())} tokens"
        raise ValueError(f"past_key_values: got {kind.__name__} ({held}), expected {expected}")
    limit = given.get_max_length() if kind is StaticCache else None
    given.__dict__.clear()
    given.__class__ = FilterCache
    FilterCache.__init__(cast(FilterCache, given), limit)
    return cast(FilterCache, given)
