"""Series in CSV files: times of any unit or dates, several channels, gaps, and clear words about what is wrong."""

from rfa.checks import needs

needs("pandas")

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require

from .cells import SEPARATORS, read_cells, read_text, separator_of
from .dates import EPOCHS, UNITS, calendar_offset, check_date_format, first_row, numbers_of, read_times, rounded

_LARGEST = 1e30  # larger ones are marks of missing readings, such as 9.97e36
_SIGNS = ".,'_ \u00a0\u202f\u2019"  # of thousands, spaces and a quote among them
_DUPLICATES = ("refuse", "mean", "first", "last")


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How CSV files are written. What is None is told from the file, and said where it is unusual.

    Args:
        date_format: of dates, as `strptime` has it: `%d.%m.%Y`.
        time_unit: "s", "ms", "us" or "ns" of epoch stamps; "number": times are plain numbers.
        separator: of cells: a character, "tab", or "space" for any white space.
        decimal, thousands: signs in numbers.
        encoding: such as `cp1252`.
        missing: marks of missing readings, such as `-999`, beside empty cells, `NA` and `nan`.
        duplicates: what becomes of rows of one time: their "mean", the "first" or "last" reading, or "refuse". None:
            rows that do not contradict each other are merged, others refused.
        sort: put rows in order of time. False: refuse those that are not.

    Raises:
        ValueError: for a value that is none of these.
    """

    date_format: str | None = None
    time_unit: str | None = None
    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    encoding: str | None = None
    missing: tuple[str, ...] = ()
    duplicates: str | None = None
    sort: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "missing", tuple(self.missing or ()))
        check_date_format(self.date_format)
        units = (*EPOCHS, "number")
        require(self.time_unit in (None, *units), "time-unit", self.time_unit, f"one of {', '.join(units)}")
        require(None in (self.date_format, self.time_unit), "date-format", self.date_format, "it or --time-unit")
        separates = self.separator is None or self.separator in SEPARATORS or len(self.separator) == 1
        require(separates, "separator", self.separator, "a single character, tab or space")
        for name, signs in (("decimal", ".,"), ("thousands", _SIGNS)):
            sign = getattr(self, name)
            fits = sign is None or (len(sign) == 1 and sign in signs)
            require(fits, name, sign, "a point or a comma" + ("" if name == "decimal" else ", a quote, _ or a space"))
        differ = self.thousands != (self.decimal or ".")
        require(differ, "thousands", self.thousands, "another sign than that of --decimal, a point")
        known = (None, *_DUPLICATES)
        require(self.duplicates in known, "duplicates", self.duplicates, f"one of {', '.join(_DUPLICATES)}")


class SeriesTable(NamedTuple):
    """A series with its times, in float64.

    Fields:
        times: strictly increasing, in `unit`, since `origin`.
        values: NaN where nothing was read.
        channels: their names.
        unit: "D", "h", "min" or "s" of dated series; "" where the file has numbers.
        origin: the date of time 0, in the zone of the file; None where the file has numbers.
        sensor: the label of each row's sensor; empty where no column names sensors. Then times may be equal.
        lines: of the file, where the rows stand; empty where there is no file.
        notes: what was told from the file, and what was changed, a line each.
    """

    times: Float[Tensor, " T"]
    values: Float[Tensor, "T channels"]
    channels: tuple[str, ...]
    unit: str = ""
    origin: pd.Timestamp | None = None
    sensor: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The median time between rows with a reading; 1 where fewer than two times have one."""
        steps = self.times[~self.values.isnan().all(1)].diff()
        return float(steps[steps > 0].quantile(0.5)) if (steps > 0).any() else 1.0

    def duration(self, name: str, given: str) -> float:
        """A length of time such as `24h`, `7D`, `12M` or `3.5`, in the unit of the times; of the calendar its mean.

        Raises:
            ValueError: naming the argument, unless it is a length of time above 0, with a unit only for dated series.
        """
        expected = "a length of time above 0, such as 24h, 7D or 12M" if self.unit else "a number above 0"
        notes = [note for note in self.notes if note.startswith("times: ")]
        hint = (
            f"; {notes[0]}"
            if notes
            else ""
            if self.unit
            else "; the times are numbers, --date-format or --time-unit reads dates"
        )
        try:
            if self.unit and not re.search("[A-Za-z]", given):  # pandas takes a bare number for nanoseconds
                raise ValueError
            calendar = calendar_offset(given) if self.unit else None
            span = calendar[1] if calendar else pd.Timedelta(given) if self.unit else float(given)
            length = float(span / UNITS[self.unit]) if self.unit else float(span)
        except (pd.errors.OutOfBoundsTimedelta, pd.errors.OutOfBoundsDatetime):  # the latter of pandas 3.0
            raise ValueError(f"{name}: got {given!r}, expected at most {pd.Timedelta.max.days} days") from None
        except ValueError:
            raise ValueError(f"{name}: got {given!r}, expected {expected}{hint}") from None
        if not 0 < length < np.inf:
            raise ValueError(f"{name}: got {given!r}, expected {expected}{hint}")
        return length

    def longest_duration(self, name: str, given: str) -> float:
        """As `duration`; of a length of the calendar the longest one after a time of the series, as 31 days of `1M`."""
        mean = self.duration(name, given)
        if not self.unit or (calendar := calendar_offset(given)) is None:
            return mean
        dates = pd.Series(self.dates(self.times.numpy()))
        return float(((dates + calendar[0]) - dates).max() / UNITS[self.unit])

    def dates(self, times: Float[np.ndarray, " n"]) -> pd.DatetimeIndex:
        """Times of a dated series as dates, in the zone of the file."""
        assert self.origin is not None
        found = self.origin + rounded(np.asarray(times) * UNITS[self.unit].total_seconds(), self.origin.unit)
        return found if self.unit == "s" else found.round("s")

    def since_origin(self, dates: Any) -> np.ndarray:
        """Dates as times of the series."""
        return ((pd.DatetimeIndex(dates) - self.origin) / UNITS[self.unit]).to_numpy(np.float64)

    def label(self, time: float) -> str:
        """A time as the file writes it: a date, or a number."""
        if self.origin is None:
            text = str(int(time)) if float(time).is_integer() and abs(time) < 2**63 else f"{time:.15g}"
            exact = abs(float(text) - time) <= 4 * np.spacing(abs(time))  # sums of steps are off by so much
            return text if exact else repr(float(time))
        date = self.dates(np.array([time]))[0]
        text = date.isoformat(sep=" ")  # unlike strftime it writes four digits of each year
        is_day = self.unit == "D" and date.tzinfo is None and date == date.normalize()
        return text.partition(" ")[0] if is_day else text

    def axis(self, times: Float[np.ndarray, " n"]) -> np.ndarray:
        """Times for the axis of a figure: dates, or numbers."""
        return np.asarray(times) if self.origin is None else self.dates(times).tz_localize(None).to_numpy()

    def in_unit(self, unit: str) -> "SeriesTable":
        """The same series with its times in another unit of dated series."""
        if unit == self.unit:
            return self
        return self._replace(times=self.times * (UNITS[self.unit] / UNITS[unit]), unit=unit)

    def rows(self, chosen: Any) -> "SeriesTable":
        """Some of its rows, by a slice or a mask."""
        sensor, lines = (tuple(np.asarray(x)[chosen].tolist()) if x else () for x in (self.sensor, self.lines))
        return self._replace(times=self.times[chosen], values=self.values[chosen], sensor=sensor, lines=lines)


