"""Times in CSV files: numbers, or dates in several spellings, with their unit, zone and steps of the calendar."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from rfa.checks import require

# units of the times of dated series, the coarsest first
UNITS = {name: pd.Timedelta(1, unit=name) for name in ("D", "h", "min", "s")}
EPOCHS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}  # nanoseconds
_SPELLINGS = {
    6: ("YYYYMM", "%Y%m"),
    7: ("YYYYDDD", "%Y%j"),
    8: ("YYYYMMDD", "%Y%m%d"),
    10: ("YYYYMMDDHH", "%Y%m%d%H"),
    12: ("YYYYMMDDHHMM", "%Y%m%d%H%M"),
    14: ("YYYYMMDDHHMMSS", "%Y%m%d%H%M%S"),
}
_FIRST, _LAST = 1e17, 4.1e18  # epoch stamps that are recognised: 1973-03-03 to 2099-12-03, in nanoseconds
_FEW = 0.5  # share of the times
_LARGEST = 1e100  # time: squares are computed
_KEEP = "--time-unit number keeps numbers"


def read_times(
    column: "pd.Series[Any]", path: Path, date_format: str | None, time_unit: str | None
) -> tuple["pd.Series[Any]", str]:
    """The times of a column, as float64 or as dates, and in a line what they were taken for; "" where it is plain.

    Dates are those of ISO 8601, digits such as 20240131 or 202401, and epoch stamps from 1973 to 2099. Others are read
    by the only format that fits all of them. The column has the cells as they are written, its index the rows' numbers.

    Raises:
        ValueError: for times that are missing, infinite, or neither numbers nor dates.
    """
    if column.isna().any():
        raise ValueError(f"time: row {first_row(column.isna())} of {path} has none, expected a time in every row")
    column = column.str.strip()
    numbers = pd.to_numeric(column, errors="coerce")
    if date_format is not None:
        return _parsed(column, path, date_format, f"a date like {date_format}"), ""
    if time_unit in EPOCHS:
        return _of_epoch(column, numbers, path, str(time_unit)), ""
    if time_unit is None and not numbers.isna().any():
        if (spelled := _spelled(column.str.replace(r"\.0+$", "", regex=True), path)) is not None:
            return spelled
        size = numbers.abs()
        for unit, length in EPOCHS.items():
            if bool(size.between(_FIRST / length, _LAST / length).all()) and bool((numbers > 0).all()):
                note = f"times: {column.name!r} was read as epoch stamps in {unit}, UTC ({_KEEP})"
                return _of_epoch(column, numbers, path, unit), note
    if time_unit is not None or not numbers.isna().any():
        return _plain(column, numbers, path), ""
    expected = "a number, or a date like 2024-01-31 12:00; --date-format reads others, such as %d.%m.%Y"
    if numbers.isna().mean() < _FEW:  # a row that is none of the series
        _check(column, numbers.isna(), path, expected)
    column = _first_days(column)
    dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    formats = _fitting(column) if dates.isna().any() else []
    if len(formats) > 1:
        given = f"time: got {column.iloc[0]!r} in row {column.index[0]} of {path}"
        raise ValueError(f"{given}, expected --date-format: {' and '.join(formats)} fit all rows")
    if formats:
        note = f"times: {column.name!r} was read as dates by {formats[0]} (--date-format chooses another)"
        return _parsed(column, path, formats[0], expected), note
    return _parsed(column, path, "ISO8601", expected), ""


def _plain(column: "pd.Series[Any]", numbers: "pd.Series[Any]", path: Path) -> "pd.Series[Any]":
    """Numbers as float64, which must hold them."""
    _check(column, numbers.isna(), path, "a number (--time-unit number)")
    times = numbers.astype(np.float64)
    _check(column, ~(times.abs() <= _LARGEST), path, f"a finite number, up to {_LARGEST:g}")
    if pd.api.types.is_integer_dtype(numbers):
        changed = times.astype(numbers.dtype) != numbers
        _check(column, changed, path, "a number up to 2**53; --time-unit ns reads epoch stamps")
    return times


def _of_epoch(column: "pd.Series[Any]", numbers: "pd.Series[Any]", path: Path, unit: str) -> "pd.Series[Any]":
    """Dates of epoch stamps. Whole ones stay integers, others are rounded to microseconds."""
    _check(column, numbers.isna() | ~np.isfinite(numbers.astype(np.float64)), path, f"a number of {unit}")
    if not pd.api.types.is_integer_dtype(numbers):
        wrong = numbers != np.rint(numbers) if unit == "ns" else numbers.isna()
        _check(column, wrong, path, "a whole number of ns")
        numbers, unit = np.rint(numbers * (EPOCHS[unit] / EPOCHS["us"])).astype(np.int64), "us"
    dates = pd.to_datetime(numbers, unit=unit, utc=True, errors="coerce")  # type: ignore[call-overload]
    far = ~dates.dt.year.between(-290_000, 290_000)  # NaT; and in pandas 3.0 what microseconds do not hold
    _check(column, far, path, f"{unit} since 1970-01-01 of a date that pandas knows")
    return _to_microseconds(dates)


def _spelled(column: "pd.Series[Any]", path: Path) -> tuple["pd.Series[Any]", str] | None:
    """Dates without separators, such as 19580329, and what is said of them. None where most are no dates.

    Raises:
        ValueError: where some of them are no dates: the others could not be taken for numbers either.
    """
    size = len(column.iloc[0])
    if size not in _SPELLINGS or not column.str.fullmatch(rf"(1[89]|2[01])\d{{{size - 2}}}").all():
        return None
    name, date_format = _SPELLINGS[size]
    late = column.str[8:10] == "24"  # hour 24 is the next day's hour 0
    dates = pd.to_datetime(column.where(~late, column.str[:8] + "00" + column.str[10:]), "coerce", format=date_format)
    dates += pd.to_timedelta(late.astype(np.int64), "D")
    if dates.isna().mean() > 0.5:
        return None
    _check(column, dates.isna(), path, f"a date as {name}, as most rows have ({_KEEP})")
    return _to_microseconds(dates), f"times: {column.name!r} was read as dates, {name} ({_KEEP})"


def check_date_format(given: str | None) -> None:
    """Raise `ValueError` for what is no format of dates."""
    expected = "a format of dates such as %d.%m.%Y or %Y-%m-%d %H:%M"
    require(given is None or "%" in given, "date-format", given, expected)
    try:
        pd.to_datetime(pd.Series(["0"]), errors="coerce", format=given)
    except (ValueError, re.error):
        raise ValueError(f"date-format: got {given!r}, expected {expected}") from None


def _first_days(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Months and quarters, written as 2024M03 or 2024-Q1, by their first days; other dates as they are."""
    parts = column.str.extract(r"^(\d{4})-?([MQ])(\d{1,2})$")
    if parts.isna().any(axis=None):
        return column
    months = parts[2].astype(int).where(parts[1] == "M", 3 * parts[2].astype(int) - 2)
    return parts[0] + "-" + months.astype(str).str.zfill(2)


