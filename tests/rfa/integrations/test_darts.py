"""The model for darts: against the filter itself, and by what darts' tests ask of local models."""

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("darts", reason="darts, whose newest release wants older libraries: an environment of its own")

from darts import TimeSeries

from rfa.estimation import Level, RobustFilter, Season
from rfa.forecasting import Forecaster
from rfa.integrations.darts import RobustFilterModel

MODEL = Level() + Season(period=12.0, harmonics=2)
INDICES = {"dates": pd.date_range("2024-05-01", periods=80, freq="D"), "numbers": pd.RangeIndex(80)}


def readings(index):
    """Two components, the first with a gap and a wrong reading, and a covariate."""
    random = np.random.default_rng(0)
    wave = np.sin(2 * np.pi * np.arange(80) / 12)
    values = np.stack([5 + wave, -3 * wave], axis=1) + 0.1 * random.normal(size=(80, 2))
    values[20:30, 0], values[41, 0] = np.nan, 100.0
    series = TimeSeries.from_times_and_values(index, values, columns=["a", "b"])
    return series, TimeSeries.from_times_and_values(index, random.normal(size=(80, 1)), columns=["x"])


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_forecasts_and_paths_are_the_filters(index):
    series, covariate = readings(index)
    model = RobustFilterModel(MODEL, random_state=1).fit(series[:70], future_covariates=covariate)
    found = model.predict(10, future_covariates=covariate)
    paths = model.predict(10, future_covariates=covariate, num_samples=4000).all_values()
    assert found.time_index.equals(index[70:])
    assert [*found.columns] == ["a", "b"]
    exog = covariate.values()
    for place, column in enumerate(series.values().T):
        alone = RobustFilter(MODEL).fit(index[:70], column[:70], exog=exog[:70]).forecast(index[70:], exog=exog[70:])
        np.testing.assert_allclose(found.values()[:, place], alone.mean, rtol=1e-9)
        deviation = np.sqrt(alone.variance)
        assert (np.abs(paths[:, place].mean(1) - alone.mean) < 5 * deviation / np.sqrt(4000)).all()
        assert (np.abs(paths[:, place].std(1) / deviation - 1) < 5 / np.sqrt(2 * 4000)).all()


def test_another_series_keeps_the_parameters():
    series, _ = readings(INDICES["dates"])
    model = RobustFilterModel(MODEL).fit(series["a"][:60])
    known = model.filters[0].parameters
    expected = RobustFilter(MODEL).fit(series.time_index[20:75], series.values()[20:75, 0], fixed=known).forecast(3)
    np.testing.assert_allclose(model.predict(3, series=series["a"][20:75]).values()[:, 0], expected.mean, rtol=1e-9)
    # as in a backtest without new fits
    ahead = model.historical_forecasts(
        series["a"], start=74, forecast_horizon=3, retrain=False, start_format="position"
    )
    until = RobustFilter(MODEL).fit(series.time_index[:74], series.values()[:74, 0], fixed=known).forecast(3)
    np.testing.assert_allclose(ahead.values()[0, 0], until.mean[-1], rtol=1e-9)
    assert model.filters[0].parameters == known


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_without_a_model_the_forecasts_are_forecasters(index):
    """Its mean, and paths with its quantiles at each step; of another series its own; with a covariate."""
    series, covariate = readings(index)
    model = RobustFilterModel(random_state=1).fit(series[:70])
    found, paths = model.predict(6), model.predict(6, num_samples=4000).all_values()
    assert found.time_index.equals(index[70:76])
    for place, column in enumerate(series.values().T):
        alone = Forecaster().forecast(pd.Series(column[:70], index[:70]), 6, level=[80])
        np.testing.assert_allclose(found.values()[:, place], alone["rfa"], rtol=1e-9)
        ends = alone[["rfa-lo-80", "rfa-hi-80"]].to_numpy()
        inside = ((paths[:, place] >= ends[:, :1]) & (paths[:, place] <= ends[:, 1:])).mean(1)
        np.testing.assert_allclose(inside, 0.8, atol=0.04)
    again = model.predict(6, series=series[10:70])
    expected = Forecaster().forecast(pd.Series(series.values()[10:70, 0], index[10:70]), 6)["rfa"]
    np.testing.assert_allclose(again.values()[:, 0], expected, rtol=1e-9)
    values = 3.0 * covariate.values()
    explained = TimeSeries.from_times_and_values(index, values + 0.001 * series.values()[:, 1:])
    model = RobustFilterModel().fit(explained[:70], future_covariates=covariate)
    np.testing.assert_allclose(
        model.predict(6, future_covariates=covariate).values(), explained.values()[70:76], atol=0.05
    )
    assert str(model) == "RobustFilterModel()"


def test_a_saved_model_is_loaded_where_its_file_is_trusted(tmp_path):
    series, _ = readings(INDICES["dates"])
    model = RobustFilterModel(MODEL).fit(series)
    model.save(str(tmp_path / "model.pkl"))
    loaded = RobustFilterModel.load(str(tmp_path / "model.pkl"), trusted=True)
    assert loaded.predict(4) == model.predict(4)