def read_series(
    path: str | Path,
    time: str,
    values: list[str] | None = None,
    *,
    sensor: str | None = None,
    table_format: TableFormat | None = None,
) -> SeriesTable:
    """Read a series from a CSV file with a header.

    An empty cell, `NA` and `nan` are missing readings; a column without a reading is left out. Times are numbers, or
    dates as `read_times` knows them. Dates with one offset, such as `+01:00`, keep it. Those with several become UTC.

    Args:
        path: of the file.
        time: the column of the times.
        values: the columns of the channels; by default all others.
        sensor: a column that names the sensor of each row. Then several rows may have one time.
        table_format: how the file is written.

    Raises:
        ValueError: for a file that cannot be read, an unknown column, no rows, times that are missing, neither numbers
            nor dates, or not in an order that `table_format` allows, values that are no finite numbers, or no reading.
    """
    file = _read_file(Path(path), time, values, ("sensor", sensor), table_format)
    return _without_unseen([_series(file, file.rows)], file.path)[0]


def read_many_series(
    paths: Iterable[str | Path],
    time: str,
    values: list[str] | None = None,
    *,
    series: str | None = None,
    table_format: TableFormat | None = None,
) -> dict[str, SeriesTable]:
    """Read several series with the same channels, by name, all in the unit of the first.

    Args:
        paths: CSV files as for `read_series`, and folders, whose `*.csv` are read.
        time, values, table_format: as for `read_series`.
        series: a column that names the series of each row. Without it each file is one series.

    Raises:
        ValueError: as `read_series`. Also for a folder without CSV files, dates in one file and numbers in another, or
            different channels.
    """
    found: dict[str, SeriesTable] = {}
    files = table_files(paths)
    for path in files:
        file = _read_file(path, time, values, ("series", series), table_format)
        names: Any = path.stem if len({p.stem for p in files}) == len(files) else str(path)
        names = pd.Series(names, file.rows.index) if series is None else file.rows[_LABEL]
        for name, rows in file.rows.groupby(names, sort=False):
            if name in found:
                raise ValueError(f"series: got {name!r} in two files, {path} is the second, expected it in one")
            found[str(name)] = _series(file, rows, f"series {name}, ")
    first = next(iter(found.values()))
    for name, one in found.items():
        if bool(one.unit) != bool(first.unit):
            notes = sorted({note for note in (*first.notes, *one.notes) if note.startswith("times")})
            fault = f"time: got dates in some series and numbers in others ({name!r}), expected one kind"
            raise ValueError(": ".join([fault, *filter(None, ["; ".join(notes)])]))
        if one.channels != first.channels:
            raise ValueError(f"values: got {one.channels} in {name!r}, expected {first.channels}, as in the first")
    seen = _without_unseen(list(found.values()), files[0])
    return {name: one.in_unit(first.unit) for name, one in zip(found, seen, strict=True)}


