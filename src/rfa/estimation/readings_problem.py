"""A structural model with values of its parameters and the readings of a series, as matrices.

Each reading has its own row of C, its own noise and its own offset: `z_k = C_k x(t_k) + d_k + e_k`, `e_k ~ N(0, R_k)`.
Readings of one time follow each other without a step between them. This is exact where their errors are independent,
and gives each sensor its own weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rfa.checks import require

from .compiled import can_run, transitions_of_models
from .gaussian import Gaussian
from .recursive_filter import Recursion
from .series import Readings
from .structural_model import SeriesScale, StructuralModel

IRREGULAR = "sigma2.irregular"
_DIFFUSE = 1e8  # variance of a diffuse state, in units of the series' variance
_MANTISSA = 2.0**34  # steps that differ by less, relatively, share a transition: times have been rounded
Carried = Gaussian | Recursion  # what the Kalman filter and the robust filter carry from one reading to the next


def irregular_names(sensors: tuple[str, ...]) -> list[str]:
    """The parameters of the readings' noise: one for each sensor."""
    return [f"{IRREGULAR}.{sensor}" if sensor else IRREGULAR for sensor in sensors]


class StateMoments(NamedTuple):
    """Mean `(T, n)` and covariance `(T, n, n)` of the state at each of T readings."""

    mean: Float[Tensor, "T n"]
    covariance: Float[Tensor, "T n n"]

    def of_readings(self, rows: Float[Tensor, "T n"]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of what a row of C shows of each state, `(T,)`."""
        mean, covariance, shown = self.mean.numpy(), self.covariance.numpy(), rows.numpy()
        spread = np.einsum("tij,tj->ti", covariance, shown)
        variance = np.einsum("ti,ti->t", shown, spread)
        # states far more uncertain than their sum leave it a negative variance by rounding
        return np.einsum("ti,ti->t", shown, mean), np.maximum(variance, 0.0)


class FilteredReadings(NamedTuple):
    """A filter or a smoother of one series of T readings.

    Args:
        predicted: the state before each reading is used.
        estimates: the state at each reading: after it in a filter, given all readings in a smoother.
        weights: of each reading, `(T,)`, in (0, 1].
        carried: what the filter carries on from the last reading.
    """

    predicted: StateMoments
    estimates: StateMoments
    weights: Float[Tensor, " T"]
    carried: Carried


@dataclass(frozen=True)
class ReadingsTable:
    """A model and readings: what does not depend on the values of parameters.

    Args:
        model: the components, and the regressors.
        readings: in order of time.
        rows: C of each reading, `(T, n)`.
        values: without their offsets, `(T,)`, NaN where nothing was read.
        sensor: of each reading, `(T,)`.
        noise: known variances, beside the sensors', `(T,)`.
        least_noise: the smallest of them among the readings of each sensor.
        lags: the different steps from a reading to the next, `(lags,)`.
        lag_index: which of them each step is, `(T - 1,)`.
    """

    model: StructuralModel
    readings: Readings
    rows: Float[Tensor, "T n"]
    values: Float[Tensor, " T"]
    sensor: Int[Tensor, " T"]
    noise: Float[Tensor, " T"]
    least_noise: Float[Tensor, " sensors"]
    lags: Float[Tensor, " lags"]
    lag_index: Int[Tensor, " steps"]

    @classmethod
    def of(cls, model: StructuralModel, readings: Readings) -> "ReadingsTable":
        """Of readings.

        Raises:
            ValueError: for `observation` of another width than the states.
        """
        values = readings.used - readings.offset
        least = np.full(len(readings.sensors), np.inf)
        seen = ~np.isnan(values)
        np.minimum.at(least, readings.sensor[seen], readings.noise[seen])
        steps = np.diff(readings.times)
        mantissa, exponent = np.frexp(steps)
        rounded = np.ldexp(np.round(mantissa * _MANTISSA), exponent)
        _, first, index = np.unique(rounded, return_index=True, return_inverse=True)
        noise = np.nan_to_num(readings.noise)  # of a missing reading
        arrays = values, readings.sensor, noise, least, steps[first], index
        tensors = (torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)
        return cls(model, readings, _rows(model, readings), *tensors)

    def problem(self, parameters: Mapping[str, float | int | Float[Tensor, " b"]]) -> "ReadingsProblem":
        """With values of the parameters, factors as decay rates: numbers, or `(b,)` of several models.

        Raises:
            ValueError: for a reading without any noise, and a gap over which the state overflows.
        """
        given = {name: torch.as_tensor(value, dtype=torch.float64).reshape(-1) for name, value in parameters.items()}
        b = max(len(value) for value in given.values())
        given = {name: value.expand(b) for name, value in given.items()}
        sde = self.model.sde_of_rates(given, torch.ones(b, dtype=torch.float64))
        sensor_noise = torch.stack([given[name] for name in irregular_names(self.readings.sensors)], dim=-1)
        silent = bool((sensor_noise + self.least_noise <= 0).any())
        require(not silent, IRREGULAR, "a reading without noise", "sigma2.irregular > 0, or noise=... for each reading")
        if can_run():
            transition, variance = transitions_of_models(sde, self.lags)
        else:
            transition, variance = sde.transition(self.lags), sde.covariance(self.lags)
        finite = bool((transition.sum() + variance.sum()).isfinite())
        require(finite, "times", "a gap over which the state overflows", "shorter gaps")
        covariance, units = self.model.initial(sde, self.readings.gap)
        return ReadingsProblem(self, sensor_noise, transition, variance, covariance, units)


@dataclass(frozen=True)
class ReadingsProblem:
    """Readings and b models of them.

    Args:
        table: the readings.
        sensor_noise: the variance of each sensor's errors, `(b, sensors)`.
        transition: Phi of each different lag, `(b, lags, n, n)`.
        variance: V of each different lag.
        covariance: of the stationary states before the first reading, `(b, n, n)`, 0 elsewhere.
        units: of the diffuse states, `(n,)`, 0 elsewhere.
    """

    table: ReadingsTable
    sensor_noise: Float[Tensor, "b sensors"]
    transition: Float[Tensor, "b lags n n"]
    variance: Float[Tensor, "b lags n n"]
    covariance: Float[Tensor, "b n n"]
    units: Float[Tensor, " n"]

    @classmethod
    def of(
        cls,
        model: StructuralModel,
        parameters: Mapping[str, float | int | Float[Tensor, " b"]],
        readings: Readings,
    ) -> "ReadingsProblem":
        """As `ReadingsTable.problem`."""
        return ReadingsTable.of(model, readings).problem(parameters)

    def __len__(self) -> int:
        return len(self.table.values)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states."""
        return tuple(self.table.model.states)

    @property
    def noise(self) -> Float[Tensor, "b T"]:
        """R of each reading."""
        table = self.table  # in NumPy, as below: PyTorch would start threads for it
        return torch.from_numpy(self.sensor_noise.numpy()[:, table.sensor.numpy()] + table.noise.numpy())

    @property
    def present(self) -> Bool[Tensor, " T"]:
        """Where something was read."""
        return ~self.table.values.isnan()

    def whitened(self) -> tuple[Float[Tensor, "b T n"], Float[Tensor, "b T"]]:
        """Rows of C and values in units of the noise, 0 where nothing was read."""
        values = self.table.values.numpy()
        present, scale = ~np.isnan(values), np.sqrt(np.maximum(self.noise.numpy(), np.finfo(float).tiny))
        rows = np.where(present[:, None], self.table.rows.numpy() / scale[..., None], 0.0)
        return torch.from_numpy(rows), torch.from_numpy(np.where(present, values / scale, 0.0))

    def first(self, scale: SeriesScale) -> Gaussian:
        """The state before the first reading, for filters and smoothers.

        Diffuse states have a standard deviation of 10,000 times that of the series, or of its noise where that is
        larger, around its median in the level. So the start changes estimates by a relative 1e-8. An exact diffuse
        recursion loses all digits where many readings are needed to tell the directions from each other, such as a
        season's from a slope.
        """
        mean = torch.zeros_like(self.covariance[..., 0])
        mean[:, [k for k, name in enumerate(self.names) if name == "level"]] = scale.median
        largest = self.noise.median(dim=-1).values.clamp(min=scale.widest)  # of most readings
        wide = torch.diag_embed(self.units.square() * (_DIFFUSE * largest)[:, None])
        return Gaussian(mean, self.covariance + wide, None, mean.new_zeros(len(mean)))


def _rows(model: StructuralModel, readings: Readings) -> Float[Tensor, "T n"]:
    """C of each reading: the model's, or the caller's, and the regressors."""
    shown = np.array(list(model.states.values()))
    rows = np.tile(shown, (len(readings), 1))
    own = rows.shape[1] - readings.exog.shape[1]
    if readings.observation is not None:
        shape, names = readings.observation.shape, list(model.states)[:own]
        fits = shape[1] == own
        require(fits, "observation", f"{shape[1]} columns", f"{own}, one for each state: {', '.join(names)}")
        rows[:, :own] = np.nan_to_num(readings.observation)  # NaN of a missing reading, as below
    rows[:, own:] = np.nan_to_num(readings.exog)
    return torch.from_numpy(rows)
