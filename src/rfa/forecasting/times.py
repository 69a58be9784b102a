"""The times of a CSV file: numbers, or dates in several spellings, with their zone. What is unclear is refused."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from rfa.checks import require

Column = Any  # a column of pandas; its index has the rows of the file, counted from 1
EPOCH_UNITS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}  # of epoch stamps, in nanoseconds
_FIRST_STAMP, _LAST_STAMP = 1e17, 4.1e18  # epoch stamps that are recognised: 1973 to 2099, in nanoseconds
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_FIRST_DAYS = {"%V": ("-1", "-%u"), "%W": ("-1", "-%w"), "%U": ("-0", "-%w")}  # of weeks
_OFFSET = r"[T ]\d\d.*?(Z|UTC|[+-]\d\d(?::?\d\d)?)$"
_WAYS = "--date-format or --time-unit says how they are written"
SKIP_HINT = "--skip-bad-rows leaves such rows out"
_SPELLINGS = {  # digits that are dates
    r"(1[89]|2[01])\d\d(0[1-9]|1[0-2])": "%Y%m",
    r"(1[89]|2[01])\d{6}": "%Y%m%d",
    r"(1[89]|2[01])\d{8}": "%Y%m%d%H",
    r"(1[89]|2[01])\d{10}": "%Y%m%d%H%M",
    r"(1[89]|2[01])\d{12}": "%Y%m%d%H%M%S",
}


@dataclass
class TimeReader:
    """A file that is being read, written in a `TableFormat`, and what is said of it."""

    path: Path
    form: Any
    notes: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # series of which a cell was left out
    ids: Column | None = None  # of a long file: its bad rows are told of their series

    def good(self, rows: Any, good: Column, cells: Column, argument: str, expected: str) -> Any:
        """The rows with a condition. Unless bad ones are left out, the first of them is refused by name."""
        if self.ids is not None and good.mean() >= 0.5 and not self.form.skip_bad_rows:
            self.leave_out(cells[~good], self.ids, "is no time; the row is left out")
        elif not good.all() and not self.form.skip_bad_rows:
            row = good.index[~good.to_numpy()][0]
            given = f"{cells[row]!r:.60} in row {row} of {self.path.name}, column {cells.name!r}"
            raise ValueError(f"{argument}: got {given}, expected {expected}; {SKIP_HINT}")
        return rows[good]

    def leave_out(self, cells: Column, ids: Column, why: str) -> None:
        """Say of each series with such cells which one is the first."""
        first = cells[~ids[cells.index].duplicated()]
        for row, cell in first.items():
            said = f"{cells.name}: {cell!r:.40} in row {row} {why}"
            self.problems[ids[row]] = "; ".join(filter(None, [self.problems.get(ids[row]), said]))

    def joined_times(self, cells: pd.DataFrame, times: list[str]) -> Column:
        """The times as one column of text: a date and its clock time, or a year, a month, a day ..."""
        if len(times) == 1:
            return cells[times[0]]
        joined = cells[times].agg(" ".join, axis=1).str.strip().rename(" ".join(times))
        if self.form.date_format or cells[times[0]].str.fullmatch(r"\d{4}").mean() < 0.5:
            return joined
        parts = {part: pd.to_numeric(cells[name], errors="coerce") for part, name in zip(_PARTS, times, strict=False)}
        dates = pd.to_datetime(pd.DataFrame({"month": 1, "day": 1, **parts}), errors="coerce")
        return joined.mask(dates.notna(), dates.dt.strftime("%Y-%m-%d %H:%M:%S.%f"))

    def read_times(self, column: Column) -> Column:
        """Times as numbers or as dates: as what reads all of them, or most where bad rows are left out."""
        form, decimal = self.form, "," if column.str.fullmatch(r"\d*,\d+").all() else "."
        numbers = pd.to_numeric(plain_numbers(column, decimal, None), errors="coerce")
        numbers = numbers.where(np.isfinite(numbers.astype(float)))
        read = [(said, times, int(times.notna().sum())) for said, times in _readings_of_times(column, numbers, form)]
        most = max(count for *_, count in read)
        best = [(said, times) for said, times, count in read if count == most]
        said, times = best[0]
        given = f"{column.iloc[0]} in row {column.index[0]}, column {column.name!r}"
        expected = form.date_format or "a number, or a date like 2024-01-31 12:00"
        expected += f", as {column[times.notna()].iloc[0]!r} in other rows; {_WAYS}" if most else f"; {_WAYS}"
        require(most > 0, "time", given, expected)
        times = self.good(times, times.notna(), column, "time", expected)
        formats = [other.removeprefix("dates, ") for other, _ in best if "%" in other and "%" in said]
        require(len(formats) < 2, "time", given, f"--date-format: {' and '.join(formats)} fit all rows")
        if said not in ("", "epoch", form.date_format):
            self.notes.append(f"times: {column.name!r} was read as {said} ({_WAYS})")
        written = times.dtype.kind == "M" and not said.startswith("epoch")
        return self.with_offset(times, column[times.index]) if written else times

    def with_offset(self, dates: Column, column: Column) -> Column:
        """Dates in UTC with the offset that is written beside them, or without a zone where none is."""
        offsets = column.str.extract(_OFFSET, expand=False)
        if offsets.isna().all():
            return dates.dt.tz_localize(None)
        expected = "an offset such as +01:00 or Z, as in other rows"
        dates = self.good(dates, offsets.notna(), column, "time", expected)
        if offsets.dropna().nunique() > 1 and self.form.zone is None:
            said = "has several offsets; they are written in UTC (--zone: with a place's clock)"
            self.notes.append(f"times: {column.name!r} {said}")
            return dates
        return dates.dt.tz_convert(pd.Timestamp(f"2024-01-01T00:00{offsets.dropna().iloc[0].replace('UTC', 'Z')}").tz)

    def on_clock(self, stamps: Column, ids: Column | None) -> Column:
        """Dates as the clocks of a place show them. An hour that they show twice is the later one the second time."""
        zone = self.form.zone
        if zone is None:
            return stamps
        require(stamps.dtype.kind == "M", "zone", zone, "dates in the column of times, or no zone")
        if stamps.dt.tz is not None:
            return stamps.dt.tz_convert(zone)
        keys = pd.DataFrame({"id": "" if ids is None else ids, "t": stamps})
        again = (
            (keys if stamps.iloc[-1] >= stamps.iloc[0] else keys[::-1]).groupby(["id", "t"]).cumcount()[stamps.index]
        )
        every = np.ones(len(stamps), dtype=bool)
        first = stamps.dt.tz_localize(zone, ambiguous=every, nonexistent="shift_forward")
        second = stamps.dt.tz_localize(zone, ambiguous=~every, nonexistent="shift_forward")
        double, text = first != second, stamps.astype(str)
        there = (first.dt.tz_localize(None) == stamps) | (
            stamps == stamps.dt.normalize()
        )  # a day may lack its midnight
        self.good(stamps, there, text, "time", f"a time that the clocks of {zone} do not skip")
        self.good(stamps, ~double | (again < 2), text, "time", "the double hour of autumn twice at most")
        once = double & ~stamps.isin(stamps[double & (again > 0)])
        if once.any():
            self.notes.append(f"times: row {once.idxmax()} shows a double hour of autumn once, taken for its first")
        return first.where(~double | (again == 0), second)[there & (~double | (again < 2))]


def plain_numbers(cells: Column, decimal: str, thousands: str | None) -> Column:
    """Cells with the signs of Python's numbers. One with its signs elsewhere stays text."""
    if thousands is not None:
        sign, point = re.escape(thousands), re.escape(decimal)
        grouped = cells.str.fullmatch(rf"[+-]?\d{{1,3}}({sign}\d{{2,3}})*{sign}\d{{3}}({point}\d*)?")
        cells = cells.where(~grouped, cells.str.replace(thousands, "", regex=False))
    return cells if decimal == "." else cells.str.translate(str.maketrans(",.", ".,"))


