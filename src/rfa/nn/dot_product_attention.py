"""The baselines and controls: dot-product attention by RoPE, ALiBi, decay, turned values or forget gates."""

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.checks import check_choice, require
from rfa.dynamics import riccati_log_gain, rotation, rotation_of_heads, turn
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import Positions
from rfa.ops.problem import Certified
from rfa.ops.transforms import readable, scaled_dot_product_attention

from .attention import Attention, HeadStates, Marks, QueryStates, Rotation
from .cache_layer import FilterLayer
from .checks import check_frequencies, check_rates
from .dynamics import FullPrecision, HeadDynamics
from .projections import TokenLogits

# The numbers of a baseline's heads, as ALiBi's slopes, and the map of the released RoPE code


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    """ALiBi's slopes `2^(-8 h / H)`, h = 1 .. H, in nats per unit of time (Press et al. 2022).

    Where H is no power of two, the published rule: the slopes of the power of two below it, then every other slope of
    the power of two above it.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / power * torch.arange(1, power + 1, dtype=torch.float32))
    between = 2.0 ** (-4 / power * torch.arange(1, 2 * power + 1, 2, dtype=torch.float32))
    return torch.cat([slopes, between[: heads - power]])


def ascending_slopes(heads: int) -> Float[Tensor, " heads"]:
    """ALiBi's slopes in ascending order, because head 0 of a filter is the slowest."""
    return alibi_slopes(heads).sort().values


def rotate_as_released(x: Tensor, frequency: Tensor, times: Tensor) -> Tensor:
    """The map of the paper's released RoPE code.

    Interleaved pairs of channels share an angle, but the quarter turn exchanges halves. So it is no rotation, and
    scores depend on more than the lag. It is here to measure the effect of that.
    """
    cos, sin = (part.repeat_interleave(2, dim=-1).to(x.dtype) for part in rotation(frequency, times))
    first, second = x.chunk(2, dim=-1)
    return cos * x + sin * torch.cat([-second, first], dim=-1)


class Geometry(FullPrecision):
    """The fixed numbers of a baseline's heads, each None where the baseline does not use it."""

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
            self.register_buffer(name, rate)
        self.register_buffer("frequency", frequency)


RotaryMap = Literal["complex", "as_released"]
Gates = Literal["forget", "gain"]
LogGates = Float[Tensor, "batch heads keys"]
UNBOUNDED_PRODUCTS = (
    "these dot products, expected None: only causal ones with slopes or forget gates and normalise_states=True have a "
    "bound"
)
GATE_DEVIATION = 0.02  # of the gates' initial weights, whose bias starts at 0 in forget gates (Lin et al. 2025)


