"""The common part of all attention layers: the `d -> 2d -> d` projections, the cache and the innovation step."""

import math
from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rfa.checks import check_choice, require
from rfa.ops.content import clocked
from rfa.ops.positions import Positions
from rfa.ops.problem import Certified

from .cache import Cache, check_cache, locate_tokens
from .cache_layer import FilterLayer
from .checks import check_backend, check_certified, check_dropout, check_sizes, check_states
from .projections import (
    Clock,
    ContentClock,
    HeadStates,
    StateScale,
    complex_deviation,
    finite_where_absent,
    merge_heads,
    normal_projection,
    split_heads,
)

QueryStates = Float[Tensor, "batch heads queries channels"]
Marks = Float[Tensor, "batch heads keys ..."]  # cached beside keys and values, such as gates and speeds of clocks
Phases = Float[Tensor, "b heads length modes"]
Rotation = tuple[Phases, Phases]  # cosine and sine


class Attention(nn.Module, ABC):
    """Queries, keys and values as complex states of each head; a subclass says how they become an estimate.

    Args:
        hidden_size: d_model, also the number of complex modes of all heads together.
        num_heads: H; `d = hidden_size / H` modes a head.
        innovation: return `W_o (estimate - value)`, the correction of the current value toward the estimate
            (section 3.2), rather than `W_o estimate`.
        tie_key_value: the values are the keys (appendix E.1), with no projection of their own. A diagonal rescaling of
            theirs would be one of the output projection: `W_o D` with values `k` is `W_o` with values `D k`.
        causal: queries see keys at their own time and before. Off, they see all keys, without gates and caches.
        dropout: in training this share of the weights of each query becomes 0, and the others grow by
            `1 / (1 - share)`. Weights exist in the reference only: "auto" takes it then, a fused backend is refused.
        clock: "times", the given times; or "content", a `ContentClock`: the tokens say how fast the time of each head
            passes, which rotation, decay and noise follow.
        normalise_states: queries and keys of each head have a root mean square of one, times a learned scale
            (`StateScale`). Tied values are the normalised keys.
        certified: eps, by which old keys are left out that provably cannot change an estimate, as of
            `robust_filter_attention`; or "auto", 2^-24 for states in float32 and 2^-12 in half precision, where the
            layer's scores have a bound and a fused backend saves time; or None, to visit all keys.

    Raises:
        ValueError: if sizes do not fit together, for a dropout outside [0, 1), or one that the backend does not have.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        innovation: bool,
        tie_key_value: bool = False,
        *,
        backend: str = "auto",
        causal: bool = True,
        dropout: float = 0.0,
        clock: Clock = "times",
        normalise_states: bool = False,
        certified: Certified = "auto",
    ):
        super().__init__()
        check_sizes(hidden_size, num_heads)
        check_choice("clock", clock, Clock)
        self.clock = ContentClock(hidden_size, num_heads) if clock == "content" else None
        require(causal or clock == "times", "clock", clock, "'times' with causal=False: a token sets the time after it")
        self.state_scale = StateScale(num_heads) if normalise_states else None
        self.hidden_size, self.num_heads, self.innovation = hidden_size, num_heads, innovation
        check_backend(backend)
        check_dropout(dropout, backend)
        self.certified = certified
        self.unbounded: str | None = None  # why scores have no bound
        self.modes = hidden_size // num_heads
        self.backend, self.causal, self.dropout = backend, causal, dropout
        deviation = complex_deviation(hidden_size, hidden_size)
        self.query_projection = normal_projection(hidden_size, 2 * hidden_size, deviation)
        self.key_projection = normal_projection(hidden_size, 2 * hidden_size, deviation)
        self.value_projection = None if tie_key_value else normal_projection(hidden_size, 2 * hidden_size, deviation)
        self.output_projection = normal_projection(2 * hidden_size, hidden_size, deviation * math.sqrt(0.5))

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        *,
        times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None = None,
        key_mask: Bool[Tensor, "batch keys"] | None = None,
        segment_ids: Int[Tensor, "batch keys"] | None = None,
        past_key_values: Cache | None = None,
        layer_index: int = 0,
        positions: Positions | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """The layer's correction, to be added to the residual stream.

        Args:
            hidden_states: the tokens, already normalised.
            times: of all keys, those in the cache included; 0, 1, 2, ... by default.
            key_mask: True for keys that take part, those in the cache included.
            segment_ids: attend within equal ids only.
            past_key_values: a `FilterCache` of earlier tokens, which this call extends.
            layer_index: the layer's index in that cache.
            positions: of the tokens, instead of times, mask and segments. A model locates its tokens once for all
                layers. With a cache they are those of `FilterCache.locate`.

        Raises:
            ValueError: for another cache, a cache whose layers hold different tokens after a call that was broken
                off, or states, a mask, segments, times or positions that do not fit.
        """
        batch, length, _ = check_states("hidden_states", hidden_states, self.hidden_size, self.query_projection)
        cache = check_cache(past_key_values)
        require(self.causal or cache is None, "past_key_values", type(cache).__name__, "None with causal=False")
        if positions is None:
            device = hidden_states.device
            positions = locate_tokens(batch, length, device, times, key_mask, segment_ids, cache, layer_index)
        else:
            for name, value in {"times": times, "key_mask": key_mask, "segment_ids": segment_ids}.items():
                require(value is None, name, "given beside positions", "positions alone: they have it already")
        hidden_states = finite_where_absent(hidden_states, positions)
        query = self.queries(hidden_states)
        layer = None if cache is None else cache.layer(layer_index)
        if layer is not None:
            layer.check_positions(positions, length)
            check_certified(layer.certified, self.unbounded)
        key, value, given = self.located_states(hidden_states, positions, layer)
        query = query.to(key.dtype)
        if layer is None:
            estimate = self.estimate(query, key, value, **given)
        else:
            estimate = self.estimate_with_cache(query, key, value, layer, **given)
        if self.innovation:
            estimate = estimate - value
        return self.output_projection(merge_heads(estimate.to(value.dtype)))

    def located_states(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        positions: Positions,
        cached: FilterLayer | None = None,
    ) -> tuple[HeadStates, HeadStates, dict[str, Any]]:
        """Keys and values of tokens, and what `estimate` is given beside states: positions by the clock, and marks."""
        key = self.keys(hidden_states)
        value = self.values(hidden_states, key)
        marks = self.marks(hidden_states)
        if cached is not None and marks:
            cached.check_fit(key, value)
            marks = cached.update_marks(marks)
        if (rate := marks.pop("rate", None)) is not None:
            positions = clocked(positions, rate)
        return key, value, {"positions": positions, **marks}

    def queries(self, hidden_states: Float[Tensor, "batch queries hidden"]) -> QueryStates:
        """The queries of tokens."""
        return self._scaled(split_heads(self.query_projection(hidden_states), self.num_heads))

    def keys(self, hidden_states: Float[Tensor, "batch length hidden"]) -> HeadStates:
        """The keys of tokens."""
        return self._scaled(split_heads(self.key_projection(hidden_states), self.num_heads))

    def values(self, hidden_states: Float[Tensor, "batch length hidden"], key: HeadStates) -> HeadStates:
        """The values of tokens, which are their keys where these are tied."""
        if self.value_projection is None:
            return key
        return split_heads(self.value_projection(hidden_states), self.num_heads)

    def settle_certified(self, missing: str | None) -> None:
        """Say why scores have no bound, or None. `ValueError` for an eps without one, where "auto" becomes None."""
        check_certified(self.certified, missing)
        self.certified, self.unbounded = None if missing is not None else self.certified, missing

    def _scaled(self, states: Tensor) -> Tensor:
        return states if self.state_scale is None else self.state_scale(states)

    def marks(self, hidden_states: Float[Tensor, "batch length hidden"]) -> dict[str, Marks]:
        """What each token says about the time after it, `(batch, heads, length, ...)` by name.

        Estimates receive those of all keys by these names, except the "rate" of a clock: it changes their positions.
        """
        return {} if self.clock is None else {"rate": self.clock(hidden_states)}

    def value_rotations(self, positions: Positions, **marks: Marks) -> tuple[Rotation, Rotation] | None:
        """Cosine and sine by which values turn to the origin, and the estimates back; None where values do not turn.

        `(b, heads, length, modes)` each, for the positions and marks that `estimate` is given.
        """
        return None

    @abstractmethod
    def estimate(
        self,
        query: QueryStates,
        key: HeadStates,
        value: HeadStates,
        *,
        positions: Positions,
    ) -> QueryStates:
        """The estimates from the queries, keys and values of whole sequences."""

    @abstractmethod
    def estimate_with_cache(
        self, query: HeadStates, key: HeadStates, value: HeadStates, cached: FilterLayer, *, positions: Positions
    ) -> HeadStates:
        """The same for tokens that continue a cache, which their keys and values join, turned into the frame."""
