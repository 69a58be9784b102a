"""Forecasts of a CSV file: what is asked for, and the files and the figure that are written."""

from rfa.checks import needs

needs("pandas")

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rfa.checks import require
from rfa.environment import environment
from rfa.estimation.time_axis import calendar_step, has_clock
from rfa.estimation.time_grid import time_grid
from rfa.files import sha256, whole_name, write_text_whole

from .dates import UNITS, calendar_offset, length_of_time, rounded
from .scale import angles_from, continuous_angles, jumps_of_angle
from .style import COLOURS, MUTED, PAGE, plain, save, styled
from .table import SeriesTable, TableFormat, read_series

FORECAST_FORMAT = 1
LEVELS = (0.5, 0.9)
FILES = ("forecast.csv", "cleaned.csv", "forecast.json", "figure.png")
_MOST_STEPS = 100_000
_SHOWN_HORIZONS, _SHOWN_READINGS = 6.0, 60  # of the past in the figure, at least


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

    def turned(self, values: Float[np.ndarray, " T"], period: float) -> "ChannelForecast":
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


Forecaster = Callable[[SeriesTable, Float[np.ndarray, " steps"]], list[ChannelForecast]]


def read_request(request: ForecastRequest) -> tuple[SeriesTable, Float[np.ndarray, " steps"]]:
    """The series up to its last reading, and the times to forecast, in its unit.

    Raises:
        ValueError: as `read_series`, and for a horizon or a step that is none.
    """
    options: dict[str, Any] = {"sensor": request.sensor, "table_format": request.table_format}
    table = read_series(request.file, request.time, request.values, **options)
    table = table._replace(notes=(*table.notes, *_angle_notes(table, request.angle)))
    table = table.rows(slice(0, int((~table.values.isnan().all(1)).nonzero().max()) + 1))
    horizon = table.duration("horizon", request.horizon)
    if request.step is None:
        step, least, last, note = _usual_step(table)
    else:
        step = least = table.duration("step", request.step)
        last, note = float(table.times[-1]), ""
    if table.dated:
        end = _end(table, request.horizon)
        if (dates := _calendar_dates(table, request, end, step)) is not None:
            note = f"steps: {dates[0]} of the calendar" + ("" if request.step else " (--step chooses another)")
            notes = (*table.notes, *([note] if dates[0] else []))
            return table._replace(notes=notes), table.since_origin(dates[1])
        if calendar_offset(request.horizon) is not None:
            horizon = float(table.since_origin([end])[0] - table.times[-1])
    table = table._replace(notes=(*table.notes, *([note] if note else [])))
    count = horizon / step * (1 + 1e-6)  # steps are known to so much, or between two ends
    count = max(count, min(horizon / least, np.ceil(horizon / step)))
    name = f"{step:g} {table.unit}".rstrip()
    require(count >= 1, "horizon", request.horizon, f"at least one step, {name}; --step chooses another")
    given, most = f"{request.horizon}, {count:.6g} steps of {name}", f"at most {_MOST_STEPS}"
    require(count < _MOST_STEPS + 1, "horizon", given, f"{most}; --step chooses longer ones")
    return table, last + step * np.arange(1, int(count) + 1)


def _angle_notes(table: SeriesTable, period: float | None) -> list[str]:
    """What is said of channels that jump as angles do; an error for channels that are none where they shall be."""
    notes = []
    for name, values in zip(table.channels, table.values.numpy().T, strict=True):
        jumps = 0 if period is not None or table.sensor else jumps_of_angle(values)
        if jumps:
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
    last, calendar = table.dates(table.times[-1:].numpy())[0], calendar_offset(horizon)
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
) -> tuple[str, list[Any]] | None:
    """The next dates by a step of the calendar, or on the clocks of a zone, with its name if it is of the calendar.

    None where all steps have one length.
    """
    dates = table.dates(table.times.numpy())
    if request.step is None:
        offset = calendar_step(dates.tz_localize(None).to_numpy())
        name = "" if offset is None else f"{offset.kwds['months']}M" if "months" in offset.kwds else offset.freqstr
    else:
        offset, name = (calendar_offset(request.step) or (None,))[0], request.step
    if offset is None and has_clock(dates.tz):
        offset, name = _offset(rounded(step * UNITS[table.unit].total_seconds(), "us"), request.step), ""
    if offset is None:
        return None
    # from the last date, so that 30 January is followed by 29 February and 30 March
    later = takewhile(lambda date: date <= end, (dates[-1] + offset * k for k in count(1)))
    found = list(islice(later, _MOST_STEPS + 1))
    said = name or f"{step:g} {table.unit}"
    require(len(found) > 0, "horizon", request.horizon, f"at least one step, {said}; --step chooses another")
    most = f"at most {_MOST_STEPS} steps of {said}; --step chooses longer ones"
    require(len(found) <= _MOST_STEPS, "horizon", request.horizon, most)
    return name, found


