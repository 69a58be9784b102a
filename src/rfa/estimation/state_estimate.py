"""Readings of a model as a caller gives them, and estimates of its states in the same shape and kind."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require, require_each

from .linear_model import Found, LinearKernel, Rows
from .linear_sde import LinearModel, check_covariance
from .nonlinear_filter import NonlinearKernel
from .nonlinear_model import NonlinearModel
from .series import column_names, index_of, like
from .series_estimate import OUTLIER_GAIN, ReadingMoments
from .time_axis import TimeAxis, as_numbers


@dataclass(frozen=True)
class Shape:
    """How the caller gave readings, so that results have the same shape and kind."""

    given: Any = None  # an empty part of them, where they are a tensor or of pandas
    tracks: bool = False  # readings are (tracks, times, width), else (times, width)
    single: bool = False  # readings are (times,)
    width: int | None = None  # None: all components that there are
    index: Any = None  # of pandas
    columns: tuple[str, ...] = ()

    def like(self, part: Any, columns: Iterable[str] = ()) -> Any:
        """A result `(T,)` or `(T, k)` in the kind of the readings."""
        return like(self.given, part, self.index, list(columns) or None)

    def of_components(self, part: Any) -> Any:
        """The same of components of readings."""
        return self.like(part[..., 0]) if self.single else self.like(part[..., : self.width], self.columns)


ARRAYS = Shape()
Model = LinearModel | NonlinearModel
Kernel = LinearKernel | NonlinearKernel


class StateEstimate(ReadingMoments):
    """The estimate at each row of readings, or at one reading of `update`: then there is no dimension of times.

    Many tracks have a leading dimension. Results are arrays, tensors or tables of pandas, as the readings were.
    """

    def __init__(
        self, kernel: Kernel, sensor: Any, times: Any, given: Any, readings: Any = None, shape: Shape = ARRAYS
    ):
        self._kernel, self._sensor, self.times, self._given = kernel, sensor, times, given
        self._readings, self._shape = readings, shape

    @cached_property
    def found(self) -> Found:
        """The arrays, split where `update` has left their bytes."""
        if isinstance(self._given, Found):
            return self._given
        kernel, one = self._kernel, self._sensor
        assert isinstance(kernel, LinearKernel)
        n, width = kernel.states, len(kernel.noise) if one < 0 else int(kernel.sizes[one])
        parts = kernel.all_parts if one < 0 else width if kernel.by_component else 1
        *found, readings = np.split(np.frombuffer(self._given), kernel.ends)
        sizes = (n, n * n, parts, parts, width, width, 1)
        mean, covariance, *rest = (x[:size] for x, size in zip(found, sizes, strict=True))
        self._readings = readings[:width]
        return Found(mean, covariance.reshape(n, n), *rest[:-1], rest[-1][0])  # type: ignore[call-arg]

    @property
    def readings(self) -> Any:
        """`(T, m)`: NaN where nothing was read."""
        return self._shape.of_components(self._read())

    @property
    def states(self) -> Any:
        """`(T, n)`: the mean of each state."""
        return self._shape.like(self.found.mean, self._kernel.names)

    @property
    def state_covariances(self) -> Any:
        """`(T, n, n)`, infinite where nothing is known."""
        return self._shape.like(self.found.covariance)

    @property
    def weights(self) -> Any:
        """`(T,)`, `(T, sensors)` or, of components, `(T, m)`: a reading counts as if its noise were R / weight."""
        return self._of_parts(self.found.weight)

    @property
    def outliers(self) -> Any:
        """As `weights`: where a reading moves the prediction by less than a fifth of what it would with weight 1."""
        return self._of_parts(self.found.gain_ratio < OUTLIER_GAIN)

    @property
    def innovations(self) -> Any:
        """`(T, m)`: reading minus its prediction from earlier ones, over its standard deviation. NaN without one."""
        deviation = np.sqrt(np.where(np.isinf(self.found.variance), np.nan, self.found.variance))
        return self._shape.of_components((self._read() - self.found.predicted) / deviation)

    @property
    def mean(self) -> Any:
        """`(T, m)`: of each component of a reading, by the state: C x, or h(x)."""
        return self._shape.of_components(self._moments[0])

    @property
    def variance(self) -> Any:
        """`(T, m)`: of each component of a reading, with its noise."""
        return self._shape.of_components(self._moments[1])

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        mean, covariance, numbers = self.found.mean, self.found.covariance, np.asarray(self._sensor)
        if numbers.ndim == 0:
            return self._kernel.readings_of(int(numbers), mean, covariance)
        found = np.full((2, *mean.shape[:-1], int(self._kernel.sizes.max())), np.nan)
        for number in np.unique(numbers):
            rows = numbers == number
            moments = self._kernel.readings_of(int(number), mean[..., rows, :], covariance[..., rows, :, :])
            found[..., rows, : int(self._kernel.sizes[number])] = moments
        return found[0], found[1]

    @property
    def log_likelihood(self) -> Any:
        """The log density of all readings, each by what was known before it; of each track.

        With a diffuse start the readings that determine the states count as in statsmodels' exact diffuse start. The
        density of a robust filter is that of its mixture of noises.
        """
        density = np.asarray(self.found.log_density)
        return np.nansum(density, axis=-1) if density.ndim > 1 else float(np.nansum(density))

    def _read(self) -> Any:
        return self.found and self._readings

    def _of_parts(self, part: Any) -> Any:
        names = self._shape.columns if self._kernel.by_component else tuple(self._kernel.sensors)
        names = names if len(names) == part.shape[-1] else ()
        return self._shape.like(part[..., 0]) if part.shape[-1] == 1 else self._shape.like(part, names)


def read_rows(
    kernel: Kernel,
    axis: TimeAxis | None,
    time_unit: str,
    times: Any,
    readings: Any,
    sensor: Any,
    control: Any,
    mask: Any,
    names: tuple[str, str] = ("times", "readings"),
) -> tuple[TimeAxis, Rows, Shape]:
    """Rows as a caller gives them, checked. `names` are those of the arguments."""
    time_name, name = names
    if readings is None:
        require(index_of(times) is not None, name, None, f"{name} beside the times")
        times, readings = times.index, times
    labels, sizes = None if sensor is None else sensor_numbers(kernel, sensor), kernel.sizes
    if labels is not None and isinstance(readings, list | tuple) and len({np.size(row) for row in readings}) > 1:
        readings = _rows_by_sensor(name, readings, np.resize(sizes[labels], len(readings)).tolist())
    given = as_numbers(name, readings)
    width, own = (int(x.sum() if labels is None else x.max()) for x in (sizes, sizes[labels]))
    own = width if labels is None else own  # columns that the rows need
    single = given.ndim == 1 and own == 1
    table = given[:, None] if single else given
    fits = table.ndim in (2, 3) and 0 not in table.shape and table.shape[-1] in (own, width)
    expected = f"(times, {own}) or (tracks, times, {own})" + " or (times,)" * (own == 1)
    expected = expected if time_name == "times" else f"{own} components"
    expected += " of all sensors, or `sensor=` beside those of one" * (labels is None and len(sizes) > 1)
    require(fits, name, f"shape {given.shape}", expected)
    tracks, length, count = table.ndim == 3, table.shape[-2], len(table) if table.ndim == 3 else 1
    flat = times if np.ndim(times) < 2 else np.asarray(times).reshape(-1)
    axis = axis or TimeAxis.of(flat, time_unit)
    numbers = axis.numbers(time_name, flat)
    fits = numbers.size == length or (np.ndim(times) == 2 and np.shape(times) == (count, length))
    expected = f"({length},), one for each row" + f", or ({count}, {length})" * tracks
    require(fits, time_name, f"shape {np.shape(times)}", expected)
    numbers = np.ascontiguousarray(numbers.reshape(-1, length))
    ordered = np.diff(numbers, axis=1, prepend=-np.inf) >= 0
    fault = "times that decrease"
    require_each(ordered.all(axis=0), time_name, fault, lambda: axis.labels(numbers[0]), "times in order")
    values = np.ascontiguousarray(table.reshape(count, length, -1))
    if values.shape[2] < width:
        values = np.pad(values, ((0, 0), (0, 0), (0, width - values.shape[2])), constant_values=np.nan)
    if mask is not None:
        seen = np.asarray(mask)
        seen = seen[..., None] if seen.ndim == table.ndim - 1 else seen
        fits = seen.dtype == bool and seen.shape in (table.shape, (*table.shape[:-1], 1))
        require(fits, "mask", f"{seen.dtype} of shape {np.shape(mask)}", f"bool of shape {table.shape[:-1]}")
        values[:, :, : table.shape[-1]][~np.broadcast_to(seen, table.shape).reshape(count, length, -1)] = np.nan
    which = None
    if labels is not None:
        require(len(labels) in (1, length), "sensor", f"{len(labels)} labels", f"one, or {length}")
        which = np.resize(labels, (1, length)).astype(np.int64)
        beyond = values[:, np.arange(width) >= sizes[which[0]][:, None]]
        require(bool(np.isnan(beyond).all()), name, "numbers beyond the components of the sensor", "NaN there")
    rows = Rows(numbers, values, read_control(kernel, control, count, length), which)
    index = index_of(readings)
    empty = readings[:0] if isinstance(readings, Tensor) else None if index is None else readings.head(0)
    return axis, rows, Shape(empty, tracks, single, table.shape[-1], index, column_names(readings))


def _rows_by_sensor(name: str, readings: Any, sizes: list[int]) -> np.ndarray:
    """Rows of sensors with different numbers of components, NaN after the last one."""
    table = np.full((len(sizes), max(sizes)), np.nan)
    for k, (row, size) in enumerate(zip(readings, sizes, strict=True)):
        numbers = np.atleast_1d(as_numbers(name, row))
        require(numbers.shape == (size,), name, f"shape {numbers.shape} in row {k}", f"{size} components of its sensor")
        table[k, :size] = numbers
    return table


def sensor_numbers(kernel: Kernel, sensor: Any) -> np.ndarray:
    """The numbers of sensors by their labels."""
    labels, names = [str(label) for label in np.atleast_1d(np.asarray(sensor))], list(kernel.sensors)
    unknown = sorted(set(labels) - set(names))
    require(not unknown, "sensor", unknown, f"some of {names}" if len(names) > 1 else "None: the model has one")
    return np.array([names.index(label) for label in labels])


def read_control(kernel: Kernel, control: Any, count: int, length: int) -> np.ndarray | None:
    """Inputs as a caller gives them, of so many series and rows, checked."""
    if control is None:
        require(not kernel.needs_control, "control", None, "an input for each row: transition is f(x, dt, u)")
        return None
    inputs, found = kernel.inputs, as_numbers("control", control)
    require(inputs != 0, "control", "an input", "None: RobustFilter has no control_matrix")
    found = found[:, None] if found.ndim == 1 and inputs in (1, None) else found
    found = found[None] if found.ndim == 2 else found
    inputs = found.shape[-1] if inputs is None and found.ndim else inputs
    fits = found.shape in ((1, length, inputs), (count, length, inputs)) and bool(np.isfinite(found).all())
    require(fits, "control", f"shape {np.shape(control)}", f"finite numbers ({length}, {inputs})")
    return np.ascontiguousarray(found)


def read_start(start: Any, at: Any, n: int | None, discrete: bool) -> tuple[np.ndarray, np.ndarray, Any] | None:
    """Mean `(1 or tracks, n)` and covariance `(1 or tracks, n, n)` of a start, checked, and where it stands."""
    if start is None:
        require(at is None, "start_at", at, "None without a start")
        return None
    pair = isinstance(start, tuple | list) and len(start) == 2
    require(pair, "start", type(start).__name__, "a mean and a covariance")
    mean, covariance = (as_numbers("start", part) for part in start)
    mean, covariance = mean[None] if mean.ndim == 1 else mean, covariance[None] if covariance.ndim == 2 else covariance
    fits = mean.ndim == 2 and mean.shape[1] in (n or mean.shape[1],) and mean.size > 0 and bool(np.isfinite(mean).all())
    expected = f"finite numbers ({n or 'n'},), or so many for each track"
    require(fits, "start", f"a mean of shape {np.shape(start[0])}", expected)
    check_covariance("start", torch.from_numpy(covariance), mean.shape[1])
    named = not isinstance(at, str) or at == "reading" or (at == "before" and discrete)
    places = "'reading', " + "'before' (one step), " * discrete + "or a time: where the start stands"
    require(at is not None and named, "start_at", at, places)
    count = max(len(mean), len(covariance))
    fits = {len(mean), len(covariance)} <= {1, count}
    require(fits, "start", f"{len(mean)} means, {len(covariance)} covariances", "one, or one for each track")
    mean, covariance = (np.broadcast_to(x, (count, *x.shape[1:])) for x in (mean, covariance))
    return mean, covariance, at