class DotProductAttention(Attention):
    """`softmax(q.k / sqrt(2 d) + bias)`, with the parts of RFA that a baseline or ablation keeps.

    Args:
        hidden_size: d_model.
        num_heads: H.
        frequency: turns queries and keys, `(heads, modes)` in radians per unit of time; None for no rotation.
        decay: multiplies the normalised weights by `exp(-mu tau)`, `(heads,)`; None for none.
        slopes: ALiBi's linear bias `-slope * lag`, `(heads,)`; None for none.
        learn_slopes: the slopes are those of a Riccati prior without decay, `-log(1 - K)` at unit intervals, whose
            noises sigma^2 and eta^2 are learned and start where the slopes are the given ones.
        gates: "forget" adds the Forgetting Transformer's bias `sum_{l = j + 1 .. i} log f_l`, with
            `f_l = 1 / (1 + exp(-w_h.x_l - b_h))` of each token and head (Lin et al. 2025, arXiv:2503.02130).
            "gain" adds `log K_j + sum_{l = j + 1 .. i} log(1 - K_l)`, the Riccati prior without decay whose measurement
            noise depends on the content: Kalman gains `K_l = 1 - f_l`, which start at the slopes, `1 - exp(-slope)`.
        rotate_values: transport values by rotation too (RoPER).
        innovation: return the correction toward the estimate, not the estimate.
        rotary_map: "complex", or "as_released" for the map of the paper's code.
        backend: of the operator, where PyTorch's own kernel does not serve. "reference" also has second derivatives
            where it serves, and is slower in training there.
        **options: of every layer, as `causal`; see `Attention`.

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
        learn_slopes: bool = False,
        gates: Gates | None = None,
        rotate_values: bool = False,
        innovation: bool = False,
        rotary_map: RotaryMap = "complex",
        backend: str = "auto",
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, innovation, backend=backend, **options)
        check_choice("rotary_map", rotary_map, RotaryMap)
        turns = frequency is not None and rotary_map == "complex"
        require(turns or not rotate_values, "rotate_values", rotate_values, "frequencies that turn values")
        self.rotate_values, self.rotary_map = rotate_values, rotary_map
        fixed = self.clock is None or rotary_map == "complex"
        require(fixed, "clock", "content", "'times' with rotary_map='as_released'")
        require(slopes is not None or not learn_slopes, "learn_slopes", learn_slopes, "slopes to start from")
        require(gates in (None, *get_args(Gates)), "gates", gates, f"None or one of {get_args(Gates)}")
        require(gates != "gain" or slopes is not None, "slopes", slopes, "gains to start from with gates='gain'")
        require(gates is None or not learn_slopes, "learn_slopes", learn_slopes, "False with gates")
        require(self.causal or gates is None, "gates", gates, "None with causal=False: they forget the past")
        require(gates != "forget" or slopes is None, "slopes", slopes, "None with gates='forget'")
        self.learn_slopes = learn_slopes
        # slopes and gates make scores fall with time; normalised states bound them, where nothing changes their lengths
        bounded = (slopes is not None or gates is not None) and self.state_scale is not None and self.causal
        self.settle_certified(None if bounded and rotary_map == "complex" else UNBOUNDED_PRODUCTS)
        fixed_slopes = None if learn_slopes or gates else slopes
        self.geometry = Geometry(num_heads, self.modes, frequency, decay, fixed_slopes)
        if learn_slopes:
            none = torch.zeros(num_heads, self.modes, dtype=torch.float32), torch.zeros(num_heads, dtype=torch.float32)
            self.dynamics = HeadDynamics(*none, prior="riccati", slopes=slopes, uses_query_noise=False, robust=False)
        self.gates, self.gate_projection = gates, None
        if gates is not None:
            start = torch.zeros(num_heads, device="cpu")
            if slopes is not None:
                check_rates("slopes", slopes, num_heads)
                rises = not readable(slopes) or bool((slopes > 0).all())
                require(rises, "slopes", slopes, "positive numbers with gates")
                start = -torch.log(torch.expm1(slopes))  # 1 / (1 + exp(-b)) = exp(-slope)
            self.gate_projection = TokenLogits(hidden_size, start, GATE_DEVIATION)

    def marks(self, hidden_states: Float[Tensor, "batch length hidden"]) -> dict[str, Marks]:
        """The rates of a clock, and `log f` of each token and head, at least in float32."""
        marks = super().marks(hidden_states)
        if self.gate_projection is None:
            return marks
        return marks | {"log_gate": F.logsigmoid(self.gate_projection(hidden_states)).transpose(1, 2)}

    def value_rotations(self, positions: Positions, **marks: Marks) -> tuple[Rotation, Rotation] | None:
        """The rotations by the frequencies, where values turn."""
        if not self.rotate_values or self.geometry.frequency is None:
            return None
        frequency, (of_keys, of_queries) = self.geometry.frequency, positions.times_of_heads()
        return rotation_of_heads(frequency, of_keys), rotation_of_heads(frequency, of_queries)

    def slopes(self) -> Float[Tensor, " heads"] | None:
        """The slopes of the linear bias, fixed or from the learned noises."""
        if not self.learn_slopes:
            return self.geometry.slopes
        held = self.dynamics()
        noise = held["key_noise"] + held["noise_floor"]
        return -riccati_log_gain(held["decay"], held["process_noise"], noise, torch.ones_like(noise))[1]

    def estimate(
        self,
        query: QueryStates,
        key: HeadStates,
        value: HeadStates,
        *,
        positions: Positions,
        log_gate: LogGates | None = None,
    ) -> QueryStates:
        """Scaled dot-product attention of whole sequences."""
        if self.rotary_map == "as_released" or self._plain(positions):
            of_keys, of_queries = positions.times_of_heads()
            query = self._turn(query, of_queries)  # an absent key has no time, but its query has
            key = self._turn(key, of_keys)
            return self._attend(query, key, value, positions, log_gate)
        frequency = self.geometry.frequency
        if frequency is not None and not self.rotate_values:
            frequency = -frequency  # RoPE turns forwards
        turns = {"frequency": frequency, "rotate_values": self.rotate_values, **self._biases(log_gate, self.certified)}
        return decayed_dot_product_attention(query, key, value, positions=positions, **turns)

    def estimate_with_cache(
        self,
        query: HeadStates,
        key: HeadStates,
        value: HeadStates,
        cached: FilterLayer,
        *,
        positions: Positions,
        log_gate: LogGates | None = None,
    ) -> HeadStates:
        """The same over the keys and values of a cache, which are turned already; only new states are turned."""
        _, times = positions.times_of_heads()
        query, key = self._turn(query, times), self._turn(key, times)
        if self.rotate_values:
            value = self._turn(value, times)
        eps = cached.eps(self.certified, query.dtype)
        estimate = self._attend(query, *cached.update(key, value), positions, log_gate, certified=eps)
        if self.rotate_values and self.geometry.frequency is not None:
            estimate = turn(estimate, *rotation_of_heads(self.geometry.frequency, times))
        return estimate

    def _plain(self, positions: Positions) -> bool:
        """Whether PyTorch's own kernel serves: no bias, no decay, no turned values, only later keys unseen."""
        keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
        masked = positions.key_groups is not None or queries not in (1, keys)
        biased = self.geometry.slopes is not None or self.learn_slopes or self.gate_projection is not None
        return not (masked or biased or self.rotate_values or self.geometry.decay is not None)

    def _biases(self, log_gate: Tensor | None, certified: Certified) -> dict[str, Any]:
        """The operator's arguments beside states and positions."""
        geometry = {"decay": self.geometry.decay, "slopes": self.slopes()}
        gates = {"log_gate": log_gate, "gains": self.gates == "gain"}
        options = {"causal": self.causal, "dropout": self._dropout(), "backend": self.backend}
        bound = {"certified": certified, "largest": None if certified is None else self._largest_product()}
        return {**geometry, **gates, **options, **bound}

    def _largest_product(self) -> Float[Tensor, " heads"] | None:
        """`s_h^2 sqrt(2 d)` of normalised states, and 1 % for their rounding; None without them."""
        if self.state_scale is None:
            return None
        scale = self.state_scale.positive(torch.float32)["scale"].detach()
        return 1.01 * math.sqrt(2 * self.modes) * scale.square()

    def _dropout(self) -> float:
        """The share of weights to drop now."""
        return self.dropout if self.training else 0.0

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Positions,
        log_gate: Tensor | None,
        certified: Certified = None,
    ) -> Tensor:
        """Attention over turned states."""
        if self._plain(positions):
            twice = self.backend == "reference"  # differentiable a second time
            # a single query sees all keys; a bool even while lengths are symbols
            causal = True if self.causal and query.shape[2] == key.shape[2] else False  # noqa: SIM210
            return scaled_dot_product_attention(query, key, value, twice, is_causal=causal, dropout_p=self._dropout())
        biases = self._biases(log_gate, certified)
        return decayed_dot_product_attention(query, key, value, positions=positions, **biases)

    def _turn(self, x: Tensor, times: Tensor) -> Tensor:
        """States at times `(b, 1 or heads, length)`: RoPE turns forwards, a common frame for the values backwards."""
        frequency = self.geometry.frequency
        if frequency is None:
            return x
        if self.rotary_map == "as_released":
            return rotate_as_released(x, frequency, times[:, 0])
        cos, sin = rotation_of_heads(frequency, times)
        return turn(x, cos, -sin if self.rotate_values else sin)
