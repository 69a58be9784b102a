"""The baselines: dot-product attention with RoPE, ALiBi, decay or value rotation, on the same projections."""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import rotate, rotation
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.inputs import Positions, locate
from rfa.ops.validation import validate_positions

from .attention import Attention
from .cache import FilterLayer
from .checks import check_backend, check_frequencies, check_rates
from .precision import FullPrecision

RotaryMap = Literal["complex", "as_released"]


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    """ALiBi's slopes `2^(-8 h / H)`, h = 1 .. H (Press et al. 2022).

    Args:
        heads: number of heads H. Where it is not a power of two, the published rule: the slopes of the power of
            two below it, then every other slope of the power of two above it.

    Returns:
        Slopes in nats per unit of time.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / power * torch.arange(1, power + 1, dtype=torch.float32))
    between = 2.0 ** (-4 / power * torch.arange(1, 2 * power + 1, 2, dtype=torch.float32))
    return torch.cat([slopes, between[: heads - power]])


def rotate_as_released(x: Tensor, frequency: Tensor, times: Tensor) -> Tensor:
    """The map of the paper's released RoPE code (SPEC section 6).

    Interleaved pairs of channels share an angle, but the quarter turn exchanges halves, so that it is no rotation
    and scores depend on more than the lag. Kept to measure what that explains.
    """
    cos, sin = (part.repeat_interleave(2, dim=-1).to(x.dtype) for part in rotation(frequency, times))
    first, second = x.chunk(2, dim=-1)
    return cos * x + sin * torch.cat([-second, first], dim=-1)


class Geometry(FullPrecision):
    """The fixed numbers of a baseline's heads, each None where the baseline does without."""

    frequency: Tensor | None
    decay: Tensor | None
    slopes: Tensor | None

    def __init__(self, heads: int, modes: int, frequency: Tensor | None, decay: Tensor | None, slopes: Tensor | None):
        super().__init__()
        if frequency is not None:
            check_frequencies("frequency", frequency, heads, modes)
        for name, rate in (("decay", decay), ("slopes", slopes)):
            if rate is not None:
                check_rates(name, rate, heads)
        for name, buffer in (("frequency", frequency), ("decay", decay), ("slopes", slopes)):
            self.register_buffer(name, buffer)


class DotProductAttention(Attention):
    """`softmax(q.k / sqrt(2 d) + bias)`, with the parts of RFA that a baseline or ablation keeps.

    Args:
        hidden_size: d_model.
        num_heads: H.
        frequency: turns queries and keys, `(heads, modes)` in radians per unit of time; None for no rotation.
        decay: multiplies the normalised weights by `exp(-mu tau)`, `(heads,)`; None for none.
        slopes: ALiBi's linear bias `-slope * lag`, `(heads,)`; None for none.
        rotate_values: transport values by rotation too (RoPER).
        innovation: return the correction toward the estimate, not the estimate.
        rotary_map: "complex", or "as_released" for the map of the paper's code.
        backend: of the operator, where PyTorch's own kernel does not serve.

    Raises:
        ValueError: if sizes or options do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        frequency: Float[Tensor, "heads modes"] | None = None,
        decay: Float[Tensor, " heads"] | None = None,
        slopes: Float[Tensor, " heads"] | None = None,
        rotate_values: bool = False,
        innovation: bool = False,
        rotary_map: RotaryMap = "complex",
        backend: str = "auto",
    ):
        super().__init__(hidden_size, num_heads, innovation)
        if rotary_map not in get_args(RotaryMap):
            raise ValueError(f"rotary_map: got {rotary_map!r}, expected one of {get_args(RotaryMap)}")
        if rotate_values and (frequency is None or rotary_map != "complex"):
            raise ValueError("rotate_values: got True, expected frequencies and rotary_map='complex' with it")
        check_backend(backend)
        self.rotate_values, self.rotary_map, self.backend = rotate_values, rotary_map, backend
        self.geometry = Geometry(num_heads, self.modes, frequency, decay, slopes)

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
        """Scaled dot-product attention of whole sequences."""
        batch, _, queries, _ = query.shape
        keys = key.shape[2]
        validate_positions(batch, queries, keys, query.device, times, None, key_mask, segment_ids)
        positions = locate(queries, keys, query.device, times, None, key_mask, segment_ids)
        if self._plain(positions) or self.rotary_map == "as_released":
            query, key = self._turn(query, positions.query_times), self._turn(key, positions.key_times)
            return self._attend(query, key, value, positions)
        frequency = self.geometry.frequency
        if frequency is not None and not self.rotate_values:
            frequency = -frequency  # RoPE turns forwards
        return decayed_dot_product_attention(
            query,
            key,
            value,
            positions=positions,
            frequency=frequency,
            decay=self.geometry.decay,
            slopes=self.geometry.slopes,
            rotate_values=self.rotate_values,
            backend=self.backend,
        )

    def estimate_with_past(
        self, query: Tensor, key: Tensor, value: Tensor, past: FilterLayer, positions: Positions
    ) -> Tensor:
        """The same over the keys and values of a cache, turned already; only what is new is turned."""
        query = self._turn(query, positions.query_times)
        key = self._turn(key, positions.query_times)
        if self.rotate_values:
            value = self._turn(value, positions.query_times)
        estimate = self._attend(query, *past.update(key, value), positions)
        if self.rotate_values and self.geometry.frequency is not None:
            estimate = rotate(estimate, self.geometry.frequency, positions.query_times)
        return estimate

    def _plain(self, positions: Positions) -> bool:
        """Whether PyTorch's own kernel serves: no bias, no decay, no turned values and nothing masked."""
        keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
        masked = positions.key_mask is not None or positions.key_segments is not None or queries not in (1, keys)
        return not (masked or self.rotate_values or self.geometry.slopes is not None or self.geometry.decay is not None)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        """Attention over turned states."""
        if self._plain(positions):
            return F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
        return decayed_dot_product_attention(
            query,
            key,
            value,
            positions=positions,
            decay=self.geometry.decay,
            slopes=self.geometry.slopes,
            backend=self.backend,
        )

    def _turn(self, x: Tensor, times: Tensor) -> Tensor:
        """RoPE turns forwards, as published; a common frame for the values needs the inverse."""
        frequency = self.geometry.frequency
        if frequency is None:
            return x
        if self.rotary_map == "as_released":
            return rotate_as_released(x, frequency, times)
        return rotate(x, frequency, times, inverse=self.rotate_values)
