"""Options of the states of any layer: queries and keys of one length, taps, and a gain on the output."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.ops.cumulative import predecessors
from rfa.ops.positions import Positions
from rfa.ops.transforms import without_autocast

from .dynamics import FullPrecision, PositiveParameters, softplus_inverse
from .projections import HeadStates, full_precision_linear, numbers_of

LEAST_RATE = 1e-6  # of a clock, so that two tokens never stand at the same time
LEAST_SQUARE = 1e-6  # added to the mean square, so that a state of zeros stays zero

Clock = Literal["times", "content"]


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
        self.start, self.deviation = numbers_of(start), deviation
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
        gated: the number of heads with a clock of their own, the last ones; None for all. The others have rate 1.

    Source: appendix E.6, of which this is the case of one common factor for decay, rotation and noise.
    """

    def __init__(self, hidden_size: int, num_heads: int, gated: int | None = None):
        gated = num_heads if gated is None else gated
        super().__init__(hidden_size, softplus_inverse(torch.ones(gated, device="cpu") - LEAST_RATE))
        self.ungated = num_heads - gated

    def forward(self, hidden_states: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch heads length"]:
        """The rates of tokens, at least in float32."""
        rate = (F.softplus(super().forward(hidden_states)) + LEAST_RATE).transpose(1, 2)
        return F.pad(rate, (0, 0, self.ungated, 0), value=1.0)


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


class TokenGates(TokenLogits):
    """A gate `1 / (1 + exp(-w_h . x_l - b_h))` of each token and head; w starts at zero."""

    first_logit: float  # b at the start

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__(hidden_size, torch.full((num_heads,), self.first_logit, device="cpu"))

    def forward(self, hidden_states: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch heads length"]:
        """The gates of tokens, at least in float32."""
        return torch.sigmoid(super().forward(hidden_states)).transpose(1, 2)


class Taps(TokenGates):
    """The share `a_l` of the token before that is taken from each key and value: `k_l - a_l T k_{l-1}`, as `v_l`.

    This is the whitening of coloured measurement noise: if the error of a token holds `a` times that of the token
    before it, the difference has a fresh error. The token before is the last one of the same segment that takes part.
    Where there is none, nothing is taken. T is the rotation of the robust filter's states over the time in between,
    without decay (of its values only where they turn). For dot products T is 1: states as they are before their turn.

    Source: Bryson and Henrikson 1968, of a constant share; the gates of the content are ours.
    """

    first_logit = -4.0  # a share of 0.018


class OutputGain(TokenGates):
    """The gain `g_l` by which each head's output at token l is multiplied before the output projection.

    With the innovation step the output is the step from the token's value to the estimate, so `g` is the gain of a
    Kalman filter, set by the content: 1 takes the estimate, 0 stays with the value. Without it, `g` shrinks the
    estimate to zero, the head's prior mean.

    Source: as a gate without the filter, the headwise gate of Qiu et al. 2025 (arXiv:2505.06708).
    """

    first_logit = 4.0  # a gain of 0.982


def tapped(states: HeadStates, before: HeadStates, share: Float[Tensor, "batch heads length"]) -> HeadStates:
    """States less a share of those before them, rounded once."""
    return (states.to(share.dtype) - share[..., None] * before.to(share.dtype)).to(states.dtype)


def states_before(
    states: Float[Tensor, "batch heads keys channels"], positions: Positions
) -> tuple[Float[Tensor, "batch heads queries channels"], Float[Tensor, "b h queries"]]:
    """The state of the token before each query, zero where there is none, and the time since then in each head.

    Args:
        states: of all keys' tokens. The queries are the last of them.
        positions: of the tokens.
    """
    of_keys, of_queries = positions.times_of_heads()
    queries = of_queries.shape[-1]
    if positions.key_groups is None:
        last = slice(-1 - queries, -1)
        return F.pad(states, (0, 0, 1, 0))[:, :, last], of_queries - F.pad(of_keys, (1, 0))[..., last]
    index = predecessors(positions)[:, None]
    first, index = index < 0, index.clamp(min=0)
    before = torch.take_along_dim(states, index[..., None], dim=2).masked_fill(first[..., None], 0.0)
    return before, of_queries - torch.take_along_dim(of_keys, index, dim=-1)
