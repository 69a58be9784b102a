"""Robust filter attention whose dynamics depend on content (appendix E.6)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.checks import check_choice, require
from rfa.dynamics import turn
from rfa.ops.content import (
    Noises,
    TokenDynamics,
    content_attention_in_frame,
    content_filter_attention,
    content_path,
)
from rfa.ops.positions import Positions
from rfa.ops.problem import Weight, certificate_missing
from rfa.ops.transforms import readable

from .attention import Attention, HeadStates, Marks, QueryStates, Rotation
from .cache_layer import FilterLayer
from .checks import check_rates, paired
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
from .projections import full_precision_linear

Rates = Float[Tensor, "batch heads keys rates"]


class ContentDynamics(PositiveParameters):
    """Decay, process noise and frequencies of each token, `softplus(W x + b)`, and the noises of each head.

    W begins at zero and b at the given dynamics, so that at first no token differs from another; decays are raised to
    1e-6. Frequencies come in conjugate pairs `(w, -w)` with w >= 0, of which the map gives the positive half.
    """

    def __init__(self, hidden_size: int, frequency: Tensor, decay: Tensor, steady_state: float):
        super().__init__()
        heads = len(frequency)
        check_rates("decay", decay, heads)
        ordered = not readable(frequency) or bool((frequency[:, ::2] >= 0).all())
        if not (paired(frequency) and ordered):
            require(False, "frequency", frequency.tolist(), "conjugate pairs (w, -w) with w >= 0")
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

    def rates(self, hidden_states: Tensor) -> Tensor:
        """Decay, process noise and the positive frequencies of tokens, `(batch, heads, length, 2 + modes / 2)`."""
        rates = F.softplus(full_precision_linear(hidden_states, self.weight, self.bias))
        return rates.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, rates: Tensor) -> tuple[TokenDynamics, Noises]:
        """The dynamics of tokens with these rates, and the noises."""
        half = rates[..., 2:].mT
        frequency = torch.stack([half, -half], dim=3).flatten(2, 3)
        noises = Noises(noise_floor=self.get_buffer("noise_floor"), **self.positive(rates.dtype))
        return TokenDynamics(rates[..., 0], rates[..., 1], frequency), noises


class ContentFilterAttention(Attention):
    """Robust filter attention in which each token sets the decay, frequencies and process noise until the next.

    A token can keep the earlier tokens, forget them, or make them uncertain. Decay, phases and variance accumulate
    along the sequence: in float64 by O(N) scans for the fused backends and the reference alike. The formulas are
    those of `rfa.ops.content.content_filter_attention`. The layer begins as `RobustFilterAttention` with the same
    dynamics, the Lyapunov prior and the innovation step, but decays of zero are raised to 1e-6.

    Args:
        hidden_size: d_model.
        num_heads: H.
        frequency, decay, steady_state: of all tokens at first, as of `RobustFilterAttention`. Frequencies come in
            conjugate pairs `(w, -w)`.
        weight: "student_t" or "exponential".
        innovation, backend, **options: of every layer; see `Attention`. It is causal, has no dropout and no clock of
            its own.

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
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, innovation, backend=backend, **options)
        self.settle_certified(certificate_missing("lyapunov", self.causal))
        check_choice("weight", weight, Weight)
        require(self.causal, "causal", False, "True: a token sets the dynamics of the time after it")
        require(not self.dropout, "dropout", self.dropout, "0 with content-dependent dynamics")
        require(self.clock is None, "clock", "content", "'times': each token sets all dynamics already")
        self.weight = weight
        frequency, decay = bank(num_heads, self.modes, frequency, decay)
        self.dynamics = ContentDynamics(hidden_size, frequency, decay, steady_state)

    def marks(self, hidden_states: Float[Tensor, "batch length hidden"]) -> dict[str, Marks]:
        """The rates of each token."""
        return {"rates": self.dynamics.rates(hidden_states)}

    def value_rotations(self, positions: Positions, **marks: Marks) -> tuple[Rotation, Rotation] | None:
        """The rotations by the phases of the tokens."""
        return content_path(self.dynamics(marks["rates"])[0], positions).rotations()

    def estimate(
        self,
        query: QueryStates,
        key: HeadStates,
        value: HeadStates,
        *,
        positions: Positions,
        rates: Rates | None = None,
    ) -> QueryStates:
        """The operator under the dynamics of the tokens."""
        assert rates is not None  # this layer's own mark
        dynamics, noises = self.dynamics(rates)
        given: dict[str, Any] = {"dynamics": dynamics, "noises": noises, "positions": positions}
        return content_filter_attention(query, key, value, **given, weight=self.weight, backend=self.backend)

    def estimate_with_cache(
        self,
        query: HeadStates,
        key: HeadStates,
        value: HeadStates,
        cached: FilterLayer,
        *,
        positions: Positions,
        rates: Rates | None = None,
    ) -> HeadStates:
        """The operator in the frame of the cache: only new states are turned, and the estimate is turned back."""
        assert rates is not None
        dynamics, noises = self.dynamics(rates)
        path = content_path(dynamics, positions)
        cos, sin = path.of_queries()
        query, key, value = (turn(x, cos, -sin) for x in (query, key, value))
        keys, values = cached.update(key, value)
        chosen: dict[str, Any] = {"noises": noises, "weight": self.weight, "backend": self.backend}
        estimate = content_attention_in_frame(query, keys, values, path=path, **chosen)
        return turn(estimate, cos, sin)