def table_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files themselves, and all `*.csv` of folders in the order of their names.

    Raises:
        ValueError: for no path, or a folder without such a file.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"file: the folder {path} has no *.csv, expected at least one")
        found += inside
    if not found:
        raise ValueError("file: got none, expected at least one CSV file")
    return found


_TIME, _LABEL = 0, 1  # columns of a file's rows; those of channels have their names, which are texts


class _File(NamedTuple):
    """A file that was read: times, labels (if there are some) and float64 values; the index has the lines."""

    path: Path
    rows: pd.DataFrame
    channels: tuple[str, ...]
    written: "pd.Series[Any]"  # times as they stand there
    sensors: bool
    notes: tuple[str, ...]
    table_format: TableFormat


def _read_file(
    path: Path, time: str, values: list[str] | None, label: tuple[str, str | None], table_format: TableFormat | None
) -> _File:
    """Read a file, and understand its times and values. `label` is "sensor" or "series" with its column."""
    table_format = table_format or TableFormat()
    time, values = time.strip(), values and [name.strip() for name in values]
    label = label[0], label[1] and label[1].strip()
    text, notes = read_text(path, table_format.encoding)
    separator = separator_of(text, time, table_format.separator, notes)
    table = read_cells(path, text, separator)
    columns = [name for name in table.columns if name not in (time, label[1])] if values is None else list(values)
    for argument, name in [("time", time), label, *(("values", column) for column in columns)]:
        if name is not None and name not in table.columns:
            names = ", ".join(table.columns)
            hint = "; --separator tells where it ends" if len(table.columns) == 1 else ""
            raise ValueError(f"{argument}: got {name!r}, expected a column of {path}: {names}{hint}")
    if {time, label[1]} & set(columns) or not columns or len(set(columns)) < len(columns):
        raise ValueError(f"values: got {columns}, expected columns other than those of times and labels, each once")
    decimal = table_format.decimal or _decimal(table[columns], table_format, notes)
    of_times = decimal if table[time].str.contains(decimal, regex=False).any() else "."
    stamps = _plain_numbers(table[time], of_times, table_format.thousands if table_format.time_unit else None)
    if table_format.date_format or (not table_format.time_unit and pd.to_numeric(stamps, errors="coerce").isna().any()):
        stamps = table[time]  # a date's own signs stay
    times, note = read_times(stamps, path, table_format.date_format, table_format.time_unit)
    parts: dict[Any, Any] = {_TIME: times}
    if label[1] is not None:
        missing = table[label[1]].isna()
        if missing.any():
            raise ValueError(f"{label[0]}: row {first_row(missing)} of {path} has none, expected a name in each")
        parts[_LABEL] = table[label[1]]
    parts |= {name: _numbers(table[name], path, decimal, table_format) for name in columns}
    notes += [note] if note else []
    sensors = label[0] == "sensor" and label[1] is not None
    return _File(path, pd.DataFrame(parts), tuple(columns), table[time], sensors, tuple(notes), table_format)


