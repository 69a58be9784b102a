"""Bands of a forecast by the errors that such forecasts have made (conformal prediction), for each horizon."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import norm

from .rolling import FittedChannel, Origins

_NEAR = 0.25  # of the horizon: errors of steps so near to each other are pooled
_FEW = 0.5  # share of the correction for few errors, which is right where they are independent
_LEAST = 20  # errors


class PastErrors(NamedTuple):
    """What rolling forecasts have got wrong.

    Fields:
        lags: from the origin to the reading, `(pairs,)`.
        errors: their absolute size, over the standard deviation that the model has expected.
        horizons: how many horizons the origins span: so many errors of a step are independent.
        horizon: the longest lag.
    """

    lags: Float[np.ndarray, " pairs"]
    errors: Float[np.ndarray, " pairs"]
    horizons: float
    horizon: float

    @classmethod
    def of(cls, fitted: FittedChannel, horizon: float) -> "PastErrors":
        """Of a model, with the readings that its filter has refused."""
        origins, times = Origins.of(fitted.channel, horizon), fitted.channel.times
        mean, variance = fitted.rolling(origins)
        errors = np.abs(fitted.channel.values[origins.targets] - mean) / np.sqrt(variance)
        kept = np.isfinite(errors)
        rows, lags = origins.rows[kept], (times[origins.targets] - times[origins.rows])[kept]
        span = float(np.ptp(times[rows])) if len(rows) else 0.0
        return cls(lags, errors[kept], 1 + span / horizon, horizon)

    def half_widths(self, probability: float, lags: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
        """Of the band that holds a reading with this probability, in standard deviations of the model, `(steps,)`.

        The quantile of the errors at lags within a quarter of the horizon, a little higher where few of them are
        independent. Where there are fewer than 20 errors in all, the model's.

        Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005).
        """
        if len(self.errors) < _LEAST:
            return np.full(len(lags), float(norm.ppf((1 + probability) / 2)))
        level = min(1.0, probability * (1 + _FEW / self.horizons))
        order = np.argsort(self.lags, kind="stable")
        known, errors = self.lags[order], self.errors[order]
        ends = np.searchsorted(known, [lags - _NEAR * self.horizon, lags + _NEAR * self.horizon * (1 + 1e-9)])
        near = ((first, last) if last - first >= _LEAST else (0, len(errors)) for first, last in ends.T.tolist())
        return np.array([np.quantile(errors[slice(*some)], level) for some in near])
