"""The calendar of a series: its stamps as numbers of steps, its usual step, its next stamps, lengths of time."""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rfa.checks import require

_TICKS = {"ns": 10**9, "us": 10**6}  # in a second
_DAY, _YEAR = 86400, 31556952  # seconds
_LAST = 253402300800 * 10**6  # the end of the year 9999, in microseconds
_SHARE = 0.75  # of the stamps that lie on a series' grid; the others are kept beside it
_ROUNDING = 1e-6  # of a step
_LATE = 0.15  # of a month: stamps may come so much after their day, or before it
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": _DAY, "w": 7 * _DAY}
_WORDS = (("day", _DAY), ("hour", 3600), ("minute", 60), ("second", 1))
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


def horizon(given: Any, name: str = "h") -> int | Length:
    """A number of steps, or a length such as "24h", "12M" or "52w". The name is that of the argument.

    Raises:
        ValueError: for a number below 1, or another text.
    """
    expected = 'a number of steps >= 1, or a length such as "24h", "12M", "52w" (s, min, h, d, w, M, Q, Y)'
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d|w|M|Q|Y|H|D|W|y)", given.strip())
        require(parts is not None and float(parts[1]) > 0, name, given, expected)
        number, unit = float(parts[1]), parts[2]  # type: ignore[index]
        unit = "Y" if unit == "y" else unit.lower() if unit in "HDW" else unit
        if unit in _MONTHS:
            require(number == int(number), name, given, "a whole number of months, quarters or years")
            return Length(int(number) * _MONTHS[unit], 0.0, given)
        return Length(0, number * _SECONDS[unit], given)
    return whole_number(name, given, expected)


