"""`RobustFilter` as a local model of darts."""

from rfa.checks import needs

needs("darts", "pandas")


import numpy as np
import torch
from darts import TimeSeries
from darts.models.forecasting.forecasting_model import TransferableFutureCovariatesLocalForecastingModel
from darts.utils.utils import random_method

from rfa.estimation import Component, StructuralModel

from .series_filter import fitted_filter


class RobustFilterModel(TransferableFutureCovariatesLocalForecastingModel):
    """Model of darts by a `RobustFilter` for each component, with gaps and wrong readings in the past.

    One sample is the mean. Several are paths of the filter's SDE, so sums over the horizon have their distribution;
    components are drawn independently. Another series than that of training keeps components and parameters. Future
    covariates are regressors. A saved model is loaded with `trusted=True`: its file is a pickle.

    Args:
        model: components of `rfa.estimation` joined by `+`. None: chosen in `fit` by
            rolling forecasts, among those of `rfa forecast` but for free seasons.
        robust: False: the Kalman filter.
        time_unit: of dates, in which the model's periods are, as in `RobustFilter`. Numbers are taken as they are.
        add_encoders, random_state, min_train_length: as in other models of darts.

    Attributes:
        filters: the fitted `RobustFilter` of each component of the series.

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

    @property
    def supports_multivariate(self) -> bool:
        """Each component has a filter."""
        return True

    @property
    def supports_probabilistic_prediction(self) -> bool:
        """By paths."""
        return True
