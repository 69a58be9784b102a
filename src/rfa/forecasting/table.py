"""Series in CSV files: times of any unit or dates, several channels, gaps, and clear words about what is wrong."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation.time_axis import has_clock, moments_of_clock, wall_clock

from .cells import (
    SEPARATORS,
    SIGNS,
    SKIP,
    UNNAMED,
    decimal_of,
    is_reading,
    joined_times,
    read_cells,
    read_header,
    read_numbers,
    read_text,
    times_of_rows,
    without_unit,
)
from .dates import UNITS, calendar_offset, check_dates, first_row, length_of_time, numbers_of, rounded_length

_DUPLICATES = ("refuse", "mean", "first", "last")


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How CSV files are written. What is None is told from the file, and said where it is unusual.

    Args:
        date_format: of dates, as `strptime` has it: `%d.%m.%Y`.
        time_unit: "s", "ms", "us" or "ns" of epoch stamps; "number": times are plain numbers.
        zone: whose clocks dates without an offset show, such as `Europe/Berlin`, and in which forecasts are written.
        epoch: the date of stamp 0, such as `1980-01-06` of GPS; 1970-01-01 by default.
        separator: of cells: a character, "tab", or "space" for any white space.
        decimal, thousands: signs in numbers.
        encoding: such as `cp1252`.
        missing: marks of missing readings, such as `-999`, beside empty cells, `NA` and `nan`.
        duplicates: what becomes of rows of one time: their "mean", the "first" or "last" reading, or "refuse". None:
            rows that do not contradict each other are merged, others refused.
        sort: put rows in order of time. False: refuse those that are not.
        skip_rows: lines at the beginning that are left out.
        comment: the sign after which a line is left out, such as `#`.
        skip_bad_rows: leave out rows without a time, with too many cells, or with values that are no numbers.
        no_header: the first row is one of readings; the columns are 1, 2, ...

    Raises:
        ValueError: for a value that is none of these.
    """

    date_format: str | None = None
    time_unit: str | None = None
    zone: str | None = None
    epoch: str | None = None
    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    encoding: str | None = None
    missing: tuple[str, ...] = ()
    duplicates: str | None = None
    sort: bool = True
    skip_rows: int = 0
    comment: str | None = None
    skip_bad_rows: bool = False
    no_header: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "missing", tuple(self.missing or ()))
        check_dates(self)
        separates = self.separator is None or self.separator in SEPARATORS or len(self.separator) == 1
        require(separates, "separator", self.separator, "a single character, tab or space")
        for name, signs in (("decimal", ".,"), ("thousands", SIGNS)):
            sign = getattr(self, name)
            fits = sign is None or (len(sign) == 1 and sign in signs)
            require(fits, name, sign, "a point or a comma" + ("" if name == "decimal" else ", a quote, _ or a space"))
        differ = self.thousands != (self.decimal or ".")
        require(differ, "thousands", self.thousands, "another sign than that of --decimal, a point")
        require(self.skip_rows >= 0, "skip-rows", self.skip_rows, "a number of lines, 0 or more")
        require(self.comment is None or len(self.comment) == 1, "comment", self.comment, "a single sign, such as #")
        known = (None, *_DUPLICATES)
        require(self.duplicates in known, "duplicates", self.duplicates, f"one of {', '.join(_DUPLICATES)}")


