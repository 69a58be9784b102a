"""The maps between the real model space and the complex state space of the heads (appendix D.1, D.2)."""

import math

from torch import Tensor, nn


def complex_projection_(projection: nn.Linear, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
    """Initialise a real linear layer that holds the parts of a complex one; the bias becomes 0.

    Complex weights have Rayleigh magnitude of scale `gain sqrt(1 / (fan_in + fan_out))` and uniform phase
    (appendix D.2): their real and imaginary parts are then independent normal numbers of that deviation.

    Args:
        projection: the layer; rows (or columns) of its weight are the parts of complex weights.
        fan_in: complex or real input size.
        fan_out: complex or real output size.
        gain: multiplies every weight; `1 / sqrt(2)` for output projections.
    """
    nn.init.normal_(projection.weight, std=gain * math.sqrt(1 / (fan_in + fan_out)))
    nn.init.zeros_(projection.bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(batch, length, heads * channels)` to `(batch, heads, length, channels)`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`(batch, heads, length, channels)` to `(batch, length, heads * channels)`."""
    return x.transpose(1, 2).flatten(-2)