def _usual_step(table: SeriesTable) -> tuple[float, float, float, str]:
    """The step of the grid on which the times lie, the least it can be, and the grid's time of the last reading.

    Where there is no grid: the median gap. At last a note, where times are rounded.
    """
    times = np.unique(table.times.numpy())
    last = float(times[-1])
    if table.origin is None:
        grid = time_grid(times)
    else:
        dates = table.shown(times)
        times = (dates - dates[0].floor("s")).total_seconds().to_numpy(np.float64)
        grid = time_grid(times, tick=60.0 if not (times % 60).any() else None, cut=True)
    if grid is None:
        return table.gap, table.gap, last, ""
    unit = 1.0 if table.origin is None else UNITS[table.unit].total_seconds()
    step, least = grid.step / unit, grid.least / unit
    if grid.rounding == 0:
        return step, least, last, ""
    note = f"steps: {step:.6g} {table.unit}".rstrip() + ", by a line through times that are rounded"
    return step, least, last + (grid.last - float(times[-1])) / unit, f"{note} (--step chooses another)"


def check_out(out: Path, overwrite: bool) -> None:
    """Raise `ValueError` unless the folder is free, or holds a forecast that may be replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file, expected a folder")
    there = {whole_name(path) for path in out.iterdir()} if out.exists() else set()
    if foreign := sorted(there - {*FILES}):
        raise ValueError(f"out: {out} has other files, {', '.join(foreign)[:80]}, expected an empty folder")
    if there and not overwrite:
        held = ", ".join(sorted(there))
        raise ValueError(f"out: {out} has {held} already, expected an empty folder, or --overwrite")


def write_forecast(
    request: ForecastRequest,
    forecaster: Forecaster,
    out: Path,
    table: SeriesTable,
    query_times: Float[np.ndarray, " steps"],
) -> dict[str, Any]:
    """Forecast, and write `forecast.csv`, `cleaned.csv`, `figure.png` and last `forecast.json`, which is returned.

    Args:
        request: what to forecast.
        forecaster: does it.
        out: the folder, checked already.
        table, query_times: of `read_request`.

    Raises:
        ValueError: for what cannot be forecast.
        OSError: if a file cannot be written.
    """
    given, period = table.values.numpy(), request.angle
    if period is not None:
        turns = [continuous_angles(values, period) for values in given.T]
        table = table._replace(values=torch.tensor(np.stack(turns, axis=1)))
    drawn = found = forecaster(table, query_times)
    if period is not None:
        found = [one.turned(given[:, table.channels.index(one.name)], period) for one in found]
    labels = table.labels(query_times)
    content: dict[str, Any] = {
        "format": FORECAST_FORMAT,
        "robust": request.robust,
        "file": str(request.file),
        "sha256": sha256(request.file),
        "time": request.time,
        "unit": table.unit or None,
        "readings": {name: int(n) for name, n in zip(table.channels, (~table.values.isnan()).sum(0), strict=True)},
        "last": table.label(float(table.times[-1])),
        "horizon": request.horizon,
        "notes": [*table.notes, *(note for one in found for note in one.notes)],
        "step": float(query_times[-1] - float(table.times[-1])) / len(query_times),
        "channels": {
            one.name: {
                "times": labels,
                "mean": one.mean.tolist(),
                "intervals": {
                    f"{level:.0%}"[:-1]: {"lower": ends[0].tolist(), "upper": ends[1].tolist()}
                    for level, ends in one.intervals.items()
                },
                "outliers": _outliers(one, table),
                **one.details,
            }
            for one in found
        },
        "environment": environment(),
    }
    bad = [one.name for one in found if not all(np.isfinite(x).all() for x in (one.mean, *one.intervals[0.9]))]
    said, expected = f"numbers that are not finite for {bad}", "finite ones; are values or times too large?"
    require(not bad, "forecast", said, expected)
    texts = {
        "forecast.csv": _rows(found, labels),
        "cleaned.csv": _cleaned(found, table),
        "forecast.json": json.dumps(content, indent=2, allow_nan=False) + "\n",
    }
    save(forecast_figure(drawn, table, query_times), out / "figure.png")
    for name, text in texts.items():
        write_text_whole(out / name, text)
    return content


def _rows(found: list[ChannelForecast], labels: list[str]) -> str:
    parts = []
    for one in found:
        columns: dict[str, Any] = {"time": labels, "channel": one.name, "mean": one.mean}
        for level, (lower, upper) in one.intervals.items():
            columns |= {f"lower_{level * 100:.0f}": lower, f"upper_{level * 100:.0f}": upper}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts).to_csv(index=False)


def _cleaned(found: list[ChannelForecast], table: SeriesTable) -> str:
    """A row for each reading, with its estimate by those on both sides."""
    parts = []
    for one in found:
        rows = one.past.assign(time=table.labels(one.past["time"].to_numpy()))
        rows.insert(1, "channel", one.name)
        parts.append(rows)
    return pd.concat(parts).to_csv(index=False)


def _outliers(one: ChannelForecast, table: SeriesTable) -> list[dict[str, Any]]:
    """Each outlier: its time as the file writes it, what was read and expected, and its weight."""
    rows = one.past[one.past["outlier"]]
    columns = (rows[name].tolist() for name in ("reading", "estimate", "weight"))
    return [
        {"time": label, "value": value, "expected": expected, "weight": weight}
        for label, value, expected, weight in zip(table.labels(rows["time"].to_numpy()), *columns, strict=True)
    ]


@styled
def forecast_figure(found: Sequence[ChannelForecast], table: SeriesTable, query_times: np.ndarray) -> Figure:
    """The forecast of each channel after its recent past. Outliers beyond the axes stand at their edge."""
    size = (PAGE, 0.4 + 2.0 * len(found))
    figure, rows = plt.subplots(len(found), 1, figsize=size, sharex=True, squeeze=False)
    for axes, one in zip(rows[:, 0], found, strict=True):
        _draw_channel(axes, one, table, query_times)
    bottom = rows[-1, 0]
    if table.dated:
        locator = mdates.AutoDateLocator()
        bottom.xaxis.set_major_locator(locator)
        bottom.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    bottom.set_xlabel("time; dotted: the last reading")
    return figure


def _draw_channel(axes: Axes, one: ChannelForecast, table: SeriesTable, query_times: np.ndarray) -> None:
    times, values = table.times.numpy(), table.values[:, table.channels.index(one.name)].numpy()
    shown = min(
        times[-1] - _SHOWN_HORIZONS * (query_times[-1] - times[-1]), times[max(0, len(times) - _SHOWN_READINGS)]
    )
    times, values = times[times >= shown], values[times >= shown]
    past = one.past[one.past["time"] >= shown]
    at, wrong = past.loc[past["outlier"], ["time", "reading"]].to_numpy().T
    read_at, wrong_at, ahead = (table.axis(each) for each in (times, at, query_times))
    pairs = {*zip(wrong_at.tolist(), wrong.tolist(), strict=True)}  # another sensor's reading at that time is none
    usual = np.array([pair not in pairs for pair in zip(read_at.tolist(), values.tolist(), strict=True)])
    past_times, past_mean = table.axis(past["time"].to_numpy()), past["estimate"].to_numpy()
    axes.fill_between(past_times, past["lower_90"], past["upper_90"], color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.plot(past_times, past_mean, color=COLOURS[0], linewidth=0.9, label="estimate")
    axes.plot(read_at[usual], values[usual], ".", color=MUTED, markersize=2.5, label="reading")
    for level, ends in sorted(one.intervals.items(), reverse=True):
        look: dict[str, Any] = {"color": COLOURS[1], "alpha": 0.2 + 0.4 * (1 - level), "linewidth": 0}
        axes.fill_between(ahead, *ends, label=f"{level * 100:.0f} % interval", **look)
    marker: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(ahead) == 1 else {}
    axes.plot(ahead, one.mean, color=COLOURS[3], label="forecast", **marker)
    drawn = np.concatenate([values[usual], past_mean, one.mean, *chain(*one.intervals.values())])
    low, high = np.nanmin(drawn), np.nanmax(drawn)
    margin = 0.05 * (high - low) or 1.0
    low, high = axes.set_ylim(low - margin, high + margin)
    if len(at):
        axes.plot(wrong_at, wrong.clip(low, high), "x", color=COLOURS[3], clip_on=False, label="outlier")
    axes.axvline(read_at[-1], color=MUTED, linestyle=":", linewidth=1)
    axes.set_title(plain(one.name, 200), loc="left", parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
