"""The content clock: each token says how much time passes in each head until the next token."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .dynamics import FullPrecision, softplus_inverse
from .projections import full_precision_linear

Clock = Literal["times", "content"]
LEAST_RATE = 1e-6  # so that two tokens never stand at the same time


class ContentClock(FullPrecision):
    """`rate_l = softplus(w_h . x_l + b_h) + 1e-6`: the speed of each head's clock from token l to the next one.

    The time of token i in a head is `t_i = sum_{l < i} rate_l (T_{l+1} - T_l)`, with the given times T, which are 0, 1,
    2, ... for text. All dynamics of the head follow that clock: rotation, decay and uncertainty.

    w begins at zero and b where the rate is 1, so that at first the clock shows the given times. Parameters and rates
    are in full precision.

    Args:
        hidden_size: d_model.
        num_heads: H.
        gated: the number of heads with a clock of their own, the last ones; None for all. The others have rate 1.

    Source: appendix E.6, of which this is the case of one common factor for decay, rotation and noise.
    """

    def __init__(self, hidden_size: int, num_heads: int, gated: int | None = None):
        super().__init__()
        gated = num_heads if gated is None else gated
        self.ungated = num_heads - gated
        self.weight = nn.Parameter(torch.zeros(gated, hidden_size))
        self.bias = nn.Parameter(softplus_inverse(torch.ones(gated) - LEAST_RATE))

    def forward(self, hidden_states: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch heads length"]:
        """The rates of tokens, at least in float32."""
        logit = full_precision_linear(hidden_states, self.weight, self.bias)
        rate = (F.softplus(logit) + LEAST_RATE).transpose(1, 2)
        return F.pad(rate, (0, 0, self.ungated, 0), value=1.0)
