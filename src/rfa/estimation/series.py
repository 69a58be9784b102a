"""What a caller gives as a series (NumPy, pandas, lists, tensors), as numbers; and results in the same kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require

from .time_axis import TimeAxis, as_numbers

_LARGEST = 1e100


@dataclass(frozen=True)
class Readings:
    """The readings of a series, one a row, in order of time.

    Args:
        times: `(T,)`, not decreasing. Equal times are readings of several sensors.
        values: `(T,)`, NaN where nothing was read.
        sensor: `(T,)`: which of `sensors` has read it.
        sensors: their names. One without a name: `("",)`.
        exog: `(T, k)`: the regressors.
        regressors: their names.
        offset: `(T,)`: a known part of each value.
        noise: `(T,)`: a known variance of each reading's error, beside the sensor's.
        observation: `(T, n)`: rows of C in the place of the model's. None: the model's.
        gap: the median time between readings of the first series; 1 where it has one time alone. Readings that follow
            do not change it, so that units of states stay.
        refused: `(T,)`: True where a reading at the start is wrong, and is not used. None: all are used.
    """

    times: np.ndarray
    values: np.ndarray
    sensor: np.ndarray
    sensors: tuple[str, ...]
    exog: np.ndarray
    regressors: tuple[str, ...]
    offset: np.ndarray
    noise: np.ndarray
    observation: np.ndarray | None
    gap: float
    refused: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.times)

    @property
    def _with_rows(self) -> list[str]:
        names = ["times", "values", "sensor", "exog", "offset", "noise"]
        return names if self.observation is None else [*names, "observation"]

    @property
    def used(self) -> np.ndarray:
        """The values, `(T,)`, NaN where nothing was read or the reading is refused."""
        return np.where(self.wrong, np.nan, self.values)

    @property
    def wrong(self) -> np.ndarray:
        """Where a reading is refused, `(T,)`. Readings that followed later are not."""
        refused = np.zeros(0, dtype=bool) if self.refused is None else self.refused
        return np.pad(refused, (0, len(self) - len(refused)))

    @property
    def span(self) -> float:
        """From the first time to the last one."""
        return float(self.times[-1] - self.times[0])

    def selected(self, rows: Any) -> "Readings":
        """Some rows, by mask, slice or index."""
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in self._with_rows}
        return replace(self, **parts, refused=self.wrong[rows])

    def followed_by(self, others: "Sequence[Readings]") -> "Readings":
        """With later readings."""
        if not others:
            return self
        both = (self, *others)
        parts: dict[str, Any] = {name: np.concatenate([getattr(x, name) for x in both]) for name in self._with_rows}
        return replace(self, **parts)

    def check(self) -> None:
        """Raise `ValueError` for a series that cannot be filtered."""
        require(len(self) > 0, "values", "no rows", "at least one reading")
        steps = np.diff(self.times)
        require(bool((steps >= 0).all()), "times", "times that decrease", "times in order; sort the series first")
        pairs = np.stack([self.times, self.sensor])
        repeated = np.unique(pairs, axis=1).shape[1] < len(self)
        advice = "one reading of a sensor at a time; give sensor=... where several sensors read at once"
        require(not repeated, "times", "two readings at one time", advice)
        require(not bool(np.isinf(self.values).any()), "values", "infinite values", "finite numbers, NaN where missing")
        large = bool((np.abs(self.values[~np.isnan(self.values)]) > _LARGEST).any())
        require(not large, "values", f"numbers beyond {_LARGEST:g}", "smaller ones: their squares are computed")
        seen = ~np.isnan(self.values)
        require(bool(seen.any()), "values", "missing values in all rows", "some readings")
        for place, name in enumerate(self.sensors):
            of_sensor = self.sensor == place
            unseen = bool(of_sensor.any()) and not bool((seen & of_sensor).any())
            require(not unseen, "values", f"no reading of {name!r}", "at least one of each sensor or column")


def per_reading(name: str, given: Any, length: int) -> np.ndarray:
    """A finite number for each reading, `(T,)`: one number for all, or one for each. None is 0."""
    if given is None:
        return np.zeros(length)
    found = as_numbers(name, given)
    fits = found.shape in ((), (length,))
    require(fits, name, f"shape {found.shape}", f"a number, or {length} of them, one for each reading")
    require(bool(np.isfinite(found).all()), name, "NaN or infinite values", "finite numbers")
    return np.broadcast_to(found, (length,)).copy()


def per_reading_table(name: str, given: Any, length: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """A finite table with a row for each reading, `(T, k)`, and the names of its columns. None has no columns."""
    if given is None:
        return np.zeros((length, 0)), ()
    columns = getattr(given, "columns", None)
    found = as_numbers(name, given)
    found = found[:, None] if found.ndim == 1 else found
    require(found.ndim == 2 and len(found) == length, name, f"shape {found.shape}", f"({length}, k), a row each")
    require(bool(np.isfinite(found).all()), name, "NaN or infinite values", "finite numbers")
    series = (getattr(given, "name", None),) if columns is None and found.shape[1] == 1 else None
    names = columns if columns is not None else series if series and series[0] else _numbered("x", found.shape[1])
    return found, tuple(map(str, names))


def read_series(
    axis: TimeAxis, times: Any, values: Any, sensor: Any, exog: Any, offset: Any, noise: Any, observation: Any
) -> Readings:
    """The readings that a caller gives, in rows. A table `(T, m)` becomes m readings at each time.

    Raises:
        ValueError: for what `RobustFilter.fit` names.
    """
    table = as_numbers("values", values)
    require(table.ndim in (1, 2), "values", f"shape {table.shape}", "(T,) or (T, sensors)")
    numbers = axis.numbers("times", times)
    length = len(numbers)
    require(len(table) == length, "values", f"{len(table)} rows", f"{length}, one for each time")
    sensors: tuple[str, ...] = ("",)
    which = np.zeros(length, dtype=int)
    regressors_table, regressors = per_reading_table("exog", exog, length)
    known, variances = per_reading("offset", offset, length), per_reading("noise", noise, length)
    require(bool((variances >= 0).all()), "noise", "a negative variance", "variances >= 0")
    rows = None if observation is None else per_reading_table("observation", observation, length)[0]
    if table.ndim == 2 and table.shape[1] != 1:
        require(sensor is None, "sensor", "labels beside a table of values", "one column of values with labels")
        m = table.shape[1]
        names = getattr(values, "columns", None)
        sensors = tuple(map(str, names)) if names is not None else _numbered("", m)
        numbers, which = np.repeat(numbers, m), np.tile(np.arange(m), length)
        known, variances = np.repeat(known, m), np.repeat(variances, m)
        regressors_table = np.repeat(regressors_table, m, axis=0)
        rows = None if rows is None else np.repeat(rows, m, axis=0)
    elif sensor is not None:
        given = np.asarray(sensor).reshape(-1)
        missing = [label is None or label != label for label in given]
        require(not any(missing), "sensor", "a missing label", "a label for each reading")
        labels = np.asarray([str(label) for label in given])
        require(len(labels) == length, "sensor", f"{len(labels)} labels", f"{length}, one for each reading")
        found, which = np.unique(labels, return_inverse=True)
        sensors = tuple(found.tolist())
    for name, each in (("sensor", sensors), ("exog", regressors)):
        require(len(set(each)) == len(each), name, f"the names {', '.join(each)}", "a name of its own for each column")
    flat, steps = table.reshape(-1), np.diff(numbers)
    gap = float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0
    readings = Readings(numbers, flat, which, sensors, regressors_table, regressors, known, variances, rows, gap)
    readings.check()
    return readings


def read_later(
    axis: TimeAxis,
    earlier: Readings,
    times: tuple[str, Any],
    values: Any,
    sensor: Any,
    exog: Any,
    offset: Any,
    noise: Any,
    observation: Any,
) -> Readings:
    """Readings after others, or times at which a reading is asked for. `times` has the name of the argument.

    Raises:
        ValueError: for times before the last reading, an unknown sensor, and what `RobustFilter.fit` names.
    """
    name, given = times
    found = axis.numbers(name, given)
    length, last = len(found), earlier.times[-1]
    require(length > 0, name, "no times", "at least one")
    in_order = bool((np.diff(found, prepend=last) >= 0).all())
    least, end = (f"{x:g}" if axis.origin is None else str(x)[:19] for x in axis.labels(np.array([found.min(), last])))
    require(in_order, name, f"a time of {least}", f"times in order, not before the last reading at {end}")
    read = np.full(length, np.nan) if values is None else as_numbers("value", values)
    require(read.shape == (length,), "value", f"shape {read.shape}", "one number")
    far = bool((np.abs(read[~np.isnan(read)]) > _LARGEST).any())
    require(not far, "value", f"a number beyond {_LARGEST:g}", "a smaller one, NaN where missing")
    labels = [earlier.sensors[0]] if sensor is None else [str(label) for label in np.atleast_1d(np.asarray(sensor))]
    unknown = [label for label in labels if label not in earlier.sensors]
    require(not unknown, "sensor", unknown, f"some of {', '.join(earlier.sensors)}")
    require(len(labels) in (1, length), "sensor", f"{len(labels)} labels", f"one, or {length}")
    which = np.resize([earlier.sensors.index(label) for label in labels], length)
    table = per_reading_table("exog", exog, length)[0]
    width = earlier.exog.shape[1]
    require(table.shape[1] == width, "exog", f"{table.shape[1]} columns", f"{width}, as in fit")
    rows = None if observation is None else per_reading_table("observation", observation, length)[0]
    given_rows = earlier.observation is not None
    require((rows is not None) == given_rows, "observation", rows, "rows of C exactly where fit had them")
    known, variances = per_reading("offset", offset, length), per_reading("noise", noise, length)
    require(bool((variances >= 0).all()), "noise", "a negative variance", "variances >= 0")
    names = earlier.sensors, table, earlier.regressors
    return Readings(found, read, which, *names, known, variances, rows, earlier.gap)


def like(given: Any, found: np.ndarray, index: Any = None) -> Any:
    """Results in the kind of `given`: a tensor, a pandas Series over `index`, or an array."""
    if isinstance(given, Tensor):
        return torch.from_numpy(np.ascontiguousarray(found))
    if hasattr(given, "index") and hasattr(given, "to_numpy"):
        import pandas as pd

        return pd.Series(found, index=index)
    return found


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{k}" for k in range(1, count + 1))
