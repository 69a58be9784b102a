"""Times in CSV files: numbers, or dates in several spellings, with their unit, zone and steps of the calendar."""

import re
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from rfa.checks import require
from rfa.estimation.time_axis import wall_clock

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
_FIRST_STAMP, _LAST_STAMP = 1e17, 4.1e18  # epoch stamps that are recognised: 1973-03-03 to 2099-12-03, in nanoseconds
_MAX_FAULTS = 0.5  # share of the times
_LARGEST = 1e100  # time: squares are computed
_NUMBER_HINT = "--time-unit number keeps numbers"
_WEEKS = r"\d{4}(0[1-9]|[1-4]\d|5[0-3])"
_FIRST_DAYS = {"%V": ("-1", "-%u"), "%W": ("-1", "-%w"), "%U": ("-0", "-%w")}  # of weeks
_CLOCK = r"[+-]?\d+:\d\d:\d\d(\.\d+)?"
_LENGTH = rf"(-?\d+ days?,? ?({_CLOCK})?|{_CLOCK})"  # of time, as pandas and Python write it
_ISO = r"P(?:(\d+)Y)?(?:(\d+)M)?(?:(#)W)?(?:(#)D)?(?:T(?=.)(?:(#)H)?(?:(#)M)?(?:(#)S)?)?".replace(
    "#", r"\d+(?:[.,]\d+)?"
)


class WrongTimes(ValueError):
    """Times that are none. `rows` has the numbers of all of them."""

    def __init__(self, message: str, rows: Any):
        super().__init__(message)
        self.rows = rows


def read_times(
    column: "pd.Series[Any]", path: Path, form: Any, by: "pd.Series[Any] | None" = None
) -> tuple["pd.Series[Any]", str]:
    """The times of a column, as float64, dates or lengths of time, and in a line what they were taken for.

    Dates are those of ISO 8601, digits such as 20240131 or 202401, and epoch stamps from 1973 to 2099. Others are read
    by the only format that fits all of them. The line is "" where times are plain. The column has the cells as they
    are written, its index the rows' numbers. `form` is the `TableFormat`. `by` names the sensor of each row: clocks
    show an hour twice in each.

    Raises:
        ValueError: for times that are missing, infinite, or neither numbers nor dates.
    """
    if column.isna().any():
        said = f"time: row {first_row(column.isna())} of {path} has none, expected a time in every row"
        raise WrongTimes(said, column.index[column.isna()])
    column = column.str.strip()
    numbers = pd.to_numeric(column, errors="coerce")
    zone, note = form.zone, ""
    if form.date_format is not None:
        times, note = _by_format(column, path, form.date_format, f"a date like {form.date_format}")
    elif form.time_unit in EPOCHS or form.epoch is not None:
        times = _of_epoch(column, numbers, path, form.time_unit or "s", form.epoch)
    else:
        times, note = _times_of_cells(column, numbers, path, form.time_unit)
    if zone is None:
        return times, note
    if times.dtype.kind != "M":
        raise ValueError(f"zone: got {zone!r}, but {column.name!r} has no dates, expected none, or dates")
    if times.dt.tz is not None:
        return times.dt.tz_convert(zone), re.sub(r"(; )?times: [^;]* several offsets;.*", "", note)
    times, said = _with_zone(times, column, path, zone, by)
    return times, "; ".join(filter(None, [note, said]))


