"""RoPE beyond the training length by YaRN (Peng, Quesnelle, Fan and Shippole 2023, arXiv:2309.00071)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import exported
from rfa.dynamics import time_dtype, turn
from rfa.ops.positions import Positions
from rfa.ops.transforms import readable

FAST, SLOW = 32, 1  # turns within the training length, above which a mode stays and below which it is interpolated
TEMPERATURE = 0.1


class Yarn(NamedTuple):
    """NTK-by-parts interpolation and attention temperature, for sequences longer than in training.

    With the scale `s = length / train_length`, a mode turns at `omega (1 - g + g / s)`, where g grows linearly over the
    modes from 0 at 32 turns within the training length to 1 at a single turn, and queries and keys are multiplied by
    `0.1 ln s + 1`. As in the authors' code, the ends of g are rounded outwards to whole modes.

    train_length: in units of time.
    base: of RoPE's bank.
    """

    train_length: int
    base: float = 10000.0

    def interpolated(self, modes: int, device: torch.device | None = None) -> Float[Tensor, " modes"]:
        """The interpolated part g of each mode, from 0 to 1."""
        low, high = (
            modes * math.log(self.train_length / (2 * math.pi * turns)) / math.log(self.base) for turns in (FAST, SLOW)
        )
        first = max(math.floor(low), 0)
        span = max(min(math.ceil(high), 2 * modes - 1) - first, 0.001)
        index = torch.arange(modes, dtype=time_dtype(device or torch.device("cpu")), device=device)
        return ((index - first) / span).clamp(0, 1)

    def scale(self, positions: Positions) -> Float[Tensor, "b queries"] | None:
        """`s >= 1` of the sequence that each query belongs to; None where no sequence is too long.

        A sequence is a row, or one segment of a row, from its first key that takes part up to the last one.
        """
        if positions.uniform and not exported() and positions.key_times.shape[-1] <= self.train_length:
            return None
        return next(iter(positions.once(f"{self} scale", lambda: self._scale(positions))), None)

    def _scale(self, positions: Positions) -> tuple[Tensor, ...]:
        """`scale`, as a tuple; it is empty where no sequence is too long."""
        times, groups = positions.key_times, positions.key_groups
        if groups is None:
            groups = torch.zeros(times.shape, dtype=torch.int32, device=times.device)
        times, groups = torch.broadcast_tensors(times.detach(), groups)
        index = groups.clamp(min=0).long()
        ends = []
        for sign in (1, -1):
            present = (sign * times).masked_fill(groups < 0, -torch.inf)
            ends.append(present.new_full(present.shape, -torch.inf).scatter_reduce(-1, index, present, "amax"))
        of_queries = positions.query_groups
        if of_queries is None:
            of_queries = torch.zeros(positions.query_times.shape, dtype=torch.int32, device=times.device)
        of_groups = (ends[0] + ends[1] + 1).clamp(min=1.0)  # -inf where no key takes part
        length = of_groups.gather(-1, of_queries.expand(times.shape[0], -1).long())
        if not positions.uniform and readable(of_groups) and bool((of_groups <= self.train_length).all()):
            return ()
        return ((length / self.train_length).clamp(min=1.0),)

    def rotate(
        self,
        x: Float[Tensor, "batch heads length state"],
        frequency: Float[Tensor, "heads modes"],
        times: Float[Tensor, "#batch length"],
        scale: Float[Tensor, "#batch length"],
    ) -> Float[Tensor, "batch heads length state"]:
        """States of `2 d` real channels turned forwards and multiplied, each token by its own scale."""
        part = self.interpolated(frequency.shape[-1], x.device)
        slower = 1 - part + part / scale[:, None, :, None].to(part)
        phase = times.to(part)[:, None, :, None] * frequency.to(part)[:, None, :] * slower
        factor = TEMPERATURE * scale[:, None, :, None].to(part).log() + 1
        return turn(x, factor * phase.cos(), factor * phase.sin())
