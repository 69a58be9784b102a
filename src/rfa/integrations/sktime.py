"""Robust forecasts in sktime, and a transformer that fills gaps, replaces outliers or smooths."""

from rfa.checks import needs

needs("sktime", "pandas")

from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from sktime.datatypes import update_data
from sktime.forecasting.base import BaseForecaster
from sktime.transformations.base import BaseTransformer

from rfa.checks import require
from rfa.estimation import Component, Level, Season, StructuralModel

from .series_filter import combined_forecast, fitted_filter

_SEASONAL: dict[str, Any] = {"model": Level() + Season(period=4.0, harmonics=1), "robust": False}  # for sktime's checks


class RFAForecaster(BaseForecaster):
    """Robust forecasts of a series with gaps and wrong readings.

    With a `model`, means and variances are those of the filter after the last reading, and of the smoother before.
    Without one they are those of `Forecaster`, with its bands: a combination of filters, which is fitted for the
    horizon that `predict` asks for. Several columns get a filter each. Columns of X are regressors.

    Args:
        model: components of `rfa.estimation` joined by `+`. None: the combination.
        robust: False: the Kalman filter.
        time_unit: of dates, in which the model's periods are, as in `RobustFilter`. Numbers are taken as they are.

    Attributes:
        filter_: the fitted `RobustFilter`, with a model.

    Raises:
        ValueError: as `RobustFilter`, from `fit` and `predict`.

    Examples:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from rfa.integrations.sktime import RFAForecaster
        >>> y = pd.Series(np.arange(40.0), pd.period_range("2024-01", periods=40, freq="D"))
        >>> y.iloc[[7, 20]] = np.nan, 1000.0  # a gap and a wrong reading
        >>> forecaster = RFAForecaster().fit(y, fh=[1, 2])
        >>> forecaster.predict().round(1).tolist()
        [40.0, 41.0]
        >>> bands = forecaster.predict_interval(coverage=0.9)
    """

    _tags = {  # noqa: RUF012
        "y_inner_mtype": "pd.Series",
        "X_inner_mtype": "pd.DataFrame",
        "requires-fh-in-fit": False,
        "capability:exogenous": True,
        "capability:missing_values": True,
        "capability:pred_int": True,
        "capability:update": True,
        "capability:categorical_in_X": False,
    }

    def __init__(
        self, model: Component | StructuralModel | None = None, robust: bool = True, time_unit: str = "day"
    ) -> None:
        self.model = model
        self.robust = robust
        self.time_unit = time_unit
        super().__init__()

    def _fit(self, y: pd.Series, X: pd.DataFrame | None, fh: Any) -> "RFAForecaster":
        self._seen, self._exog = y, X
        if self.model is not None:
            self.filter_ = fitted_filter(self, y.index, y, exog=X)
        return self

    def _update(self, y: pd.Series, X: pd.DataFrame | None = None, update_params: bool = True) -> "RFAForecaster":
        """The components stay. Parameters are fitted again to all readings, or stay too if there is a model."""
        self._seen = update_data(self._seen, y)
        self._exog = None if self._exog is None else update_data(self._exog, X).reindex(self._seen.index)
        if self.model is not None:
            fixed = None if update_params else self.filter_.parameters
            self.filter_ = fitted_filter(self, self._seen.index, self._seen, exog=self._exog, fixed=fixed)
        return self

    def _predict(self, fh: Any, X: pd.DataFrame | None) -> pd.Series:
        return self._forecast(fh, X)["rfa"].rename(self._seen.name)

    def _predict_quantiles(self, fh: Any, X: pd.DataFrame | None, alpha: list[float]) -> pd.DataFrame:
        found = self._forecast(fh, X, alpha).drop(columns="rfa")
        return found.set_axis(pd.MultiIndex.from_product([self._get_varnames()[:1], alpha]), axis=1)

    def _predict_var(self, fh: Any, X: pd.DataFrame | None = None, cov: bool = False) -> pd.DataFrame:
        """The filter's variance; without a model that of a normal distribution with the width of the bands."""
        require(not cov, "cov", cov, "False; covariances between times are in the paths of filter_.simulate")
        low, high = NormalDist().cdf(-1), NormalDist().cdf(1)
        found = self._forecast(fh, X, [low, high])
        return ((found[high] - found[low]) / 2).pow(2).to_frame(self._get_varnames()[0])

    def _forecast(self, fh: Any, X: pd.DataFrame | None, alpha: Any = ()) -> pd.DataFrame:
        """The mean and quantiles at the horizon: columns "rfa" and the probabilities."""
        index, normal = fh.to_absolute_index(self.cutoff), [NormalDist().inv_cdf(each) for each in alpha]
        if self.model is not None:
            exog = None if self._exog is None or X is None else X.reindex(index)
            mean, deviation = (each.set_axis(index) for each in self.filter_.predict(index, return_std=True, exog=exog))
            return pd.DataFrame({"rfa": mean, **{p: mean + z * deviation for p, z in zip(alpha, normal, strict=True)}})
        steps = max(1, int(np.max(fh.to_relative(self.cutoff).to_numpy())))
        later: dict[str, Any] = {}
        if self._exog is not None and X is not None:
            later = {"exog": self._exog, "later": X.index, "later_exog": X}
        ahead, past = combined_forecast(self.robust, self._seen.index, self._seen, steps, sorted({*alpha}), **later)
        width = (past["rfa-hi-90"] - past["rfa-lo-90"]) / (2 * NormalDist().inv_cdf(0.95))
        columns = {"rfa": pd.concat([past["rfa"], ahead["rfa"]])}
        for p, z in zip(alpha, normal, strict=True):
            columns[p] = pd.concat([past["rfa"] + z * width, ahead[f"rfa-q-{100 * p:.10g}"]])
        found = pd.DataFrame(columns).reindex(index)
        require(bool(found["rfa"].notna().all()), "fh", [*index][:3], "times on the steps of the series")
        return found

    def _get_fitted_params(self) -> dict[str, float]:
        return {} if self.model is None else self.filter_.parameters

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Arguments with which sktime checks this class."""
        return [{}, _SEASONAL]


class RFAImputer(BaseTransformer):
    """Transformer that fills gaps by a robust smoother, and replaces outliers or all readings by it.

    `fit` finds the parameters of a `model`. `transform` smooths the given series together with the readings of `fit` at
    other times, so that a short new part is filled from what was before it. Without a model it is the history of
    `rfa.forecasting.Forecaster`. Several columns get a filter each.

    Args:
        replace: "missing" readings, "outliers" too, or "all" readings: then the result is the smoothed series.
        model, robust, time_unit: as in `RFAForecaster`.

    Attributes:
        filter_: the `RobustFilter` that is fitted to the series of `fit`, with a model.

    Raises:
        ValueError: as `RobustFilter`, and for another word.

    Examples:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from rfa.integrations.sktime import RFAImputer
        >>> y = pd.Series(np.arange(40.0), pd.period_range("2024-01", periods=40, freq="D"))
        >>> y.iloc[[7, 20]] = np.nan, 1000.0  # a gap and a wrong reading
        >>> RFAImputer(replace="outliers").fit_transform(y).iloc[[7, 20]].round(1).tolist()
        [7.0, 20.0]
    """

    _tags = {  # noqa: RUF012
        "X_inner_mtype": "pd.Series",
        "y_inner_mtype": "None",
        "scitype:transform-input": "Series",
        "scitype:transform-output": "Series",
        "scitype:instancewise": True,
        "transform-returns-same-time-index": True,
        "fit_is_empty": False,
        "capability:multivariate": False,
        "capability:missing_values": True,
        "capability:missing_values:removes": True,
        "capability:inverse_transform": True,
        "skip-inverse-transform": True,
        "capability:categorical_in_X": False,
    }

    def __init__(
        self,
        replace: str = "missing",
        model: Component | StructuralModel | None = None,
        robust: bool = True,
        time_unit: str = "day",
    ) -> None:
        self.replace = replace
        self.model = model
        self.robust = robust
        self.time_unit = time_unit
        super().__init__()

    def _fit(self, X: pd.Series, y: None = None) -> "RFAImputer":
        require(self.replace in ("missing", "outliers", "all"), "replace", self.replace, "missing, outliers or all")
        self._seen = X
        if self.model is not None:
            self.filter_ = fitted_filter(self, X.index, X)
        return self

    def _transform(self, X: pd.Series, y: None = None) -> pd.Series:
        every = pd.concat([self._seen.drop(X.index, errors="ignore"), X]).sort_index()
        if self.model is None:
            past = combined_forecast(self.robust, every.index, every, 1)[1]
            smooth, refused = past["rfa"], past["outlier"]
        else:
            found = fitted_filter(self, every.index, every, fixed=self.filter_.parameters).smooth()
            smooth, refused = found.mean, found.outliers
        mean, outliers = smooth.loc[X.index], refused.loc[X.index]
        if self.replace == "all":
            return mean.rename(X.name)
        wrong = X.isna() | (outliers if self.replace == "outliers" else False)
        return X.where(~wrong, mean)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Arguments with which sktime checks this class."""
        return [{"replace": "missing"}, {**_SEASONAL, "replace": "all"}]