def _fitting(column: "pd.Series[Any]") -> list[str]:
    """The formats, of those that fit the first date, that fit all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = {guess_datetime_format(column.iloc[0], dayfirst=first) for first in (True, False)} - {None}
        fitting = [f for f in found if pd.to_datetime(column, errors="coerce", format=f, utc=True).notna().all()]
    return sorted(map(str, fitting))


def _parsed(column: "pd.Series[Any]", path: Path, date_format: str, expected: str) -> "pd.Series[Any]":
    """Dates by a format, in their zone: none where none has one, UTC where they differ."""
    dates = pd.to_datetime(column, errors="coerce", format=date_format, utc=True)
    _check(column, dates.isna(), path, expected)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # what pandas 2 says of several offsets
            zone = pd.to_datetime(column, format=date_format).dt.tz
    except (FutureWarning, ValueError):
        zone = "UTC"
        if date_format == "ISO8601":  # other formats have an offset in all rows, or in none
            local = column.map(lambda date: pd.Timestamp(date).tz is None)
            _check(column, local, path, "an offset such as +01:00 or Z, as other rows have")
    return _to_microseconds(dates.dt.tz_convert(zone))


def _to_microseconds(dates: "pd.Series[Any]") -> "pd.Series[Any]":
    """Dates in microseconds; in nanoseconds where they have some."""
    return dates if dates.dt.nanosecond.any() else dates.dt.as_unit("us")


def _check(column: "pd.Series[Any]", wrong: "pd.Series[Any]", path: Path, expected: str) -> None:
    if wrong.any():
        row = first_row(wrong)
        raise ValueError(f"time: got {column.loc[row]!r} in row {row} of {path}, expected {expected}")


def numbers_of(times: "pd.Series[Any]") -> tuple[np.ndarray, str, Any]:
    """Times in order as float64, their unit, and the date of time 0; "" and None where they are numbers."""
    if pd.api.types.is_float_dtype(times):
        return times.to_numpy(np.float64), "", None
    steps = times.diff()
    typical = steps[steps > pd.Timedelta(0)].median()
    unit = next((name for name, length in UNITS.items() if length <= typical), "s")
    return ((times - times.iloc[0]) / UNITS[unit]).to_numpy(np.float64), unit, times.iloc[0]


def rounded(seconds: Any, unit: str) -> Any:
    """A length of time, rounded to "us" or "ns": pandas would cut it off."""
    return pd.to_timedelta(np.rint(np.multiply(seconds, 1e9 / EPOCHS[unit])).astype(np.int64), unit)


def calendar_offset(given: str) -> tuple[Any, pd.Timedelta] | None:
    """A length of the calendar as an offset of pandas, and its mean length.

    `M`, `Q` and `Y` are months, quarters and years from any date, as in `12M`. `MS`, `ME`, `QS`, `QE`, `YS` and `YE`
    are their starts and ends, and `B` business days. None: `given` is something else.
    """
    found = re.fullmatch(r"(\d*)(?:(B)|([MQY])([SE]-[A-Z]{3}|[SE])?)", given)
    if found is None or int(found[1] or 1) == 0:
        return None
    count = int(found[1] or 1)
    if found[2]:
        return pd.offsets.BDay(count), count * pd.Timedelta(days=7 / 5)
    months = {"M": 1, "Q": 3, "Y": 12}[found[3]]
    try:
        anchored = pd.tseries.frequencies.to_offset(found[3] + found[4]) if found[4] else pd.DateOffset(months=months)
    except ValueError:
        return None
    return anchored * count, months * count * pd.Timedelta(days=365.2425 / 12)


def first_row(wrong: "pd.Series[Any]") -> int:
    """The number of the first wrong row in the file, which the index has."""
    return int(wrong.index[np.flatnonzero(wrong.to_numpy())[0]])
