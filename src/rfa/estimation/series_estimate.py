"""What `RobustFilter` returns: the estimate of each reading, with its states, weight and interval."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from rfa.checks import needs, require

from .readings_problem import FilteredReadings, ReadingsProblem, StateMoments
from .series import like
from .structural_model import SeriesScale
from .time_axis import TimeAxis, drawable

_OUTLIER_GAIN = 0.2  # gain of a reading over its Kalman gain, below which it is an outlier

_NO_PREDICTION = 1e4  # variance over that of the series: such a reading is not predicted, the states are unknown yet


@dataclass(frozen=True)
class SeriesEstimate:
    """The estimate at each of T readings or query times. All fields have T rows, in the order of time as given.

    Fields are NumPy arrays, tensors where the caller's values were a tensor, pandas Series where they were one. A
    Series of `filter` or `smooth` has the index of the values, one of `forecast` or `update` has the times. Where
    readings have come by `update`, all have the times.

    Args:
        times: as the caller gave them: numbers or dates. Those of pandas are an index of the same kind, zone and name.
        sensor: the names of the sensors, "" where there is one without a name.
        values: the readings, NaN where there is none.
        mean: of the reading: states, regressors and offset. NaN, as its variance, where one of these was missing.
        variance: of the reading, with the noise of its sensor.
        weights: of the readings, in (0, 1]. A reading counts as if its noise were R / weight. NaN without a reading.
        outliers: where a reading moves the prediction from earlier ones by less than a fifth of what it would move it
            with weight 1.
        states: the mean of each state by its name.
        state_variances: the variance of each state by its name.
        innovations: reading minus prediction from earlier readings, over its standard deviation. NaN where there is no
            prediction, and for times without a reading.
    """

    times: Any
    sensor: np.ndarray
    values: Any
    mean: Any
    variance: Any
    weights: Any
    outliers: Any
    states: dict[str, Any]
    state_variances: dict[str, Any]
    innovations: Any

    @classmethod
    def of(
        cls,
        given: Any,
        axis: TimeAxis,
        scale: SeriesScale,
        problem: ReadingsProblem,
        run: FilteredReadings,
        begin: int = 0,
        index: Any = None,
    ) -> "SeriesEstimate":
        """Of filtered, smoothed or forecast readings, from number `begin` on.

        `given` are the caller's values, whose kind the fields get. Series get the index, or None: the times.
        """
        readings = problem.table.readings
        times = axis.labels(readings.times[begin:])
        missing = np.isnan(readings.values)
        noise = problem.noise[0].numpy()

        def reading(states: StateMoments) -> tuple[np.ndarray, np.ndarray]:
            mean, variance = states.of_readings(problem.table.rows)
            return mean + readings.offset, variance + noise

        known = readings.known
        mean, variance = (np.where(known, part, np.nan) for part in reading(run.estimates))
        _, expected_variance = reading(run.predicted)
        weights = np.where(missing, np.nan, run.weights.numpy())
        weights = np.where(readings.wrong, np.finfo(float).tiny, weights)
        gain_ratio = expected_variance / (expected_variance + noise * (1 / weights - 1))
        outliers = (gain_ratio < _OUTLIER_GAIN) | readings.wrong
        means = run.estimates.mean.numpy()
        covariance = run.estimates.covariance
        variances = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).numpy()  # below 0 by rounding
        names = problem.names

        def each(part: np.ndarray) -> Any:
            return like(given, part[begin:], times if index is None else index)

        return cls(
            times,
            np.array(readings.sensors)[readings.sensor[begin:]],
            each(readings.values),
            each(mean),
            each(variance),
            each(weights),
            each(outliers),
            {name: each(means[:, k]) for k, name in enumerate(names)},
            {name: each(variances[:, k]) for k, name in enumerate(names)},
            each(standardised_innovations(problem, run, scale)),
        )

    def interval(self, probability: float = 0.9) -> tuple[Any, Any]:
        """The lower and the upper end of the interval that holds a reading with this probability.

        It is `mean -+ q sqrt(variance)`, with q of the normal distribution.

        Raises:
            ValueError: unless the probability is between 0 and 1.
        """
        require(0 < probability < 1, "probability", probability, "a number between 0 and 1")
        q = float(torch.special.ndtri(torch.tensor((1 + probability) / 2, dtype=torch.float64)))
        half = q * self.variance**0.5
        return self.mean - half, self.mean + half

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
            times,
            lower,
            upper,
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
            label=f"{probability:.0%} of readings",
        )
        if not np.isnan(values).all():
            axes.plot(times, values, ".", color="0.35", markersize=3, label="reading")
        if outliers.any():
            axes.plot(times[outliers], values[outliers], "x", color="tab:red", markersize=6, label="outlier")
        axes.legend(frameon=False, fontsize=8)
        return axes


def standardised_innovations(
    problem: ReadingsProblem, run: FilteredReadings, scale: SeriesScale
) -> Float[np.ndarray, " T"]:
    """Reading minus prediction from earlier readings, over its standard deviation. NaN without a prediction."""
    readings, noise = problem.table.readings, problem.noise[0].numpy()
    expected, variance = run.predicted.of_readings(problem.table.rows)
    variance = variance + noise
    innovations = (readings.used - expected - readings.offset) / np.sqrt(variance)
    unknown = variance > _NO_PREDICTION * max(scale.widest, float(np.median(noise))) + noise
    return np.where(unknown, np.nan, innovations)
