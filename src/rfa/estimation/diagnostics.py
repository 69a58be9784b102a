"""Whether a filter's model fits a series: tests of its standardised innovations, NIS and NEES.

    e_k = (z_k - C m-_k) / sqrt(S_k)            independent N(0, 1) where the model is right
    NIS = mean of e_k^2,    NEES = mean of (x_k - m_k)^T P_k^-1 (x_k - m_k) / n            1 where it is right

Sources: Bar-Shalom, Li and Kirubarajan, Estimation with Applications to Tracking and Navigation (2001), section 5.4;
Durbin and Koopman (2012), section 2.12.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rfa.checks import needs, require

from .readings_problem import StateMoments
from .series_estimate import SeriesEstimate
from .time_axis import as_numbers, drawable


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
    def of(cls, found: SeriesEstimate, states: StateMoments, true_states: Any, lags: int | None) -> "Diagnostics":
        """Of a filter's estimates and states.

        Raises:
            ValueError: for fewer than three innovations, equal ones, and `true_states` of another shape than `(T, n)`.
        """
        innovations, outliers, values = (np.asarray(x) for x in (found.innovations, found.outliers, found.values))
        used = ~np.isnan(innovations) & ~outliers
        count = int(used.sum())
        require(count > 2, "values", f"{count} readings with a prediction", "at least three for diagnostics")
        spread = bool(np.ptp(innovations[used]) > 0)
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


def _nees(states: StateMoments, truth: np.ndarray, used: np.ndarray) -> float:
    """The mean over the readings that are tested."""
    expected, n = tuple(states.mean.shape), states.mean.shape[1]
    require(truth.shape == expected, "true_states", f"shape {truth.shape}", f"{expected}")
    error = torch.from_numpy(truth) - states.mean
    distances = (error * torch.linalg.solve(states.covariance, error)).sum(-1)
    return float(distances[torch.from_numpy(used)].mean() / n)


def _upper_tail(statistic: float, freedom: int) -> float:
    """Of the chi-squared distribution."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _two_sided(statistic: float, freedom: int) -> float:
    upper = _upper_tail(statistic, freedom)
    return min(1.0, 2 * min(upper, 1 - upper))
