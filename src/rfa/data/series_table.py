"""Series in CSV files: times of any unit or dates, several channels, gaps, and clear words about what is wrong."""

from rfa.checks import needs

needs("pandas")

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from .series_dates import UNITS, first_row, rounded, times_of

_LARGEST = 1e30  # larger ones are marks of missing readings, such as 9.97e36


class SeriesTable(NamedTuple):
    """A series with its times, in float64.

    Fields:
        times: strictly increasing, in `unit`, since `origin`.
        values: NaN where nothing was read.
        channels: their names.
        unit: "D", "h", "min" or "s" of dated series; "" where the file has numbers.
        origin: the date of time 0, in the zone of the file; None where the file has numbers.
        sensor: the label of each row's sensor; empty where no column names sensors. Then times may be equal.
    """

    times: Float[Tensor, " T"]
    values: Float[Tensor, "T channels"]
    channels: tuple[str, ...]
    unit: str = ""
    origin: pd.Timestamp | None = None
    sensor: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The median time between rows with a reading; 1 where fewer than two times have one."""
        steps = self.times[~self.values.isnan().all(1)].diff()
        return float(steps[steps > 0].quantile(0.5)) if (steps > 0).any() else 1.0

    def duration(self, name: str, given: str) -> float:
        """A length of time such as `24h`, `7D` or `3.5`, in the unit of the times.

        Raises:
            ValueError: naming the argument, unless it is a length of time above 0, with a unit only for dated series.
        """
        expected = "a length of time above 0, such as 24h or 7D" if self.unit else "a number above 0"
        try:
            if self.unit and not re.search("[A-Za-z]", given):  # pandas takes a bare number for nanoseconds
                raise ValueError
            length = pd.Timedelta(given) / UNITS[self.unit] if self.unit else float(given)
        except ValueError:
            raise ValueError(f"{name}: got {given!r}, expected {expected}") from None
        if not 0 < length < np.inf:
            raise ValueError(f"{name}: got {given!r}, expected {expected}")
        return float(length)

    def label(self, time: float) -> str:
        """A time as the file writes it: a date, or a number."""
        if self.origin is None:
            text = str(int(time)) if float(time).is_integer() and abs(time) < 2**63 else f"{time:.15g}"
            exact = abs(float(text) - time) <= 4 * np.spacing(abs(time))  # sums of steps are off by so much
            return text if exact else repr(float(time))
        date = self.origin + rounded(time * UNITS[self.unit].total_seconds())
        date = date if self.unit == "s" else date.round("s")
        is_day = self.unit == "D" and date.tzinfo is None and date == date.normalize()
        return date.strftime("%Y-%m-%d") if is_day else date.isoformat(sep=" ")

    def axis(self, times: Float[np.ndarray, " n"]) -> np.ndarray:
        """Times for the axis of a figure: dates, or numbers."""
        if self.origin is None:
            return np.asarray(times)
        dates = self.origin + rounded(np.asarray(times) * UNITS[self.unit].total_seconds())
        return dates.tz_localize(None).to_numpy()

    def in_unit(self, unit: str) -> "SeriesTable":
        """The same series with its times in another unit of dated series."""
        if unit == self.unit:
            return self
        return self._replace(times=self.times * (UNITS[self.unit] / UNITS[unit]), unit=unit)

    def rows(self, chosen: Any) -> "SeriesTable":
        """Some of its rows, by a slice or a mask."""
        sensor = tuple(np.asarray(self.sensor)[chosen].tolist()) if self.sensor else ()
        return self._replace(times=self.times[chosen], values=self.values[chosen], sensor=sensor)


def read_series(
    path: str | Path,
    time: str,
    values: list[str] | None = None,
    *,
    sensor: str | None = None,
    date_format: str | None = None,
) -> SeriesTable:
    """Read a series from a CSV file with a header.

    An empty cell, `NA` and `nan` are missing readings. Times are numbers, or dates by ISO 8601, `19580329` among them.
    Dates with one offset, such as `+01:00`, keep it. Those with several become UTC.

    Args:
        path: of the file.
        time: the column of the times.
        values: the columns of the channels; by default all others.
        sensor: a column that names the sensor of each row. Then several rows may have one time.
        date_format: of the dates, as `strptime` has it (`%d.%m.%Y`); needed for other dates than those of ISO 8601.

    Raises:
        ValueError: for a file that cannot be read, an unknown column, no rows, times that are missing, neither numbers
            nor dates, or not strictly increasing, values that are no finite numbers, or a channel without a reading.
    """
    path = Path(path)
    table = _read_csv(path)
    found = _series(table, path, time, _channels(table, path, time, values, ("sensor", sensor)), sensor, date_format)
    _check_seen(found.channels, found.values, path)
    return found


def read_many_series(
    paths: Iterable[str | Path],
    time: str,
    values: list[str] | None = None,
    *,
    series: str | None = None,
    date_format: str | None = None,
) -> dict[str, SeriesTable]:
    """Read several series with the same channels, by name, all in the unit of the first.

    Args:
        paths: CSV files as for `read_series`, and folders, whose `*.csv` are read.
        time, values, date_format: as for `read_series`.
        series: a column that names the series of each row. Without it each file is one series.

    Raises:
        ValueError: as `read_series`; a channel needs a reading in one of the series. Also for a folder without CSV
            files, dates in one file and numbers in another, or different channels.
    """
    found: dict[str, SeriesTable] = {}
    files = table_files(paths)
    for path in files:
        table = _read_csv(path)
        channels = _channels(table, path, time, values, ("series", series))
        names = pd.Series(path.stem if len({p.stem for p in files}) == len(files) else str(path), table.index)
        if series is not None:
            if table[series].isna().any():
                raise ValueError(
                    f"series: row {first_row(table[series].isna())} of {path} has none, expected a name in each"
                )
            names = table[series]
        for name, rows in table.groupby(names, sort=False):
            if name in found:
                raise ValueError(f"series: got {name!r} in two files, {path} is the second, expected it in one")
            found[str(name)] = _series(rows, path, time, channels, None, date_format)
    first = next(iter(found.values()))
    for name, one in found.items():
        if bool(one.unit) != bool(first.unit):
            raise ValueError(f"time: got dates in some series and numbers in others ({name!r}), expected one kind")
        if one.channels != first.channels:
            raise ValueError(f"values: got {one.channels} in {name!r}, expected {first.channels}, as in the first")
    _check_seen(first.channels, torch.cat([one.values for one in found.values()]), files[0])
    return {name: one.in_unit(first.unit) for name, one in found.items()}


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


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        names = pd.read_csv(path, dtype=str, header=None, nrows=1, keep_default_na=False).iloc[0].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas would shift or cut off cells
            table = pd.read_csv(path, dtype=str, index_col=False)
    except pd.errors.ParserWarning:
        raise ValueError(f"file: rows of {path} have more cells than its header, expected a name for each") from None
    except FileNotFoundError:
        raise ValueError(f"file: {path} does not exist, expected a CSV file") from None
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"file: {path} cannot be read as CSV: {str(error).strip().splitlines()[0]}") from None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"file: {path} has two columns {twice!r}, expected each name once")
    if not len(table):
        raise ValueError(f"file: {path} has no rows, expected at least one")
    return table.reset_index(drop=True)


def _channels(
    table: pd.DataFrame, path: Path, time: str, values: list[str] | None, label: tuple[str, str | None]
) -> tuple[str, ...]:
    """The columns of the channels. `label` is "sensor" or "series" with its column."""
    columns = [name for name in table.columns if name not in (time, label[1])] if values is None else list(values)
    for argument, name in [("time", time), label, *(("values", column) for column in columns)]:
        if name is not None and name not in table.columns:
            raise ValueError(f"{argument}: got {name!r}, expected a column of {path}: {', '.join(table.columns)}")
    if {time, label[1]} & set(columns) or not columns or len(set(columns)) < len(columns):
        raise ValueError(f"values: got {columns}, expected columns other than those of times and labels, each once")
    return tuple(columns)


def _series(
    table: pd.DataFrame, path: Path, time: str, channels: tuple[str, ...], sensor: str | None, date_format: str | None
) -> SeriesTable:
    """The series of some rows of a file."""
    times, unit, origin = times_of(table[time], path, date_format)
    values = np.stack([_numbers(table[name], path) for name in channels], axis=1)
    labels: tuple[str, ...] = ()
    if sensor is not None:
        if table[sensor].isna().any():
            raise ValueError(
                f"sensor: row {first_row(table[sensor].isna())} of {path} has none, expected a name in each"
            )
        labels = tuple(table[sensor])
    _check_increasing(times, table[time], path, labels)
    return SeriesTable(torch.tensor(times), torch.tensor(values), channels, unit, origin, labels)


def _check_seen(channels: tuple[str, ...], values: Tensor, path: Path) -> None:
    unseen = [name for name, column in zip(channels, values.T, strict=True) if column.isnan().all()]
    if unseen:
        raise ValueError(f"values: {unseen[0]!r} has no reading in {path}, expected at least one")


def _numbers(column: "pd.Series[Any]", path: Path) -> np.ndarray:
    numbers = pd.to_numeric(column, errors="coerce")
    wrong = numbers.isna() & column.notna()
    wrong |= numbers.abs() > _LARGEST
    if wrong.any():
        row, expected = first_row(wrong), f"a number up to {_LARGEST:g}, or an empty cell where none was read"
        raise ValueError(f"values: got {column[row - 2]!r} in row {row} of {path}, expected {expected} ({column.name})")
    return numbers.to_numpy(np.float64)


def _check_increasing(times: np.ndarray, written: "pd.Series[Any]", path: Path, sensor: tuple[str, ...]) -> None:
    steps = np.diff(times)
    wrong = steps < 0
    if sensor:  # in order of time; one sensor has one reading at a time
        repeated = pd.DataFrame({"time": times, "sensor": sensor}).duplicated().to_numpy()
        wrong |= repeated[1:]
    else:
        wrong |= steps == 0
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        both = "before an earlier one" if steps[place] < 0 else "twice"
        given, row = written.iloc[place + 1], int(written.index[place + 1]) + 2
        several = "keep one row of a sensor at a time" if sensor else "name the column of the sensors (--sensor COLUMN)"
        raise ValueError(
            f"time: got {given!r} {both} (row {row} of {path}), expected strictly increasing times: "
            f"sort the file, merge rows of one time, or {several}"
        )
