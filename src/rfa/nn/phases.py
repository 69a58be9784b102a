"""The turns of decoding: phases of the next tokens, made for many at a time, and applied in few operations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import rotation_of_heads
from rfa.ops.positions import Positions
from rfa.ops.transforms import transformed

AHEAD = 64  # tokens whose phases are made at once: in float64 they cost more than one token's attention to few keys
FEW = 8  # new tokens, up to which the phases are looked up


class Turns(NamedTuple):
    """Phases of tokens as factors of their channels, real parts first.

    Fields:
        cos: cosines, twice side by side, `(b, heads, length, 2 d)`.
        sin: negative sines and then sines, `(b, heads, length, 2 d)`.
    """

    cos: Tensor
    sin: Tensor

    def forward(self, states: Float[Tensor, "*batch heads length channels"]) -> Tensor:
        """`exp(+i omega t) x` in the dtype of x; half precision is rounded once."""
        return self._applied(states, torch.add)

    def backward(self, states: Float[Tensor, "*batch heads length channels"]) -> Tensor:
        """`exp(-i omega t) x`, which brings states into the common frame."""
        return self._applied(states, torch.sub)

    def _applied(self, states: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = states.to(self.cos.dtype)
        return combine(x * self.cos, x.roll(x.shape[-1] // 2, -1) * self.sin).to(states.dtype)


class TurnTable:
    """Turns of the tokens at 0, 1, 2, ... of one layer, valid while its frequencies do not change."""

    def __init__(self) -> None:
        self._start = 0
        self._turns: Turns | None = None
        self._each: list[Turns] = []  # the same, token by token

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy or a pickle: an empty table. Each token's views would be stored with all phases."""
        return vars(TurnTable())

    def at(self, frequency: Float[Tensor, "heads modes"], positions: Positions, dtype: torch.dtype) -> Turns:
        """The turns of the queries, in a dtype; looked up for a few tokens at 0, 1, 2, ..."""
        length = positions.query_times.shape[-1]
        start = positions.key_times.shape[-1] - length
        known = positions.uniform and positions.clock is None and length <= FEW
        if not known or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
            return turns(frequency, positions.times_of_heads()[1], dtype)
        held, first = self._turns, start - self._start
        fits = held is not None and held.cos.dtype == dtype and first >= 0 and first + length <= AHEAD
        if held is None or not fits:
            times = positions.query_times
            ahead = torch.arange(start, start + AHEAD, device=times.device, dtype=times.dtype)
            held, first = turns(frequency, ahead[None, None], dtype), 0
            self._start, self._turns = start, held
            self._each = list(map(Turns, held.cos.split(1, dim=2), held.sin.split(1, dim=2)))
        if length == 1:
            return self._each[first]
        return Turns(held.cos.narrow(2, first, length), held.sin.narrow(2, first, length))


def turns(frequency: Float[Tensor, "heads modes"], times: Float[Tensor, "b h length"], dtype: torch.dtype) -> Turns:
    """The turns of tokens at any times; phases are formed in float64."""
    cos, sin = (part.to(dtype) for part in rotation_of_heads(frequency, times))
    return Turns(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
