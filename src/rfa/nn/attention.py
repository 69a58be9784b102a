"""What every attention layer here shares: the `d -> 2d -> d` projections, the cache and the innovation step."""

import math
from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rfa.ops.validation import check_flags

from .projections import NormalLinear, complex_deviation, merge_heads, split_heads


class Attention(nn.Module, ABC):
    """Queries, keys and values as complex states of each head; a subclass says how they become an estimate.

    Args:
        hidden_size: d_model, also the number of complex modes of all heads together.
        num_heads: H; `d = hidden_size / H` modes a head.
        innovation: return `W_o (estimate - value)`, the correction of the current value toward the estimate
            (section 3.2), rather than `W_o estimate`.

    Raises:
        ValueError: if `hidden_size` is not a multiple of `num_heads`.
    """

    def __init__(self, hidden_size: int, num_heads: int, innovation: bool):
        super().__init__()
        if num_heads < 1 or hidden_size < 1 or hidden_size % num_heads:
            raise ValueError(f"hidden_size: got {hidden_size}, expected a multiple of num_heads = {num_heads}")
        self.hidden_size, self.num_heads, self.innovation = hidden_size, num_heads, innovation
        self.modes = hidden_size // num_heads
        deviation = complex_deviation(hidden_size, hidden_size)
        self.query_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.key_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.value_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
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
    ) -> Float[Tensor, "batch length hidden"]:
        """The layer's correction, to be added to the residual stream.

        Args:
            hidden_states: the tokens, already normalised.
            times: of all keys, those in the cache included; 0, 1, 2, ... by default.
            key_mask: True for keys that take part, those in the cache included.
            segment_ids: attend within equal ids only.
            past_key_values: a transformers cache of earlier keys and values, which this call extends.
            layer_index: the layer's place in that cache.

        Returns:
            `(batch, length, hidden)`.
        """
        if key_mask is not None:
            batch, length, _ = hidden_states.shape
            cached = 0 if past_key_values is None else past_key_values.get_seq_length(layer_index)
            check_flags("key_mask", key_mask, batch, cached + length, hidden_states.device, integer=False)
            missing = ~key_mask[:, cached:, None] & ~hidden_states.isfinite()
            hidden_states = hidden_states.masked_fill(missing, 0.0)  # its query stays a query, its key is none
        query, key, value = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.query_projection, self.key_projection, self.value_projection)
        )
        own_value = value
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, layer_index)
        estimate = self.estimate(query, key, value, times=times, key_mask=key_mask, segment_ids=segment_ids)
        if self.innovation:
            estimate = estimate - own_value
        return self.output_projection(merge_heads(estimate))

    @abstractmethod
    def estimate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        times: Tensor | None,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
    ) -> Tensor:
        """`(batch, heads, queries, 2 d)` from queries, keys and values; queries stand at the last times."""
