"""What a caller gives as a series (NumPy, pandas, lists, tensors), as numbers; and results in the same kind."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rfa.checks import as_array, require, require_each

from .time_axis import TimeAxis, as_numbers, dates_and_kind

_LARGEST = 1e100


@dataclass(frozen=True)
class ReadingInfo:
    """What a caller says of readings beside their values: arguments of `RobustFilter.fit`, which explains them."""

    sensor: Any = None
    exog: Any = None
    offset: Any = None
    noise: Any = None
    observation: Any = None


@dataclass(frozen=True)
class Readings:
    """The readings of a series, one a row, in order of time."""

    times: np.ndarray  # `(T,)`, not decreasing. Equal times are readings of several sensors
    values: np.ndarray  # `(T,)`, NaN where nothing was read. There what is known of a reading may be NaN too
    sensor: np.ndarray  # `(T,)`: which of `sensors` has read it
    sensors: tuple[str, ...]  # their names. One without a name: `("",)`
    regressors: tuple[str, ...]  # names of the columns of `exog`
    gap: float  # the median time between readings of the first series, 1 for a single time: later ones do not change it
    exog: np.ndarray  # `(T, k)`: the regressors
    offset: np.ndarray  # `(T,)`: a known part of each value
    noise: np.ndarray  # `(T,)`: a known variance of each reading's error, beside the sensor's
    observation: np.ndarray | None  # `(T, n)`: rows of C in the place of the model's. None: the model's
    refused: np.ndarray | None = None  # `(T,)`: True where a reading at the start is wrong, and is not used
    needed: frozenset[str] = frozenset()  # which of "sensor", "offset" and "noise" `fit` had: later readings need them

    def __len__(self) -> int:
        return len(self.times)

    @property
    def used(self) -> np.ndarray:
        """The values, `(T,)`, NaN where nothing was read or the reading is refused."""
        return np.where(self.wrong, np.nan, self.values)

    @property
    def wrong(self) -> np.ndarray:
        """Where a reading is refused, `(T,)`. Readings that followed later are not."""
        wrong = np.zeros(len(self), dtype=bool)
        if self.refused is not None:
            wrong[: len(self.refused)] = self.refused
        return wrong

    @property
    def known(self) -> np.ndarray:
        """Where nothing is missing of what the mean of a reading needs, `(T,)`."""
        parts = [self.exog, self.offset[:, None]]
        parts += [] if self.observation is None else [self.observation]
        return ~np.isnan(np.concatenate(parts, axis=1)).any(axis=1)

    @property
    def span(self) -> float:
        """From the first time to the last one."""
        return float(self.times[-1] - self.times[0])

    def selected(self, rows: Any) -> "Readings":
        """Some rows, by mask, slice or index."""
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in self._columns}
        return replace(self, **parts, refused=self.wrong[rows])

    def followed_by(self, others: "Sequence[Readings]") -> "Readings":
        """With later readings."""
        each = {name: [getattr(one, name) for one in (self, *others)] for name in self._columns}
        parts: dict[str, Any] = {name: np.concatenate(columns) for name, columns in each.items()}
        return replace(self, **parts) if others else self

    @property
    def _columns(self) -> list[str]:
        """The names of fields with a row for each reading."""
        given = [] if self.observation is None else ["observation"]
        return ["times", "values", "sensor", "exog", "offset", "noise", *given]

    def check(self, axis: TimeAxis, rows: int) -> None:
        """Raise `ValueError` for a series that cannot be filtered. The caller has it in so many rows."""
        advice = "one reading of a sensor at a time; give sensor=... where several sensors read at once"
        _, first = np.unique(np.stack([self.times, self.sensor]), axis=1, return_index=True)
        once = np.isin(np.arange(len(self)), first).reshape(rows, -1).all(axis=1)
        labels = lambda: axis.labels(self.times[:: len(self) // rows])  # noqa: E731
        require_each(once, "times", "two readings at one time", labels, advice)
        seen = ~np.isnan(self.values)
        require(bool(seen.any()), "values", "missing values in all rows", "some readings")
        for place, name in enumerate(self.sensors):
            of_sensor = self.sensor == place
            unseen = bool(of_sensor.any()) and not bool((seen & of_sensor).any())
            require(not unseen, "values", f"no reading of {name!r}", "at least one of each sensor or column")


@dataclass(frozen=True)
class RowLabels:
    """What tells the rows of a series: their times, and an index of pandas."""

    axis: TimeAxis  # of the times
    times: np.ndarray  # as numbers, `(T,)`
    index: Any  # of the values, or of times that are a pandas Series. None: rows have no other label than their time

    def aligned(self, name: str, given: Any) -> Any:
        """`given` with its rows in the order of these, where it has an index of pandas. Else it is as it was.

        An index that but counts rows is taken by position where the values have no index either.
        """
        own = index_of(given)
        if own is None:
            return given
        import pandas as pd

        length = len(self.times)
        require(len(own) == length, name, f"{len(own)} rows", f"{length}, one for each time")
        if self.index is not None and own.equals(self.index):
            return given
        order = None if self.index is None else _order(own, self.index)
        dated, times, permuted = True, None, None
        with suppress(ValueError):  # dates beside numbers, or a missing one
            dated = dates_and_kind(own)[0] is not None
            times = self.axis.numbers(name, own) if dated or own.dtype.kind in "iuf" else None
        if order is None and times is not None:
            if np.array_equal(times, self.times):
                return given
            permuted = _order(pd.Index(times), pd.Index(self.times))  # of numbers it may be that of rows: refused
            order = permuted if dated else None
        if order is not None:
            return given.iloc[order]
        if name == "values" and self.index is None and permuted is None:
            return given
        silent = own.equals(pd.Index(np.arange(length)))
        other_kind = times is None and not (dated and self.axis.origin is not None) and own.is_monotonic_increasing
        expected = f"that of the {'times' if self.index is None else 'values'}, its labels in any order"
        expected = f"{expected}; {name}.to_numpy() for rows by position"
        by_position = self.index is None and (silent or other_kind)
        require(by_position, name, f"an index from {own[0]} to {own[-1]}", expected)
        return given

    def columns(
        self, info: ReadingInfo, seen: np.ndarray, states: Collection[str], regressors: Collection[str] | None = None
    ) -> dict[str, Any]:
        """What is known of each reading, but its sensor, by name. It is finite where a reading is `seen`."""
        exog = info.exog if regressors is None else by_name("exog", info.exog, regressors)
        rows = None if info.observation is None else by_name("observation", info.observation, states)
        length = len(seen)

        def of_readings(name: str, given: Any, table: bool) -> np.ndarray:
            """A row `(T, k)` or a number `(T,)` for each reading. One number is that of all."""
            found = as_numbers(name, self.aligned(name, given))
            found = found[:, None] if table and found.ndim == 1 else found
            fits = found.ndim == 2 and len(found) == length if table else found.shape in ((), (length,))
            expected = f"({length}, k), a row each" if table else f"a number, or {length} of them, one for each reading"
            require(fits, name, f"shape {found.shape}", expected)
            needed = seen[:, None] if table else seen if found.ndim else np.array(seen.any())
            fault, expected = "NaN or infinite values", "finite numbers where there is a reading"
            require_each(~(np.isnan(found) & needed), name, fault, found, expected)
            require_each(~np.isinf(found), name, fault, found, "finite numbers")
            return found if table else np.broadcast_to(found, (length,)).copy()

        found: dict[str, Any] = {
            "exog": np.zeros((length, 0)) if exog is None else of_readings("exog", exog, True),
            "offset": of_readings("offset", 0.0 if info.offset is None else info.offset, False),
            "noise": of_readings("noise", 0.0 if info.noise is None else info.noise, False),
            "observation": None if rows is None else of_readings("observation", rows, True),
        }
        require_each(~(found["noise"] < 0), "noise", "a negative variance", found["noise"], "variances >= 0")
        return found


def read_series(
    axis: TimeAxis, times: Any, values: Any, info: ReadingInfo, states: Collection[str]
) -> tuple[Readings, Any]:
    """The readings that `RobustFilter.fit` is given, m at each time of a table `(T, m)`, and the values' index."""
    labels = RowLabels(axis, axis.numbers("times", times), index_of(times))
    values = labels.aligned("values", values)
    index = index_of(values)
    labels = labels if index is None else replace(labels, index=index)
    table = as_numbers("values", values)
    require(table.ndim in (1, 2), "values", f"shape {table.shape}", "(T,) or (T, sensors)")
    numbers, length = labels.times, len(labels.times)
    require(len(table) == length, "values", f"{len(table)} rows", f"{length}, one for each time")
    require(table.size > 0, "values", "no rows", "at least one reading")
    ordered, expected = np.diff(numbers, prepend=-np.inf) >= 0, "times in order; sort the series first"
    require_each(ordered, "times", "times that decrease", lambda: axis.labels(numbers), expected)
    require_each(~np.isinf(table), "values", "infinite values", table, "finite numbers, NaN where missing")
    fault, expected = f"numbers beyond {_LARGEST:g}", "smaller ones: their squares are computed"
    require_each(~(np.abs(table) > _LARGEST), "values", fault, table, expected)
    seen = ~np.isnan(table if table.ndim == 2 else table[:, None]).all(axis=1)
    rows = {"times": numbers, "sensor": np.zeros(length, dtype=int), **labels.columns(info, seen, states)}
    sensors: tuple[str, ...] = ("",)
    sensor, regressors = info.sensor, column_names(info.exog) or _numbered("x", rows["exog"].shape[1])
    if table.ndim == 2 and table.shape[1] != 1:
        m, columns = table.shape[1], column_names(values)
        unclear, named = sensor is None and len(columns) > 0, ", ".join(columns)
        ways = "one filter for each column, or sensor=list(values) where all columns read the same quantity"
        require(not unclear, "values", f"a table with the columns {named:.200}", ways)
        sensors = _numbered("", m) if sensor is None else tuple(map(str, np.asarray(sensor).reshape(-1)))
        require(len(sensors) == m, "sensor", f"{len(sensors)} labels beside {m} columns", "one for each column")
        rows = {name: None if x is None else np.repeat(x, m, axis=0) for name, x in rows.items()}
        rows["sensor"] = np.tile(np.arange(m), length)
        index = None if index is None else index.repeat(m)
    elif sensor is not None:
        given = as_array(labels.aligned("sensor", sensor), "sensor").reshape(-1)
        known_labels = np.array([bool(label == label) for label in given])
        require_each(known_labels, "sensor", "a missing label", given, "a label for each reading")
        names = np.asarray([str(label) for label in given])
        require(len(names) == length, "sensor", f"{len(names)} labels", f"{length}, one for each reading")
        found, rows["sensor"] = np.unique(names, return_inverse=True)
        sensors = tuple(found.tolist())
    for name, each in (("sensor", sensors), ("exog", regressors)):
        require(len(set(each)) == len(each), name, f"the names {', '.join(each)}", "a name of its own for each column")
    steps = np.diff(numbers)
    gap = float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0
    needed = {name for name in ("offset", "noise") if bool((rows[name] != 0).any())}
    needed |= {"sensor"} if sensor is not None and len(sensors) > 1 else set()
    parts = {"regressors": regressors, "gap": gap, "needed": frozenset(needed), **rows}
    readings = Readings(values=table.reshape(-1), sensors=sensors, **parts)
    readings.check(axis, length)
    return readings, index


