"""Robust filter attention across two coupled processes as a layer (appendix E.4)."""

import math
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rfa.checks import require
from rfa.ops.coupled import Observations, PredictionWeights, Process, coupled_filter_attention
from rfa.ops.positions import times_dtype
from rfa.ops.problem import Weight

from .cache import locate_tokens
from .checks import check_frequencies, check_learnable, check_rates, check_sizes, check_states
from .dynamics import (
    INVERSE_TEMPERATURE,
    KEY_NOISE,
    NOISE_FLOOR,
    QUERY_NOISE,
    ROBUSTNESS,
    SMALLEST,
    PositiveParameters,
    bank,
)
from .projections import NormalLinear, complex_deviation, finite_where_absent, merge_heads, split_heads


class _HeadProcess(PositiveParameters):
    """Decay, frequencies and noises of one process; fixed buffers for the first two unless learned."""

    def __init__(self, frequency: Tensor, decay: Tensor, steady_state: float, learned: bool):
        super().__init__()
        each = torch.ones_like(decay)
        self.register_buffer("frequency", frequency.clone())
        self.learned = learned
        if learned:  # frequencies grow or shrink by one factor a mode, so that conjugate pairs keep their sign
            self.hold("decay", decay.clamp(min=SMALLEST))
            self.hold("pace", torch.ones_like(frequency[:, ::2]))
        else:
            self.register_buffer("decay", decay.clone())
        self.hold("process_noise", torch.where(decay > 0, 2 * decay * steady_state, SMALLEST))
        self.hold("key_noise", KEY_NOISE * each)
        self.hold("prior_variance", each)

    def forward(self, dtype: torch.dtype) -> Process:
        values = self.positive(dtype)
        frequency, decay = self.get_buffer("frequency"), values.get("decay")
        if decay is None:
            decay = self.get_buffer("decay")
        else:
            frequency = frequency * values["pace"].repeat_interleave(2, dim=-1)
        return Process(decay, frequency, values["process_noise"], values["key_noise"], values["prior_variance"])


class _Weighing(PositiveParameters):
    """How predictions are weighed, and how strongly one process drives the other."""

    def __init__(self, heads: int, coupling: float):
        super().__init__()
        each = torch.ones(heads)
        self.hold("query_noise", QUERY_NOISE * each)
        self.hold("robustness", ROBUSTNESS * each)
        self.hold("inverse_temperature", INVERSE_TEMPERATURE * each)
        self.register_buffer("noise_floor", NOISE_FLOOR * each)
        self.coupling = nn.Parameter(coupling * each)  # of either sign

    def forward(self, dtype: torch.dtype) -> PredictionWeights:
        return PredictionWeights(noise_floor=self.get_buffer("noise_floor"), **self.positive(dtype))


