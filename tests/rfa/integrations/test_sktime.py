"""The forecaster and the imputer for sktime: against the filter itself, and by sktime's own checks."""

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("sktime", reason="sktime, whose newest release wants pandas below 3.1: an environment of its own")

from cover import ALL
from sktime.forecasting.base import ForecastingHorizon
from sktime.utils.estimator_checks import check_estimator

from rfa.estimation import Level, RobustFilter, Season
from rfa.forecasting import Forecaster
from rfa.integrations.sktime import RFAForecaster, RFAImputer

pytestmark = pytest.mark.filterwarnings("ignore")  # those of sktime
MODEL = Level() + Season(period=12.0, harmonics=2)
SOME = ["test_clone", "test_set_params", "test_score", "test_fit_transform_output"]


def readings(index, wrong=True):
    count = len(index)
    random = np.random.default_rng(0)
    values = 5 + np.sin(2 * np.pi * np.arange(count) / 12) + 0.1 * random.normal(size=count)
    if wrong:
        values[20:30], values[41] = np.nan, 100.0
    return pd.Series(values, index, name="reading")


INDICES = {
    "numbers": pd.RangeIndex(3, 75),
    "dates": pd.date_range("2024-05-01", periods=72, freq="D"),
    "periods": pd.period_range("2024-05-01", periods=72, freq="D"),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_forecasts_and_bands_are_the_filters(index):
    """After the last reading and within the series, with a gap, a wrong reading and a regressor."""
    y = readings(index)
    X = pd.DataFrame({"x": np.random.default_rng(1).normal(size=72)}, index)
    past, later = y.iloc[:66], index[66:]
    forecaster = RFAForecaster(MODEL).fit(past, X.iloc[:66])
    found = RobustFilter(MODEL).fit(past.index, past, exog=X.iloc[:66])
    ahead, smooth = found.forecast(later, exog=X.iloc[66:]), found.smooth()
    fh = ForecastingHorizon(index[[25, *range(66, 72)]], is_relative=False)
    mean = forecaster.predict(fh, X.iloc[[25, *range(66, 72)]])
    np.testing.assert_allclose(mean, [smooth.mean.iloc[25], *ahead.mean], rtol=1e-9)
    assert mean.name == "reading"
    bands = forecaster.predict_interval(fh, X.iloc[[25, *range(66, 72)]], coverage=0.9)
    for place, end in enumerate(("lower", "upper")):
        expected = [smooth.interval(0.9)[place].iloc[25], *ahead.interval(0.9)[place]]
        np.testing.assert_allclose(bands["reading", 0.9, end], expected, rtol=1e-7)  # the quantile is scipy's
    assert forecaster.get_fitted_params()["sigma2.level"] == found.parameters["sigma2.level"]


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_without_a_model_forecasts_and_bands_are_forecasters(index):
    """After the last reading and within the series; the imputer has its history."""
    y = readings(index)
    forecaster, own = RFAForecaster().fit(y.iloc[:66]), Forecaster()
    expected = own.forecast(y.iloc[:66], 4, level=[90])
    fh = ForecastingHorizon(index[[25, 66, 69]], is_relative=False)
    past = own.history()
    np.testing.assert_allclose(forecaster.predict(fh), [past["rfa"][25], *expected["rfa"].iloc[[0, 3]]], rtol=1e-9)
    bands = forecaster.predict_interval(fh, coverage=0.9)["reading", 0.9]
    np.testing.assert_allclose(bands["upper"].iloc[1:], expected["rfa-hi-90"].iloc[[0, 3]], rtol=1e-6)
    assert bands["lower"].iloc[0] < past["rfa"][25] < bands["upper"].iloc[0]
    own.forecast(y.iloc[:66], 1)
    np.testing.assert_allclose(RFAImputer("outliers").fit_transform(y.iloc[:66]), own.history()["cleaned"], rtol=1e-9)


def test_updates_with_and_without_a_new_fit():
    y = readings(INDICES["dates"])
    forecaster = RFAForecaster(MODEL).fit(y.iloc[:60], fh=[1, 2])
    before = forecaster.filter_.parameters
    forecaster.update(y.iloc[60:], update_params=False)
    same = RobustFilter(MODEL).fit(y.iloc[:60])
    for time, value in y.iloc[60:].items():
        same.update(time, value)
    np.testing.assert_allclose(forecaster.predict(), same.forecast(2).mean, rtol=1e-6)  # the diffuse start's scale
    assert forecaster.filter_.parameters == before
    forecaster.update(y.iloc[60:], update_params=True)
    assert forecaster.filter_.parameters == RobustFilter(MODEL).fit(y).parameters


@pytest.mark.parametrize(("replace", "changed"), [("missing", 10), ("outliers", 11), ("all", 72)])
def test_the_imputer_replaces_what_it_is_asked_to_by_the_smoother(replace, changed):
    y = readings(INDICES["periods"])
    found = RFAImputer(replace, MODEL).fit_transform(y)
    smooth = RobustFilter(MODEL).fit(y).smooth()
    differs = (found != y).to_numpy()
    assert differs.sum() == changed
    np.testing.assert_allclose(found[differs], smooth.mean[differs], rtol=1e-9)
    assert differs[41] == (replace != "missing")


def test_a_short_new_part_is_filled_from_what_was_before_it():
    y = readings(INDICES["dates"], wrong=False)
    new = y.iloc[66:].copy()
    new.iloc[[1, 2]] = np.nan
    imputer = RFAImputer(model=MODEL).fit(y.iloc[:66])
    every = pd.concat([y.iloc[:66], new])
    whole = RobustFilter(MODEL).fit(every, fixed=imputer.filter_.parameters).smooth()
    np.testing.assert_allclose(imputer.transform(new).iloc[1:3], whole.mean.iloc[67:69], rtol=1e-9)
    # readings at the same times count in the place of those of `fit`
    masked = y.iloc[:66].where(np.arange(66) != 8)
    alone = RobustFilter(MODEL).fit(masked, fixed=imputer.filter_.parameters).smooth()
    np.testing.assert_allclose(imputer.transform(masked).iloc[8], alone.mean.iloc[8], rtol=1e-9)


def test_what_is_wrong_is_named():
    y = readings(INDICES["dates"])
    with pytest.raises(ValueError, match=r"replace: got 'gaps', expected missing, outliers or all"):
        RFAImputer("gaps").fit(y)
    with pytest.raises(ValueError, match=r"cov: got True, expected False"):
        RFAForecaster(MODEL).fit(y, fh=[1]).predict_var(cov=True)


@pytest.mark.parametrize("kind", [RFAForecaster, RFAImputer])
def test_sktimes_own_checks_pass(kind):
    """All of them, eight minutes, in `make test-all`."""
    found = check_estimator(kind, tests_to_run=None if ALL else SOME, verbose=False)
    assert len(found) > (300 if ALL else 9)
    assert {name: result for name, result in found.items() if result != "PASSED"} == {}
