"""Windows of series to learn forecasts from: readings up to a moment, and what follows within the horizon."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rfa.checks import require
from rfa.data.series_table import SeriesTable

FEWEST_READINGS = 4  # that a window begins with
_MOST_VALIDATED = 256  # windows
_SEVERAL = 5  # series, from which on whole series are held out


class WindowPlace(NamedTuple):
    """Where a window is: the number of its series, the row of its last reading, and the row after its last target."""

    series: int
    now: int
    end: int


class SeriesWindows(Dataset):
    """Windows as examples for `TimeSeriesCollator`: future rows are NaN in `values`, and have `targets`.

    Args:
        series: in one unit of time.
        places: of the windows.
        context: the most rows that a window begins with.
    """

    def __init__(self, series: Sequence[SeriesTable], places: Sequence[WindowPlace], context: int):
        self.series, self.places, self.context = series, places, context

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = self.places[index]
        table, rows = self.series[place.series], slice(max(0, place.now + 1 - self.context), place.end)
        values = table.values[rows]
        future = torch.arange(rows.start, rows.stop) > place.now
        times = table.times[rows] - table.times[place.now]
        return {
            "times": times,
            "values": values.masked_fill(future[:, None], torch.nan),
            "targets": values.masked_fill(~future[:, None], torch.nan),
        }


class WindowSplit(NamedTuple):
    """Windows for training and for validation, and in words how they were split."""

    train: list[WindowPlace]
    valid: list[WindowPlace]
    words: str


def split_windows(series: Sequence[SeriesTable], horizon: float, held_out: float, seed: int) -> WindowSplit:
    """All windows of the training part, and up to 256 of the part that is held out.

    Of five series or more some are held out, drawn by the seed. Of fewer the last part of each is: windows of training
    end before it, targets and all, and those of validation begin their targets in it.

    Args:
        series: in one unit of time.
        horizon: within which targets lie, in that unit.
        held_out: the share for validation.
        seed: of the draw.

    Raises:
        ValueError: for a share that is none, or series too short for a window of each kind.
    """
    require(0 < held_out < 1, "hold_out", held_out, "a share between 0 and 1")
    require(0 <= seed < 2**31, "seed", seed, "a number from 0 to 2147483647")
    every = [_places(number, table, horizon) for number, table in enumerate(series)]
    usable = [number for number, places in enumerate(every) if places]
    if len(usable) >= _SEVERAL:
        count = min(max(1, round(held_out * len(usable))), len(usable) - 1)
        generator = torch.Generator().manual_seed(seed)
        drawn = {usable[k] for k in torch.randperm(len(usable), generator=generator)[:count].tolist()}
        train = [place for number in usable if number not in drawn for place in every[number]]
        valid = [place for number in sorted(drawn) for place in every[number]]
        words = f"{count} of {len(usable)} series held out"
    else:
        train, valid = [], []
        for number in usable:
            border = round((1 - held_out) * len(series[number].times))
            train += [place for place in every[number] if place.end <= border]
            valid += [place for place in every[number] if place.now >= border - 1]
        words = f"the last {held_out:.0%} of each series held out"
    if not train or not valid:
        longest = max((len(table.times) for table in series), default=0)
        expected = (
            f"windows with {FEWEST_READINGS} readings and one reading within the horizon after them, in both parts"
        )
        raise ValueError(
            f"horizon: got {horizon:g} for series of at most {longest} rows, expected {expected}: give more data"
        )
    few = np.unique(np.linspace(0, len(valid) - 1, _MOST_VALIDATED).round().astype(int)).tolist()
    return WindowSplit(train, [valid[k] for k in few], words)


def _places(number: int, table: SeriesTable, horizon: float) -> list[WindowPlace]:
    """All windows of a series: each ends its readings at a row that has one."""
    times = table.times.numpy()
    present = (~table.values.isnan().all(1)).numpy()
    rounding = 4 * np.spacing(np.abs(times).max())  # seconds since 1970 are known to 1e-7
    seen, ends = np.cumsum(present), np.searchsorted(times, times + horizon * (1 + 1e-9) + rounding, side="right")
    rows = np.flatnonzero(present & (seen >= FEWEST_READINGS))
    return [WindowPlace(number, int(row), int(ends[row])) for row in rows if seen[ends[row] - 1] > seen[row]]


def training_part(series: Sequence[SeriesTable], places: Sequence[WindowPlace]) -> list[tuple[Tensor, Tensor]]:
    """Times and values of the series up to the last row of training, as `RFATimeSeriesConfig.from_data` takes them."""
    last: dict[int, int] = {}
    for place in places:
        last[place.series] = max(last.get(place.series, 0), place.end)
    return [(series[number].times[:end], series[number].values[:end]) for number, end in sorted(last.items())]


def windows_span(series: Sequence[SeriesTable], places: Sequence[WindowPlace], context: int) -> float:
    """The longest time from the first row of a window to its last."""
    ends = ((series[p.series].times, max(0, p.now + 1 - context), p.end - 1) for p in places)
    return max(float(times[last] - times[first]) for times, first, last in ends)
