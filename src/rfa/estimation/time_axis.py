"""Times and values as a caller gives them, as numbers: NumPy, pandas, lists, tensors; dates."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rfa.checks import require

SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0, "year": 31556952.0}


@dataclass(frozen=True)
class TimeAxis:
    """How times become numbers: as they are, or dates as units of time since an origin.

    Args:
        unit: of dates: one of "second", "minute", "hour", "day", "week", "year" (365.2425 days).
        origin: the date of number 0. None: times are numbers.
        tick: nanoseconds to which dates are rounded: numbers in float64 are not exact.
    """

    unit: str
    origin: np.datetime64 | None = None
    tick: int = 1000

    @classmethod
    def of(cls, times: Any, unit: str) -> "TimeAxis":
        """Of a series' times. The first date is the origin."""
        require(unit in SECONDS, "time_unit", unit, f"one of {', '.join(SECONDS)}")
        dates = as_dates(times)
        if dates is None:
            return cls(unit)
        tick = 1000 if bool((dates.astype("int64") % 1000 == 0).all()) else 1
        return cls(unit, np.sort(np.append(dates, np.datetime64("2200-01-01", "ns")))[0], tick)

    def numbers(self, name: str, times: Any) -> np.ndarray:
        """Times as numbers, `(T,)`.

        Raises:
            ValueError: for numbers where dates are expected or the reverse, and for times that are not finite.
        """
        dates = as_dates(times)
        if (dates is None) != (self.origin is None):
            given, expected = ("numbers", "dates") if dates is None else ("dates", "numbers")
            raise ValueError(f"{name}: got {given}, expected {expected}, as the times of the series")
        if dates is None:
            text = not isinstance(times, Tensor) and np.asarray(times).dtype.kind in "US"
            require(not text, name, "text", "numbers or dates; pandas.to_datetime makes dates of text")
            found = as_numbers(name, times)
        else:
            require(not bool(np.isnat(dates).any()), name, "a missing date", "a date for each reading")
            found = (dates - self.origin) / np.timedelta64(1, "ns") / (1e9 * SECONDS[self.unit])
        require(found.ndim == 1, name, f"shape {found.shape}", "one time for each reading, (T,)")
        require(bool(np.isfinite(found).all()), name, "NaN or infinite times", "finite times")
        return found

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers as the caller's times: dates or numbers."""
        if self.origin is None:
            return numbers
        step = np.round(numbers * SECONDS[self.unit] * (1e9 / self.tick)).astype("int64") * self.tick
        return self.origin + step.astype("timedelta64[ns]")


def next_times(axis: TimeAxis, times: np.ndarray, count: int, index: Any) -> np.ndarray:
    """The next times of a series.

    Args:
        axis: of the times.
        times: of the series, as numbers.
        count: how many.
        index: of pandas, with a frequency; or None. Then all steps of the series must be equal.

    Raises:
        ValueError: without a frequency.
    """
    require(count > 0, "query_times", count, "a number of steps >= 1, or times")
    if index is not None:
        import pandas as pd

        last = pd.Timestamp(axis.labels(times[-1:])[0])
        if isinstance(index, pd.PeriodIndex):
            following = pd.period_range(last, periods=count + 1, freq=index.freq).to_timestamp()
        else:  # steps of the caller's time zone: a day there may have 23 hours
            last = last if index.tz is None else last.tz_localize("UTC").tz_convert(index.tz)
            following = pd.date_range(last, periods=count + 1, freq=index.freq)
            last = last if index.tz is None else last.tz_convert("UTC").tz_localize(None)
        found = np.asarray(as_dates(following))
        return found[found > last.to_datetime64()][:count]
    gaps = np.diff(np.unique(times))
    regular = len(gaps) > 0 and bool(np.ptp(gaps) <= 1e-6 * gaps[0])  # dates as numbers are rounded
    require(regular, "query_times", f"{count} steps of a series without a frequency", "times")
    return axis.labels(times[-1] + gaps.mean() * np.arange(1, count + 1))


def calendar_step(dates: np.ndarray) -> Any:
    """The step of dates that have no fixed length: months, quarters, years, or business days.

    Dates on one day of the month, or all on its last day, have a step of whole months. Dates without a weekend that
    are mostly one day apart have steps of business days.

    Args:
        dates: `(T,)`, on the caller's clock: without a time zone.

    Returns:
        A `pandas.tseries.offsets.BaseOffset`; None where the dates have no such step, or are fewer than three.
    """
    import pandas as pd

    index = pd.DatetimeIndex(np.unique(dates))
    if len(index) < 3 or len({*(index - index.normalize())}) > 1:
        return None
    ends, days = bool(index.is_month_end.all()), np.unique(index.day)
    if ends or len(days) == 1:
        gaps = np.diff(index.year * 12 + index.month)
        usual = int(np.median(gaps))
        months = usual if not (gaps % max(usual, 1)).any() else int(np.gcd.reduce(gaps))
        return pd.offsets.MonthEnd(months) if ends else pd.DateOffset(months=months)
    gaps = np.diff(index.normalize()) // np.timedelta64(1, "D")
    weekdays = bool((index.day_of_week < 5).all()) and np.median(gaps) == 1
    weekends = int(((index.day_of_week[1:] < index.day_of_week[:-1]) & (gaps >= 3)).sum())
    return pd.offsets.BDay() if weekdays and weekends > 0 else None


def as_dates(times: Any) -> np.ndarray | None:
    """Dates in nanoseconds, or None where `times` are no dates. Time zones become UTC."""
    if isinstance(times, Tensor):
        return None
    if hasattr(times, "to_timestamp") and hasattr(times, "freq"):  # a PeriodIndex
        times = times.to_timestamp()
    if getattr(times, "tz", None) is not None:
        times = times.tz_convert("UTC").tz_localize(None)
    given = np.asarray(times)
    if given.dtype == object and given.size and hasattr(given.flat[0], "isoformat"):  # datetime, date, Timestamp
        given = given.astype("datetime64[us]")
    if given.dtype.kind != "M":
        return None
    dates = np.atleast_1d(given).astype("datetime64[ns]")
    whole = dates.astype(given.dtype) == np.atleast_1d(given)
    expected = "dates from 1678 to 2262, as nanoseconds hold"
    require(bool((whole | np.isnat(dates)).all()), "times", "dates that are too far", expected)
    return dates


def as_numbers(name: str, given: Any) -> np.ndarray:
    """Real numbers in float64, NaN for what is missing.

    Raises:
        ValueError: for text, dates, truth values or complex numbers.
    """
    if isinstance(given, Tensor):
        given = given.detach().cpu().numpy()
    found = np.asarray(given)
    kind = found.dtype.kind
    texts = kind in "US" or (kind == "O" and any(isinstance(value, str) for value in found.flat))
    require(not texts, name, "text", "numbers")
    if kind == "O":
        missing = np.array([value is None or value != value or str(value) == "<NA>" for value in found.flat])
        found = np.where(missing.reshape(found.shape), np.nan, found)
    require(kind in "iufO", name, f"values of type {found.dtype}", "real numbers")
    try:
        return found.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got values of type {type(found.flat[0]).__name__}, expected numbers") from None
