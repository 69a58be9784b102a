"""`RobustFilter` in sktime: a forecaster, and a transformer that fills gaps, replaces outliers or smooths."""

from rfa.checks import needs

needs("sktime", "pandas")

from typing import Any

import pandas as pd
from sktime.datatypes import update_data
from sktime.forecasting.base import BaseForecaster
from sktime.transformations.base import BaseTransformer

from rfa.checks import require
from rfa.estimation import Component, Level, Season, StructuralModel

from .series_filter import fitted_filter

_SEASONAL: dict[str, Any] = {"model": Level() + Season(period=4.0, harmonics=1), "robust": False}  # for sktime's checks


class RFAForecaster(BaseForecaster):
    """Forecaster by a `RobustFilter`, with gaps and wrong readings in the past.

    Means and variances are those of the filter after the last reading, and of the smoother before. Quantiles and
    intervals are the model's, of the normal distribution. Several columns get a filter each. Columns of X are
    regressors.

    Args:
        model: components of `rfa.estimation` joined by `+`. None: chosen in `fit` by
            rolling forecasts, among those of `rfa forecast` but for free seasons.
        robust: False: the Kalman filter.
        time_unit: of dates, in which the model's periods are, as in `RobustFilter`. Numbers are taken as they are.

    Attributes:
        filter_: the fitted `RobustFilter`.

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
        ahead = None if fh is None else fh.to_absolute_index(self.cutoff)
        self.filter_ = fitted_filter(self, y.index, y, exog=X, ahead=ahead)
        return self

    def _update(self, y: pd.Series, X: pd.DataFrame | None = None, update_params: bool = True) -> "RFAForecaster":
        """The components stay. Parameters are fitted again to all readings, or stay too."""
        self._seen = update_data(self._seen, y)
        self._exog = None if self._exog is None else update_data(self._exog, X).reindex(self._seen.index)
        model, fixed = self.filter_.model, None if update_params else self.filter_.parameters
        self.filter_ = fitted_filter(self, self._seen.index, self._seen, exog=self._exog, model=model, fixed=fixed)
        return self

    def _predict(self, fh: Any, X: pd.DataFrame | None) -> pd.Series:
        return self._moments(fh, X)[0]

    def _predict_var(self, fh: Any, X: pd.DataFrame | None = None, cov: bool = False) -> pd.DataFrame:
        require(not cov, "cov", cov, "False; covariances between times are in the paths of filter_.simulate")
        variance = self._moments(fh, X)[1] ** 2
        return variance.to_frame(self._get_varnames()[0])

    def _moments(self, fh: Any, X: pd.DataFrame | None) -> tuple[pd.Series, pd.Series]:
        index = fh.to_absolute_index(self.cutoff)
        exog = None if self._exog is None or X is None else X.reindex(index)
        mean, deviation = self.filter_.predict(index, return_std=True, exog=exog)
        return mean.set_axis(index).rename(self._seen.name), deviation.set_axis(index)

    def _get_fitted_params(self) -> dict[str, float]:
        return self.filter_.parameters

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Arguments with which sktime checks this class."""
        return [{}, _SEASONAL]


class RFAImputer(BaseTransformer):
    """Transformer that fills gaps by the smoother of a `RobustFilter`, and replaces outliers or all readings by it.

    `fit` chooses components and finds parameters. `transform` smooths the given series together with the readings of
    `fit` at other times, so that a short new part is filled from what was before it. Several columns get a filter each.

    Args:
        replace: "missing" readings, "outliers" too, or "all" readings: then the result is the smoothed series.
        model, robust, time_unit: as in `RFAForecaster`.

    Attributes:
        filter_: the `RobustFilter` that is fitted to the series of `fit`.

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
        self.filter_ = fitted_filter(self, X.index, X)
        return self

    def _transform(self, X: pd.Series, y: None = None) -> pd.Series:
        every = pd.concat([self._seen.drop(X.index, errors="ignore"), X]).sort_index()
        model, fixed = self.filter_.model, self.filter_.parameters
        found = fitted_filter(self, every.index, every, model=model, fixed=fixed).smooth()
        mean, outliers = found.mean.loc[X.index], found.outliers.loc[X.index]
        if self.replace == "all":
            return mean.rename(X.name)
        wrong = X.isna() | (outliers if self.replace == "outliers" else False)
        return X.where(~wrong, mean)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Arguments with which sktime checks this class."""
        return [{"replace": "missing"}, {**_SEASONAL, "replace": "all"}]