def read_later(
    axis: TimeAxis,
    earlier: Readings,
    name: str,
    given: Any,
    values: Any,
    info: ReadingInfo,
    states: Collection[str],
    in_order: bool = True,
) -> Readings:
    """Readings after others, or times at which a reading is asked for: any, unless they must be `in_order`.

    `name` is that of the times' argument.
    """
    found, last = axis.numbers(name, given), earlier.times[-1]
    length = len(found)
    if in_order and bool((np.diff(found, prepend=last) < 0).any()):
        ends = axis.labels(np.array([found.min(), last]))
        least, end = (f"{x:g}" if axis.origin is None else str(x)[:19] for x in ends)
        require(False, name, f"a time of {least}", f"times in order, not before the last reading at {end}")
    require(length > 0, name, "no times", "at least one")
    read = np.full(length, np.nan) if values is None else as_numbers("value", values)
    require(read.shape == (length,), "value", f"shape {read.shape}", "one number")
    far = bool((np.abs(read) > _LARGEST).any())
    require(not far, "value", f"a number beyond {_LARGEST:g}", "a smaller one, NaN where missing")
    for each in sorted(earlier.needed):
        expected = "one of " + ", ".join(earlier.sensors) if each == "sensor" else "numbers (0.0 where there is none)"
        require(getattr(info, each) is not None, each, None, f"{expected}, as in fit")
    rows = RowLabels(axis, found, index_of(given))
    sensor = rows.aligned("sensor", info.sensor)
    labels = [earlier.sensors[0]] if sensor is None else [str(label) for label in np.atleast_1d(np.asarray(sensor))]
    unknown = [label for label in labels if label not in earlier.sensors]
    require(not unknown, "sensor", unknown, f"some of {', '.join(earlier.sensors)}")
    require(len(labels) in (1, length), "sensor", f"{len(labels)} labels", f"one, or {length}")
    which = np.resize([earlier.sensors.index(label) for label in labels], length)
    seen = np.full(length, values is None) | ~np.isnan(read)  # of a time that is asked for all must be known
    parts = rows.columns(info, seen, states, earlier.regressors)
    columns, width, shown = parts["exog"].shape[1], earlier.exog.shape[1], parts["observation"]
    require(columns == width, "exog", f"{columns} columns", f"{width}, as in fit")
    same = (shown is None) == (earlier.observation is None)
    require(same, "observation", shown, "rows of C exactly where fit had them")
    return replace(earlier, times=found, values=read, sensor=which, refused=None, **parts)


