"""What `RobustFilter` returns: the estimate of each reading, with its states, weight and interval."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from rfa.checks import needs, require

from .components import SeriesScale
from .linear_model import Found
from .readings_problem import ReadingsProblem
from .series import like
from .time_axis import TimeAxis, as_numbers, drawable

OUTLIER_GAIN = 0.2  # gain of a reading over its Kalman gain, below which it is an outlier

_NO_PREDICTION = 1e4  # variance over that of the series: such a reading is not predicted, the states are unknown yet


class ReadingMoments:
    """Estimates with a `mean` and a `variance` of readings."""

    def interval(self: Any, probability: float = 0.9) -> tuple[Any, Any]:
        """The lower and the upper end of the interval that holds a reading, or its component, with this probability.

        It is `mean -+ q sqrt(variance)`, with q of the normal distribution.

        Raises:
            ValueError: unless the probability is between 0 and 1.
        """
        require(0 < probability < 1, "probability", probability, "a number between 0 and 1")
        half = NormalDist().inv_cdf((1 + probability) / 2) * self.variance**0.5
        return self.mean - half, self.mean + half


class SeriesEstimate(ReadingMoments):
    """The estimate at each of T readings or query times. All attributes have T rows, in the order of time as given.

    They are NumPy arrays, tensors where the caller's values were a tensor, pandas Series where they were one. A Series
    of `filter` or `smooth` has the index of the values, one of `forecast` or `update` has the times. Where readings
    have come by `update`, all have the times.

    Args:
        given: the caller's values, whose kind the attributes get.
        axis, scale: of the series.
        problem: the filtered, smoothed or forecast readings.
        run: what is found there.
        index: of Series. None: the times.
    """

    def __init__(
        self,
        given: Any,
        axis: TimeAxis,
        scale: SeriesScale,
        problem: ReadingsProblem,
        run: Found,
        index: Any = None,
    ):
        self._given, self._axis, self._scale, self._problem, self._run = given, axis, scale, problem, run
        self._readings, self._index = problem.table.readings, index

    @cached_property
    def times(self) -> Any:
        """As the caller gave them: numbers or dates. Those of pandas are an index of the same kind, zone and name."""
        return self._axis.labels(self._readings.times)

    @property
    def sensor(self) -> np.ndarray:
        """The names of the sensors, "" where there is one without a name."""
        return np.array(self._readings.sensors)[self._readings.sensor]

    @cached_property
    def values(self) -> Any:
        """The readings, NaN where there is none."""
        return self._like(self._readings.values)

    @cached_property
    def mean(self) -> Any:
        """Of the reading: states, regressors and offset. NaN, as its variance, where one of these was missing."""
        return self._like(self._moments[0])

    @cached_property
    def variance(self) -> Any:
        """Of the reading, with the noise of its sensor, and its own where `noise` is not missing."""
        return self._like(self._moments[1])

    @cached_property
    def weights(self) -> Any:
        """Of the readings, in (0, 1]. A reading counts as if its noise were R / weight. NaN without a reading."""
        return self._like(self._weights)

    @cached_property
    def outliers(self) -> Any:
        """Where a reading moves its prediction by less than a fifth of what it would move it with weight 1."""
        ratio = self._run._replace(weight=self._weights[:, None]).gain_ratio[:, 0]
        return self._like((ratio < OUTLIER_GAIN) | self._readings.wrong)

    @cached_property
    def states(self) -> dict[str, Any]:
        """The mean of each state by its name."""
        return {name: self._like(self._run.mean[:, k]) for k, name in enumerate(self._problem.names)}

    @cached_property
    def state_variances(self) -> dict[str, Any]:
        """The variance of each state by its name."""
        variances = np.maximum(self._run.covariance.diagonal(axis1=1, axis2=2), 0.0)  # below 0 by rounding
        return {name: self._like(variances[:, k]) for k, name in enumerate(self._problem.names)}

    @cached_property
    def innovations(self) -> Any:
        """Reading minus prediction from earlier readings, over its standard deviation. NaN where there is no
        prediction, and for times without a reading.
        """
        return self._like(standardised_innovations(self._problem, self._run, self._scale))

    @cached_property
    def _moments(self) -> list[np.ndarray]:
        mean, variance = self._problem.of_readings(self._run)
        return [np.where(self._readings.known, x, np.nan) for x in (mean + self._readings.offset, variance)]

    @cached_property
    def _weights(self) -> np.ndarray:
        weights = np.where(np.isnan(self._readings.values), np.nan, self._run.weight[:, 0])
        return np.where(self._readings.wrong, np.finfo(float).tiny, weights)

    def _like(self, part: np.ndarray) -> Any:
        return like(self._given, part, self.times if self._index is None else self._index)

    def to_pandas(self, probability: float = 0.9) -> Any:
        """A pandas DataFrame with a row for each time.

        Its columns are `value`, `mean`, `variance`, `lower`, `upper`, `weight`, `outlier`, `innovation`, the states,
        and `sensor` where sensors have names. Its index is that of the fields. Where this is not the times, `time` is
        a column.
        """
        needs("pandas")
        import pandas as pd

        lower, upper = self.interval(probability)
        columns = {"value": self.values, "mean": self.mean, "variance": self.variance, "lower": lower, "upper": upper}
        columns |= {"weight": self.weights, "outlier": self.outliers, "innovation": self.innovations, **self.states}
        times = self.times if isinstance(self.times, pd.Index) else pd.Index(self.times, name="time")
        index = self.mean.index if isinstance(self.mean, pd.Series) else times
        table = {} if index.equals(times) else {"time": times}
        table |= {"sensor": self.sensor} if any(self.sensor) else {}
        table |= {name: np.asarray(column) for name, column in columns.items()}
        return pd.DataFrame(table, index=index)

    def plot(self, axes: Any = None, probability: float = 0.9, label: str = "estimate") -> Any:
        """Draw the mean, the interval of readings, the readings, and a cross on each outlier.

        Args:
            axes: of matplotlib. None: new ones.
            probability: of the interval.
            label: of the mean, in the legend.

        Returns:
            The axes.
        """
        needs("matplotlib")
        import matplotlib.pyplot as plt

        if axes is None:
            axes = plt.subplots(figsize=(9, 4), layout="constrained")[1]
        values, mean, outliers = (np.asarray(x) for x in (self.values, self.mean, self.outliers))
        lower, upper = (np.asarray(x) for x in self.interval(probability))
        times = drawable(self.times)
        (line,) = axes.plot(times, mean, linewidth=1.2, label=label)
        axes.fill_between(
            times, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0, label=f"{probability:.0%} of readings"
        )
        if not np.isnan(values).all():
            axes.plot(times, values, ".", color="0.35", markersize=3, label="reading")
        if outliers.any():
            axes.plot(times[outliers], values[outliers], "x", color="tab:red", markersize=6, label="outlier")
        axes.legend(frameon=False, fontsize=8)
        return axes


def standardised_innovations(problem: ReadingsProblem, run: Found, scale: SeriesScale) -> Float[np.ndarray, " T"]:
    """Reading minus prediction from earlier readings, over its standard deviation. NaN without a prediction."""
    readings, noise = problem.table.readings, problem.noise[0].numpy()
    variance = run.variance[:, 0]
    innovations = (readings.used - run.predicted[:, 0] - readings.offset) / np.sqrt(variance)
    unknown = variance > _NO_PREDICTION * max(scale.widest, float(np.median(noise))) + noise
    return np.where(unknown, np.nan, innovations)


# Whether a filter's model fits a series: tests of its standardised innovations, NIS and NEES


@dataclass(frozen=True)
class Diagnostics:
    """Tests of a filter's standardised innovations. Outliers are counted, and left out of the tests.

    A p-value below 0.05 says that the model does not describe the series in this respect.

    Args:
        innovations: standardised, of the readings that have a prediction and are no outliers, in order.
        times: of these readings, as in `SeriesEstimate`.
        readings: how many readings the series has.
        outliers: how many of them are outliers.
        nees: the mean over readings where the true states are known, else None.
        lags: of the test of correlation.
    """

    innovations: np.ndarray
    times: Any
    readings: int
    outliers: int
    nees: float | None
    lags: int

    @classmethod
    def of(cls, found: SeriesEstimate, states: Found, true_states: Any, lags: int | None) -> "Diagnostics":
        """Of a filter's estimates and states.

        Raises:
            ValueError: for fewer than three innovations, equal ones, and `true_states` of another shape than `(T, n)`.
        """
        innovations, outliers, values = (np.asarray(x) for x in (found.innovations, found.outliers, found.values))
        used = ~np.isnan(innovations) & ~outliers
        count = int(used.sum())
        require(count > 2, "values", f"{count} readings with a prediction", "at least three for diagnostics")
        spread = bool(np.ptp(innovations[used]) > 0 and np.ptp(values[used]) > 0)
        require(spread, "values", "innovations that are all equal", "a series that varies, for diagnostics")
        lags = max(1, min(10, count // 5)) if lags is None else lags
        require(0 < lags < count, "lags", lags, f"a number from 1 to {count - 1}")
        nees = None if true_states is None else _nees(states, as_numbers("true_states", true_states), used)
        readings = int((~np.isnan(values)).sum())
        return cls(innovations[used], found.times[used], readings, int(outliers.sum()), nees, lags)

    @property
    def nis(self) -> float:
        """The mean of the squared innovations."""
        return float(np.mean(self.innovations**2))

    @property
    def autocorrelation(self) -> np.ndarray:
        """Of the innovations, at lags 1 to `lags`."""
        e = self.innovations - self.innovations.mean()
        return np.array([(e[lag:] * e[:-lag]).sum() for lag in range(1, self.lags + 1)]) / (e**2).sum()

    @property
    def table(self) -> dict[str, tuple[float, float]]:
        """Each test by its name: the statistic and the p-value.

        "mean" and "variance" are those of the innovations, expected to be 0 and 1; "NIS" is expected to be 1;
        "Ljung-Box" tests for correlation, "Jarque-Bera" for a normal distribution. NEES has no p-value here (NaN).
        """
        e, count = self.innovations, len(self.innovations)
        deviations = e - e.mean()
        variance = float(np.mean(deviations**2))
        skewness = float(np.mean(deviations**3)) / variance**1.5
        kurtosis = float(np.mean(deviations**4)) / variance**2
        jarque_bera = count / 6 * (skewness**2 + (kurtosis - 3) ** 2 / 4)
        correlation = self.autocorrelation**2 / (count - np.arange(1, self.lags + 1))
        ljung_box = count * (count + 2) * float(correlation.sum())
        mean = float(e.mean())
        found = {
            "mean": (mean, math.erfc(abs(mean) * math.sqrt(count / 2))),
            "variance": (variance, _two_sided(count * variance, count - 1)),
            "NIS": (self.nis, _two_sided(count * self.nis, count)),
            "Ljung-Box": (ljung_box, _upper_tail(ljung_box, self.lags)),
            "Jarque-Bera": (jarque_bera, _upper_tail(jarque_bera, 2)),
        }
        return found if self.nees is None else {**found, "NEES": (self.nees, math.nan)}

    def __str__(self) -> str:
        rows = [f"{name:<12}{statistic:>12.4g}{p:>12.3g}" for name, (statistic, p) in self.table.items()]
        head = f"{self.readings} readings, {self.outliers} of them outliers, {len(self.innovations)} tested"
        return "\n".join([head, f"{'':<12}{'statistic':>12}{'p-value':>12}", *rows])

    def to_pandas(self) -> Any:
        """The table of tests as a pandas DataFrame."""
        needs("pandas")
        import pandas as pd

        return pd.DataFrame.from_dict(self.table, orient="index", columns=["statistic", "p_value"])

    def plot(self) -> Any:
        """A figure of matplotlib: the innovations over time, their distribution, quantiles and correlation."""
        needs("matplotlib")
        import matplotlib.pyplot as plt

        e, count = np.sort(self.innovations), len(self.innovations)
        figure, ((over_time, histogram), (quantiles, correlation)) = plt.subplots(
            2, 2, figsize=(9, 5.5), layout="constrained"
        )
        over_time.plot(drawable(self.times), self.innovations, ".", markersize=3)
        over_time.axhspan(-1.96, 1.96, alpha=0.15, linewidth=0)
        over_time.set(title="standardised innovations (band: 95 %)", xlabel="time")
        histogram.hist(e, bins="auto", density=True, alpha=0.5)
        grid = np.linspace(-4, 4, 201)
        histogram.plot(grid, np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi))
        histogram.set(title="distribution, and the normal density")
        expected = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
        quantiles.plot(expected, e, ".", markersize=3)
        quantiles.plot(expected, expected, linewidth=1)
        quantiles.set(title="quantiles", xlabel="normal", ylabel="innovations")
        lags = np.arange(1, self.lags + 1)
        correlation.bar(lags, self.autocorrelation, width=0.4)
        correlation.axhspan(-1.96 / math.sqrt(count), 1.96 / math.sqrt(count), alpha=0.15, linewidth=0)
        correlation.set(title="autocorrelation (band: 95 %)", xlabel="lag in readings")
        return figure


def _nees(states: Found, truth: np.ndarray, used: np.ndarray) -> float:
    """The mean over the readings that are tested."""
    mean, covariance = states.mean, states.covariance
    require(truth.shape == mean.shape, "true_states", f"shape {truth.shape}", f"{mean.shape}")
    error = truth - mean
    distances = (error * np.linalg.solve(covariance, error[..., None])[..., 0]).sum(-1)
    return float(distances[used].mean() / mean.shape[1])


def _upper_tail(statistic: float, freedom: int) -> float:
    """Of the chi-squared distribution."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _two_sided(statistic: float, freedom: int) -> float:
    upper = _upper_tail(statistic, freedom)
    return min(1.0, 2 * min(upper, 1 - upper))
