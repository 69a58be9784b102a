"""Times and values as a caller gives them, as numbers: NumPy, pandas, lists, tensors; dates."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cached_property, lru_cache
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
from torch import Tensor

from rfa.checks import as_array, installed, require, require_each
from rfa.steps import StampKind, usual_steps

from .time_grid import PATTERN, time_grid

_EPOCH = np.datetime64(0, "ns")
_LARGEST = 1e100  # time: squares are computed
_ROUGH = 0.15  # of a step: the rounding with which a number of steps is known
SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0, "year": 31556952.0}

_USUAL = {name: SECONDS[name] for name in ("minute", "hour", "day", "week", "year")} | {"half day": 43200.0}
_NEAR = 0.025  # relative: 12 months of 31 days are a year


@dataclass(frozen=True)
class TimeAxis:
    """How times become numbers: as they are, or dates as units of time since an origin, on the clock of their zone."""

    unit: str  # of dates, one of `SECONDS`; a year has 365.2425 days
    origin: np.datetime64 | None = None  # the date of number 0, in UTC where dates have a zone. None: no dates
    tick: int = 1000  # nanoseconds to which dates are rounded: numbers in float64 are not exact
    kind: Any = None  # an empty index of the caller's kind; outside pandas a zone or `np.timedelta64`; or None

    @classmethod
    def of(cls, times: Any, unit: str) -> "TimeAxis":
        """Of a series' times. The first date is the origin."""
        require(unit in SECONDS, "time_unit", unit, f"one of {', '.join(SECONDS)}")
        dates, kind = dates_and_kind(times)
        if dates is None:
            return cls(unit, kind=kind)
        tick = 1000 if bool((dates.astype("int64") % 1000 == 0).all()) else 1
        return cls(unit, np.sort(np.append(dates, np.datetime64("2200-01-01", "ns")))[0], tick, kind)

    @property
    def zone(self) -> Any:
        """The time zone of dates, or None."""
        return self.kind if isinstance(self.kind, tzinfo) else getattr(self.kind, "tz", None)

    @property
    def lengths(self) -> bool:
        """Whether times are lengths of time: they are kept as dates since 1970."""
        return self.kind is np.timedelta64 or getattr(getattr(self.kind, "dtype", None), "kind", "") == "m"

    def numbers(self, name: str, times: Any) -> np.ndarray:
        """Times as numbers, `(T,)`."""
        dates, kind = dates_and_kind(times)
        if (dates is None) != (self.origin is None):
            given, expected = ("numbers", "dates") if dates is None else ("dates", "numbers")
            raise ValueError(f"{name}: got {given}, expected {expected}, as the times of the series")
        if dates is None:
            found = as_numbers(name, times, "numbers or dates; pandas.to_datetime makes dates of text")
            if bool((np.abs(found) >= 2.0**53).any()):
                entries = as_array(times, name)
                same = [not isinstance(x, int) or float(x) == x for x in entries.ravel().tolist()]
                expected = "whole numbers up to 2**53; pandas.to_datetime makes dates of epoch stamps"
                require_each(
                    np.reshape(same, found.shape), name, "numbers that float64 does not hold", entries, expected
                )
        else:
            require_each(~np.isnat(dates), name, "a missing date", dates, "a date for each reading")
            given, expected = (
                "lengths of time" if axis.lengths else f"dates {'without' if axis.zone is None else 'with'} a time zone"
                for axis in (replace(self, kind=kind), self)
            )
            require(given == expected, name, given, f"{expected}, as the times of the series")
            found = (self._shown(dates) - self._start) / np.timedelta64(1, "ns") / (1e9 * SECONDS[self.unit])
        require(found.ndim == 1, name, f"shape {found.shape}", "one time for each reading, (T,)")
        require_each(np.isfinite(found), name, "NaN or infinite times", found, "finite times")
        require_each(np.abs(found) <= _LARGEST, name, f"times beyond {_LARGEST:g}", found, "smaller ones")
        return found

    def dates(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers as dates, in UTC where they have a zone."""
        step = np.round(numbers * SECONDS[self.unit] * (1e9 / self.tick)).astype("int64") * self.tick
        found = self._start + step.astype("timedelta64[ns]")
        if not self._on_clock:
            return found
        import pandas as pd

        moments = moments_of_clock(pd.DatetimeIndex(found).as_unit("us"), self.zone)
        return moments.tz_convert("UTC").tz_localize(None).to_numpy().astype("datetime64[ns]")

    @property
    def _on_clock(self) -> bool:
        """Whether numbers are of the clock of a place, so that its days have 24 hours."""
        return has_clock(self.zone) and self.tick > 1 and installed("pandas")

    @cached_property
    def _start(self) -> np.ndarray:
        """The origin as the numbers count dates, `(1,)`."""
        return self._shown(np.array([self.origin]))

    def _shown(self, dates: np.ndarray) -> np.ndarray:
        """Dates in UTC as the numbers count them."""
        if not self._on_clock:
            return dates
        import pandas as pd

        clock = wall_clock(pd.DatetimeIndex(dates).tz_localize("UTC").tz_convert(self.zone))
        return np.asarray(clock).astype("datetime64[ns]")

    def labels(self, numbers: np.ndarray) -> Any:
        """Numbers as the caller's times: numbers or dates, an index of pandas where theirs are of pandas."""
        if self.origin is None:
            if self.kind is None:
                return numbers
            import pandas as pd

            whole = self.kind.dtype.kind in "iu" and bool((numbers == np.round(numbers)).all())
            dtype = self.kind.dtype if whole else np.dtype(np.float64)
            return pd.Index(numbers.astype(np.int64) if whole else numbers, dtype=dtype, name=self.kind.name)
        dates = self.dates(numbers)
        if self.kind is None:
            return dates
        if self.lengths:
            lengths = dates - _EPOCH
            return lengths if self.kind is np.timedelta64 else type(self.kind)(lengths, name=self.kind.name)
        if isinstance(self.kind, tzinfo):
            clocks = [x.replace(tzinfo=UTC).astimezone(self.kind) for x in dates.astype("M8[us]").tolist()]
            return np.array(clocks, dtype=object)
        import pandas as pd

        index = pd.DatetimeIndex(dates, name=self.kind.name)
        if isinstance(self.kind, pd.PeriodIndex):
            return index.to_period(self.kind.freq)
        if self.zone is not None:
            index = index.tz_localize("UTC").tz_convert(self.zone)
        same = index.as_unit(self.kind.unit)
        index = same if bool((same == index).all()) else index  # a coarser unit may not hold later times
        if self.kind.freq is not None:
            with suppress(ValueError):  # times between the steps
                index.freq = self.kind.freq
        return index


def next_times(axis: TimeAxis, times: np.ndarray, count: int) -> Any:
    """The next times of a series, by the frequency of the caller's index, else the calendar's, else equal steps."""
    require(count > 0, "query_times", count, "a number of steps >= 1, or times")
    times = np.unique(times)
    try:
        dated = axis.origin is not None and not axis.lengths and installed("pandas")
        found = _next_dates(axis, times, count) if dated else None
    except (OverflowError, ValueError):  # OutOfBoundsDatetime of pandas
        raise ValueError(f"query_times: got {count} steps, expected dates until 2262, as nanoseconds hold") from None
    if found is not None:
        return found
    grid = time_grid(times)
    rough = _ROUGH if len(times) >= PATTERN else 1e-6
    if grid is None or grid.steps[-1] >= len(times) or not grid.rounding <= rough * grid.step:
        raise ValueError(f"query_times: got '{count} steps of a series without a frequency', expected times")
    return axis.labels(grid.last + grid.step * np.arange(1, count + 1))


def _next_dates(axis: TimeAxis, times: np.ndarray, count: int) -> Any:
    """The next dates of a frequency, on the caller's clock: a day there may have 23 hours. None without a frequency."""
    import pandas as pd

    if isinstance(axis.kind, pd.PeriodIndex):
        return pd.period_range(axis.labels(times[-1:])[0], periods=count + 1, freq=axis.kind.freq)[1:]
    dates = axis.dates(times)
    clock = pd.DatetimeIndex(dates)
    clock = clock if axis.zone is None else clock.tz_localize("UTC").tz_convert(axis.zone)
    step = getattr(axis.kind, "freq", None)
    if step is None:
        kind = StampKind(None, "ns", axis.zone)
        steps = usual_steps(dates.astype("M8[ns]").view(np.int64), kind) if len(dates) > 2 else None
        if steps is None or not (steps.calendar or (steps.local and steps.gridded)):
            return None
        found = pd.DatetimeIndex(steps.later(dates[-1:].astype("M8[ns]").view(np.int64)[0], count).view("M8[ns]"))
        return found if axis.zone is None else found.tz_localize("UTC").tz_convert(axis.zone)
    elapsed = isinstance(step, pd.offsets.Tick) and not isinstance(step, pd.offsets.Day)  # hours, and shorter steps
    start = clock[-1] if elapsed else clock[-1].tz_localize(None)
    found = pd.DatetimeIndex([start + k * step for k in range(1, count + 1)])
    if axis.zone is None or elapsed:
        return found
    return found.tz_localize(axis.zone, nonexistent="shift_forward", ambiguous=np.ones(count, dtype=bool))


def has_clock(zone: Any) -> bool:
    """Whether a zone is one of a place, whose offset may change."""
    return isinstance(zone, Hashable) and not isinstance(zone, timezone | None)


def wall_clock(dates: Any) -> Any:
    """Dates of pandas with a zone as its clocks show them: days have 24 hours, so seasons of the day keep their phase.

    The hour that clocks show twice in autumn is passed at double speed, so that times stay in order. Dates without the
    zone of a place, and lengths of time, are returned as they are.
    """
    if not has_clock(getattr(dates, "tz", None)):
        return dates
    shown, moments = dates.tz_localize(None).as_unit("us"), dates.tz_convert("UTC").tz_localize(None).as_unit("us")
    for start, clock, length in _double_hours(dates.tz, shown):
        inside = (moments >= start) & (moments < start + 2 * length)
        shown = shown.where(~inside, clock + (moments - start) // 2)
    return shown


def moments_of_clock(shown: Any, zone: Any) -> Any:
    """Dates of pandas in a zone, from what `wall_clock` gives."""
    every = np.ones(len(shown), dtype=bool)
    found = shown.tz_localize(zone, ambiguous=every, nonexistent="shift_forward")
    for start, clock, length in _double_hours(zone, shown):
        inside = (shown >= clock) & (shown < clock + length)
        found = found.where(~inside, (start + 2 * (shown - clock)).tz_localize("UTC").tz_convert(zone))
    return found


def _double_hours(zone: Any, shown: Any) -> list[tuple[Any, Any, Any]]:
    """When clocks show times twice: the moment from which they do, in UTC and on the clock, and for how long."""
    if not len(shown):
        return []
    return [each for year in range(shown.min().year, shown.max().year + 1) for each in _double_hours_of(zone, year)]


@lru_cache(maxsize=10_000)
def _double_hours_of(zone: Any, year: int) -> list[tuple[Any, Any, Any]]:
    import pandas as pd

    def shown(moments: Any) -> Any:
        return moments.tz_localize("UTC").tz_convert(zone).tz_localize(None)

    found, days = [], pd.date_range(f"{year}-01-01", f"{year + 1}-01-02")
    for place in np.flatnonzero(np.diff(shown(days) - days) < np.timedelta64(0)):
        minutes = pd.date_range(days[place], days[place + 1], freq="min")
        change = np.diff(shown(minutes) - minutes)
        after = int((change < np.timedelta64(0)).argmax())
        length = pd.Timedelta(-change[after])
        start = minutes[after + 1] - length
        found.append((start, shown(minutes)[after + 1], length))
    return found


def doubtful_period(period: float, steps: np.ndarray, unit: str) -> str | None:
    """What is wrong with a period that looks counted in something else than the unit of time of dates. None: nothing.

    It is no usual period, but would be one if it counted readings or a shorter unit: 24 readings an hour apart are a
    day. Or it is shorter than two readings. `steps` are > 0.
    """

    def usual(seconds: float) -> str | None:
        return next((name for name, size in _USUAL.items() if abs(seconds / size - 1) < _NEAR), None)

    gap, least, size = float(np.median(steps)), float(steps.min()), SECONDS[unit]
    seen = period >= 2 * least * (1 - _NEAR)
    if seen and usual(period * size):
        return None
    text = f"the unit of time is the {unit}, so a period of {period:g} is {period / gap:.4g} readings"
    shorter = {f"{name}s": seconds for name, seconds in SECONDS.items() if seconds < size}
    for counted, seconds in {"readings": gap * size, **shorter}.items():
        name = usual(period * seconds)
        if name and period * seconds >= 2 * gap * size * (1 - _NEAR):
            same = [f', or time_unit="{each}"' for each, x in SECONDS.items() if abs(seconds / x - 1) < 1e-6]
            mend = f"period={_USUAL[name] / size:.6g}{''.join(same)}"
            return f"{text}. If {period:g} {counted} are meant, that is one {name}, give {mend}"
    return None if seen else f"{text}, and two are the least that show a pattern. time_unit gives another unit"


def dates_and_kind(times: Any) -> tuple[np.ndarray | None, Any]:
    """Dates in nanoseconds, or None where `times` are no dates, and their kind as `TimeAxis` has it.

    Time zones become UTC, a period its start. Lengths of time are dates since 1970.
    """
    if isinstance(times, Tensor):
        return None, None
    index = _pandas_index(times)
    kind = None if index is None else index[:0]
    if hasattr(index, "to_timestamp"):  # a PeriodIndex
        index = index.to_timestamp()
    if getattr(index, "tz", None) is not None:
        index = index.tz_convert("UTC").tz_localize(None)
    entries = as_array(times if index is None else index)
    given = _dates_of_objects(entries) if entries.dtype == object else entries
    if given.dtype.kind not in "mM":
        return None, kind
    if not hasattr(index, "freq"):
        kind = np.timedelta64 if given.dtype.kind == "m" else None if index is not None else _zone(times, entries)
    given = _EPOCH + given if given.dtype.kind == "m" else given
    dates = np.atleast_1d(given).astype("datetime64[ns]")
    whole = dates.astype(given.dtype) == np.atleast_1d(given)
    expected = "dates from 1678 to 2262, as nanoseconds hold"
    require_each(whole | np.isnat(dates), "times", "dates that are too far", given, expected)
    return dates, kind


def _dates_of_objects(given: np.ndarray) -> np.ndarray:
    """Dates of the standard library and of pandas, in UTC where they have a zone. Other objects as they are."""
    found = [each.to_timestamp() if hasattr(each, "to_timestamp") else each for each in given.flat]  # periods
    present = [each for each in found if each == each]
    if present and all(isinstance(each, timedelta) for each in present):
        return np.array([np.timedelta64(each if each == each else "NaT", "ns") for each in found]).reshape(given.shape)
    for date in present:  # of models, such as cftime's with twelve months of 30 days
        calendar = str(getattr(date, "calendar", "") or "")
        julian = calendar in ("standard", "gregorian") and (date.year, date.month, date.day) < (1582, 10, 15)
        if calendar not in ("", "standard", "gregorian", "proleptic_gregorian") or julian:
            units = f"'days since {date.year:04}-01-01', calendar={calendar!r}"
            expected = f"dates of the Gregorian one, or numbers: cftime.date2num(times, {units})"
            raise ValueError(f"times: got dates of the calendar {calendar!r}, expected {expected}")
    if not present or not all(hasattr(each, "year") for each in present):
        return given
    zoned = [getattr(each, "tzinfo", None) is not None for each in present]
    require(all(zoned) or not any(zoned), "times", "some dates with a time zone", "all of them, or none")
    if all(zoned):
        found = [x.astimezone(UTC).replace(tzinfo=None) if x == x else x for x in found]
    found = [each if each == each else np.datetime64("NaT", "us") for each in found]
    found = [each.isoformat() if hasattr(each, "calendar") else each for each in found]
    stamps = [x.to_datetime64() if hasattr(x, "to_datetime64") else np.datetime64(x, "us") for x in found]
    return np.array(stamps).reshape(given.shape)


def _pandas_index(times: Any) -> Any:
    """Times of pandas as an index, dates as a `DatetimeIndex` or a `PeriodIndex`. None for other times."""
    if type(times).__module__.split(".")[0] != "pandas" or np.ndim(times) != 1:
        return None
    import pandas as pd

    index = pd.Index(times)
    first = next((each for each in index.dropna()), None) if index.dtype.kind == "O" else None
    if first is not None and hasattr(first, "calendar"):  # of cftime
        return index
    if not hasattr(index, "freq") and (index.dtype.kind == "M" or hasattr(first, "isoformat")):
        with suppress(TypeError, ValueError):  # dates of pyarrow, and of the standard library
            return pd.DatetimeIndex(index)
    return index


def _zone(times: Any, entries: np.ndarray) -> Any:
    """The time zone of dates outside pandas, or None."""
    named = getattr(getattr(times, "dtype", None), "time_zone", None)  # of polars
    if (name := named or getattr(getattr(times, "type", None), "tz", None)) is not None:  # of pyarrow
        return ZoneInfo(name) if name[:1].isalpha() else datetime.strptime(name, "%z").tzinfo
    zones = (getattr(each, "tzinfo", None) for each in entries.flat) if entries.dtype == object else ()
    return next((zone for zone in zones if zone is not None), None)


def drawable(times: Any) -> Any:
    """Times that matplotlib draws: the start of each period, lengths of time in days."""
    if np.asarray(times).dtype.kind == "m":
        return times / np.timedelta64(1, "D")
    return times.to_timestamp() if hasattr(times, "to_timestamp") else times


def as_numbers(name: str, given: Any, expected: str = "numbers") -> np.ndarray:
    """Real numbers in float64, NaN for what is missing."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = (given.double() if given.is_floating_point() else given).numpy()  # NumPy has no bfloat16
    found = as_array(given, name)
    kind = found.dtype.kind
    if kind in "USO":
        entries = np.asarray(given, dtype=object)
        text = [isinstance(each, str | bytes) for each in entries.flat]
        require_each(~np.reshape(text, entries.shape), name, "text", entries, expected)
    objects = found.ravel().tolist() if kind == "O" else []
    truths = kind == "b" or any(isinstance(each, bool | np.bool_) for each in objects)
    require(kind in "iufO" and not truths, name, f"values of type {'bool' if truths else found.dtype}", "real numbers")
    try:
        return found.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        good = np.reshape([_is_number(each) for each in found.flat], found.shape)
        wrong = type(found[~good].tolist()[0]).__name__
        require_each(good, name, f"values of type {wrong}", found, expected)
        raise


def _is_number(given: Any) -> bool:
    """Whether an object is one that float64 can hold."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(given) is not None
    return False
