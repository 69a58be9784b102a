"""Readings and queries of a window as one sequence of tokens, in order of time.

Every reading is a token, and every query is one too. A query is marked absent as a key: it sees the readings and no
token sees it. So the decoder of the language model serves without another kind of attention.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rfa.checks import require
from rfa.dynamics import time_dtype
from rfa.ops.positions import (
    Positions,
    by_group,
    check_flags,
    check_given,
    check_tensor,
    checked_positions,
    first_time,
    numbered,
    times_dtype,
)
from rfa.ops.transforms import readable

# Robust scaling of windows: the median and the median deviation of each channel

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
    """The median, and 1.4826 times the median absolute deviation from it (Hampel 1974); NaN without readings."""
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
        """The scale of each token, of its segment's readings, or of the row's for a number of `tokens`."""
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


LINEAR_UP_TO = 4.0  # spreads: a reading farther out enters by its logarithm
LEAST_GAP = 0.05  # typical gaps: added before the logarithm, because a query may stand at a reading's time


class ReadingRows(NamedTuple):
    """A batch of windows whose parts fit together, as `checked_readings` returns them."""

    times: Tensor  # (batch, length)
    values: Tensor  # (batch, length, channels), NaN where nothing was read
    query_times: Tensor | None  # (batch, queries); None where every row of `values` is a query
    segments: Tensor | None  # (batch, length + queries), numbers 0, 1, 2, ...; None for one window a row

    def present(self) -> Bool[Tensor, "batch length"]:
        """Whether a row holds a reading of any channel."""
        return ~self.values.isnan().all(-1)


class SeriesTokens(NamedTuple):
    """The sequence that the decoder receives.

    Features are scaled values (0 where nothing was read), flags of what was read, the logarithm of the gap to the
    reading before, and whether the token is a query.
    """

    features: Tensor  # (batch, tokens, 2 channels + 2)
    positions: Positions  # in typical gaps
    of_readings: Tensor  # (batch, length), the tokens of the readings
    of_outputs: Tensor  # (batch, outputs), the tokens of the outputs
    scale: Scale  # of the outputs


def checked_readings(
    times: Tensor,
    values: Tensor,
    channels: int,
    observed_mask: Tensor | None = None,
    query_times: Tensor | None = None,
    segment_ids: Tensor | None = None,
    query_segment_ids: Tensor | None = None,
) -> ReadingRows:
    """The arguments of `RFAForTimeSeries.forward`, checked."""
    check_tensor("values", values)
    fits = values.dim() == 3 and values.shape[-1] == channels and values.is_floating_point()
    expected = f"floating-point (batch, length, channels) with {channels} channels"
    require(fits, "values", f"{values.dtype} {tuple(values.shape)}", expected)
    check_tensor("times", times)
    if observed_mask is not None:
        check_given("observed_mask", observed_mask, "torch.bool", values.device, tuple(values.shape))
        values = values.masked_fill(~observed_mask, torch.nan)
    batch, length, _ = values.shape
    present = ~values.isnan().all(-1)
    if readable(values):
        finite = not bool(values.isinf().any())
        require(finite, "values", "infinite values", "finite ones, or NaN where nothing is read")
        empty = (~present.any(-1)).nonzero().flatten().tolist()
        require(not empty, "values", f"no reading in batch rows {empty}", "at least one reading in each row")
    checked_positions(batch, length, length, values.device, times, None, present, segment_ids)
    times = torch.atleast_2d(times).expand(batch, length)
    if query_times is not None:
        check_tensor("query_times", query_times)
        queries = query_times.shape[-1] if query_times.dim() else 0
        checked_positions(batch, queries, queries, values.device, None, query_times)
        query_times = torch.atleast_2d(query_times).expand(batch, queries)
    return ReadingRows(times, values, query_times, _segments(segment_ids, query_segment_ids, query_times, batch))


def _segments(
    segment_ids: Tensor | None, query_segment_ids: Tensor | None, query_times: Tensor | None, batch: int
) -> Tensor | None:
    """The segments of readings and queries, numbered together."""
    asked = segment_ids is not None and query_times is not None
    given = tuple(query_segment_ids.shape) if isinstance(query_segment_ids, Tensor) else query_segment_ids
    expected = "ids of the queries if and only if there are query_times and segment_ids"
    require(isinstance(query_segment_ids, Tensor) == asked, "query_segment_ids", given, expected)
    if segment_ids is None or query_segment_ids is None or query_times is None:
        return None if segment_ids is None else numbered(segment_ids)
    queries = query_times.shape[1]
    check_flags("query_segment_ids", query_segment_ids, batch, queries, segment_ids.device, integer=True)
    return numbered(torch.cat([segment_ids, query_segment_ids], dim=1))


def series_tokens(
    readings: ReadingRows,
    scaling: WindowScaling,
    typical_gap: float,
    dtype: torch.dtype,
    scale: Scale | None = None,
    ordered: bool = False,
) -> SeriesTokens:
    """The tokens of a batch of windows.

    `scale` replaces that of each row's window. `ordered`: rows without a reading come first, then the readings in order
    of time, then one query, and nothing is sorted.
    """
    times, values, query_times, segments = readings
    batch, length, channels = values.shape
    present = readings.present()
    common = times_dtype(times, query_times)
    every = times.to(common) if query_times is None else torch.cat([times.to(common), query_times.to(common)], dim=1)
    clock = (every - first_time(times.to(common), ~present)).to(time_dtype(times.device)) / typical_gap
    tokens = every.shape[1]
    if scale is None:
        own = None if segments is None else segments[:, :length]
        scale = scaling(values, own, segments, tokens)
    else:
        scale = Scale(*(part.expand(-1, tokens, -1) for part in scale))
    observed = _padded(~values.isnan(), tokens)
    wide = clock.dtype  # a finite reading stays finite, however far out it is
    scaled = (_padded(values.nan_to_num(), tokens).to(wide) - scale.location.to(wide)) / scale.spread.to(wide)
    scaled = torch.where(observed, logarithmic_beyond(scaled), 0.0)
    is_key = _padded(present, tokens)

    stand = torch.arange(tokens, device=values.device).expand(batch, -1)
    order = stand if ordered else _order(clock, is_key, segments)
    clock, is_key = clock.gather(1, order), is_key.gather(1, order)
    sorted_segments = None if segments is None else segments.gather(1, order)
    parts = [scaled, observed, _log_gap(clock, is_key, sorted_segments, ordered), ~is_key]
    index = order[..., None].expand(-1, -1, channels)
    parts[:2] = [part.gather(1, index) for part in parts[:2]]
    features = torch.cat([(part if part.dim() == 3 else part[..., None]).to(dtype) for part in parts], dim=-1)
    positions = checked_positions(batch, tokens, tokens, values.device, clock, None, is_key, sorted_segments)
    if ordered and positions.key_groups is not None and positions.orders is not None:
        last = stand.clamp(max=tokens - 2)
        positions.orders["keys"] = by_group(positions.key_groups, stand.roll(1, -1))  # the query is absent too
        positions.orders["last keys"] = last, torch.ones_like(last, dtype=torch.bool)
    place = stand if ordered else order.argsort(-1)
    first = 0 if query_times is None else length
    scale = Scale(*(part[:, first:] for part in scale))
    return SeriesTokens(features, positions, place[:, :length], place[:, first:], scale)


def logarithmic_beyond(x: Float[Tensor, "..."], linear: float = LINEAR_UP_TO) -> Float[Tensor, "..."]:
    """`x` up to `|x| = linear`, and `linear (1 + log(|x| / linear))` with its sign beyond; its slope is continuous."""
    size = x.abs()
    return torch.where(size <= linear, x, x.sign() * linear * (1 + torch.log(size.clamp(min=linear) / linear)))


def _padded(x: Tensor, tokens: int) -> Tensor:
    """Zeros for the queries after the readings."""
    return torch.cat([x, x.new_zeros(x.shape[0], tokens - x.shape[1], *x.shape[2:])], dim=1)


def _order(
    clock: Float[Tensor, "batch tokens"],
    is_key: Bool[Tensor, "batch tokens"],
    segments: Int[Tensor, "batch tokens"] | None,
) -> Tensor:
    """Segment by segment in order of time; a query after the reading of the same time."""
    order = (~is_key).to(torch.int8).argsort(dim=-1, stable=True)
    order = order.gather(1, clock.detach().gather(1, order).argsort(dim=-1, stable=True))
    if segments is None:
        return order
    return order.gather(1, segments.gather(1, order).argsort(dim=-1, stable=True))


def _log_gap(clock: Tensor, is_key: Tensor, segments: Tensor | None, ordered: bool) -> Tensor:
    """`log(gap + 0.05)` of each token to the reading before it in its segment, in typical gaps; 0 without one."""
    index = torch.arange(clock.shape[1], device=clock.device).expand(clock.shape)
    last = torch.where(is_key, index, -1)
    last = last if ordered else last.cummax(-1).values
    before = torch.cat([last.new_full((len(last), 1), -1), last[:, :-1]], dim=1)
    follows, before = before >= 0, before.clamp(min=0)
    if segments is not None:
        follows = follows & (segments.gather(1, before) == segments)
    gap = (clock - clock.gather(1, before)).masked_fill(~follows, 1 - LEAST_GAP)
    return torch.log(gap + LEAST_GAP)
