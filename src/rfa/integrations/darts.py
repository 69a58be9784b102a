"""Robust forecasts as a local model of darts: of a `Forecaster`, or of a `RobustFilter`."""

from rfa.checks import needs

needs("darts", "pandas", "scipy")

from typing import Any

import numpy as np
import torch
from darts import TimeSeries
from darts.models.forecasting.forecasting_model import TransferableFutureCovariatesLocalForecastingModel
from darts.utils.utils import random_method
from scipy.stats import norm

from rfa.estimation import Component, StructuralModel

from .series_filter import combined_forecast, fitted_filter

_PROBABILITIES = (0.002, 0.01, *(k / 40 for k in range(1, 40)), 0.99, 0.998)  # of quantiles that paths go between


class RobustFilterModel(TransferableFutureCovariatesLocalForecastingModel):
    """Model of darts by robust filters for each component of a series, with gaps and wrong readings in the past.

    One sample is the mean. Several are paths of the SDE of the `model`, so sums over the horizon have their
    distribution. Without a model they are paths of a random walk with the quantiles of `rfa.forecasting.Forecaster` at
    each step. Components are drawn independently. Another series than that of training keeps a model's parameters.
    Future covariates are regressors. A saved model is loaded with `trusted=True`: its file is a pickle.

    Args:
        model: components of `rfa.estimation` joined by `+`. None: the combination of `Forecaster`.
        robust: False: the Kalman filter.
        time_unit: of dates, in which the model's periods are, as in `RobustFilter`. Numbers are taken as they are.
        add_encoders, random_state, min_train_length: as in other models of darts.

    Attributes:
        filters: the fitted `RobustFilter` of each component of the series, with a model.

    Raises:
        ValueError: as `RobustFilter`, from `fit` and `predict`.
    """

    @random_method
    def __init__(
        self,
        model: Component | StructuralModel | None = None,
        robust: bool = True,
        time_unit: str = "day",
        add_encoders: dict | None = None,
        random_state: int | None = None,
        min_train_length: int | None = None,
    ):
        super().__init__(add_encoders=add_encoders, min_train_length=min_train_length)
        self.model = model
        self.robust = robust
        self.time_unit = time_unit

    def _fit(
        self, series: TimeSeries, future_covariates: TimeSeries | None = None, verbose: bool | None = None
    ) -> "RobustFilterModel":
        exog = None if future_covariates is None else future_covariates.values()
        columns = series.values(copy=False).T
        if self.model is None:
            self._past = series.time_index, columns.copy(), exog
            return self
        self.filters = [fitted_filter(self, series.time_index, column, exog=exog) for column in columns]
        return self

    @random_method
    def _predict(
        self,
        n: int,
        series: TimeSeries | None = None,
        historic_future_covariates: TimeSeries | None = None,
        future_covariates: TimeSeries | None = None,
        num_samples: int = 1,
        predict_likelihood_parameters: bool = False,
        verbose: bool = False,
        random_state: int | None = None,
    ) -> TimeSeries:
        if self.model is None:
            past = None if historic_future_covariates is None else historic_future_covariates.values()
            known = self._past if series is None else (series.time_index, series.values(copy=False).T, past)
            return self._build_forecast_series(
                self._combined(n, *known, future_covariates, num_samples), input_series=series
            )
        filters = self.filters
        if series is not None:  # filters of another series, with the parameters of training
            past = None if historic_future_covariates is None else historic_future_covariates.values()
            filters = [
                fitted_filter(self, series.time_index, column, exog=past, model=each.model, fixed=each.parameters)
                for each, column in zip(self.filters, series.values(copy=False).T, strict=True)
            ]
        times = self._generate_new_dates(n, input_series=series)
        exog = None if future_covariates is None else future_covariates.values()
        if num_samples == 1:
            found = [each.forecast(times, exog=exog).mean[:, None] for each in filters]
        else:
            generator = torch.Generator().manual_seed(np.random.randint(2**31))  # noqa: NPY002  # that of `random_method`
            found = [each.simulate(times, num_samples, generator=generator, exog=exog) for each in filters]
        return self._build_forecast_series(np.stack(found, axis=1), input_series=series)

    def _combined(
        self, n: int, index: Any, columns: np.ndarray, exog: np.ndarray | None, future: TimeSeries | None, samples: int
    ) -> np.ndarray:
        """Forecasts `(n, components, samples)` of `Forecaster`."""
        later: dict[str, Any] = {}
        if future is not None and exog is not None:
            later = {"exog": exog[: len(index)], "later": future.time_index, "later_exog": future.values()}
        walk = np.random.normal(size=(n, len(columns), samples)).cumsum(0)  # noqa: NPY002  # that of `random_method`
        chance = norm.cdf(walk / np.sqrt(np.arange(1, n + 1))[:, None, None])
        found = np.empty_like(chance)
        for place, column in enumerate(columns):
            quantiles = _PROBABILITIES if samples > 1 else ()
            ahead, _ = combined_forecast(self.robust, index, column, n, quantiles, **later)
            table = ahead.to_numpy()
            for k in range(n):
                if samples == 1:
                    found[k, place] = table[k, 0]
                else:
                    found[k, place] = np.interp(chance[k, place], _PROBABILITIES, table[k, 1:])
        return found

    @property
    def supports_multivariate(self) -> bool:
        """Each component has a filter."""
        return True

    @property
    def supports_probabilistic_prediction(self) -> bool:
        """By paths."""
        return True
