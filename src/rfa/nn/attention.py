"""The common part of all attention layers: the `d -> 2d -> d` projections, the cache and the innovation step."""

import math
from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rfa.checks import require
from rfa.ops.positions import Positions

from .cache import FilterLayer, check_cache, locate_tokens
from .checks import check_sizes, check_states
from .projections import NormalLinear, complex_deviation, finite_where_absent, merge_heads, split_heads

HeadStates = Float[Tensor, "batch heads length channels"]  # a state of d modes is `2 d` real channels
LogGates = Float[Tensor, "batch heads length"]


class Attention(nn.Module, ABC):
    """Queries, keys and values as complex states of each head; a subclass says how they become an estimate.

    Args:
        hidden_size: d_model, also the number of complex modes of all heads together.
        num_heads: H; `d = hidden_size / H` modes a head.
        innovation: return `W_o (estimate - value)`, the correction of the current value toward the estimate
            (section 3.2), rather than `W_o estimate`.
        tie_key_value: the values are the keys (appendix E.1: `W_v = W_k` up to a diagonal), with no projection of
            their own. Their diagonal rescaling, a complex number a mode, is the output projection's: the estimate is
            linear in the values and treats modes alike, so that `W_o D` with values `k` is `W_o` with values `D k`.
        causal: queries see keys at their own time and before. Off, they see all keys, there are no gates, and there is
            no cache.

    Raises:
        ValueError: if `hidden_size` is not a multiple of `num_heads`.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, innovation: bool, tie_key_value: bool = False, *, causal: bool = True
    ):
        super().__init__()
        check_sizes(hidden_size, num_heads)
        self.hidden_size, self.num_heads, self.innovation = hidden_size, num_heads, innovation
        self.modes, self.causal = hidden_size // num_heads, causal
        deviation = complex_deviation(hidden_size, hidden_size)
        self.query_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.key_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.value_projection = None if tie_key_value else NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.output_projection = NormalLinear(2 * hidden_size, hidden_size, deviation * math.sqrt(0.5))

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
                layers.

        Returns:
            `(batch, length, hidden)`.

        Raises:
            ValueError: for another cache, or states, a mask, segments or times that do not fit.
        """
        batch, length, _ = check_states("hidden_states", hidden_states, self.hidden_size, self.query_projection)
        cache = check_cache(past_key_values)
        require(self.causal or cache is None, "past_key_values", type(cache).__name__, "None with causal=False")
        if positions is None:
            device = hidden_states.device
            positions = locate_tokens(batch, length, device, times, key_mask, segment_ids, cache, layer_index)
        hidden_states = finite_where_absent(hidden_states, positions)
        query, key = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.query_projection, self.key_projection)
        )
        value = key
        if self.value_projection is not None:
            value = split_heads(self.value_projection(hidden_states), self.num_heads)
        log_gate = self.log_gate(hidden_states)
        given: dict[str, Any] = {"positions": positions} | ({} if log_gate is None else {"log_gate": log_gate})
        if cache is None:
            estimate = self.estimate(query, key, value, **given)
        else:
            estimate = self.estimate_with_cache(query, key, value, cache.layer(layer_index), **given)
        if self.innovation:
            estimate = estimate - value
        return self.output_projection(merge_heads(estimate.to(value.dtype)))

    def log_gate(self, hidden_states: Float[Tensor, "batch length hidden"]) -> LogGates | None:
        """The log forget gates that estimates then receive; None in a layer without."""
        return None

    @abstractmethod
    def estimate(
        self,
        query: HeadStates,
        key: HeadStates,
        value: HeadStates,
        *,
        positions: Positions,
    ) -> HeadStates:
        """The estimates from the queries, keys and values of whole sequences."""

    @abstractmethod
    def estimate_with_cache(
        self,
        query: HeadStates,
        key: HeadStates,
        value: HeadStates,
        cached: FilterLayer,
        *,
        positions: Positions,
    ) -> HeadStates:
        """The same for tokens that continue a cache, which their keys and values join, turned into the frame."""
