"""The baselines: dot-product attention with RoPE, ALiBi, decay or value rotation, on the same projections."""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import decay_kernel, rotate, rotation
from rfa.ops.inputs import Positions, locate, row_blocks
from rfa.ops.validation import validate_positions

from .attention import Attention
from .cache import FilterLayer
from .checks import check_frequencies, check_rates
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
            check_frequencies(frequency, heads, modes, paired=False)
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
    ):
        super().__init__(hidden_size, num_heads, innovation)
        if rotary_map not in get_args(RotaryMap):
            raise ValueError(f"rotary_map: got {rotary_map!r}, expected one of {get_args(RotaryMap)}")
        if rotate_values and (frequency is None or rotary_map != "complex"):
            raise ValueError("rotate_values: got True, expected frequencies and rotary_map='complex' with it")
        self.rotate_values, self.rotary_map = rotate_values, rotary_map
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
        query = self._turn(query, positions.query_times)
        key = self._turn(key, positions.key_times)
        if self.rotate_values:
            value = self._turn(value, positions.key_times)
        return self._attend(query, key, value, positions)

    def estimate_with_past(
        self, query: Tensor, key: Tensor, value: Tensor, past: FilterLayer, positions: Positions
    ) -> Tensor:
        """The same over the keys and values of a cache, turned already; only what is new is turned."""
        query = self._turn(query, positions.query_times)
        key = self._turn(key, positions.query_times)
        if self.rotate_values:
            value = self._turn(value, positions.query_times)
        return self._attend(query, *past.update(key, value), positions)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        """Attention over turned states; without bias or mask it runs on PyTorch's fused kernels."""
        batch, heads, queries, _ = query.shape
        keys = key.shape[2]
        if positions.key_mask is not None:
            absent = ~positions.key_mask[:, None, :, None]
            key, value = key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
        masked = positions.key_mask is not None or positions.key_segments is not None or queries not in (1, keys)
        if not masked and self.geometry.slopes is None and self.geometry.decay is None:
            estimate = F.scaled_dot_product_attention(query, key, value, is_causal=queries > 1)
        else:
            blocks = row_blocks(batch, heads, queries, keys)
            dtype = torch.promote_types(query.dtype, torch.float32)  # half precision cannot tell distant lags apart
            with torch.autocast(query.device.type, enabled=False):
                states = query.to(dtype), key.to(dtype), value.to(dtype)
                rows = [self._rows(states[0][:, :, rows], *states[1:], positions.rows(rows)) for rows in blocks]
            estimate = torch.cat(rows, dim=2).to(value.dtype)
        if self.rotate_values and self.geometry.frequency is not None:
            estimate = rotate(estimate, self.geometry.frequency, positions.query_times)
        return estimate

    def _turn(self, x: Tensor, times: Tensor) -> Tensor:
        """RoPE turns forwards, as published; a common frame for the values needs the inverse."""
        frequency = self.geometry.frequency
        if frequency is None:
            return x
        if self.rotary_map == "as_released":
            return rotate_as_released(x, frequency, times)
        return rotate(x, frequency, times, inverse=self.rotate_values)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        """Some rows of the attention, with bias, mask and decay."""
        visible = positions.visible(causal=True)[:, None]
        empty = ~visible.any(-1, keepdim=True)
        lag = (positions.query_times[:, :, None] - positions.key_times[:, None, :])[:, None]
        lag = lag.masked_fill(~visible, 0.0).to(query.dtype)
        bias = torch.zeros_like(lag).masked_fill(~visible & ~empty, -torch.inf)
        slopes, decay = self.geometry.slopes, self.geometry.decay
        if slopes is not None:
            bias = bias - slopes[:, None, None] * lag
        if decay is None:
            estimate = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        else:
            score = query @ key.mT / math.sqrt(query.shape[-1]) + bias
            estimate = (score.softmax(-1) * decay_kernel(decay[:, None, None], lag)) @ value
        return estimate.masked_fill(empty, 0.0)