def _decimal(cells: pd.DataFrame, table_format: TableFormat, notes: list[str]) -> str:
    """A comma where no number has a point, and the commas of some cannot be thousands; otherwise a point."""
    written = pd.concat([cells[name] for name in cells]).dropna()
    commas = written[written.str.contains(",", regex=False)]
    known = table_format.thousands is not None or not len(commas) or bool(written.str.contains(r"\d\.\d").any())
    if known or not commas.str.strip().str.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?").all():
        return "."
    if commas.str.strip().str.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}").all():
        return "."  # nobody can tell: refused, with both options
    notes.append("numbers: with a decimal comma (--decimal chooses another)")
    return ","


def _plain_numbers(column: "pd.Series[Any]", decimal: str, thousands: str | None) -> "pd.Series[Any]":
    """Cells with the signs of Python's numbers. One with its signs elsewhere stays text."""
    column = column.str.strip()
    if thousands is not None:
        sign, point = re.escape(thousands), re.escape(decimal)
        grouped = column.str.fullmatch(rf"[+-]?\d{{1,4}}({sign}\d{{2,4}})*{sign}\d{{3,4}}({point}\d*)?")
        column = column.where(grouped != True, column.str.replace(thousands, "", regex=False))  # noqa: E712 - or NA
    return column.str.translate(str.maketrans(decimal + ".", "." + decimal))


def _numbers(column: "pd.Series[Any]", path: Path, decimal: str, table_format: TableFormat) -> "pd.Series[Any]":
    """The values of a column, NaN where none was read."""
    marks = pd.Series(["", *table_format.missing], dtype=str)
    numbers = pd.to_numeric(_plain_numbers(column, decimal, table_format.thousands), errors="coerce")
    missing = column.isna() | column.str.strip().isin(marks)
    missing |= numbers.isin(pd.to_numeric(marks, errors="coerce").dropna())
    wrong = ~missing & (numbers.isna() | (numbers.abs() > _LARGEST))
    if wrong.any():
        row, expected = first_row(wrong), f"a number up to {_LARGEST:g}, or an empty cell where none was read"
        given = str(column.loc[row])
        signs = re.fullmatch(rf"\s*[+-]?\d*([{_SIGNS}]\d+)+\s*", given)
        hint = "--decimal or --thousands reads such signs" if signs else "--missing names other marks, --values columns"
        raise ValueError(f"values: got {given!r} in row {row} of {path}, expected {expected}; {hint} ({column.name})")
    return numbers.astype(np.float64).mask(missing)


