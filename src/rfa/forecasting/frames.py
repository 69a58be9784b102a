"""Tables in and out of a forecaster, through narwhals: ids, times with their zone, readings and regressors."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd

from rfa.checks import require
from rfa.steps import StampKind

_OF_RESULTS = ("rfa", "cutoff", "weight", "outlier", "cleaned", "member", "error", "note", "step", "season")
_PLAIN_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass
class Ids:
    """The ids of series, in their order, and the type of their column."""

    keys: list[Any]  # of each series its type's name and its id, so that 1, 1.0, "1" and True are four
    labels: Any  # the ids as a column of narwhals. None: one series without an id
    backend: Any  # the library of the table

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
        first, *rest = parts.values()  # with `backend`, `narwhals.from_dict` loses zones
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

    def check(self, *arguments: str) -> None:
        """Raise `ValueError`, by the names of the arguments, for a name that a column of the results has."""
        for argument, name in zip(arguments, self, strict=True):
            good = isinstance(name, str) and name not in _OF_RESULTS and not name.startswith("rfa-")
            require(good, argument, name, f"a column with another name than those of results: {', '.join(_OF_RESULTS)}")


class Quantiles(NamedTuple):
    """The columns of a forecast beside its mean, and their probabilities."""

    columns: tuple[str, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, level: Iterable[float] | float | None, quantiles: Iterable[float] | None) -> "Quantiles":
        """Of levels in percent and of quantiles, each once and in order.

        Raises:
            ValueError: for a level outside (0, 100), a quantile outside (0, 1).
        """
        found: dict[str, float] = {}
        for each in _numbers("level", level, 100, "above 0 and below 100, in percent"):
            found[f"rfa-lo-{each:.10g}"] = 0.5 - each / 200
            found[f"rfa-hi-{each:.10g}"] = 0.5 + each / 200
        for each in _numbers("quantiles", quantiles, 1, "above 0 and below 1"):
            found[f"rfa-q-{100 * each:.10g}"] = each
        return cls(tuple(found), tuple(found.values()))


def _numbers(name: str, given: Any, most: float, expected: str) -> list[float]:
    listed = [] if given is None else [given] if isinstance(given, int | float | np.number) else list(given)
    for each in listed:
        good = isinstance(each, int | float | np.number) and not isinstance(each, bool) and 0 < each < most
        require(bool(good), name, each, f"numbers {expected}")
    return sorted({float(each) for each in listed})


def as_table(data: Any, names: Names) -> tuple[Any, str | None]:
    """What a caller gives as a table of narwhals, and the frequency of its periods."""
    if isinstance(data, dict | pd.Series):
        data = pd.DataFrame(data if isinstance(data, dict) else {names.time: data.index, names.target: data.to_numpy()})
    period = None
    if isinstance(data, pd.DataFrame) and str(getattr(data.get(names.time), "dtype", "")).startswith("period["):
        period = str(data[names.time].dtype)[7:-1]
        data = data.assign(**{names.time: data[names.time].dt.to_timestamp()})
    expected = f"a table of pandas or polars with {names.time!r} and {names.target!r}, or a Series of pandas"
    try:
        table = nw.from_native(data, eager_only=True)
    except (TypeError, nw.exceptions.DuplicateError) as error:
        raise ValueError(f"df: got {type(data).__name__}, expected {expected} ({error!s:.80})") from None
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
    for name in [names.time, *([names.target] if target else []), *(regressors or [])]:
        require(name in table.columns, "df" if target else "X", table.columns, f"a column {name!r}")
    stamps, kind = read_stamps(table[names.time], period, unit)
    others = [name for name in table.columns if name not in names] if regressors is None else list(regressors)
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
    rows = [order[a:b] for a, b in pairwise(starts)]
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
    _require_rows(~absent, column.name, found, "an id in each row")
    plain = [value.item() if isinstance(value, np.generic) else value for value in found]
    return [(type(value).__name__, value) for value in plain]


def read_stamps(column: Any, period: str | None = None, unit: str = "") -> tuple[np.ndarray, StampKind]:
    """Stamps as numbers, or as integers in UTC, and what they are."""
    dtype, name = column.dtype, column.name
    _require_rows(~np.array(column.is_null().to_list(), dtype=bool), name, column, "a time in each row")
    if dtype == nw.Object:  # dates of the standard library
        found = column.to_list()
        dates = [hasattr(each, "year") and getattr(each, "tzinfo", None) is None for each in found]
        _require_rows(np.array(dates), name, found, "dates or numbers; dates with zones in a column of one zone")
        column = nw.new_series(name, np.array(found, dtype="M8[us]"), backend=column.implementation)
        dtype = column.dtype
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
    _require_rows(np.isfinite(numbers), name, numbers.tolist(), "finite times")
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
    """A cell as a number, which may be written as text; infinite where it is none."""
    try:
        none = isinstance(cell, bytes) or (isinstance(cell, str) and not _PLAIN_NUMBER.fullmatch(cell.strip()))
        return float("inf") if none else float(cell)
    except (TypeError, ValueError):
        return float("inf")


def _read_regressor(column: Any) -> np.ndarray:
    found, wrong = read_numbers(column)
    good = np.ones(len(found), dtype=bool)
    good[list(wrong)] = False
    _require_rows(good, column.name, wrong, "numbers, flags or missing cells: other columns are regressors")
    return found


def _require_rows(good: np.ndarray, name: str, cells: Any, expected: str) -> None:
    """Raise `ValueError` unless the condition holds in each row. It names the first other one."""
    if not good.all():
        row = int(good.argmin())
        raise ValueError(f"{name}: got {cells[row]!r:.40} in row {row}, counted from 0, expected {expected}")


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
        part = np.full((len(stamps), len(panel.names)), np.nan)
        if source is not None:
            known = given.stamps[source]
            rows = np.minimum(np.searchsorted(known, stamps), len(known) - 1)
            there = known[rows] == stamps
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
        column = nw.new_series(name, stamps, backend=backend)
        fits = kind.is_float or bool((stamps.astype(str(kind.dtype).lower()) == stamps).all())
        return column.cast(kind.dtype) if fits else column
    column = nw.new_series(name, stamps.view(f"M8[{kind.unit}]"), backend=backend)
    if kind.period is not None:
        native = column.to_native()
        return nw.from_native(native.dt.to_period(kind.period), series_only=True)
    if kind.zone is not None:
        column = column.dt.replace_time_zone("UTC").dt.convert_time_zone(kind.zone)
    return column.cast(kind.dtype) if column.dtype != kind.dtype else column