def _times_of_cells(
    column: "pd.Series[Any]", numbers: "pd.Series[Any]", path: Path, time_unit: str | None
) -> tuple["pd.Series[Any]", str]:
    """Times whose kind nobody has named, or plain numbers."""
    if time_unit is None and not numbers.isna().any():
        digits = column.str.replace(r"\.0+$", "", regex=True)
        if (spelled := _of_digits(digits, path)) is not None:
            return spelled
        size = numbers.abs()
        for unit, length in EPOCHS.items():
            if bool(size.between(_FIRST_STAMP / length, _LAST_STAMP / length).all()) and bool((numbers > 0).all()):
                note = f"times: {column.name!r} was read as epoch stamps in {unit}, UTC"
                return _of_epoch(
                    column, numbers, path, unit
                ), f"{note} ({_NUMBER_HINT}, --epoch names another date of 0)"
        if digits.str.fullmatch(r"(1[89]|2[01])\d{4}").all() and digits.str.fullmatch(_WEEKS).all():
            note = f"times: {column.name!r} was read as numbers; --date-format %G%V: weeks"
            return _plain_numbers_of(column, numbers, path), note
    if time_unit is not None or not numbers.isna().any():
        return _plain_numbers_of(column, numbers, path), ""
    expected = "a number, or a date like 2024-01-31 12:00; --date-format reads others, such as %d.%m.%Y"
    if numbers.isna().mean() < _MAX_FAULTS:  # a row that is none of the series
        _check(column, numbers.isna(), path, expected)
    if column.str.contains("day").any() and column.str.fullmatch(_LENGTH).all():
        return _to_microseconds(pd.to_timedelta(column.str.replace(",", ""))), ""
    named = column.str.extract(r"\[([\w+-]+(?:/[\w+-]+)*)\]$", expand=False)
    if not named.isna().any() and named.nunique() == 1:  # 2024-01-01T00:00+01:00[Europe/Berlin]
        dates, note = _times_of_cells(column.str.replace(r"\[.*\]$", "", regex=True), numbers, path, time_unit)
        place = _zone_of(named.iloc[0])
        if dates.dtype.kind != "M" or dates.dt.tz is None or place is None:
            _check(column, column.notna(), path, expected)
        return dates.dt.tz_convert(place), ""
    column = _first_days_of_periods(column)
    if column.str.contains(r"(?:UTC|GMT)$").all():
        column = column.str.replace(r" ?([+-]00:?00)? ?(UTC|GMT)$", "Z", regex=True)
    dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    formats = _fitting_formats(column) if dates.isna().any() else []
    if len(formats) > 1:
        given = f"time: got {column.iloc[0]!r} in row {column.index[0]} of {path}"
        raise ValueError(f"{given}, expected --date-format: {' and '.join(formats)} fit all rows")
    dates, note = _by_format(column, path, formats[0] if formats else "ISO8601", expected)
    if formats:
        said = f"times: {column.name!r} was read as dates by {formats[0]} (--date-format chooses another)"
        note = "; ".join(filter(None, [said, note]))
    return dates, note


def _plain_numbers_of(column: "pd.Series[Any]", numbers: "pd.Series[Any]", path: Path) -> "pd.Series[Any]":
    """Numbers as float64, which must hold them."""
    _check(column, numbers.isna(), path, "a number (--time-unit number)")
    times = numbers.astype(np.float64)
    _check(column, ~(times.abs() <= _LARGEST), path, f"a finite number, up to {_LARGEST:g}")
    if pd.api.types.is_integer_dtype(numbers):
        changed = times.astype(numbers.dtype) != numbers
        _check(column, changed, path, "a number up to 2**53; --time-unit ns reads epoch stamps")
    return times


def _of_epoch(
    column: "pd.Series[Any]", numbers: "pd.Series[Any]", path: Path, unit: str, epoch: str | None = None
) -> "pd.Series[Any]":
    """Dates of stamps since an epoch, 1970 by default. Whole ones stay integers, others are rounded to microseconds."""
    _check(column, numbers.isna() | ~np.isfinite(numbers.astype(np.float64)), path, f"a number of {unit}")
    if not pd.api.types.is_integer_dtype(numbers):
        wrong = numbers != np.rint(numbers) if unit == "ns" else numbers.isna()
        _check(column, wrong, path, "a whole number of ns")
        numbers, unit = np.rint(numbers * (EPOCHS[unit] / EPOCHS["us"])).astype(np.int64), "us"
    dates = pd.to_datetime(numbers, unit=unit, utc=True, errors="coerce")  # type: ignore[call-overload]
    if epoch is not None:
        dates = dates + (_epoch_date(epoch) - pd.Timestamp(0, tz="UTC"))
    far = ~dates.dt.year.between(-290_000, 290_000)  # NaT; and in pandas 3.0 what microseconds do not hold
    _check(column, far, path, f"{unit} since {epoch or '1970-01-01'} of a date that pandas knows")
    return _to_microseconds(dates)