def _series(file: _File, rows: pd.DataFrame, name: str = "") -> SeriesTable:
    """The series of some rows of a file. The name stands before what is said of them alone."""
    rows, changes = _in_order(file, rows)
    times, unit, origin = numbers_of(rows[_TIME])
    values = rows[list(file.channels)].to_numpy(np.float64)
    labels, lines = tuple(rows[_LABEL]) if file.sensors else (), tuple(rows.index.tolist())
    notes = (*file.notes, *(name + note for note in changes))
    return SeriesTable(torch.tensor(times), torch.tensor(values), file.channels, unit, origin, labels, lines, notes)


def _in_order(file: _File, rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rows in order of time, one for each time (and sensor), and what was changed."""
    notes, chosen = [], file.table_format
    early = rows[_TIME].diff() < (0 if rows[_TIME].dtype.kind == "f" else pd.Timedelta(0))
    if early.any():
        row = first_row(early)
        given = f"{file.written.loc[row]!r} before an earlier one"
        if not chosen.sort:
            raise ValueError(f"time: got {given} (row {row} of {file.path}), expected times in order (or --sort)")
        notes.append(f"rows: sorted by time; the first out of order is row {row} (--no-sort refuses them)")
        rows = rows.sort_values(_TIME, kind="stable")
    keys = [_TIME, _LABEL] if file.sensors else [_TIME]
    doubled = rows.duplicated(keys, keep=False)
    if not doubled.any():
        return rows, notes
    groups = rows[doubled].groupby(keys, sort=False)[list(file.channels)]
    apart = groups.transform("nunique").gt(1).any(axis=1)  # missing readings contradict nothing
    if chosen.duplicates == "refuse" or (chosen.duplicates is None and apart.any()):
        one = rows.loc[first_row(apart) if chosen.duplicates is None else first_row(doubled)]
        same = (rows[keys] == one[keys]).all(axis=1)
        both = rows.index[same]
        several = "keep one row of a sensor at a time" if file.sensors else "name their column by --sensor"
        different = " with different values" if chosen.duplicates is None else ""
        raise ValueError(
            f"time: got {file.written.loc[both[1]]!r} twice{different} (rows {both[0]} and {both[1]} of {file.path}), "
            f"expected each time once: --duplicates mean, first or last merges rows, or {several}"
        )
    how = chosen.duplicates or "first"
    merged = rows.groupby(keys, sort=False)[list(file.channels)].agg(how).reset_index()
    merged.index = rows.index[~rows.duplicated(keys)]
    words = f"by the {how} reading of each column" if apart.any() else "which do not contradict each other"
    fewer = len(rows) - len(merged)
    return merged, [*notes, f"rows: {fewer} of a time that another row has were merged, {words}"]


def _without_unseen(series: list[SeriesTable], path: Path) -> list[SeriesTable]:
    """The series without channels that have no reading in any of them."""
    channels = series[0].channels
    seen = torch.stack([~one.values.isnan().all(0) for one in series]).any(0)
    unseen = [name for name, there in zip(channels, seen.tolist(), strict=True) if not there]
    if len(unseen) == len(channels):
        raise ValueError(f"values: {unseen[0]!r} has no reading in {path}, expected at least one")
    if not unseen:
        return series
    kept = tuple(name for name in channels if name not in unseen)
    note = f"values: {', '.join(map(repr, unseen))} left out, without a reading"
    return [one._replace(values=one.values[:, seen], channels=kept, notes=(*one.notes, note)) for one in series]
