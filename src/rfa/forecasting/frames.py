"""Tables in and out of a forecaster: ids, times with their zone and calendar, readings and regressors.

Tables of pandas and polars come and go through narwhals. Nothing is resampled: a series keeps its own stamps, and what
is computed with them are positions, counted in its usual step.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np

from rfa.checks import require

_TICKS = {"ns": 10**9, "us": 10**6}  # in a second
_DAY, _YEAR = 86400, 31556952  # seconds
_SHARE = 0.75  # of the stamps that lie on a series' grid; the others are kept beside it
_ROUNDING = 1e-6  # of a step
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": _DAY, "w": 7 * _DAY}
_MONTHS = {"M": 1, "Q": 3, "Y": 12}


class StampKind(NamedTuple):
    """What a column of times is, so that later stamps are given as it has them."""

    dtype: Any  # of narwhals
    unit: str = ""  # in which dates are counted, "ns" or "us"; "" for numbers
    zone: str | None = None
    period: str | None = None  # the frequency of periods of pandas

    @property
    def is_float(self) -> bool:
        """Whether stamps are numbers that need not be whole."""
        return not self.unit and not self.dtype.is_integer()

    @property
    def name(self) -> str:
        """In words, for messages."""
        return "numbers" if not self.unit else f"dates {'without a zone' if self.zone is None else 'with a zone'}"

    def label(self, stamp: Any) -> str:
        """A stamp as a message names it."""
        if not self.unit:
            return f"{stamp:.15g}"
        shown = str(_local(np.array([stamp]), self)[0].astype(f"M8[{self.unit}]"))
        return re.sub(r"(T00:00:00)?\.0+$", "", shown)


class Length(NamedTuple):
    """A horizon that is a length of time: months of the calendar, or seconds."""

    months: int
    seconds: float
    text: str


def horizon(given: Any) -> int | Length:
    """A number of steps, or a length such as "24h", "12M" or "52w".

    Raises:
        ValueError: for a number below 1, or another text.
    """
    expected = 'a number of steps >= 1, or a length such as "24h", "12M", "52w" (s, min, h, d, w, M, Q, Y)'
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d|w|M|Q|Y|H|D|W|y)", given.strip())
        require(parts is not None and float(parts[1]) > 0, "h", given, expected)
        number, unit = float(parts[1]), parts[2]  # type: ignore[index]
        unit = "Y" if unit == "y" else unit.lower() if unit in "HDW" else unit
        if unit in _MONTHS:
            require(number == int(number), "h", given, "a whole number of months, quarters or years")
            return Length(int(number) * _MONTHS[unit], 0.0, given)
        return Length(0, number * _SECONDS[unit], given)
    whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    require(whole and given >= 1, "h", given, expected)
    return int(given)


def _local(stamps: np.ndarray, kind: StampKind) -> np.ndarray:
    """Stamps in UTC as the clocks of their zone show them, in the same unit."""
    if kind.zone is None:
        return stamps
    import pandas as pd

    clock = pd.DatetimeIndex(stamps.view(f"M8[{kind.unit}]")).tz_localize("UTC").tz_convert(kind.zone)
    return clock.tz_localize(None).to_numpy().astype(f"M8[{kind.unit}]").view(np.int64)


def _utc(clock: np.ndarray, kind: StampKind) -> np.ndarray:
    """The inverse. A midnight that clocks skip is the first moment after it."""
    if kind.zone is None:
        return clock
    import pandas as pd

    shown = pd.DatetimeIndex(clock.view(f"M8[{kind.unit}]"))
    moments = shown.tz_localize(kind.zone, nonexistent="shift_forward", ambiguous=np.ones(len(clock), dtype=bool))
    return moments.tz_convert("UTC").tz_localize(None).to_numpy().astype(f"M8[{kind.unit}]").view(np.int64)


@dataclass(frozen=True)
class Steps:
    """The usual step of a series: months, business days, another offset of pandas, or a length.

    Steps of a day or more are counted on the clock of the zone, shorter ones in elapsed time.
    """

    kind: StampKind
    size: Any  # months, or a length in ticks; 1 for the others
    origin: Any  # a stamp at position 0, on the clock where `local`
    calendar: str = ""  # "months", "weekdays", or the name of an offset of pandas. "": a length
    gridded: bool = True  # most stamps lie whole numbers of steps apart
    day: int = 1  # of months: that of the stamps; 31 for their last days

    @property
    def local(self) -> bool:
        """Whether steps are counted on the clock of the zone."""
        return bool(self.calendar) or (self.kind.unit != "" and self.size % self._day == 0)

    @property
    def period(self) -> float:
        """The season that the calendar suggests, in steps: a year of months or weeks, a week, a day. 0: none."""
        if self.calendar == "months":
            return 12 / self.size if self.size < 12 else 0.0
        if self.calendar == "weekdays":
            return 5.0
        if self.calendar or not self.kind.unit:
            return 0.0
        seconds = self.size / _TICKS[self.kind.unit]
        if seconds <= _DAY / 2:
            return _DAY / seconds
        return {_DAY: 7.0, 7 * _DAY: _YEAR / (7 * _DAY)}.get(seconds, 0.0)

    @property
    def _day(self) -> int:
        return _DAY * _TICKS[self.kind.unit]

    def positions(self, stamps: np.ndarray) -> np.ndarray:
        """Stamps as numbers of steps from the origin, whole ones on the grid, `(n,)`."""
        clock = _local(stamps, self.kind) if self.local else stamps
        if self.calendar == "months":
            found = (self._months(clock) - self._months(np.array([self.origin]))) / self.size
        elif self.calendar == "weekdays":
            days, first = (np.asarray(x) // self._day for x in (clock, self.origin))
            found = np.busday_count(first.astype("M8[D]"), days.astype("M8[D]")) + (
                clock % self._day - self.origin % self._day
            ) / float(self._day)
        elif self.calendar:
            import pandas as pd

            ends = np.array([self.origin, clock.max()]).view(f"M8[{self.kind.unit}]")
            grid = pd.date_range(*ends, freq=self.calendar).to_numpy().astype(f"M8[{self.kind.unit}]").view(np.int64)
            found = np.interp(clock, grid, np.arange(len(grid)))
        else:
            found = (clock - self.origin) / float(self.size)
        whole = np.round(found)
        return np.where(np.abs(found - whole) < _ROUNDING, whole, found)

    def later(self, last: Any, count: int) -> np.ndarray:
        """The next stamps after one, `(count,)`: on the grid where the series has one.

        Raises:
            ValueError: for stamps beyond what their unit holds.
        """
        start = self.positions(np.array([last]))[0]
        clock = _local(np.array([last]), self.kind)[0] if self.local else last
        positions = (np.floor(start) if self.gridded else start) + np.arange(1, count + 1)
        if self.calendar == "months":
            months = self.origin_month + positions.astype(np.int64) * self.size
            found = self._anchor(months)
        elif self.calendar == "weekdays":
            first = np.asarray(self.origin // self._day).astype("M8[D]")
            days = np.busday_offset(first, positions.astype(np.int64), roll="forward")
            found = days.astype(np.int64) * self._day + self.origin % self._day
        elif self.calendar:
            import pandas as pd

            start = pd.Timestamp(np.array([self.origin]).view(f"M8[{self.kind.unit}]")[0])
            offset = pd.tseries.frequencies.to_offset(self.calendar)
            dates = [start + int(k) * offset for k in positions]
            found = np.array(dates, dtype=f"M8[{self.kind.unit}]").view(np.int64)
        elif not isinstance(self.size, int):
            found = self.origin + positions * self.size
        elif self.gridded:
            found = self.origin + positions.astype(np.int64) * self.size
        else:
            found = clock + np.arange(1, count + 1) * self.size
        far = bool((np.diff(found, prepend=clock) <= 0).any())
        require(not far, "h", f"{count} steps", "stamps that the type of the series' times holds")
        return _utc(found, self.kind) if self.local else found

    def count(self, last: Any, length: int | Length) -> int:
        """How many steps a horizon has after a stamp.

        Raises:
            ValueError: for a length where times are numbers, or one that is shorter than a step.
        """
        if isinstance(length, int):
            return length
        require(self.kind.unit != "", "h", length.text, "a number of steps: the times are numbers")
        if self.calendar == "months" and length.months:
            steps = length.months // self.size
        else:
            now, seconds = np.array([last]), int(length.seconds * _TICKS[self.kind.unit])
            end = now + seconds
            if self.local or length.months:
                clock = _local(now, self.kind) + seconds
                day, time = np.divmod(clock, self._day)
                month = day.astype("M8[D]").astype("M8[M]").astype(np.int64)
                moved = _anchored(month + length.months, day - _first_day(month) + 1, time, self._day)
                end = _utc(moved if length.months else clock, self.kind)
            start, stop = self.positions(np.concatenate([now, end]))
            steps = int(np.floor(stop - (np.floor(start) if self.gridded else start) + _ROUNDING))
        require(steps >= 1, "h", length.text, f"at least one step of the series, {self._words}")
        return steps

    @cached_property
    def origin_month(self) -> int:
        """The month of the origin, counted from 1970."""
        return int(np.floor(self._months(np.array([self.origin]))[0] + _ROUNDING))

    @property
    def _words(self) -> str:
        if self.calendar == "months":
            return f"{self.size} months"
        return f"{self.size / _TICKS[self.kind.unit]:g} s" if not self.calendar else self.calendar

    def _months(self, clock: np.ndarray) -> np.ndarray:
        """Months since 1970 with their parts: whole at the day of the stamps."""
        month = (clock // self._day).astype("M8[D]").astype("M8[M]").astype(np.int64)
        month = month - (clock < self._anchor(month))
        start, end = self._anchor(month), self._anchor(month + 1)
        return month + (clock - start) / (end - start)

    def _anchor(self, month: np.ndarray) -> np.ndarray:
        return _anchored(month, self.day, self.origin % self._day, self._day)


def _first_day(month: np.ndarray) -> np.ndarray:
    return month.astype("M8[M]").astype("M8[D]").astype(np.int64)


def _anchored(month: np.ndarray, day: Any, time_of_day: Any, ticks: int) -> np.ndarray:
    """A day of months since 1970, the last one where a month is shorter."""
    days = np.minimum(_first_day(month) + day, _first_day(month + 1)) - 1
    return days * ticks + time_of_day


def usual_steps(stamps: np.ndarray, kind: StampKind, others: Steps | None = None) -> Steps | None:
    """The step of increasing stamps. With fewer than three it is that of other series. None: it is unknown."""
    if len(stamps) < 3 and others is not None:
        origin = (_local(stamps, kind) if others.local else stamps)[-1]
        day = others.day
        if others.calendar == "months":
            last = np.asarray(origin // others._day).astype("M8[D]")
            is_end = (last + 1).astype("M8[M]") != last.astype("M8[M]")
            day = 31 if day == 31 and is_end else int((last - last.astype("M8[M]")).astype(int)) + 1
        return replace(others, origin=origin, day=day)
    if len(stamps) == 1:
        return None if kind.unit else Steps(kind, type(stamps[0].item())(1), stamps[0])
    if not kind.unit:
        return _equal_steps(stamps, kind)
    clock = _local(stamps, kind)
    ticks = _DAY * _TICKS[kind.unit]
    gap = _lower_median(np.diff(clock))
    calendar = _calendar(clock, kind, gap) if gap >= ticks else None
    if calendar is not None:
        return calendar
    return _equal_steps(clock if gap % ticks == 0 else stamps, kind)


def _lower_median(gaps: np.ndarray) -> Any:
    return np.sort(gaps)[(len(gaps) - 1) // 2]


def _equal_steps(stamps: np.ndarray, kind: StampKind) -> Steps:
    """Steps of the usual gap, on the grid that most stamps have."""
    size = _lower_median(np.diff(stamps))
    parts = (
        (stamps - stamps[-1]) % size if stamps.dtype.kind == "i" else np.round((stamps - stamps[-1]) / size % 1, 6) % 1
    )
    phases, counts = np.unique(parts, return_counts=True)
    usual = parts == phases[counts.argmax()]
    gridded = bool(usual.mean() >= _SHARE)
    return Steps(kind, size.item(), stamps[usual][0] if gridded else stamps[-1], gridded=gridded)


def _calendar(clock: np.ndarray, kind: StampKind, gap: int) -> Steps | None:
    """Steps of months or business days, or another offset that pandas infers. None: there are none."""
    ticks = _DAY * _TICKS[kind.unit]
    if gap == ticks and not (np.diff(clock) == 3 * ticks).any():
        return None
    if gap % (7 * ticks) == 0 and (np.diff(clock) == gap).mean() >= _SHARE:
        return None
    dates = clock.view(f"M8[{kind.unit}]")
    if len(clock) == 2:
        month, day = dates.astype("M8[M]"), dates.astype("M8[D]")
        ends = bool(((day + 1).astype("M8[M]") != month).all())
        days = (day - month).astype(int) + 1
        if gap < 28 * ticks or not (ends or days[0] == days[1]):
            return None
        size = int((month[1] - month[0]).astype(int))
        return Steps(kind, size, clock[-1], "months", day=31 if ends else int(days[0]))
    import pandas as pd

    from rfa.estimation.time_axis import calendar_step

    offset, usual = calendar_step(dates), np.ones(len(dates), dtype=bool)
    if offset is None and gap >= 28 * ticks:  # some stamps are off the days of the others
        day = (dates.astype("M8[D]") - dates.astype("M8[M]")).astype(int) + 1
        last = (dates.astype("M8[D]") + 1).astype("M8[M]") != dates.astype("M8[M]")
        usual = max(last, day == np.bincount(day).argmax(), key=np.sum)
        offset = calendar_step(dates[usual]) if usual.mean() >= _SHARE else None
    if isinstance(offset, pd.offsets.BDay):
        return Steps(kind, 1, clock[0], "weekdays")
    if offset is not None:
        ends = isinstance(offset, pd.offsets.MonthEnd)
        day = 31 if ends else pd.Timestamp(dates[usual][0]).day
        return Steps(kind, offset.n if ends else offset.kwds["months"], clock[usual][0], "months", day=day)
    if (np.diff(clock) == gap).all():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pandas 4 gives an offset in the place of its name
        name = pd.infer_freq(pd.DatetimeIndex(dates))
    return None if name is None else Steps(kind, 1, clock[0], getattr(name, "freqstr", name))


@dataclass
class Ids:
    """The ids of series, in their order, and the type of their column."""

    keys: list[Any]  # of each series its type's name and its id, so that 1, 1.0, "1" and True are four
    labels: Any  # the ids as a column of narwhals. None: one series without an id
    backend: str  # the library of the table

    @property
    def named(self) -> bool:
        """Whether there is a column of ids."""
        return self.labels is not None

    @classmethod
    def of(cls, column: Any, keys: list[Any]) -> "Ids":
        """Of a column and its keys, each once; those of other types one type after the other."""
        first: dict[Any, int] = {}
        for row, key in enumerate(keys):
            first.setdefault(key, row)
        try:
            ordered = sorted(first)
        except TypeError:  # ids of a type without an order
            ordered = sorted(first, key=lambda key: (key[0], str(key[1])))
        return cls(ordered, column[[first[key] for key in ordered]], column.implementation.value)

    def value(self, place: int) -> Any:
        """The id of a series, None where there is no column of ids."""
        return self.keys[place][1]

    def table(self, columns: dict[str, Any], places: np.ndarray, name: str) -> Any:
        """A table of the caller's library: ids by the places of their series, then the columns."""
        parts: dict[str, Any] = {}
        if self.named:
            parts[name] = nw.maybe_reset_index(self.labels[places.tolist()]).alias(name)
        for each, column in columns.items():
            known = isinstance(column, nw.Series)
            parts[each] = column if known else nw.new_series(each, column, backend=self.backend)
        first, *rest = parts.values()  # `narwhals.from_dict` loses the zone of dates of pandas
        return first.to_frame().with_columns(*rest).to_native()