def _of_digits(column: "pd.Series[Any]", path: Path) -> tuple["pd.Series[Any]", str] | None:
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
    weeks = "; --date-format %G%V: weeks" if size == 6 and column.str.fullmatch(_WEEKS).all() else ""
    _check(column, dates.isna(), path, f"a date as {name}, as most rows have ({_NUMBER_HINT}{weeks})")
    return _to_microseconds(dates), f"times: {column.name!r} was read as dates, {name} ({_NUMBER_HINT}{weeks})"


def check_dates(form: Any) -> None:
    """Raise `ValueError` where a `TableFormat` has what is no format of dates, no unit, no zone, or no date."""
    date_format, time_unit, zone, epoch = form.date_format, form.time_unit, form.zone, form.epoch
    expected = "a format of dates such as %d.%m.%Y or %Y-%m-%d %H:%M"
    require(date_format is None or "%" in date_format, "date-format", date_format, expected)
    try:
        pd.to_datetime(pd.Series(["0"]), errors="coerce", format=_with_day(date_format)[1])
    except (ValueError, re.error):
        raise ValueError(f"date-format: got {date_format!r}, expected {expected}") from None
    require(zone is None or _zone_of(zone) is not None, "zone", zone, "a name such as Europe/Berlin or UTC")
    require(epoch is None or date_format is None, "epoch", epoch, "it or --date-format")
    require(epoch is None or time_unit != "number", "epoch", epoch, "it or --time-unit number")
    if epoch is not None:
        _epoch_date(epoch)
    units = (*EPOCHS, "number")
    require(time_unit in (None, *units), "time-unit", time_unit, f"one of {', '.join(units)}")
    require(None in (date_format, time_unit), "date-format", date_format, "it or --time-unit")


