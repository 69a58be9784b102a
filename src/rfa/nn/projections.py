"""The maps between the real model space and the complex states of the heads (appendix D.1, D.2), and their options:
a clock that the tokens set, and queries and keys of one length."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.ops.positions import Positions
from rfa.ops.transforms import readable, without_autocast

from .dynamics import FullPrecision, PositiveParameters, softplus_inverse

HeadStates = Float[Tensor, "batch heads length channels"]  # a state of d modes is `2 d` real channels
LEAST_RATE = 1e-6  # of a clock, so that two tokens never stand at the same time
LEAST_SQUARE = 1e-6  # added to the mean square, so that a state of zeros stays zero

Clock = Literal["times", "content"]


class NormalLinear(nn.Linear):
    """A linear layer whose weights start as normal numbers of a given deviation, its bias at 0 or at given numbers.

    Args:
        in_features: input size.
        out_features: output size.
        deviation: of the initial weights; `in_features ** -0.5`, which keeps the input's variance.
        start: the initial bias, `(out_features,)`; None for 0.
    """

    def __init__(
        self, in_features: int, out_features: int, deviation: float | None = None, start: Tensor | None = None
    ):
        self.deviation = in_features**-0.5 if deviation is None else deviation
        self.start = None if start is None else initial_values(start)
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.normal_(self.weight, std=self.deviation)
        nn.init.zeros_(self.bias)
        if self.start is not None:
            with torch.no_grad():
                self.bias.copy_(torch.tensor(self.start, dtype=torch.float32))


def initial_values(start: Float[Tensor, " outputs"]) -> tuple[float, ...]:
    """The numbers of a tensor; zeros where it has none, because then nothing has."""
    return tuple(start.tolist()) if readable(start) else (0.0,) * len(start)


def normal_projection(in_features: int, out_features: int, deviation: float | None = None) -> nn.Linear:
    """A `NormalLinear` whose type is `nn.Linear` itself: `torch.ao` quantises layers of exactly this type only."""
    made: nn.Linear = NormalLinear(in_features, out_features, deviation)
    made.__class__ = nn.Linear
    return made


def full_precision_linear(
    states: Float[Tensor, "batch length size"], weight: Float[Tensor, "outputs size"], bias: Float[Tensor, " outputs"]
) -> Float[Tensor, "batch length outputs"]:
    """`W x + b` at least in float32, under autocast too: what sums over tokens are formed of."""
    dtype = torch.promote_types(torch.promote_types(states.dtype, weight.dtype), torch.float32)
    with without_autocast(states):
        return F.linear(states.to(dtype), weight.to(dtype), bias.to(dtype))


def complex_deviation(fan_in: int, fan_out: int) -> float:
    """The deviation of normal real and imaginary parts: Rayleigh magnitude, uniform phase (appendix D.2)."""
    return math.sqrt(1 / (fan_in + fan_out))


def finite_where_absent(states: Tensor, positions: Positions) -> Tensor:
    """States `(batch, length, hidden)` with zeros where an absent token, still a query, holds NaN or infinity."""
    present = positions.present()
    if present is None:
        return states
    present = present[:, present.shape[-1] - states.shape[1] :, None]
    return states.masked_fill(~present & ~states.isfinite(), 0.0)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(batch, length, heads * channels)` to `(batch, heads, length, channels)`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def repeated_for_heads(states: Float[Tensor, "batch groups length channels"], share: int) -> HeadStates:
    """States of groups of heads, once for each of the `share` heads of a group; not copied where it has one."""
    return states if share == 1 else states.repeat_interleave(share, dim=1)


def merge_heads(x: Tensor) -> Tensor:
    """`(batch, heads, length, channels)` to `(batch, length, heads * channels)`."""
    return x.transpose(1, 2).flatten(-2)


class TokenLogits(FullPrecision):
    """`w_h . x_l + b_h` of each token, in full precision.

    It is no `nn.Linear`: adapters and quantisers act on these, and sums over thousands of tokens follow from it.

    Args:
        hidden_size: d_model.
        start: the initial b, `(outputs,)`, on the CPU: a model on "meta" gets its numbers later.
        deviation: of the initial w. At 0 no token differs from another at first.
    """

    def __init__(self, hidden_size: int, start: Float[Tensor, " outputs"], deviation: float = 0.0):
        super().__init__()
        self.start, self.deviation = initial_values(start), deviation
        self.weight = nn.Parameter(torch.empty(len(start), hidden_size))
        self.bias = nn.Parameter(torch.empty(len(start)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        if self.deviation:
            nn.init.normal_(self.weight, std=self.deviation)
        else:
            nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.tensor(self.start, dtype=torch.float32))

    def forward(self, hidden_states: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length outputs"]:
        """The logits of tokens, at least in float32."""
        return full_precision_linear(hidden_states, self.weight, self.bias)


class ContentClock(TokenLogits):
    """`rate_l = softplus(w_h . x_l + b_h) + 1e-6`: the speed of each head's clock from token l to the next one.

    The time of token i in a head is `t_i = sum_{l < i} rate_l (T_{l+1} - T_l)`, with the given times T, which are 0, 1,
    2, ... for text. All dynamics of the head follow that clock: rotation, decay and uncertainty.

    w begins at zero and b where the rate is 1, so that at first the clock shows the given times.

    Args:
        hidden_size: d_model.
        num_heads: H.

    Source: appendix E.6, of which this is the case of one common factor for decay, rotation and noise.
    """

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__(hidden_size, softplus_inverse(torch.ones(num_heads, device="cpu") - LEAST_RATE))

    def forward(self, hidden_states: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch heads length"]:
        """The rates of tokens, at least in float32."""
        return (F.softplus(super().forward(hidden_states)) + LEAST_RATE).transpose(1, 2)


class StateScale(PositiveParameters):
    """`s_h x / sqrt(mean(x^2) + 1e-6)`, the mean over the `2 d` channels of a state of head h.

    Queries and keys share the scale `s_h > 0`, which starts at 1. For dot products `1 / s_h^2` is a temperature: a
    score is `s_h^2` times `sqrt(2 d)` times a cosine. For the robust filter `s_h` is the scale of all distances, which
    the noises are compared with.

    Source: Henry et al. 2020 (arXiv:2010.04245), who divide by the Euclidean norm and learn one scale.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.hold("scale", torch.ones(num_heads))

    def forward(self, states: HeadStates) -> HeadStates:
        """The states, rounded once to their own dtype."""
        dtype = torch.promote_types(states.dtype, torch.float32)
        with without_autocast(states):
            square = states.to(dtype).square().mean(-1, keepdim=True)
            scale = self.positive(dtype)["scale"][:, None, None]
            return (states.to(dtype) * (scale * torch.rsqrt(square + LEAST_SQUARE))).to(states.dtype)
