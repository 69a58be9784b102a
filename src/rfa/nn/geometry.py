"""The numbers of a baseline's heads, as ALiBi's slopes and KERPLE's bias, and the map of the released RoPE code."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rfa.dynamics import rotation

from .checks import check_frequencies, check_rates
from .dynamics import FullPrecision, PositiveParameters


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    """ALiBi's slopes `2^(-8 h / H)`, h = 1 .. H (Press et al. 2022).

    Args:
        heads: number of heads H. Where it is not a power of two, the published rule: the slopes of the power of
            two below it, then every other slope of the power of two above it.

    Returns:
        Slopes in nats per unit of time.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / power * torch.arange(1, power + 1, dtype=torch.float32))
    between = 2.0 ** (-4 / power * torch.arange(1, 2 * power + 1, 2, dtype=torch.float32))
    return torch.cat([slopes, between[: heads - power]])


def rotate_as_released(x: Tensor, frequency: Tensor, times: Tensor) -> Tensor:
    """The map of the paper's released RoPE code.

    Interleaved pairs of channels share an angle, but the quarter turn exchanges halves. So it is no rotation, and
    scores depend on more than the lag. It is here to measure the effect of that.
    """
    cos, sin = (part.repeat_interleave(2, dim=-1).to(x.dtype) for part in rotation(frequency, times))
    first, second = x.chunk(2, dim=-1)
    return cos * x + sin * torch.cat([-second, first], dim=-1)


class Geometry(FullPrecision):
    """The numbers of a baseline's heads, each None where the baseline does not use it. Frequencies may be learned."""

    frequency: Tensor | None
    decay: Tensor | None
    slopes: Tensor | None

    def __init__(
        self,
        heads: int,
        modes: int,
        frequency: Tensor | None,
        decay: Tensor | None,
        slopes: Tensor | None,
        learn_frequency: bool,
    ):
        super().__init__()
        if frequency is not None:
            check_frequencies("frequency", frequency, heads, modes)
        for name, rate in (("decay", decay), ("slopes", slopes)):
            if rate is not None:
                check_rates(name, rate, heads)
            self.register_buffer(name, rate)
        if learn_frequency and frequency is not None:
            self.frequency = nn.Parameter(frequency.clone())
        else:
            self.register_buffer("frequency", frequency)


class LogarithmicBias(PositiveParameters):
    """KERPLE's bias `-r1 log(1 + r2 tau)`, by which weights fall as a power of the lag, `(1 + r2 tau)^-r1`.

    Both numbers of each head are learned and positive. They start at random as published, r1 between 0 and 2 and r2
    between 0 and 1, neither below 0.01. The paper keeps them positive by a bound, and this module by softplus.

    Without decay the Lyapunov prior of the robust filter has this form: `-beta log(sigma^2 tau + eta^2 + sigma_0^2)`
    has `r1 = beta` and `r2 = sigma^2 / (eta^2 + sigma_0^2)`, up to a constant.

    Args:
        num_heads: H.

    Source: Chi et al. 2022 (arXiv:2205.09921), the logarithmic kernel.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.hold("exponent", (2 * torch.rand(num_heads)).clamp(min=0.01))
        self.hold("rate", torch.rand(num_heads).clamp(min=0.01))

    def forward(self) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
        """r1, without unit, and r2, per unit of time."""
        held = self.positive(next(self.parameters()).dtype)
        return held["exponent"], held["rate"]