def _zone_of(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def _epoch_date(given: str) -> pd.Timestamp:
    """The date of stamp 0, in UTC where it names no offset."""
    try:
        date = pd.Timestamp(given)
        return date.tz_localize("UTC") if date.tz is None else date.tz_convert("UTC")
    except ValueError:
        raise ValueError(f"epoch: got {given!r}, expected a date such as 1980-01-06 or 2000-01-01T12:00") from None


def _with_day(date_format: str | None) -> tuple[str, str | None]:
    """What is written behind each date, and its format: weeks without a day begin on their first one."""
    if date_format is not None and not re.search("%[aAuwd]", date_format):
        for week, (day, directive) in _FIRST_DAYS.items():
            if week in date_format:
                return day, date_format + directive
    return "", date_format


def _first_days_of_periods(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Weeks, months, quarters and halves of years, such as 2024-W05, 2024M03 or 1994-S1, by their first days."""
    if not re.match(r"\d{4}[- ]?[MQSHW]\d", column.iloc[0]):
        return column

    def of_weeks(year: Any, week: Any, day: Any) -> Any:
        dates = pd.to_datetime(year + "-" + week + "-" + day, format="%G-%V-%u", errors="coerce")
        return dates.dt.strftime("%Y-%m-%d").fillna(column)

    parts = column.str.extract(r"^(\d{4})[- ]?([MQSHW])(\d{1,2})$")
    if parts.isna().any(axis=None):
        days = column.str.extract(r"^(\d{4})-?W(\d{2})-?([1-7])$")
        if days.isna().any(axis=None):
            return column
        return of_weeks(days[0], days[1], days[2])
    if (parts[1] == "W").all():
        return of_weeks(parts[0], parts[2], "1")
    length = parts[1].map({"M": 1, "Q": 3, "S": 6, "H": 6})
    months = length * (parts[2].astype(int) - 1) + 1
    if not months.between(1, 12).all():
        return column
    return parts[0] + "-" + months.astype(int).astype(str).str.zfill(2)


def _fitting_formats(column: "pd.Series[Any]") -> list[str]:
    """The formats, of those that fit the first date, that fit all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # pandas knows no format of 12:00 AM and 1:05:00 PM
        known = re.sub(r"(?i)\b(12|\d)(?=:[\d:]+ ?[AP]M)", "11", column.iloc[0])
        found = {guess_datetime_format(known, dayfirst=first) for first in (True, False)} - {None}
        fitting = [f for f in found if pd.to_datetime(column, errors="coerce", format=f, utc=True).notna().all()]
    return sorted(map(str, fitting))


def _by_format(column: "pd.Series[Any]", path: Path, date_format: str, expected: str) -> tuple["pd.Series[Any]", str]:
    """Dates by a format, in their zone: none where none has one, that of the last where they differ, which is said."""
    day, date_format = _with_day(date_format)  # type: ignore[assignment]
    written = column + day
    dates = pd.to_datetime(written, errors="coerce", format=date_format, utc=True)
    _check(column, dates.isna(), path, expected)
    note = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # what pandas 2 says of several offsets
            zone = pd.to_datetime(written, format=date_format).dt.tz
    except (FutureWarning, ValueError):
        if date_format == "ISO8601":  # other formats have an offset in all rows, or in none
            local = written.map(lambda date: pd.Timestamp(date).tz is None)
            _check(column, local, path, "an offset such as +01:00 or Z, as other rows have")
        last = dates.idxmax()
        zone = pd.to_datetime(written.loc[[last]], format=date_format).dt.tz
        note = f"times: {column.name!r} has several offsets; they are written with the last one's, {zone}"
        note += " (--zone, such as Europe/Berlin: with a place's clock)"
    return _to_microseconds(dates.dt.tz_convert(zone)), note


def _with_zone(
    dates: "pd.Series[Any]", column: "pd.Series[Any]", path: Path, zone: str, by: "pd.Series[Any] | None"
) -> tuple["pd.Series[Any]", str]:
    """Dates as the clocks of a place show them. The order of rows tells which time a double hour of autumn is."""
    every = np.ones(len(dates), dtype=bool)
    shown = dates.dt.tz_localize(zone, ambiguous=every, nonexistent="NaT")
    night = shown.isna() & (dates == dates.dt.normalize())  # of days, which begin later where there is no midnight
    shown = shown.where(~night, dates.dt.tz_localize(zone, ambiguous=every, nonexistent="shift_forward"))
    _check(column, shown.isna(), path, f"a time that the clocks of {zone} do not skip")
    second = dates.dt.tz_localize(zone, ambiguous=~every, nonexistent="shift_forward")
    double = shown != second
    if not double.any():
        return shown, ""
    later, unsure = pd.Series(False, dates.index), list[int]()
    for _, part in dates.groupby(np.zeros(len(dates)) if by is None else by.to_numpy()):
        part = part[::-1] if part.diff().median() < pd.Timedelta(0) else part
        own = part[double[part.index]]
        alone, usual = part.drop(own.index), part.diff().median()
        expected = "rows in order of time, which tells the double hour of autumn apart, or offsets"
        _check(column, alone.cummax() != alone, path, expected)
        for _, twice in own.groupby((own - pd.Timedelta(hours=12)).dt.floor("D")):
            again = twice.diff() <= pd.Timedelta(0)
            expected = "the double hour of autumn twice at most in order of time, or offsets"
            _check(column, again.cumsum() > 1, path, expected)
            later[twice.index] = again.cumsum() > 0
            if again.any():
                continue
            rows = part.index.get_indexer(twice.index[[0, -1]])
            before = rows[0] > 0 and part.iloc[rows[0]] - part.iloc[rows[0] - 1] <= 1.5 * usual
            after = rows[1] + 1 < len(part) and part.iloc[rows[1] + 1] - part.iloc[rows[1]] <= 1.5 * usual
            later[twice.index] = after and not before
            unsure += [int(twice.index[0])] if before == after else []
    said = f"times: row {unsure[0]} shows a double hour of autumn once, taken for its first" if unsure else ""
    return shown.where(~later, second), said


def _to_microseconds(dates: "pd.Series[Any]") -> "pd.Series[Any]":
    """Dates, or lengths of time, in microseconds; in nanoseconds where they have some."""
    parts = dates.dt.nanosecond if dates.dtype.kind == "M" else dates.dt.nanoseconds
    return dates if (parts % 1000).any() else dates.dt.as_unit("us")


def _check(column: "pd.Series[Any]", wrong: "pd.Series[Any]", path: Path, expected: str) -> None:
    if wrong.any():
        row = first_row(wrong)
        said = f"time: got {column.loc[row]!r} in row {row} of {path}, expected {expected}"
        raise WrongTimes(said, wrong.index[wrong])


def numbers_of(times: "pd.Series[Any]") -> tuple[np.ndarray, str, Any]:
    """Times in order as float64, their unit, and the date of time 0; "" and None where they are numbers.

    The date is in milliseconds where no time has a part of one: labels are rounded so, as numbers are not exact.
    """
    if pd.api.types.is_float_dtype(times):
        return times.to_numpy(np.float64), "", None
    steps, origin = times.diff(), times.iloc[0]
    typical = steps[steps > pd.Timedelta(0)].median()
    unit = next((name for name, length in UNITS.items() if length <= typical), "s")
    whole = times.dt.as_unit("ms")
    origin = origin.as_unit("ms") if unit != "s" and bool((whole == times).all()) else origin
    shown = wall_clock(pd.Index(times))
    return ((shown - shown[0]) / UNITS[unit]).to_numpy(np.float64), unit, origin


def rounded_length(seconds: Any, unit: str) -> Any:
    """A length of time, rounded to "us" or "ns": pandas would cut it off."""
    return pd.to_timedelta(np.rint(np.multiply(seconds, 1e9 / EPOCHS[unit])).astype(np.int64), unit)


def calendar_offset(given: str) -> tuple[Any, pd.Timedelta] | None:
    """A length of the calendar as an offset of pandas, and its mean length.

    `M`, `Q` and `Y` are months, quarters and years from any date, as in `12M`. `MS`, `ME`, `QS`, `QE`, `YS` and `YE`
    are their starts and ends, and `B` business days. `P1Y2M` has those of ISO 8601. None: `given` is something else.
    """
    month = pd.Timedelta(days=365.2425 / 12)
    if (iso := _iso_length(given)) is not None:
        months, rest = iso
        parts = {"days": rest.days, "seconds": rest.seconds, "microseconds": rest.microseconds}
        parts = {name: value for name, value in parts.items() if value}
        return (pd.DateOffset(months=months, **parts), months * month + rest) if months else None
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
    return anchored * count, months * count * month


def length_of_time(given: str) -> pd.Timedelta:
    """A fixed length of time, as pandas or ISO 8601 writes it; pandas itself takes `PT0.5H` for five hours.

    Raises:
        ValueError: for what is none.
    """
    iso = _iso_length(given)
    return pd.Timedelta(given) if iso is None else iso[1]


def _iso_length(given: str) -> tuple[int, pd.Timedelta] | None:
    """Months, and a fixed length, of ISO 8601, such as `P1Y2MT1.5H`. None: `given` does not begin as one."""
    if not re.match("[+-]?P", given.strip(), re.IGNORECASE):
        return None
    found = re.fullmatch(_ISO, given.strip())
    if found is None or not any(found.groups()):
        raise ValueError(f"{given!r} is no length of ISO 8601")
    years, months, *rest = (Decimal((part or "0").replace(",", ".")) for part in found.groups())
    seconds = sum(part * size for part, size in zip(rest, (604800, 86400, 3600, 60, 1), strict=True))
    try:
        return int(12 * years + months), pd.Timedelta(round(seconds * 10**9), unit="ns")
    except OverflowError:
        raise pd.errors.OutOfBoundsTimedelta(given) from None


def first_row(wrong: "pd.Series[Any]") -> int:
    """The number of the first wrong row in the file, which the index has."""
    return int(wrong.index[np.flatnonzero(wrong.to_numpy())[0]])
