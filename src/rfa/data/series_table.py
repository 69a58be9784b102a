"""Series in CSV files: times of any unit or dates, several channels, gaps, and clear words about what is wrong."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

# units of the times of dated series, the coarsest first
_UNITS = {name: pd.Timedelta(1, unit=name) for name in ("D", "h", "min", "s")}


class SeriesTable(NamedTuple):
    """A series with its times, in float64.

    Fields:
        times: strictly increasing, in `unit`, since `origin`.
        values: NaN where nothing was read.
        channels: their names.
        unit: "D", "h", "min" or "s" of dated series; "" where the file has numbers.
        origin: the date of time 0; None where the file has numbers.
    """

    times: Float[Tensor, " T"]
    values: Float[Tensor, "T channels"]
    channels: tuple[str, ...]
    unit: str = ""
    origin: pd.Timestamp | None = None

    def duration(self, name: str, given: str) -> float:
        """A length of time such as `24h`, `7D` or `3.5`, in the unit of the times.

        Raises:
            ValueError: naming the argument, unless it is a length of time above 0, with a unit only for dated series.
        """
        expected = "a length of time above 0, such as 24h or 7D" if self.unit else "a number above 0"
        try:
            length = pd.Timedelta(given) / _UNITS[self.unit] if self.unit else float(given)
        except ValueError:
            raise ValueError(f"{name}: got {given!r}, expected {expected}") from None
        if not 0 < length < np.inf:
            raise ValueError(f"{name}: got {given!r}, expected {expected}")
        return float(length)

    def label(self, time: float) -> str:
        """A time as the file writes it: a date, or a number."""
        if self.origin is None:
            return f"{time:.10g}"
        return (self.origin + time * _UNITS[self.unit]).isoformat(sep=" ", timespec="seconds")


def read_series(
    path: str | Path, time: str, values: list[str] | None = None, *, date_format: str | None = None
) -> SeriesTable:
    """Read a series from a CSV file with a header.

    An empty cell, `NA` and `nan` are missing readings. Times are numbers, or dates by ISO 8601.

    Args:
        path: of the file.
        time: the column of the times.
        values: the columns of the channels; by default all others.
        date_format: of the dates, as `strptime` has it (`%Y%m%d`); needed for other dates than those of ISO 8601.

    Raises:
        ValueError: for a file that cannot be read, an unknown column, no rows, times that are missing, neither numbers
            nor dates, or not strictly increasing, values that are no finite numbers, or a channel without a reading.
    """
    path = Path(path)
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=True)
    except FileNotFoundError:
        raise ValueError(f"file: {path} does not exist, expected a CSV file") from None
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"file: {path} cannot be read as CSV: {str(error).strip().splitlines()[0]}") from None
    columns = [name for name in table.columns if name != time] if values is None else list(values)
    for argument, name in [("time", time), *(("values", column) for column in columns)]:
        if name not in table.columns:
            raise ValueError(f"{argument}: got {name!r}, expected a column of {path}: {', '.join(table.columns)}")
    if time in columns or not columns or len(set(columns)) < len(columns):
        raise ValueError(f"values: got {columns}, expected columns other than {time!r}, each once")
    if not len(table):
        raise ValueError(f"file: {path} has no rows, expected at least one")
    times, unit, origin = _times(table[time], path, date_format)
    channels = np.stack([_numbers(table[name], path) for name in columns], axis=1)
    _check_increasing(times, table[time], path)
    unseen = [name for name, column in zip(columns, channels.T, strict=True) if np.isnan(column).all()]
    if unseen:
        raise ValueError(f"values: {unseen[0]!r} has no reading in {path}, expected at least one")
    return SeriesTable(torch.tensor(times), torch.tensor(channels), tuple(columns), unit, origin)


def _times(column: "pd.Series[Any]", path: Path, date_format: str | None) -> tuple[np.ndarray, str, Any]:
    if column.isna().any():
        raise ValueError(f"time: row {_row(column.isna())} of {path} has none, expected a time in every row")
    numbers = pd.to_numeric(column, errors="coerce")
    if date_format is None and not numbers.isna().any():
        times = numbers.to_numpy(np.float64)
        if not np.isfinite(times).all():
            raise ValueError(f"time: row {_row(~np.isfinite(times))} of {path} is infinite, expected a finite number")
        return times, "", None
    dates = pd.to_datetime(column, errors="coerce", format=date_format or "ISO8601", utc=True)
    if dates.isna().any():
        row = _row(dates.isna())
        expected = "a number, or a date like 2024-01-31 12:00" if date_format is None else f"a date like {date_format}"
        raise ValueError(f"time: got {column.iloc[row - 2]!r} in row {row} of {path}, expected {expected}")
    dates = dates.dt.tz_localize(None)
    typical = dates.diff().median()
    unit = next((name for name, length in _UNITS.items() if length <= typical), "s")
    return ((dates - dates.iloc[0]) / _UNITS[unit]).to_numpy(np.float64), unit, dates.iloc[0]


def _numbers(column: "pd.Series[Any]", path: Path) -> np.ndarray:
    numbers = pd.to_numeric(column, errors="coerce")
    wrong = numbers.isna() & column.notna()
    wrong |= np.isinf(numbers)
    if wrong.any():
        row = _row(wrong)
        raise ValueError(
            f"values: got {column.iloc[row - 2]!r} in row {row} of {path}, expected a finite number ({column.name})"
        )
    return numbers.to_numpy(np.float64)


def _check_increasing(times: np.ndarray, written: "pd.Series[Any]", path: Path) -> None:
    wrong = np.flatnonzero(np.diff(times) <= 0)
    if len(wrong):
        row, both = int(wrong[0]), "twice" if times[wrong[0]] == times[wrong[0] + 1] else "before an earlier one"
        given = written.iloc[row + 1]
        raise ValueError(
            f"time: got {given!r} {both} (row {row + 3} of {path}), expected strictly increasing times: "
            "sort the file, or merge rows of one time"
        )


def _row(wrong: Any) -> int:
    """The number of the first wrong row in the file, whose header is row 1."""
    return int(np.flatnonzero(np.asarray(wrong))[0]) + 2
