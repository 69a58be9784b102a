"""A model of statsforecast: its cross-validation, its processes and its clusters then run these forecasts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rfa.checks import require
from rfa.forecasting import engine


class RobustForecast:
    """Model for `StatsForecast(models=[RobustForecast(season_length=12)], freq="MS")`.

    statsforecast hands over values without times: they are taken as equal steps, with NaN for missing readings.

    Args:
        season_length: the length of the season in steps, 1 for none.
        robust: whether wrong readings get a small weight.
        alias: the name of the columns.
        prediction_intervals: bands by statsforecast's conformal intervals are not taken: the model has its own.

    Examples:
        >>> import numpy as np
        >>> from rfa.integrations.statsforecast import RobustForecast
        >>> found = RobustForecast().forecast(np.arange(40.0), h=2, level=[90])
        >>> sorted(found)
        ['hi-90', 'lo-90', 'mean']
    """

    uses_exog = True

    def __init__(
        self, season_length: float = 1, robust: bool = True, alias: str = "rfa", prediction_intervals: Any = None
    ):
        require(season_length >= 1, "season_length", season_length, "a number of steps >= 1, 1 for none")
        self.season_length = season_length
        self.robust = robust
        self.alias = alias
        self.prediction_intervals = prediction_intervals

    def __repr__(self) -> str:
        return self.alias

    def new(self) -> "RobustForecast":
        """A copy without a series, as statsforecast makes one for each."""
        return type(self)(self.season_length, self.robust, self.alias, self.prediction_intervals)

    def fit(self, y: np.ndarray, X: np.ndarray | None = None) -> "RobustForecast":
        """Keep a series `(T,)` and its regressors `(T, k)`: a forecast fits for the horizon asked."""
        self._series = np.asarray(y, dtype=np.float64), X
        return self

    def predict(self, h: int, X: np.ndarray | None = None, level: Sequence[float] | None = None) -> dict[str, Any]:
        """Forecast after the series of `fit`. As `forecast`."""
        require(hasattr(self, "_series"), "model", "no series", "fit() before")
        return self.forecast(self._series[0], h, self._series[1], X, level)

    def predict_in_sample(self, level: Sequence[float] | None = None) -> dict[str, Any]:
        """Forecasts of each reading of `fit` from those before it, `(T,)`. As `forecast` with `fitted`."""
        require(hasattr(self, "_series"), "model", "no series", "fit() before")
        y, X = self._series
        found = self.forecast(y, 1, X, None if X is None else X[-1:], level, fitted=True)
        return {name: each for name, each in found.items() if name.startswith("fitted")}

    def forecast(
        self,
        y: np.ndarray,
        h: int,
        X: np.ndarray | None = None,
        X_future: np.ndarray | None = None,
        level: Sequence[float] | None = None,
        fitted: bool = False,
    ) -> dict[str, Any]:
        """Forecast a series.

        Args:
            y: the readings `(T,)`, NaN where one is missing.
            h: number of steps.
            X: regressors of the readings, `(T, k)`.
            X_future: of the steps to forecast, `(h, k)`.
            level: of the bands, in percent.
            fitted: whether forecasts of each reading from those before are wanted.

        Returns:
            "mean" `(h,)`; "lo-90" and "hi-90" for each level; "fitted" `(T,)`, and with levels its bands by the spread
            of its errors. All in float64.

        Raises:
            ValueError: for a series that cannot be forecast.
        """
        given = self.prediction_intervals
        require(given is None, "prediction_intervals", given, "None: the model has bands of its own")
        values = np.asarray(y, dtype=np.float64)
        times = np.arange(len(values) + h, dtype=np.float64)
        period = 0.0 if self.season_length == 1 else float(self.season_length)
        exog = None if X is None or X_future is None else np.asarray(X, dtype=np.float64)
        future = None if exog is None else np.asarray(X_future, dtype=np.float64)
        require((X is None) == (X_future is None), "X_future", "regressors of one part", "those of both")
        series = engine.Series(times[: len(values)], values, period, exog, times[len(values) :], future)
        levels = list(dict.fromkeys(level or []))
        sides = [(each, sign, name) for each in levels for sign, name in ((-1, "lo"), (1, "hi"))]
        probabilities = [0.5 + sign * each / 200 for each, sign, _ in sides]
        (found,) = engine.forecast_panel([series], probabilities, robust=self.robust)
        if isinstance(found, str):
            raise ValueError(f"y: {found}")
        names = [f"{name}-{each}" for each, _, name in sides]
        out = {"mean": found.mean, **dict(zip(names, found.quantiles.T, strict=True))}
        if fitted:
            out["fitted"] = found.one_step
            errors = np.abs(values - found.one_step)
            known = bool((~np.isnan(errors)).any())
            for (each, sign, _), name in zip(sides, names, strict=True):
                spread = np.nanquantile(errors, each / 100) if known else np.nan
                out[f"fitted-{name}"] = found.one_step + sign * spread
        return out