def whole_number(name: str, given: Any, expected: str = "a whole number >= 1") -> int:
    """A number of things. Raises `ValueError` for others."""
    whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    require(whole and given >= 1, name, given, expected)
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
        if self.calendar or not self.kind.unit:  # of pandas: business months, the third Friday of a month ...
            return 12.0 if self.calendar.startswith(("BM", "WOM")) else 4.0 if self.calendar.startswith("BQ") else 0.0
        seconds = self.size / _TICKS[self.kind.unit]
        if seconds <= _DAY / 2:
            return _DAY / seconds
        return {_DAY: 7.0, 7 * _DAY: _YEAR / (7 * _DAY)}.get(seconds, 0.0)

    def seasons(self, span: float) -> tuple[float, float]:
        """The season of readings over so many steps, and a further one: the week beside a day or a year. 0: none."""
        if self.calendar or not self.period:
            return self.period, 0.0
        if self.size == self._day:
            year = _YEAR / _DAY
            return (year, self.period) if span > 2 * year else (self.period, 0.0)
        return self.period, 7 * self.period if self.size < self._day else 0.0

    @property
    def words(self) -> str:
        """The length of a step as a message names it."""
        if self.calendar == "months":
            return "1 month" if self.size == 1 else f"{self.size} months"
        if self.calendar or not self.kind.unit:
            return {"weekdays": "1 business day"}.get(self.calendar, self.calendar) or f"{self.size:g}"
        seconds = self.size / _TICKS[self.kind.unit]
        name, unit = next((each for each in _WORDS if seconds % each[1] == 0), _WORDS[-1])
        return f"{seconds / unit:g} {name}" + ("s" if seconds != unit else "")

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
        start = self.positions(np.array([last]))[0] + (_LATE / self.size if self.calendar == "months" else 0)
        clock = _local(np.array([last]), self.kind)[0] if self.local else last
        longest = (
            {"months": 31 * self.size, "weekdays": 3}.get(self.calendar, 366) * self._day
            if self.calendar
            else self.size
        )
        most = {"ns": 2**63, "us": _LAST, "": 2**63}[self.kind.unit]
        require(float(clock) + (count + 1.0) * longest < most, "h", f"{count} steps", "stamps that dates can hold")
        positions = (np.floor(start) if self.gridded else start) + np.arange(1, count + 1)
        if self.calendar == "months":
            first = np.floor(self._months(np.array([self.origin]))[0] + _ROUNDING)
            found = self._anchor((first + positions * self.size).astype(np.int64))
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
                moved = _stamp_in_month(month + length.months, day - _first_day(month) + 1, time, self._day)
                end = _utc(moved if length.months else clock, self.kind)
            start, stop = self.positions(np.concatenate([now, end]))
            steps = int(np.floor(stop - (np.floor(start) if self.gridded else start) + _ROUNDING))
        require(steps >= 1, "h", length.text, f"at least one step of the series, {self.words}")
        return steps

    def _months(self, clock: np.ndarray) -> np.ndarray:
        """Months since 1970 with their parts: whole at the day of the stamps."""
        month = (clock // self._day).astype("M8[D]").astype("M8[M]").astype(np.int64)
        month = month - (clock < self._anchor(month))
        start, end = self._anchor(month), self._anchor(month + 1)
        return month + (clock - start) / (end - start)

    def _anchor(self, month: np.ndarray) -> np.ndarray:
        return _stamp_in_month(month, self.day, self.origin % self._day, self._day)


def _first_day(month: np.ndarray) -> np.ndarray:
    return month.astype("M8[M]").astype("M8[D]").astype(np.int64)


def _stamp_in_month(month: np.ndarray, day: Any, time_of_day: Any, ticks: int) -> np.ndarray:
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


def steps_of_series(
    series: Sequence[np.ndarray], kind: StampKind, others: Steps | None = None
) -> tuple[list[Steps | None], Steps | None]:
    """The step of each series, and that of most, which short ones have. `others`: of more series than these."""
    known: dict[bytes, Steps | None] = {}  # many series share their stamps

    def found(stamps: np.ndarray, others: Steps | None = None) -> Steps | None:
        key = stamps.tobytes()
        if key not in known:
            known[key] = usual_steps(stamps, kind, others)
        return known[key]

    steps = [step for stamps in series if len(stamps) > 2 and (step := found(stamps))]
    kinds = [(step.calendar, step.size, step.day) for step in steps]
    others = others or (steps[kinds.index(Counter(kinds).most_common(1)[0][0])] if kinds else None)
    return [found(stamps, others) for stamps in series], others


def _lower_median(gaps: np.ndarray) -> Any:
    return np.sort(gaps)[(len(gaps) - 1) // 2]


def _equal_steps(stamps: np.ndarray, kind: StampKind) -> Steps:
    """Steps of the usual gap, on the grid that most stamps have."""
    size = _lower_median(np.diff(stamps))
    parts = (stamps - stamps[-1]) % size
    if stamps.dtype.kind == "f":
        parts = np.round(parts / size, 6) % 1
    phases, counts = np.unique(parts, return_counts=True)
    usual = parts == phases[counts.argmax()]
    gridded = bool(usual.mean() >= _SHARE)
    return Steps(kind, size.item(), stamps[usual][0] if gridded else stamps[-1], gridded=gridded)


def _calendar(clock: np.ndarray, kind: StampKind, gap: int) -> Steps | None:
    """Steps of months or business days, or another offset that pandas infers. None: there are none."""
    ticks, gaps = _DAY * _TICKS[kind.unit], np.diff(clock)
    day = (clock // ticks).astype("M8[D]")
    month = day.astype("M8[M]")
    if gap >= 28 * ticks:  # most stamps are on one day of the month, or on the last one
        days, ends = (day - month).astype(int), (day + 1).astype("M8[M]") != month
        usual = max(ends, days == np.bincount(days).argmax(), key=np.sum)
        months = np.diff(month[usual].astype(int))
        if usual.mean() >= _SHARE and len(months) and months.min() > 0:
            size = _lower_median(months)
            size = int(np.gcd.reduce(months) if (months % size).any() else size)
            return Steps(kind, size, clock[usual][0], "months", day=31 if usual is ends else int(days[usual][0]) + 1)
    weekday = (day.astype(int) + 3) % 7  # 0 is Monday
    if gap == ticks and (weekday < 5).all() and (np.diff(weekday) < 0).any():
        return Steps(kind, 1, clock[0], "weekdays")
    if len(clock) < 3 or (gaps == gap).mean() >= _SHARE:
        return None
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pandas 4 gives an offset in the place of its name
        name = pd.infer_freq(pd.DatetimeIndex(clock.view(f"M8[{kind.unit}]")))
    if name is not None:
        return Steps(kind, 1, clock[0], getattr(name, "freqstr", name))
    return _late_months(clock, kind, ticks) if gap >= 28 * ticks and len(clock) > 5 else None


def _late_months(clock: np.ndarray, kind: StampKind, ticks: int) -> Steps | None:
    """Steps of months whose stamps come some days after the same day, or before it. None: there are none."""
    date, times = (clock // ticks).astype("M8[D]"), clock % ticks
    days = (date - date.astype("M8[M]")).astype(int) + 1
    for sign, time in ((1, times.min()), (-1, times.max())):
        for day in np.unique(days)[::-1]:
            origin = clock[days == day][0] // ticks * ticks + time
            steps = Steps(kind._replace(zone=None), 1, origin, "months", day=int(day))
            found = steps.positions(clock)
            months = np.diff(np.round(found).astype(int))
            if (sign * found % 1).max() <= _LATE and months.min() > 0:
                return replace(steps, kind=kind, size=int(np.gcd.reduce(months)))
    return None


def past_windows(steps: Steps, stamps: np.ndarray, h: int | Length, count: int, apart: int) -> list[tuple[int, int]]:
    """The rows of windows, the earliest first: of the first that is forecast, and after the last.

    Windows are counted in steps from the last stamp, so that a gap is no shorter horizon.
    """
    positions = steps.positions(stamps)
    found: list[tuple[int, int]] = []
    for place in reversed(range(count)):
        end = positions[-1] - place * apart
        last = int(np.searchsorted(positions, end + 1e-6)) - 1
        length = steps.count(stamps[max(last, 0)], h)
        cut, after = np.searchsorted(positions, [end - length + 1e-6, end + 1e-6])
        if 0 < cut < after and (not found or found[-1][0] < cut):
            found.append((int(cut), int(after)))
    require(bool(found), "h", h.text if isinstance(h, Length) else h, f"readings before {count} windows of the series")
    return found
