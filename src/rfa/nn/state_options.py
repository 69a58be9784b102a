"""Options of the states of any layer: a clock that the tokens set, and queries and keys of one length."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.ops.transforms import without_autocast

from .dynamics import FullPrecision, PositiveParameters, softplus_inverse
from .projections import HeadStates, full_precision_linear, initial_values

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