def read_one(
    axis: TimeAxis, last: Readings, time: Any, value: Any, info: ReadingInfo, states: Collection[str]
) -> Readings:
    """One reading after those of the last time. `info` is of one: a label, and rows."""
    rows = {"exog": _row_of("exog", info.exog, last.regressors)}
    rows |= {"observation": _row_of("observation", info.observation, states)}
    info = replace(info, **rows, sensor=None if info.sensor is None else [info.sensor])
    new = read_later(axis, last, "time", [time], [value], info, states)
    same = (last.times == new.times[0]) & (last.sensor == new.sensor[0])
    require(not bool(same.any()), "time", time, "a time after the last reading of this sensor")
    return new


def _row_of(name: str, given: Any, names: Collection[str]) -> Any:
    """What a caller gives for one reading, as a table with one row. A pandas Series may have the names as its index."""
    own = index_of(given)
    if given is None or hasattr(given, "columns"):
        return given
    if own is not None and sorted(map(str, own)) == sorted(names):
        given = given.set_axis(own.astype(str)).reindex(list(names))
    elif own is not None and (given.name is not None or own.dtype.kind not in "iu"):
        require(len(own) == 1, name, f"the names {', '.join(map(str, own))}", ", ".join(names))
        return given  # the table's one column and row
    return np.reshape(as_numbers(name, given), (1, -1))


