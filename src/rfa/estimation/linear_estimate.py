"""What `RobustFilter` of a linear model returns: all in the shape of the readings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rfa.checks import needs, require

from .linear_model import Found, LinearKernel
from .series_estimate import OUTLIER_GAIN


@dataclass(frozen=True)
class Shape:
    """How the caller gave readings, so that results have the same shape and kind."""

    kind: str = "numpy"  # or "tensor" or "pandas"
    tracks: bool = False  # readings are (tracks, times, width), else (times, width)
    single: bool = False  # readings are (times,)
    width: int | None = None  # None: all components that there are
    index: Any = None  # of pandas
    columns: tuple[str, ...] = ()

    def like(self, part: Any, columns: Iterable[str] = ()) -> Any:
        """A result `(T,)` or `(T, k)` in the kind of the readings."""
        if self.kind == "tensor":
            return torch.from_numpy(np.ascontiguousarray(part))
        if self.index is None or part.ndim > 2:
            return part
        import pandas as pd

        return pd.Series(part, self.index) if part.ndim == 1 else pd.DataFrame(part, self.index, list(columns) or None)

    def of_components(self, part: Any) -> Any:
        """The same of components of readings."""
        return self.like(part[..., 0]) if self.single else self.like(part[..., : self.width], self.columns)


ARRAYS = Shape()


class LinearEstimate:
    """The estimate at each row of readings, or at one reading of `update`: then there is no dimension of times.

    Many tracks have a leading dimension. Results are arrays, tensors or tables of pandas, as the readings were.
    """

    _shape, _readings = ARRAYS, None

    def __init__(self, kernel: LinearKernel, sensor: Any, times: Any, given: Any):
        self._kernel, self._sensor, self.times, self._given = kernel, sensor, times, given

    @classmethod
    def of(cls, kernel: LinearKernel, sensor: Any, times: Any, found: Found, readings: Any, shape: Shape) -> Any:
        """Of rows; `sensor` is -1 where they have all components, or its number, in each row."""
        estimate = cls(kernel, sensor, times, found)
        estimate._readings, estimate._shape = readings, shape
        return estimate

    @cached_property
    def found(self) -> Found:
        """The arrays, split where `update` has left their bytes."""
        if isinstance(self._given, Found):
            return self._given
        kernel, one = self._kernel, self._sensor
        n, width = kernel.states, len(kernel.noise) if one < 0 else int(kernel.sizes[one])
        parts = kernel.all_parts if one < 0 else width if kernel.by_component else 1
        *found, readings = np.split(np.frombuffer(self._given), kernel.ends)
        sizes = (n, n * n, parts, parts, width, width, 1)
        mean, covariance, *rest, density = (x[:size] for x, size in zip(found, sizes, strict=True))
        self._readings = readings[:width]
        return Found(mean, covariance.reshape(n, n), *rest, density[0])

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
        return self._of_parts((self.found.spread + 1) / (self.found.spread + 1 / self.found.weight) < OUTLIER_GAIN)

    @property
    def innovations(self) -> Any:
        """`(T, m)`: reading minus its prediction from earlier ones, over its standard deviation. NaN without one."""
        deviation = np.sqrt(np.where(np.isinf(self.found.variance), np.nan, self.found.variance))
        return self._shape.of_components((self._read() - self.found.predicted) / deviation)

    @property
    def mean(self) -> Any:
        """`(T, m)`: of each component of a reading."""
        rows = self._kernel.rows_of(self._sensor)[0]
        return self._shape.of_components(np.einsum("...mn,...n->...m", rows, self.found.mean))

    @property
    def variance(self) -> Any:
        """`(T, m)`: of each component of a reading, with its noise."""
        rows, noise = self._kernel.rows_of(self._sensor)
        columns = []
        for row in np.moveaxis(rows, -2, 0):
            pairs = row[..., :, None] * row[..., None, :]
            with np.errstate(invalid="ignore"):
                found = np.where(pairs != 0, pairs * self.found.covariance, 0.0).sum(axis=(-2, -1))
            columns.append(
                np.where(np.isnan(found) & ~np.isnan(row[..., 0]), np.inf, found)
            )  # infinities of both signs
        return self._shape.of_components(np.stack(columns, axis=-1) + noise)

    @property
    def log_likelihood(self) -> Any:
        """The log density of all readings, each by what was known before it; of each track.

        With a diffuse start the readings that determine the states count as in statsmodels' exact diffuse start. The
        density of a robust filter is that of its mixture of noises.
        """
        found = (
            np.nansum(self.found.log_density, axis=-1) if np.ndim(self.found.log_density) else self.found.log_density
        )
        return found if np.ndim(found) else float(found)

    def interval(self, probability: float = 0.9) -> tuple[Any, Any]:
        """The ends `mean -+ q sqrt(variance)` of the interval that holds a component with this probability.

        Raises:
            ValueError: unless the probability is between 0 and 1.
        """
        require(0 < probability < 1, "probability", probability, "a number between 0 and 1")
        half = float(torch.special.ndtri(torch.tensor((1 + probability) / 2))) * self.variance**0.5
        return self.mean - half, self.mean + half

    def to_pandas(self) -> Any:
        """A table of one series: states, then mean, variance and weight of readings by component.

        Raises:
            ValueError: for many tracks, and for one reading.
        """
        needs("pandas")
        import pandas as pd

        require(np.ndim(self.found.mean) == 2, "to_pandas", "many tracks, or one reading", "the rows of one series")
        index = pd.Index(self.times, name="time") if self._shape.index is None else self._shape.index
        shape = replace(self._shape, kind="pandas", index=index, single=False)
        one = LinearEstimate.of(self._kernel, self._sensor, self.times, self.found, self._read(), shape)
        tables = [one.states]
        for name in ("readings", "mean", "variance", "weights"):
            part = getattr(one, name)
            part = part.to_frame(0) if part.ndim == 1 else part
            tables.append(part.add_prefix(f"{name}.") if part.shape[1] > 1 else part.set_axis([name], axis=1))
        return pd.concat(tables, axis=1)

    def _read(self) -> Any:
        return self.found and self._readings

    def _of_parts(self, part: Any) -> Any:
        names = self._shape.columns if self._kernel.by_component else tuple(self._kernel.sensors)
        names = names if len(names) == part.shape[-1] else ()
        return self._shape.like(part[..., 0]) if part.shape[-1] == 1 else self._shape.like(part, names)
