"""RoPE beyond the training length by YaRN (Peng, Quesnelle, Fan and Shippole 2023, arXiv:2309.00071)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import time_dtype, turn
from rfa.ops.inputs import Positions, numbered
from rfa.ops.transforms import readable

FAST, SLOW = 32, 1  # turns within the training length, above which a mode stays and below which it is interpolated
TEMPERATURE = 0.1


class Yarn(NamedTuple):
    """NTK-by-parts interpolation and attention temperature, of sequences longer than in training and of those only.

    With the scale `s = length / train_length`, a mode turns at `omega (1 - g + g / s)`, where g grows linearly over the
    modes from 0 at 32 turns within the training length to 1 at a single turn, and queries and keys are multiplied by
    `0.1 ln s + 1`. As in the authors' code, the ends of g are rounded outwards to whole modes.

    train_length: in units of time.
    base: of RoPE's bank.
    """

    train_length: int
    base: float = 10000.0

    def interpolated(self, modes: int, device: torch.device | None = None) -> Tensor:
        """The share g of interpolation of each mode, `(modes,)`."""
        low, high = (
            modes * math.log(self.train_length / (2 * math.pi * turns)) / math.log(self.base) for turns in (FAST, SLOW)
        )
        first = max(math.floor(low), 0)
        span = max(min(math.ceil(high), 2 * modes - 1) - first, 0.001)
        index = torch.arange(modes, dtype=time_dtype(device or torch.device("cpu")), device=device)
        return ((index - first) / span).clamp(0, 1)

    def scale(self, positions: Positions) -> Tensor | None:
        """`s >= 1` of the sequence that each key belongs to, `(b, keys)`; None where none is too long.

        A sequence is a row, or one segment of a row, from its first key that takes part up to the last one.
        """
        times, mask, segments = positions.key_times, positions.key_mask, positions.key_segments
        keys = times.shape[-1]
        if positions.uniform and keys <= self.train_length:
            return None
        present = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
        group = torch.zeros_like(times, dtype=torch.long)
        if segments is not None:
            group = numbered(segments)
        times, present, group = torch.broadcast_tensors(times.detach(), present, group)
        ends = []
        for sign in (1, -1):
            known = (sign * times).masked_fill(~present, -torch.inf)
            ends.append(
                known.new_full(known.shape, -torch.inf).scatter_reduce(-1, group, known, "amax").gather(-1, group)
            )
        length = (ends[0] + ends[1] + 1).clamp(min=1.0)  # -inf where no key takes part
        if not positions.uniform and readable(length) and bool((length <= self.train_length).all()):
            return None
        return (length / self.train_length).clamp(min=1.0)

    def rotate(self, x: Tensor, frequency: Tensor, times: Tensor, scale: Tensor) -> Tensor:
        """States `(batch, heads, length, 2 d)` turned forwards and multiplied, each token by its own scale."""
        share = self.interpolated(frequency.shape[-1], x.device)
        slower = 1 - share + share / scale[:, None, :, None].to(share)
        phase = times.to(share)[:, None, :, None] * frequency.to(share)[:, None, :] * slower
        factor = TEMPERATURE * scale[:, None, :, None].to(share).log() + 1
        return turn(x, factor * phase.cos(), factor * phase.sin())