@dataclass
class Panel:
    """The series of a table: in order of their ids, each in order of its stamps."""

    ids: Ids
    kind: StampKind
    stamps: list[np.ndarray]  # numbers, or dates in UTC as integers
    values: list[np.ndarray]  # NaN where nothing was read
    regressors: list[np.ndarray]  # (n, k)
    names: list[str]  # of the regressors
    refused: dict[int, str] = field(default_factory=dict)  # series that cannot be done, and why
    left_out: dict[int, str] = field(default_factory=dict)  # series of which a reading was none, which one and why


class Names(NamedTuple):
    """The names of the columns."""

    id: str
    time: str
    target: str


def as_table(data: Any, names: Names) -> tuple[Any, str | None]:
    """What a caller gives as a table of narwhals, and the frequency of its periods."""
    if isinstance(data, dict) or hasattr(data, "index") and hasattr(data, "to_frame") and not hasattr(data, "columns"):
        import pandas as pd

        data = pd.DataFrame(data if isinstance(data, dict) else {names.time: data.index, names.target: data.to_numpy()})
    period, column = None, data[names.time] if names.time in getattr(data, "columns", ()) else None
    if str(getattr(column, "dtype", "")).startswith("period["):
        period = str(column.dtype)[7:-1]
        data = data.assign(**{names.time: column.dt.to_timestamp()})
    expected = f"a table of pandas or polars with {names.time!r} and {names.target!r}, or a Series of pandas"
    try:
        table = nw.from_native(data, eager_only=True)
    except TypeError:
        raise ValueError(f"df: got {type(data).__name__}, expected {expected}") from None
    return nw.maybe_reset_index(table), period


