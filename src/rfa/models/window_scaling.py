"""Robust scaling of windows: the median and the median deviation of each channel."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

MEDIAN_DEVIATION = 1.482602218505602  # standard deviations of a normal distribution per median deviation
FEWEST = 4  # readings of a channel: fewer say too little of its spread
FEWEST_LOCATED = 3  # of fewer, one wrong reading moves the median anywhere


class Scale(NamedTuple):
    """Location and spread of each token's window, `(batch, tokens, channels)`, in the units of the values."""

    location: Tensor
    spread: Tensor


def median(values: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch channels"]:
    """The median along the length without NaN, of two middle numbers their mean; NaN where all are NaN."""
    missing = values.isnan()
    ordered = values.masked_fill(missing, math.inf).sort(dim=1).values  # infinity, unlike NaN, has a gradient of zero
    count = (~missing).sum(1, keepdim=True)
    middle = torch.cat([(count - 1).clamp(min=0) // 2, (count // 2).minimum((count - 1).clamp(min=0))], dim=1)
    low, high = ordered.gather(1, middle).unbind(1)
    return torch.where(missing.all(1), math.nan, torch.lerp(low, high, 0.5))


def robust_location_and_spread(
    values: Float[Tensor, "batch length channels"],
) -> tuple[Float[Tensor, "batch channels"], Float[Tensor, "batch channels"]]:
    """The median, and 1.4826 times the median absolute deviation from it.

    A share below one half of the readings, however wrong, cannot move either beyond the range of the others.

    Args:
        values: NaN where nothing was read.

    Returns:
        Location and spread; NaN for a channel without readings.

    Source: Hampel, 1974, "The influence curve and its role in robust estimation".
    """
    location, missing = median(values), values.isnan()
    deviation = (values.masked_fill(missing, 0.0) - location[:, None]).abs()
    return location, MEDIAN_DEVIATION * median(deviation.masked_fill(missing, math.nan))


@dataclasses.dataclass(frozen=True)
class WindowScaling:
    """Location and spread of each window, channel by channel.

    A channel with fewer than three readings in a window takes location and spread of the training data. A channel with
    three readings, or with more than half of them equal, takes the spread. Gradients go through medians.

    Args:
        location, spread: of the training data, one number a channel.
        kind: "window", or "training" to scale every window by the training data.
    """

    location: Sequence[float]
    spread: Sequence[float]
    kind: Literal["window", "training"]

    def __call__(
        self,
        values: Float[Tensor, "batch length channels"],
        segments: Int[Tensor, "batch length"] | None = None,
        token_segments: Int[Tensor, "batch tokens"] | None = None,
        tokens: int = 0,
    ) -> Scale:
        """The scale of each token.

        Args:
            values: the readings, NaN where nothing was read.
            segments: of the readings, numbers 0, 1, 2, ...; None for one window a row.
            token_segments: of the tokens that are to be scaled.
            tokens: the number of tokens, where there are no segments.
        """
        location, spread = values.new_tensor(self.location), values.new_tensor(self.spread)
        batch = values.shape[0]
        if self.kind == "training":
            length = tokens if token_segments is None else token_segments.shape[1]
            return Scale(location.expand(batch, length, -1), spread.expand(batch, length, -1))
        if segments is None or token_segments is None:
            scale = self._of_windows(values, location, spread)
            return Scale(*(part[:, None].expand(-1, tokens, -1) for part in scale))
        rows = [self._of_row(*row, location, spread) for row in zip(values, segments, token_segments, strict=True)]
        return Scale(*(torch.stack(each) for each in zip(*rows, strict=True)))

    def _of_row(
        self, values: Tensor, segments: Tensor, token_segments: Tensor, location: Tensor, spread: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Location and spread `(tokens, channels)` of several windows in one row."""
        known = torch.cat([segments, token_segments])
        windows = int(known.max()) + 1 if known.numel() else 1
        counts = torch.bincount(segments, minlength=windows).tolist()
        parts = values[segments.argsort(stable=True)].split(counts)
        padded = nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=math.nan)
        of_windows = self._of_windows(padded, location, spread)
        index = token_segments.to(torch.int64)
        return of_windows[0][index], of_windows[1][index]

    def _of_windows(self, values: Tensor, location: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Location and spread `(batch, channels)` of one window a row."""
        if not values.shape[1]:
            return location.expand(values.shape[0], -1), spread.expand(values.shape[0], -1)
        own_location, own_spread = robust_location_and_spread(values)
        count = (~values.isnan()).sum(1)
        enough = (count >= FEWEST) & (own_spread > 0)
        return torch.where(count >= FEWEST_LOCATED, own_location, location), torch.where(enough, own_spread, spread)