def _readings_of_times(column: Column, numbers: Column, form: Any) -> Iterator[tuple[str, Column]]:
    """What the times may be, the likeliest first, in words that are "" where there is no doubt."""
    if form.date_format is not None:
        yield form.date_format, parsed_dates(column, form.date_format)
    elif form.time_unit in EPOCH_UNITS or form.epoch is not None:
        yield "epoch", _of_epoch(numbers, form.time_unit or "s", form.epoch)
    elif form.time_unit is not None:
        yield "", numbers
    else:
        digits, dated = column.str.replace(r"\.0+$", "", regex=True), False
        for spelling, date_format in _SPELLINGS.items():
            found = digits.str.fullmatch(spelling)
            dated |= found.mean() > 0.5
            if found.any():
                yield f"dates, {date_format}", parsed_dates(digits.where(found, ""), date_format)
        size = numbers.dropna().abs()
        for unit, length in EPOCH_UNITS.items():
            if len(size) and size.between(_FIRST_STAMP / length, _LAST_STAMP / length).all():
                yield f"epoch stamps in {unit}, UTC", _of_epoch(numbers, unit, None)
        if not dated:
            yield "", numbers
        if numbers.isna().any():
            yield "", parsed_dates(column.str.replace(r" ?(UTC|GMT)$", "Z", regex=True), "ISO8601")
            yield "first days of weeks, months or quarters", _periods(column)
            yield from ((f"dates, {each}", parsed_dates(column, each)) for each in _guessed_formats(column))