def read_panel(
    data: Any, names: Names, regressors: Sequence[str] | None = None, target: bool = True, unit: str = ""
) -> Panel:
    """The series of a table, its other columns as regressors.

    Args:
        data: a table with a row for each reading, in any order, or a Series of pandas.
        names: of its columns. Without a column of ids it is one series.
        regressors: the names of those that are needed. None: all other columns.
        target: whether the table has readings.
        unit: in which dates are counted. "": in their own.

    Raises:
        ValueError: for a missing column, id or stamp, stamps that are text, regressors that are no numbers.
    """
    table, period = as_table(data, names)
    known = [names.id, names.time, names.target]
    for name in [names.time, *([names.target] if target else []), *(regressors or [])]:
        require(name in table.columns, "df" if target else "X", table.columns, f"a column {name!r}")
    stamps, kind = read_stamps(table[names.time], period, unit)
    others = [name for name in table.columns if name not in known] if regressors is None else list(regressors)
    columns = [_read_regressor(table[name]) for name in others]
    values, unreadable = read_numbers(table[names.target]) if target else (np.full(len(table), np.nan), {})
    require(len(table) > 0, "df", "a table without rows", "readings")
    keys, ids = [("", None)] * len(table), Ids([("", None)], None, table.implementation.value)
    if names.id in table.columns:
        keys = read_ids(table[names.id])
        ids = Ids.of(table[names.id], keys)
    code = {key: place for place, key in enumerate(ids.keys)}
    codes = np.array([code[key] for key in keys])
    order = np.lexsort((stamps, codes))
    starts = np.searchsorted(codes[order], np.arange(len(ids.keys) + 1))
    rows = [order[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    every = np.stack(columns, axis=1) if columns else np.zeros((len(table), 0))
    panel = Panel(
        ids=ids,
        kind=kind,
        stamps=[stamps[r] for r in rows],
        values=[values[r] for r in rows],
        regressors=[every[r] for r in rows],
        names=others,
    )
    for row, cell in unreadable.items():
        said = f"{names.target}: {cell!r:.40} in row {row}, counted from 0, at {kind.label(stamps[row])} is no number"
        panel.left_out.setdefault(int(codes[row]), f"{said}; it is left out")
    for place, r in enumerate(rows):
        twice = np.flatnonzero(np.diff(stamps[r]) == 0)
        if len(twice):
            pair = sorted(r[twice[0] : twice[0] + 2].tolist())
            hint = "" if panel.ids.named else f"; there is no column {names.id!r}, so all rows are one series"
            at = kind.label(stamps[r][twice[0]])
            panel.refused[place] = f"{names.time}: {at} stands twice, in rows {pair[0]} and {pair[1]}{hint}"
    return panel


def read_ids(column: Any) -> list[Any]:
    """Ids with the names of their types, so that 1, 1.0, "1" and True are four."""
    found = column.to_list()
    absent = np.array(column.is_null().to_list(), dtype=bool)
    absent |= np.array([isinstance(value, float) and value != value for value in found], dtype=bool)
    if absent.any():
        row = int(absent.argmax())
        raise ValueError(f"{column.name}: got {found[row]!r} in row {row}, counted from 0, expected an id in each row")
    plain = [value.item() if isinstance(value, np.generic) else value for value in found]
    return [(type(value).__name__, value) for value in plain]


def read_stamps(column: Any, period: str | None = None, unit: str = "") -> tuple[np.ndarray, StampKind]:
    """Stamps as numbers, or as integers in UTC, and what they are."""
    dtype, name = column.dtype, column.name
    absent = np.array(column.is_null().to_list(), dtype=bool)
    if dtype == nw.Object:  # dates of the standard library
        found = column.to_list()
        dates = all(
            hasattr(value, "year") and getattr(value, "tzinfo", None) is None for value in found if value == value
        )
        require(dates, name, found[0], "dates or numbers; dates with zones in a column of one zone")
        column = nw.new_series(name, np.array(found, dtype="M8[us]"), backend=column.implementation)
        dtype = column.dtype
    if absent.any():
        row = int(absent.argmax())
        raise ValueError(
            f"{name}: got {column.to_list()[row]!r} in row {row}, counted from 0, expected a time in each row"
        )
    if isinstance(dtype, nw.Datetime) or dtype == nw.Date:
        unit = unit or ("ns" if getattr(dtype, "time_unit", "") == "ns" else "us")
        kind = StampKind(dtype, unit, getattr(dtype, "time_zone", None), period)
        column = column.cast(nw.Datetime("us")) if dtype == nw.Date else column
        return column.dt.timestamp(unit).to_numpy().astype(np.int64), kind
    require(dtype.is_numeric(), name, str(dtype), "dates or numbers; pandas.to_datetime makes dates of text")
    numbers = column.to_numpy()
    if dtype.is_integer():
        return numbers.astype(np.int64), StampKind(dtype)
    numbers = numbers.astype(np.float64)
    if not np.isfinite(numbers).all():
        row = int((~np.isfinite(numbers)).argmax())
        raise ValueError(f"{name}: got {numbers[row]} in row {row}, counted from 0, expected finite times")
    return numbers, StampKind(dtype)


def read_numbers(column: Any) -> tuple[np.ndarray, dict[int, Any]]:
    """Numbers as float64, NaN where one is missing, and the cells that are none by their rows."""
    if column.dtype.is_numeric() or column.dtype == nw.Boolean:
        found = np.array(column.cast(nw.Float64).to_numpy(), dtype=np.float64)
        cells: Any = found
    else:
        cells = column.to_list()
        absent = column.is_null().to_list()
        found = np.array([np.nan if none else _number(cell) for cell, none in zip(cells, absent, strict=True)])
    wrong = {int(row): cells[row] for row in np.flatnonzero(np.isinf(found))}
    found[np.isinf(found)] = np.nan
    return found, {row: cell.item() if isinstance(cell, np.generic) else cell for row, cell in wrong.items()}


def _number(cell: Any) -> float:
    """A cell as a number; infinite where it is none."""
    try:
        return float("inf") if isinstance(cell, str | bytes) else float(cell)
    except (TypeError, ValueError):
        return float("inf")


def _read_regressor(column: Any) -> np.ndarray:
    found, wrong = read_numbers(column)
    if wrong:
        row, cell = next(iter(wrong.items()))
        expected = "finite numbers, flags, or missing cells in a regressor; leave out columns that are none"
        raise ValueError(f"{column.name}: got {cell!r:.40} in row {row}, counted from 0, expected {expected}")
    return found


def future_regressors(panel: Panel, data: Any, names: Names, ahead: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The regressors of stamps to forecast, joined by name, id and stamp, `(h, k)`.

    Series without one of them are refused, and the pair of id and stamp is named.

    Raises:
        ValueError: without `data` where the series have regressors, for columns that they have not, other stamps.
    """
    if not panel.names:
        require(data is None, "X", "a table", "None: df has no regressors")
        return {}
    listed = ", ".join(map(repr, panel.names))
    require(data is not None, "X", None, f"the future values of {listed}, the other columns of df")
    extra = {*as_table(data, names)[0].columns} - {*names, *panel.names}
    require(not extra, "X", sorted(extra), f"the columns that df has: {listed}")
    given = read_panel(data, names, panel.names, target=False, unit=panel.kind.unit)
    require(given.kind.name == panel.kind.name, f"X: {names.time}", given.kind.name, f"{panel.kind.name}, as in df")
    places = {key: place for place, key in enumerate(given.ids.keys)}
    found = {}
    for place, stamps in ahead.items():
        source = places.get(panel.ids.keys[place])
        known = np.zeros(0) if source is None else given.stamps[source]
        rows = np.searchsorted(known, stamps)
        there = np.append(known, known[-1:] if len(known) else [0])[rows] == stamps if len(known) else rows < 0
        part = np.full((len(stamps), len(panel.names)), np.nan)
        if source is not None:
            part[there] = given.regressors[source][rows[there]]
        if source is not None and source in given.refused:
            panel.refused[place] = f"X: {given.refused[source]}"
        elif np.isnan(part).any():
            row, column = np.argwhere(np.isnan(part))[0]
            who = f"{names.id} {panel.ids.value(place)!r}, " if panel.ids.named else ""
            at = f"{who}{names.time} {panel.kind.label(stamps[row])}"
            panel.refused[place] = f"X: {panel.names[column]!r} is missing for {at}"
        else:
            found[place] = part
    return found


def stamp_column(name: str, stamps: np.ndarray, kind: StampKind, backend: Any) -> Any:
    """Stamps as a column of the kind that was given: dates with its unit and zone, numbers, periods."""
    if not kind.unit:
        whole = stamps.dtype.kind == "i" or bool((stamps == np.round(stamps)).all())
        column = nw.new_series(name, stamps, backend=backend)
        return column.cast(kind.dtype) if whole or not kind.dtype.is_integer() else column
    column = nw.new_series(name, stamps.view(f"M8[{kind.unit}]"), backend=backend)
    if kind.period is not None:
        native = column.to_native()
        return nw.from_native(native.dt.to_period(kind.period), series_only=True)
    if kind.zone is not None:
        column = column.dt.replace_time_zone("UTC").dt.convert_time_zone(kind.zone)
    return column.cast(kind.dtype) if column.dtype != kind.dtype else column