class CoupledFilterAttention(nn.Module):
    """Cross-attention: a target process x, estimated from an auxiliary process y that drives it.

    With `dx = A_x x dt + b y dt + noise` and `dy = A_y y dt + noise`, an observation of y at `s_j <= t_i` predicts the
    target by `e^(lambda_x tau) x_j + lambda_xy(tau) y_j`; predictions are weighed as in robust filter attention, and
    `rfa.ops.coupled.coupled_filter_attention` gives the formulas and says how the two sequences, each with its own
    times, are paired. The kernel does not separate into factors of query and key, so there is no fused kernel: memory
    is O(queries x sources x hidden_size) where gradients are asked for, and bounded without.

    Args:
        hidden_size: d_model of the target.
        num_heads: H.
        auxiliary_size: d_model of the auxiliary sequence; the target's.
        frequency: of the target, `(heads, modes)` in radians per unit of time; the partitioned bank.
        decay: of the target, `(heads,)` per unit of time; `0.05` times the fastest frequency of each head, 0 for the
            first two.
        auxiliary_frequency, auxiliary_decay: of the auxiliary process; the target's.
        coupling: the initial b, per unit of time; at 0 the layer does not see the auxiliary states, only their times.
        steady_state: initial steady-state variance `sigma^2 / (2 mu)` of both.
        weight: "student_t" or "exponential".
        innovation: return the correction toward the estimate, not the estimate.
        learn_rates: make parameters of the decays and of a factor on the frequencies of both processes; frequencies
            then come in conjugate pairs.

    Raises:
        ValueError: if sizes or options do not fit together.

    Source: appendix E.4.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        auxiliary_size: int | None = None,
        frequency: Float[Tensor, "heads modes"] | None = None,
        decay: Float[Tensor, " heads"] | None = None,
        auxiliary_frequency: Float[Tensor, "heads modes"] | None = None,
        auxiliary_decay: Float[Tensor, " heads"] | None = None,
        coupling: float = 0.1,
        steady_state: float = 0.1,
        weight: Weight = "student_t",
        innovation: bool = True,
        learn_rates: bool = False,
    ):
        super().__init__()
        auxiliary_size = hidden_size if auxiliary_size is None else auxiliary_size
        check_sizes(hidden_size, num_heads)
        require(auxiliary_size >= 1, "auxiliary_size", auxiliary_size, "a number >= 1")
        require(weight in get_args(Weight), "weight", weight, f"one of {get_args(Weight)}")
        require(math.isfinite(coupling), "coupling", coupling, "a finite number")
        require(0 <= steady_state < math.inf, "steady_state", steady_state, "a finite number >= 0")
        self.hidden_size, self.num_heads, self.auxiliary_size = hidden_size, num_heads, auxiliary_size
        modes = hidden_size // num_heads
        frequency, decay = bank(num_heads, modes, frequency, decay)
        auxiliary_frequency = frequency if auxiliary_frequency is None else auxiliary_frequency
        auxiliary_decay = decay if auxiliary_decay is None else auxiliary_decay
        check_frequencies("auxiliary_frequency", auxiliary_frequency, num_heads, modes)
        for name, given in (("frequency", frequency), ("auxiliary_frequency", auxiliary_frequency)):
            if learn_rates:
                check_learnable("learn_rates", name, given)
        check_rates("decay", decay, num_heads)
        check_rates("auxiliary_decay", auxiliary_decay, num_heads)
        self.weight, self.innovation = weight, innovation

        def projection(size: int) -> NormalLinear:
            return NormalLinear(size, 2 * hidden_size, complex_deviation(size, hidden_size))

        self.query_projection, self.key_projection, self.value_projection = (projection(hidden_size) for _ in range(3))
        self.auxiliary_key_projection, self.auxiliary_value_projection = (projection(auxiliary_size) for _ in range(2))
        deviation = complex_deviation(hidden_size, hidden_size) * math.sqrt(0.5)
        self.output_projection = NormalLinear(2 * hidden_size, hidden_size, deviation)
        self.target_process = _HeadProcess(frequency, decay, steady_state, learn_rates)
        self.auxiliary_process = _HeadProcess(auxiliary_frequency, auxiliary_decay, steady_state, learn_rates)
        self.judge = _Weighing(num_heads, coupling)  # this name is that of its parameters in checkpoints

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        auxiliary_states: Float[Tensor, "batch sources auxiliary"],
        *,
        times: Float[Tensor, "*t length"] | Int[Tensor, "*t length"] | None = None,
        auxiliary_times: Float[Tensor, "*s sources"] | Int[Tensor, "*s sources"] | None = None,
        key_mask: Bool[Tensor, "batch length"] | None = None,
        auxiliary_key_mask: Bool[Tensor, "batch sources"] | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """The layer's correction of the target, to be added to its residual stream.

        Args:
            hidden_states: tokens of the target.
            auxiliary_states: tokens of the auxiliary sequence.
            times: of the target, strictly increasing; 0, 1, 2, ... by default.
            auxiliary_times: of the auxiliary sequence, on the same clock; 0, 1, 2, ... by default.
            key_mask: True for target tokens that are observations; the others are queries only.
            auxiliary_key_mask: True for auxiliary tokens that take part.

        Returns:
            `(batch, length, hidden)`. The estimate of a target token that sees no source is zero.

        Raises:
            ValueError: for states, times or masks that do not fit together.
        """
        batch, length, _ = check_states("hidden_states", hidden_states, self.hidden_size, self.query_projection)
        others, sources, _ = check_states(
            "auxiliary_states", auxiliary_states, self.auxiliary_size, self.auxiliary_key_projection
        )
        require(others == batch, "auxiliary_states", others, f"batch {batch}, that of hidden_states")
        device = hidden_states.device
        require(auxiliary_states.device == device, "auxiliary_states", auxiliary_states.device, f"device {device}")
        positions = locate_tokens(batch, length, device, times, key_mask, None)
        try:
            auxiliary = locate_tokens(batch, sources, device, auxiliary_times, auxiliary_key_mask, None)
        except ValueError as error:
            raise ValueError(f"auxiliary_{error}") from None
        times, auxiliary_times = _on_one_clock(times, length, auxiliary_times, sources, device)

        hidden_states = finite_where_absent(hidden_states, positions)
        auxiliary_states = finite_where_absent(auxiliary_states, auxiliary)
        query, key, value = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.query_projection, self.key_projection, self.value_projection)
        )
        auxiliary_key, auxiliary_value = (
            split_heads(projection(auxiliary_states), self.num_heads)
            for projection in (self.auxiliary_key_projection, self.auxiliary_value_projection)
        )
        estimate = coupled_filter_attention(
            query,
            Observations(key, value, times, key_mask),
            Observations(auxiliary_key, auxiliary_value, auxiliary_times, auxiliary_key_mask),
            target_process=self.target_process(query.dtype),
            auxiliary_process=self.auxiliary_process(query.dtype),
            coupling=self.judge.coupling,
            prediction_weights=self.judge(query.dtype),
            weight=self.weight,
        )
        if self.innovation:
            estimate = estimate - value
        return self.output_projection(merge_heads(estimate))


def _on_one_clock(
    times: Tensor | None, length: int, auxiliary_times: Tensor | None, sources: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both `(b, length)`, in a dtype in which their differences are exact."""
    first = torch.arange(length, device=device) if times is None else times
    second = torch.arange(sources, device=device) if auxiliary_times is None else auxiliary_times
    dtype = times_dtype(first, second)
    return torch.atleast_2d(first.to(dtype)), torch.atleast_2d(second.to(dtype))
