"""What to forecast: a request, the series and the times that it means, and what is said of each channel."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation.time_axis import calendar_step, has_clock
from rfa.estimation.time_grid import time_grid

from .dates import UNITS, calendar_offset, length_of_time, rounded_length
from .scale import angles_from, jumps_of_angle
from .table import SeriesTable, TableFormat, read_series

LEVELS = (0.5, 0.9)
_MAX_STEPS = 100_000


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """What to forecast.

    Args:
        file: a CSV file.
        time: its column of times, or several: date and time, or year, month, day, hour, minute, second.
        values: its columns of channels; by default all others.
        horizon: how far ahead, such as `24h` or `12M`; a number where the times are numbers.
        step: between forecasts, such as `30min` or `1MS`; by default the calendar's step, the step of
            the grid on which the times lie, or the median gap.
        sensor: a column that names the sensor of each row.
        table_format: how the file is written.
        components: of the filter, as for `components_of`; by default the data choose.
        robust: False: the Kalman filter.
        positive, counts: values are above 0: filtered on the scale of their logarithm; they are at least 0: of their
            square root. By default the readings say so.
        angle: all values are angles; a whole turn, such as 360 or 2 pi. They are filtered without their jumps.
    """

    file: Path
    time: str | Sequence[str]
    values: list[str] | None = None
    horizon: str
    step: str | None = None
    sensor: str | None = None
    table_format: TableFormat = field(default_factory=TableFormat)
    components: list[str] | None = None
    robust: bool = True
    positive: bool = False
    counts: bool = False
    angle: float | None = None

    def __post_init__(self) -> None:
        require(not (self.positive and self.counts), "positive", "--positive with --counts", "one of them")
        if self.angle is not None:
            require(0 < self.angle < np.inf, "angle", self.angle, "a whole turn, such as 360")
            require(not (self.positive or self.counts), "angle", "--angle with --positive or --counts", "one of them")


@dataclass(frozen=True, kw_only=True)
class ChannelForecast:
    """What is said of one channel. Times are numbers in the unit of the series.

    Args:
        name: of the channel.
        mean: of the readings at the forecast's times, `(steps,)`.
        intervals: lower and upper ends `(steps,)` by probability.
        past: the rows of `cleaned.csv`: `time` (a number), `reading`, `estimate`, `lower_90` and `upper_90` of it,
            `weight`, `outlier`, and `sensor` where there are some.
        notes: what was assumed, a line each.
        details: further entries of `forecast.json`.
    """

    name: str
    mean: Float[np.ndarray, " steps"]
    intervals: dict[float, tuple[np.ndarray, np.ndarray]]
    past: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def in_turns_of(self, values: Float[np.ndarray, " T"], period: float) -> "ChannelForecast":
        """The same of angles, in the turn of the readings. Ends of bands stay beside their mean, half a turn at most.

        Args:
            values: the readings, as they were given.
            period: of a turn.
        """
        least = -period / 2 if np.nanmin(values) < 0 else 0.0

        def turn(mean: Any, *ends: Any) -> list[Any]:
            found = angles_from(mean, least, period)
            return [found, *(found + np.clip(end - mean, -period / 2, period / 2) for end in ends)]

        mean, *ends = turn(self.mean, *chain(*self.intervals.values()))
        past = self.past.assign(reading=angles_from(self.past["reading"], least, period))
        names = ["estimate", "lower_90", "upper_90"]
        past[names] = np.stack(turn(*(past[name].to_numpy() for name in names)), axis=1)
        intervals = dict(zip(self.intervals, zip(ends[::2], ends[1::2], strict=True), strict=True))
        return replace(self, mean=mean, intervals=intervals, past=past)


def read_request(request: ForecastRequest) -> tuple[SeriesTable, Float[np.ndarray, " steps"]]:
    """The series up to its last reading, and the times to forecast, in its unit.

    Raises:
        ValueError: as `read_series`, and for a horizon or a step that is none.
    """
    options: dict[str, Any] = {"sensor": request.sensor, "table_format": request.table_format}
    table = read_series(request.file, request.time, request.values, **options)
    table = table.with_notes(*_angle_notes(table, request.angle))
    table = table.rows(slice(0, int(np.flatnonzero(~np.isnan(table.values).all(axis=1))[-1]) + 1))
    horizon, last, note = table.duration("horizon", request.horizon), float(table.times[-1]), ""
    if request.step is None:
        step, least, last, note = _usual_step(table)
    else:
        step = least = table.duration("step", request.step)
    if table.dated:
        end = _end(table, request.horizon)
        name, dates = _calendar_dates(table, request, end, step)
        if dates is not None:
            note = f"steps: {name} of the calendar" + ("" if request.step else " (--step chooses another)")
            return table.with_notes(note if name else ""), table.since_origin(dates)
        if calendar_offset(request.horizon) is not None:
            horizon = float(table.since_origin([end])[0] - last)
    count = horizon / step * (1 + 1e-6)  # steps are known to so much, or between two ends
    count = max(count, min(horizon / least, np.ceil(horizon / step)))
    name = f"{step:g} {table.unit}".rstrip()
    _check_steps(count, request.horizon, name)
    return table.with_notes(note), last + step * np.arange(1, int(count) + 1)


def _check_steps(count: float, horizon: str, step: str) -> None:
    """Raise `ValueError` for a horizon without a step, or with too many."""
    require(count >= 1, "horizon", horizon, f"at least one step, {step}; --step chooses another")
    given, most = f"{horizon}, {count:.6g} steps of {step}", f"at most {_MAX_STEPS}; --step chooses longer ones"
    require(count < _MAX_STEPS + 1, "horizon", given, most)


def _angle_notes(table: SeriesTable, period: float | None) -> list[str]:
    """What is said of channels that jump as angles do; an error for channels that are none where they shall be."""
    notes = []
    for name, values in zip(table.channels, table.values.T, strict=True):
        if period is None and not table.sensor and (jumps := jumps_of_angle(values)):
            said = f"{name}: values jump by nearly 360, as angles do (in {jumps} of {len(values) - 1} steps)"
            notes.append(f"{said}; --angle 360 filters them without jumps, or forecast their sine and cosine")
        if period is not None:
            low, high = np.nanmin(values), np.nanmax(values)
            turn = (low >= 0 and high <= period) or (low >= -period / 2 and high <= period / 2)
            expected = f"values from 0 to {period:g}, or {-period / 2:g} to {period / 2:g}; --values names columns"
            require(turn, "angle", f"{low:g} to {high:g} in {name!r}", expected)
    return notes


def _end(table: SeriesTable, horizon: str) -> pd.Timestamp:
    """The date up to which a dated series is forecast."""
    last, calendar = table.dates(table.times[-1:])[0], calendar_offset(horizon)
    try:
        return last + (_offset(length_of_time(horizon), horizon) if calendar is None else calendar[0])
    except (ValueError, OverflowError):
        raise ValueError(f"horizon: got {horizon!r}, expected an end in a year that dates can have") from None


def _offset(length: pd.Timedelta, given: str | None) -> Any:
    """A length of time on the clock: days, if they are written so, may have 23 or 25 hours."""
    days = length % pd.Timedelta(days=1) == pd.Timedelta(0) and (given is None or re.search("[dw]", given.lower()))
    return pd.DateOffset(days=length.days) if days else length


def _calendar_dates(
    table: SeriesTable, request: ForecastRequest, end: pd.Timestamp, step: float
) -> tuple[str, list[Any] | None]:
    """The next dates by a step of the calendar, or on the clocks of a zone, after its name if it is of the calendar.

    None where all steps have one length.
    """
    dates, name = table.dates(table.times), request.step or ""
    if request.step is None:
        offset = calendar_step(dates.tz_localize(None).to_numpy())
        name = "" if offset is None else f"{offset.kwds['months']}M" if "months" in offset.kwds else offset.freqstr
    else:
        offset = (calendar_offset(request.step) or (None,))[0]
    if offset is None and has_clock(dates.tz):
        offset, name = _offset(rounded_length(step * UNITS[table.unit].total_seconds(), "us"), request.step), ""
    if offset is None:
        return "", None
    # from the last date, so that 30 January is followed by 29 February and 30 March
    later = takewhile(lambda date: date <= end, (dates[-1] + offset * k for k in count(1)))
    found = list(islice(later, _MAX_STEPS + 1))
    many = np.inf if len(found) > _MAX_STEPS else len(found)
    _check_steps(many, request.horizon, name or f"{step:g} {table.unit}")
    return name, found


def _usual_step(table: SeriesTable) -> tuple[float, float, float, str]:
    """The step of the grid on which the times lie, the least it can be, and the grid's time of the last reading.

    Where there is no grid: the median gap. At last a note, where times are rounded.
    """
    times = np.unique(table.times)
    last, unit = float(times[-1]), 1.0
    if table.origin is None:
        grid = time_grid(times)
    else:
        dates, unit = table.clock_times(times), UNITS[table.unit].total_seconds()
        times = (dates - dates[0].floor("s")).total_seconds().to_numpy(np.float64)
        grid = time_grid(times, tick=60.0 if not (times % 60).any() else None, cut=True)
    if grid is None:
        return table.gap, table.gap, last, ""
    step, least = grid.step / unit, grid.least / unit
    if grid.rounding == 0:
        return step, least, last, ""
    note = f"steps: {step:.6g} {table.unit}".rstrip() + ", by a line through times that are rounded"
    return step, least, last + (grid.last - float(times[-1])) / unit, f"{note} (--step chooses another)"