class SeriesTable(NamedTuple):
    """A series with its times, in float64.

    Fields:
        times: strictly increasing, in `unit`, since `origin`.
        values: NaN where nothing was read.
        channels: their names.
        unit: "D", "h", "min" or "s" of dated series and lengths of time; "" where the file has numbers.
        origin: the date (or length) of time 0, in the zone of the file; None where the file has numbers. Times of
            `--zone` are those of its clocks: each day has 24 hours.
        sensor: the label of each row's sensor; empty where no column names sensors. Then times may be equal.
        lines: of the file, where the rows stand; empty where there is no file.
        notes: what was told from the file, and what was changed, a line each.
    """

    times: Float[np.ndarray, " T"]
    values: Float[np.ndarray, "T channels"]
    channels: tuple[str, ...]
    unit: str = ""
    origin: pd.Timestamp | pd.Timedelta | None = None
    sensor: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The median time between rows with a reading; 1 where fewer than two times have one."""
        steps = np.diff(self.times[~np.isnan(self.values).all(axis=1)])
        return float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0

    def duration(self, name: str, given: str) -> float:
        """A length of time such as `24h`, `7D`, `12M` or `3.5`, in the unit of the times; of the calendar its mean.

        Raises:
            ValueError: naming the argument, unless it is a length of time above 0, with a unit only for dated series.
        """
        expected = "a length of time above 0, such as 24h, 7D or 12M" if self.unit else "a number above 0"
        told = [note for note in self.notes if note.startswith("times: ")]
        told = told or ([] if self.unit else ["the times are numbers, --date-format or --time-unit reads dates"])
        fault = "; ".join([f"{name}: got {given!r}, expected {expected}", *told[:1]])
        try:
            if self.unit and not re.search("[A-Za-z]", given):  # pandas takes a bare number for nanoseconds
                raise ValueError
            calendar = calendar_offset(given) if self.unit else None
            span = calendar[1] if calendar else length_of_time(given) if self.unit else float(given)
            length = float(span / UNITS[self.unit]) if self.unit else float(span)
        except (pd.errors.OutOfBoundsTimedelta, pd.errors.OutOfBoundsDatetime):  # the latter of pandas 3.0
            raise ValueError(f"{name}: got {given!r}, expected at most {pd.Timedelta.max.days} days") from None
        except ValueError:
            raise ValueError(fault) from None
        if not 0 < length < np.inf:
            raise ValueError(fault)
        return length

    @property
    def dated(self) -> bool:
        """Whether times are dates: neither numbers nor lengths of time."""
        return isinstance(self.origin, pd.Timestamp)

    def dates(self, times: Float[np.ndarray, " n"]) -> Any:
        """Times of a dated series as dates, in the zone of the file; lengths of time as those."""
        shown, zone = self.clock_times(times), getattr(self.origin, "tz", None)
        return moments_of_clock(shown, zone) if has_clock(zone) else shown

    def clock_times(self, times: Float[np.ndarray, " n"]) -> Any:
        """The same as the clocks of a place show them, without its zone; see `wall_clock`."""
        assert self.origin is not None
        lengths = rounded_length(np.asarray(times) * UNITS[self.unit].total_seconds(), self.origin.unit)
        return wall_clock(pd.Index([self.origin]))[0] + lengths

    def since_origin(self, dates: Any) -> np.ndarray:
        """Dates as times of the series."""
        shown = [wall_clock(pd.DatetimeIndex(each)) for each in (dates, [self.origin])]
        return ((shown[0] - shown[1][0]) / UNITS[self.unit]).to_numpy(np.float64)

    def label(self, time: float) -> str:
        """A time as the file writes it: a date, or a number."""
        if self.origin is not None:
            return self.labels(np.array([time]))[0]
        text = str(int(time)) if float(time).is_integer() and abs(time) < 2**63 else f"{time:.15g}"
        exact = abs(float(text) - time) <= 4 * np.spacing(abs(time))  # sums of steps are off by so much
        return text if exact else repr(float(time))

    def labels(self, times: Float[np.ndarray, " n"]) -> list[str]:
        """Each time as `label` writes it."""
        if self.origin is None:
            return [self.label(time) for time in np.asarray(times).tolist()]
        dates = self.dates(times)
        if not self.dated:
            return [str(length) for length in dates]
        texts = [date.isoformat(sep=" ") for date in dates]  # unlike strftime it writes four digits of each year
        return [text.removesuffix(" 00:00:00") if self.unit == "D" else text for text in texts]

    def axis(self, times: Float[np.ndarray, " n"]) -> np.ndarray:
        """Times for the axis of a figure: dates, or numbers."""
        return np.asarray(times) if not self.dated else self.dates(times).tz_localize(None).to_numpy()

    def with_notes(self, *notes: str) -> "SeriesTable":
        """With further notes, but for empty ones."""
        return self._replace(notes=(*self.notes, *filter(None, notes)))

    def rows(self, chosen: Any) -> "SeriesTable":
        """Some of its rows, by a slice or a mask."""
        sensor, lines = (tuple(np.asarray(x)[chosen].tolist()) if x else () for x in (self.sensor, self.lines))
        return self._replace(times=self.times[chosen], values=self.values[chosen], sensor=sensor, lines=lines)


def read_series(
    path: str | Path,
    time: str | Sequence[str],
    values: list[str] | None = None,
    *,
    sensor: str | None = None,
    table_format: TableFormat | None = None,
) -> SeriesTable:
    """Read a series from a CSV file.

    An empty cell, `NA` and `nan` are missing readings; a column without a reading is left out. Times are numbers, or
    dates as `read_times` knows them. Dates with one offset, such as `+01:00`, keep it. Several become the last one's.

    Args:
        path: of the file.
        time: the column of the times; or several: date and time, or year, month, day, hour, minute, second.
        values: the columns of the channels; by default all others with a name.
        sensor: a column that names the sensor of each row. Then several rows may have one time.
        table_format: how the file is written.

    Raises:
        ValueError: for a file that cannot be read, an unknown column, no rows, times that are missing, neither numbers
            nor dates, or not in an order that `table_format` allows, values that are no finite numbers, or no reading.
    """
    file = _read_file(Path(path), time, values, sensor, table_format or TableFormat())
    rows, changes = _in_order(file)
    unseen = [name for name in file.channels if rows[name].isna().all()]
    if len(unseen) == len(file.channels):
        raise ValueError(f"values: {unseen[0]!r} has no reading in {path}, expected at least one")
    if unseen:
        changes.append(f"values: {', '.join(map(repr, unseen))} left out, without a reading")
    channels = tuple(name for name in file.channels if name not in unseen)
    times, unit, origin = numbers_of(rows[_TIME])
    readings, sensors = rows[list(channels)].to_numpy(np.float64), tuple(rows[_SENSOR]) if _SENSOR in rows else ()
    notes = (*file.notes, *changes)
    table = SeriesTable(times, readings, channels, unit, origin, sensors, tuple(rows.index), notes)
    return table.with_notes(*_distant_sensors(table))


_TIME, _SENSOR = 0, 1  # columns of a file's rows; those of channels have their names, which are texts


class _File(NamedTuple):
    """A file that was read: times, sensors (if there are some) and float64 values; the index has the lines."""

    path: Path
    rows: pd.DataFrame
    channels: tuple[str, ...]
    written: "pd.Series[Any]"  # times as they stand there
    cells: pd.DataFrame  # of the columns that are no times, as they stand there
    sensor: str | None  # the column that names the sensor of each row
    notes: tuple[str, ...]
    table_format: TableFormat


def _read_file(
    path: Path, time: str | Sequence[str], values: list[str] | None, sensor: str | None, form: TableFormat
) -> _File:
    """Read a file, and understand its times and values."""
    times = [name.strip() for name in ([time] if isinstance(time, str) else time)]
    require(0 < len(times) == len({*times}), "time", times, "one column of times, or several, each once")
    sensor = sensor and sensor.strip()
    text, notes = read_text(path, form.encoding)
    header = read_header(path, text, times, form, notes)
    columns = _columns(path, header.names, times, values, sensor, notes)
    table, bad = read_cells(path, header, form)
    total, table = table, table.loc[~bad, ~table.columns.duplicated()]
    stamps = joined_times(table, times, form.date_format, notes)
    if header.own and is_reading(times, table.iloc[0]):
        given = ", ".join(header.names)[:80]
        ways = "--no-header names its columns 1, 2, ... (with --skip-rows 1 where it is one)"
        raise ValueError(f"file: got {given!r} in the first row of {path}, expected a header: {ways}")
    cells = {name: without_unit(table[name], form.missing, notes) for name in columns}
    decimal = form.decimal or decimal_of(cells, form, notes)
    found, note = times_of_rows(stamps, path, decimal, form, None if sensor is None else table[sensor])
    parts: dict[Any, Any] = {_TIME: found}
    if sensor is not None:
        missing = table[sensor].isna()
        if missing.any() and not form.skip_bad_rows:
            row = first_row(missing)
            raise ValueError(f"sensor: row {row} of {path} has none, expected a name in each; {SKIP}")
        parts[_SENSOR] = table[sensor].dropna()
    parts |= {name: read_numbers(column[found.index], path, decimal, form) for name, column in cells.items()}
    rows = pd.concat(parts, axis=1, join="inner")
    if out := len(total) - len(rows):
        first = total.drop(rows.index).iloc[0]
        said = ", ".join(first.dropna())[:60]
        notes.append(f"rows: {out} of {len(total)} left out as bad ones, the first is row {first.name}: {said}")
    if not len(rows):
        raise ValueError(f"file: {path} has no row without a fault (--skip-bad-rows), expected at least one")
    notes += [note] if note else []
    return _File(path, rows, tuple(columns), stamps, table.drop(columns=times), sensor, tuple(notes), form)


def _columns(
    path: Path, names: list[str], times: list[str], values: list[str] | None, sensor: str | None, notes: list[str]
) -> list[str]:
    """The columns of the channels: those that are asked for, or all others with a name."""
    others = [name for name in names if name not in (*times, sensor)]
    columns = [name for name in others if not name.startswith(UNNAMED)] if values is None else [*map(str.strip, values)]
    for argument, name in [("sensor", sensor), *(("values", column) for column in columns)]:
        if name is not None and name not in names:
            raise ValueError(f"{argument}: got {name!r}, expected a column of {path}: {', '.join(names)}")
    for name in (*times, sensor, *columns):
        if names.count(str(name)) > 1:
            ways = "--values names others, --no-header with --skip-rows calls all of them 1, 2, ..."
            raise ValueError(f"file: {path} has two columns {name!r}, expected each name once; {ways}")
    if {*times, sensor} & {*columns} or not columns or len({*columns}) < len(columns):
        raise ValueError(f"values: got {columns}, expected columns other than those of times and labels, each once")
    if values is None and (unnamed := [name for name in others if name not in columns]):
        notes.append(f"values: {', '.join(map(repr, unnamed))} left out, without a name (--values takes it)")
    return columns


def _in_order(file: _File) -> tuple[pd.DataFrame, list[str]]:
    """Rows in order of time, one for each time (and sensor), and what was changed."""
    notes, chosen, rows = [], file.table_format, file.rows
    early = rows[_TIME].diff() < (0 if rows[_TIME].dtype.kind == "f" else pd.Timedelta(0))
    if early.any():
        row = first_row(early)
        given = f"{file.written.loc[row]!r} before an earlier one"
        if not chosen.sort:
            raise ValueError(f"time: got {given} (row {row} of {file.path}), expected times in order (or --sort)")
        notes.append(f"rows: sorted by time; the first out of order is row {row} (--no-sort refuses them)")
        rows = rows.sort_values(_TIME, kind="stable")
    keys = [_TIME, _SENSOR] if _SENSOR in rows else [_TIME]
    doubled = rows.duplicated(keys, keep=False)
    if not doubled.any():
        return rows, notes
    groups = rows[doubled].groupby(keys, sort=False)[list(file.channels)]
    apart = groups.transform("nunique").gt(1).any(axis=1)  # missing readings contradict nothing
    if chosen.duplicates == "refuse" or (chosen.duplicates is None and apart.any()):
        one = rows.loc[first_row(apart) if chosen.duplicates is None else first_row(doubled)]
        same = (rows[keys] == one[keys]).all(axis=1)
        both = rows.index[same]
        different = " with different values" if chosen.duplicates is None else ""
        raise ValueError(
            f"time: got {file.written.loc[both[1]]!r} twice{different} (rows {both[0]} and {both[1]} of {file.path}), "
            f"expected each time once: {_merge_hint(file, rows, one[_TIME])}"
        )
    how = chosen.duplicates or "first"
    merged = rows.groupby(keys, sort=False)[list(file.channels)].agg(how).reset_index()
    merged.index = rows.index[~rows.duplicated(keys)]
    words = f"by the {how} reading of each column" if apart.any() else "which do not contradict each other"
    name = _distinguishing_column(file, rows) if apart.any() else None
    words += f"; column {name!r} tells them apart" if name is not None else ""
    fewer = len(rows) - len(merged)
    return merged, [*notes, f"rows: {fewer} of a time that another row has were merged, {words}"]


def _distinguishing_column(file: _File, rows: pd.DataFrame) -> str | None:
    """A column of names, of which each has a time once; None where there is none."""
    for name, cells in file.cells.loc[rows.index].items():
        few = name != file.sensor and cells.notna().all() and 1 < cells.nunique() <= len(cells) / 2
        if few and not pd.concat([rows[_TIME], cells], axis=1).duplicated().any():
            return str(name)
    return None


def _merge_hint(file: _File, rows: pd.DataFrame, time: Any) -> str:
    """What to do where rows with one time differ."""
    merge = "--duplicates mean, first or last merges readings of one series"
    if rows[_TIME].dtype.kind == "M" and time.tzinfo is None and time.hour < 4:
        merge += ", or --zone tells the double hour of autumn apart"
    if file.sensor is not None:
        return f"{merge}, or keep one row of a sensor at a time"
    name = _distinguishing_column(file, rows)
    where = f"column {name!r} has {file.cells[name].nunique()} names; " if name is not None else ""
    ways = f"sensors of one quantity: --sensor {name or 'COLUMN'}; "
    ways += "several series: forecast each by itself, from a file with its rows alone"
    return f"{where}{ways}; {merge}; --time takes several columns, such as --time Date Time"


_DISTANT = 5.0  # deviations of the difference between two sensors that are said
_LEAST_READINGS = 4  # readings of a sensor, at least, that tell their noise


def _distant_sensors(table: SeriesTable) -> list[str]:
    """A note for each channel in which a sensor is, in the median, far off the one with most readings."""
    notes, times = [], table.times
    for name, values in zip(table.channels, table.values.T if table.sensor else (), strict=False):
        by_sensor = pd.Series(values, times).dropna().groupby(np.asarray(table.sensor)[~np.isnan(values)])
        usual = by_sensor.get_group(by_sensor.size().idxmax()).rename(by_sensor.size().idxmax())
        for label, readings in by_sensor:
            inside = readings.loc[usual.index[0] : usual.index[-1]]
            gap = inside - np.interp(inside.index, usual.index, usual)
            noise = 1.4826 * (gap - gap.median()).abs().median() + 1e-9 * usual.abs().max()
            if len(gap) >= _LEAST_READINGS and abs(gap.median()) > _DISTANT * noise:
                said = f"sensor {label!r} is {gap.median():.4g} off {usual.name!r}, far more than their noise"
                notes.append(f"{name}: {said}, {noise:.2g}; of several series forecast each from a file of its own")
                break
    return notes
