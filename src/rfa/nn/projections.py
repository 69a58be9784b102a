"""The maps between the real model space and the complex state space of the heads (appendix D.1, D.2)."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rfa.ops.positions import Positions
from rfa.ops.transforms import readable, without_autocast

HeadStates = Float[Tensor, "batch heads length channels"]  # a state of d modes is `2 d` real channels


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
