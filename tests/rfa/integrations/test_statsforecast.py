"""The model in statsforecast's own calls."""

import numpy as np
import pandas as pd
import pytest

from rfa.forecasting import Forecaster
from rfa.integrations.statsforecast import RobustForecast

MONTHS = pd.date_range("2020-01-01", periods=48, freq="MS")


def panel():
    random = np.random.default_rng(0)
    parts = [pd.DataFrame({"unique_id": i, "ds": MONTHS, "y": 50 + random.normal(size=48).cumsum()}) for i in "ab"]
    return pd.concat(parts, ignore_index=True)


def test_forecasts_are_those_of_the_forecaster():
    core = pytest.importorskip("statsforecast")
    expected = Forecaster(season_length=12).forecast(panel(), 6, level=[80, 95])
    model = core.StatsForecast(models=[RobustForecast(season_length=12)], freq="MS")
    for found in (model.forecast(df=panel(), h=6, level=[95, 80]), model.fit(df=panel()).predict(h=6, level=[80, 95])):
        pd.testing.assert_frame_equal(found[expected.columns], expected, check_dtype=False)


def test_cross_validation_of_statsforecast():
    core = pytest.importorskip("statsforecast")
    model = core.StatsForecast(models=[RobustForecast(season_length=12)], freq="MS", n_jobs=2)
    found = model.cross_validation(df=panel(), h=3, n_windows=3, step_size=3, level=[90])
    forecaster = Forecaster(season_length=12)
    expected = forecaster.cross_validation(panel(), h=3, n_windows=3, step_size=3, level=[90])
    pd.testing.assert_frame_equal(found[expected.columns], expected, check_dtype=False)


def test_regressors_and_fitted_values_of_statsforecast():
    core = pytest.importorskip("statsforecast")
    df = panel().assign(price=np.arange(96) % 7)
    df["y"] = 100 + 3.0 * df["price"]
    stamps = pd.date_range("2024-01-01", periods=2, freq="MS")
    X = pd.DataFrame({"unique_id": [*"aabb"], "ds": [*stamps] * 2, "price": [1, 2, 3, 4]})
    model = core.StatsForecast(models=[RobustForecast()], freq="MS")
    found = model.forecast(df=df, h=2, X_df=X, level=[90], fitted=True)
    np.testing.assert_allclose(found["rfa"], [103, 106, 109, 112], rtol=0.02)
    assert model.forecast_fitted_values().columns.tolist() == ["unique_id", "ds", "y", "rfa", "rfa-lo-90", "rfa-hi-90"]


def test_the_methods_alone():
    y = 20 + np.random.default_rng(0).normal(size=40).cumsum()
    y[7] = np.nan
    model = RobustForecast(season_length=12, alias="other").fit(y)
    assert repr(model.new()) == "other"
    assert sorted(model.predict(3, level=[99.5])) == ["hi-99.5", "lo-99.5", "mean"]
    inside = model.predict_in_sample(level=[90])
    assert sorted(inside) == ["fitted", "fitted-hi-90", "fitted-lo-90"]
    errors = np.abs(y - inside["fitted"])
    held = np.mean((errors <= inside["fitted-hi-90"] - inside["fitted"])[~np.isnan(errors)])
    assert held == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: RobustForecast(season_length=0), "season_length: got 0"),
        (lambda: RobustForecast().predict(2), r"expected fit\(\) before"),
        (lambda: RobustForecast().forecast(np.full(9, np.nan), 2), "y: no reading"),
        (lambda: RobustForecast().forecast(np.arange(9.0), 2, X=np.ones((9, 1))), "X_future: got"),
        (lambda: RobustForecast(prediction_intervals=1).forecast(np.arange(9.0), 2), "prediction_intervals: got 1"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