def by_name(name: str, given: Any, names: Collection[str]) -> Any:
    """A table of pandas with its columns in the order of `names`. What has no names is as it was."""
    own, columns = column_names(given), getattr(given, "columns", None)
    counted = columns is not None and list(columns) == list(range(len(columns)))  # a table made of an array
    if not own or own == tuple(names) or counted:
        return given
    missing, unknown = ([x for x in some if x not in others] for some, others in ((names, own), (own, names)))
    faults = [f"{word} {', '.join(each)}" for word, each in (("without", missing), ("unknown:", unknown)) if each]
    expected = f"{', '.join(names) or 'none'}, as in fit ({'; '.join(faults)}); {name}.to_numpy() goes by position"
    require(sorted(own) == sorted(names), name, f"columns {', '.join(own)}", expected)
    return given.iloc[:, [own.index(x) for x in names]] if columns is not None else given


def column_names(given: Any) -> tuple[str, ...]:
    """Of a table of pandas, or the name of a Series. None where there are none."""
    if index_of(given) is None:
        return ()
    single = () if getattr(given, "name", None) is None else (given.name,)
    return tuple(map(str, getattr(given, "columns", single)))


def index_of(given: Any) -> Any:
    """The index of a pandas Series or DataFrame. None for anything else."""
    return given.index if hasattr(given, "index") and hasattr(given, "to_numpy") else None


def _order(own: Any, wanted: Any) -> np.ndarray | None:
    """Where the labels of one index are in another one of the same labels. None where they are not the same."""
    if own.nlevels != wanted.nlevels or not (own.is_unique and wanted.is_unique):
        return None
    order = own.get_indexer(wanted)
    return order if len(own) == len(wanted) and bool((order >= 0).all()) else None


def like(given: Any, found: np.ndarray, index: Any = None, columns: list[str] | None = None) -> Any:
    """Results in the kind of `given`: a tensor, a pandas Series (of a matrix a DataFrame) over `index`, or an array."""
    if isinstance(given, Tensor):
        return torch.from_numpy(np.ascontiguousarray(found))
    if index_of(given) is not None and found.ndim <= 2:
        import pandas as pd

        return pd.Series(found, index) if found.ndim == 1 else pd.DataFrame(found, index, columns)
    return found


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{k}" for k in range(1, count + 1))
