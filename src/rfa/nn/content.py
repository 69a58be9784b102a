"""Robust filter attention whose dynamics depend on content (appendix E.6)."""

import math
from typing import get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rfa.checks import require
from rfa.ops.content import Noises, content_filter_attention
from rfa.ops.cumulative import TokenDynamics
from rfa.ops.positions import Positions
from rfa.ops.problem import Weight

from .cache import locate_tokens
from .checks import check_backend, check_rates, check_sizes, check_states, paired
from .dynamics import (
    INVERSE_TEMPERATURE,
    KEY_NOISE,
    NOISE_FLOOR,
    QUERY_NOISE,
    ROBUSTNESS,
    SMALLEST,
    PositiveParameters,
    bank,
    softplus_inverse,
)
from .projections import NormalLinear, complex_deviation, finite_where_absent, merge_heads, split_heads


class ContentDynamics(PositiveParameters):
    """Decay, process noise and frequencies of each token, `softplus(W x + b)`, and the noises of each head.

    W begins at zero and b at the given dynamics, so that at first no token differs from another. Frequencies come in
    conjugate pairs `(w, -w)`, of which the map gives the positive half. All in full precision.

    Args:
        hidden_size: d_model.
        frequency: `(heads, modes)`, the initial frequencies of all tokens; pairs `(w, -w)` with w >= 0.
        decay: `(heads,)`; at least 1e-6.
        steady_state: initial `sigma^2 / (2 mu)`.

    Raises:
        ValueError: for shapes or values that do not fit.
    """

    def __init__(self, hidden_size: int, frequency: Tensor, decay: Tensor, steady_state: float):
        super().__init__()
        heads = len(frequency)
        check_rates("decay", decay, heads)
        ordered = frequency.is_meta or bool((frequency[:, ::2] >= 0).all())
        require(paired(frequency) and ordered, "frequency", frequency.tolist(), "conjugate pairs (w, -w) with w >= 0")
        require(0 <= steady_state < math.inf, "steady_state", steady_state, "a finite number >= 0")
        decay = decay.clamp(min=SMALLEST)
        process_noise = (2 * decay * steady_state).clamp(min=SMALLEST**2)
        initial = torch.cat([decay[:, None], process_noise[:, None], frequency[:, ::2].to(decay.dtype)], dim=-1)
        self.weight = nn.Parameter(torch.zeros(initial.numel(), hidden_size))
        self.bias = nn.Parameter(softplus_inverse(initial.clamp(min=1e-12)).flatten())
        self.heads = heads
        each = torch.ones_like(decay)
        self.hold("key_noise", KEY_NOISE * each)
        self.hold("query_noise", QUERY_NOISE * each)
        self.hold("robustness", ROBUSTNESS * each)
        self.hold("inverse_temperature", INVERSE_TEMPERATURE * each)
        self.register_buffer("noise_floor", NOISE_FLOOR * each)

    def forward(self, hidden_states: Tensor) -> tuple[TokenDynamics, Noises]:
        """Of tokens `(batch, length, hidden)`."""
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        with torch.autocast(hidden_states.device.type, enabled=False):
            rates = F.softplus(F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype)))
            rates = rates.unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1)  # (batch, heads, 2 + modes / 2, length)
            half = rates[:, :, 2:]
            frequency = torch.stack([half, -half], dim=3).flatten(2, 3)
            noises = Noises(noise_floor=self.get_buffer("noise_floor"), **self.positive(dtype))
        return TokenDynamics(rates[:, :, 0], rates[:, :, 1], frequency), noises


class ContentFilterAttention(nn.Module):
    """Robust filter attention in which each token sets the decay, frequencies and process noise until the next.

    A token can keep the earlier tokens, forget them, or make them uncertain. Decay, phases and variance accumulate
    along the sequence by O(N) scans, and between two tokens they are differences of these sums. So the operator's
    separable path serves, and with it every fused backend: O(N) memory there, O(N^2) on the reference. The formulas are
    those of `rfa.ops.content.content_filter_attention`. The layer begins as `RobustFilterAttention` with the same
    dynamics, but decays of zero are raised to 1e-6.

    Args:
        hidden_size: d_model.
        num_heads: H.
        frequency: the initial frequencies of all tokens, `(heads, modes)` in radians per unit of time, in conjugate
            pairs `(w, -w)`; the partitioned bank by default.
        decay: `(heads,)` per unit of time; `0.05` times the fastest frequency of each head, 0 for the first two.
        steady_state: initial steady-state variance `sigma^2 / (2 mu)`.
        weight: "student_t" or "exponential".
        innovation: return the correction toward the estimate, not the estimate.
        backend: the operator's backend.

    Raises:
        ValueError: if sizes or options do not fit together.

    Source: appendix E.6.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        frequency: Float[Tensor, "heads modes"] | None = None,
        decay: Float[Tensor, " heads"] | None = None,
        steady_state: float = 0.1,
        weight: Weight = "student_t",
        innovation: bool = True,
        backend: str = "auto",
    ):
        super().__init__()
        check_sizes(hidden_size, num_heads)
        require(weight in get_args(Weight), "weight", weight, f"one of {get_args(Weight)}")
        check_backend(backend)
        self.hidden_size, self.num_heads, self.innovation = hidden_size, num_heads, innovation
        self.weight: Weight = weight
        self.backend = backend
        modes = hidden_size // num_heads
        frequency, decay = bank(num_heads, modes, frequency, decay)
        deviation = complex_deviation(hidden_size, hidden_size)
        self.query_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.key_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.value_projection = NormalLinear(hidden_size, 2 * hidden_size, deviation)
        self.output_projection = NormalLinear(2 * hidden_size, hidden_size, deviation * math.sqrt(0.5))
        self.dynamics = ContentDynamics(hidden_size, frequency, decay, steady_state)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        *,
        times: Float[Tensor, "*t length"] | Int[Tensor, "*t length"] | None = None,
        key_mask: Bool[Tensor, "batch length"] | None = None,
        segment_ids: Int[Tensor, "batch length"] | None = None,
        past_key_values: Cache | None = None,
        layer_index: int = 0,
        positions: Positions | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """The layer's correction, to be added to the residual stream.

        Args:
            hidden_states: the tokens, already normalised.
            times: of the tokens, strictly increasing within a segment; 0, 1, 2, ... by default.
            key_mask: True for tokens that take part; the others are no keys and set no dynamics.
            segment_ids: attend within equal ids only; each segment has sums of its own.
            past_key_values: None: the cache does not keep the sums at the end of a sequence.
            layer_index: not used without a cache.
            positions: of the tokens, instead of times, mask and segments.

        Returns:
            `(batch, length, hidden)`.

        Raises:
            ValueError: for a cache, or states, times, a mask or segments that do not fit.
        """
        given = None if past_key_values is None else type(past_key_values).__name__
        require(given is None, "past_key_values", given, "None: content-dependent dynamics are not kept in a cache")
        batch, length, _ = check_states("hidden_states", hidden_states, self.hidden_size, self.query_projection)
        if positions is None:
            positions = locate_tokens(batch, length, hidden_states.device, times, key_mask, segment_ids)
        hidden_states = finite_where_absent(hidden_states, positions)
        query, key, value = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.query_projection, self.key_projection, self.value_projection)
        )
        dynamics, noises = self.dynamics(hidden_states)
        estimate = content_filter_attention(
            query,
            key,
            value,
            dynamics=dynamics,
            noises=noises,
            positions=positions,
            weight=self.weight,
            backend=self.backend,
        )
        if self.innovation:
            estimate = estimate - value
        return self.output_projection(merge_heads(estimate))
