"""Times in CSV files: numbers, or dates with their unit and zone."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

# units of the times of dated series, the coarsest first
UNITS = {name: pd.Timedelta(1, unit=name) for name in ("D", "h", "min", "s")}


def times_of(column: "pd.Series[Any]", path: Path, date_format: str | None) -> tuple[np.ndarray, str, Any]:
    """The times of a column `(T,)`, their unit, and the date of time 0; "" and None where they are numbers.

    Args:
        column: the cells as they are written.
        path: of the file, for errors.
        date_format: as for `read_series`.

    Raises:
        ValueError: for times that are missing, infinite, or neither numbers nor dates.
    """
    if column.isna().any():
        raise ValueError(f"time: row {first_row(column.isna())} of {path} has none, expected a time in every row")
    numbers = pd.to_numeric(column, errors="coerce")
    if date_format is None and not numbers.isna().any() and not _are_days(column):
        times = numbers.to_numpy(np.float64)
        if not np.isfinite(times).all():
            infinite = first_row(~np.isfinite(numbers))
            raise ValueError(f"time: row {infinite} of {path} is infinite, expected a finite number")
        return times, "", None
    dates = pd.to_datetime(column, errors="coerce", format=date_format or "ISO8601", utc=True)
    if dates.isna().any():
        row = first_row(dates.isna())
        expected = "a number, or a date like 2024-01-31 12:00" if date_format is None else f"a date like {date_format}"
        raise ValueError(f"time: got {column[row - 2]!r} in row {row} of {path}, expected {expected}")
    dates = dates.dt.tz_convert(_zone(column, date_format or "ISO8601"))
    steps = dates.diff().abs()
    typical = steps[steps > pd.Timedelta(0)].median()
    unit = next((name for name, length in UNITS.items() if length <= typical), "s")
    return ((dates - dates.iloc[0]) / UNITS[unit]).to_numpy(np.float64), unit, dates.iloc[0]


def _zone(column: "pd.Series[Any]", date_format: str) -> Any:
    """The zone of dates: None where none has one, UTC where they differ."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # what pandas 2 says of several offsets
            return pd.to_datetime(column, format=date_format).dt.tz
    except (FutureWarning, ValueError):
        return "UTC"


def rounded(seconds: Any) -> Any:
    """A length of time, to microseconds: pandas would cut them off."""
    return pd.to_timedelta(np.rint(np.multiply(seconds, 1e6)).astype(np.int64), "us")


def _are_days(column: "pd.Series[Any]") -> bool:
    """Whether all are days without separators, such as 19580329."""
    if not column.str.fullmatch(r"(1[89]|2[01])\d{6}").all():
        return False
    return bool(pd.to_datetime(column, errors="coerce", format="%Y%m%d").notna().all())


def first_row(wrong: "pd.Series[Any]") -> int:
    """The number of the first wrong row in the file, whose header is row 1."""
    return int(wrong.index[np.flatnonzero(wrong.to_numpy())[0]]) + 2
