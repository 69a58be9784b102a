"""Options of the states of any layer: queries and keys of one length."""

import torch
from jaxtyping import Float
from torch import Tensor

from .dynamics import PositiveParameters

LEAST_SQUARE = 1e-6  # added to the mean square, so that a state of zeros stays zero


class StateScale(PositiveParameters):
    """`s_h x / sqrt(mean(x^2) + 1e-6)`, the mean over the `2 d` channels of a state of head h.

    Queries and keys share the scale `s_h > 0`, which starts at 1. For dot products `1 / s_h^2` is a temperature: a
    score is `s_h^2` times `sqrt(2 d)` times a cosine. For the robust filter `s_h` is the scale of all distances, which
    the noises are compared with.

    Args:
        num_heads: H.

    Source: Henry et al. 2020 (arXiv:2010.04245), who divide by the Euclidean norm and learn one scale.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.hold("scale", torch.ones(num_heads))

    def forward(
        self, states: Float[Tensor, "batch heads length channels"]
    ) -> Float[Tensor, "batch heads length channels"]:
        """The states, rounded once to their own dtype."""
        dtype = torch.promote_types(states.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            square = states.to(dtype).square().mean(-1, keepdim=True)
            scale = self.positive(dtype)["scale"][:, None, None]
            return (states.to(dtype) * (scale * torch.rsqrt(square + LEAST_SQUARE))).to(states.dtype)