def parsed_dates(column: Column, date_format: str) -> Column:
    """Dates in UTC, NaT where a cell is none. Weeks without a day begin on their first one."""
    for week, (day, directive) in _FIRST_DAYS.items():
        if week in date_format and not re.search("%[aAuwd]", date_format):
            column, date_format = column + day, date_format + directive
    return _microseconds(pd.to_datetime(column, errors="coerce", format=date_format, utc=True))


def _microseconds(dates: Column) -> Column:
    return dates if (dates.dt.nanosecond.fillna(0) % 1000).any() else dates.dt.as_unit("us")


def _of_epoch(numbers: Column, unit: str, epoch: str | None) -> Column:
    """Dates of stamps since an epoch. Whole ones stay integers, others are rounded to microseconds."""
    whole = numbers.dtype.kind == "i"
    ticks = numbers if whole else (numbers * (EPOCH_UNITS[unit] / 1e3)).round()
    dates: Column = pd.to_datetime(ticks, unit=unit if whole else "us", utc=True, errors="coerce")
    start = pd.Timestamp(epoch or 0)
    start = start.tz_localize("UTC") if start.tz is None else start
    return _microseconds(dates + (start - pd.Timestamp(0, tz="UTC")))


def _periods(column: Column) -> Column:
    """The first days of 2024-W05, 2024M03 and 2024-Q1."""
    parts = column.str.extract(r"^(\d{4})[- ]?([WMQ])(\d{1,2})$")
    month = (pd.to_numeric(parts[2]) - 1) * parts[1].map({"M": 1, "Q": 3}) + 1
    months = parts[0] + "-" + month.astype("Int64").astype(str).str.zfill(2)
    weeks = (parts[0] + "-W" + parts[2].str.zfill(2)).where(parts[1] == "W", "")
    return parsed_dates(months, "%Y-%m").fillna(parsed_dates(weeks, "%G-W%V"))


def _guessed_formats(column: Column) -> list[str]:
    """Formats of dates that fit a cell of the most common shape, day or month first."""
    shapes = column.str.replace(r"\d+", "9", regex=True).str.replace(r"[^\W\d_]+", "A", regex=True)
    usual = column[shapes == shapes.mode()[0]].iloc[0]
    usual = re.sub(r"(?i)\b(12|\d)(?=:[\d:]+ ?[AP]M)", "11", usual)  # pandas knows no format of 12:00 AM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = {guess_datetime_format(usual, dayfirst=first) or "%Y-%d" for first in (True, False)}
    return sorted(each for each in found if not each.startswith(("%Y-%d", "%Y/%d")))  # nobody writes those
