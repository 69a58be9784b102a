"""`RobustFilter.predict` at any times, and the conventions of scikit-learn."""

import numpy as np
import pytest

from rfa.estimation import Level, RobustFilter, Season, Trend


def readings(count=60):
    random = np.random.default_rng(0)
    times = random.exponential(size=count).cumsum()
    values = (random.normal(size=count) * np.sqrt(0.1 * np.diff(times, prepend=0.0))).cumsum()
    values += random.normal(size=count)
    values[10], values[30:40] = 50.0, np.nan
    return times, values


@pytest.mark.parametrize("robust", [True, False])
def test_it_is_the_smoother_at_readings_and_the_forecast_after_them_in_any_order(robust):
    """With two sensors, regressors and known parts, of which each time has its own."""
    times, values = readings()
    random, count = np.random.default_rng(1), len(times)
    sensor = np.where(random.random(count) < 0.5, "a", "b")
    later = times[-1] + np.array([0.5, 0.5, 3.0])
    every, sensors = np.concatenate([times, later]), np.concatenate([sensor, ["a", "b", "a"]])
    exog, offset = random.normal(size=(count + 3, 2)), random.normal(size=count + 3)
    noise = np.where(random.random(count + 3) < 0.5, 0.0, 2.0)
    known = {"exog": exog[:count], "offset": offset[:count], "noise": noise[:count]}
    found = RobustFilter(Level(), robust).fit(times, values, sensor=sensor, **known)
    known = {"exog": exog[count:], "offset": offset[count:], "noise": noise[count:]}
    past, ahead = found.smooth(), found.forecast(later, sensor=sensors[count:], **known)
    order = random.permutation(count + 3)
    known = {"exog": exog[order], "offset": offset[order], "noise": noise[order]}
    mean, deviation = found.predict(every[order], return_std=True, sensor=sensors[order], **known)
    exact = {"rtol": 1e-9, "atol": 1e-9}  # rows without a reading change rounding alone
    np.testing.assert_allclose(mean, np.concatenate([past.mean, ahead.mean])[order], **exact)
    variance = np.concatenate([past.variance, ahead.variance])[order]
    np.testing.assert_allclose(deviation**2, variance, **exact)


def test_between_two_readings_a_level_is_a_bridge_and_before_the_first_one_it_stays():
    """A Wiener process given both ends is their mean in the middle; before the first reading its variance grows."""
    times, values = readings()
    found = RobustFilter(Level(), robust=False).fit(times, values)
    past = found.smooth()
    middle = found.predict((times[1:] + times[:-1]) / 2)
    np.testing.assert_allclose(middle, (past.mean[1:] + past.mean[:-1]) / 2, rtol=1e-9)
    mean, deviation = found.predict([times[0] - 4.0], return_std=True)
    np.testing.assert_allclose(mean, past.mean[:1], rtol=1e-6)  # the diffuse start has a finite variance
    grown = past.variance[0] + 4.0 * found.parameters["sigma2.level"]
    np.testing.assert_allclose(deviation**2, grown, rtol=1e-6)


def test_after_updates_it_knows_the_later_readings():
    times, values = readings()
    whole = RobustFilter(Level()).fit(times, values, fixed={"sigma2.level": 0.1, "sigma2.irregular": 1.0})
    parts = RobustFilter(Level()).fit(times[:50], values[:50], fixed={"sigma2.level": 0.1, "sigma2.irregular": 1.0})
    for time, value in zip(times[50:], values[50:], strict=True):
        parts.update(time, value)
    asked = np.array([times[-1] + 1.0, times[40], times[55]])
    # the diffuse start has the scale of the readings that `fit` has seen
    np.testing.assert_allclose(parts.predict(asked), whole.predict(asked), rtol=1e-6)


def test_parameters_by_name():
    found = RobustFilter(Level(), time_unit="hour").fit(*readings())
    assert found.set_params(robust=False) is found
    assert found.get_params() == {"model": found.model, "robust": False, "time_unit": "hour"}
    assert [*found.set_params(model=Trend()).model.states] == ["level", "trend"]
    assert not hasattr(found, "log_likelihood")
    with pytest.raises(ValueError, match=r"fit: got no series yet"):
        found.smooth()
    with pytest.raises(ValueError, match=r"params: got 'units', expected one of model, robust, time_unit"):
        found.set_params(units="day")


def test_scikit_learn_clones_and_selects():
    pytest.importorskip("sklearn", reason="scikit-learn, which clones estimators")
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV, TimeSeriesSplit

    times = np.arange(96.0)
    values = np.sin(2 * np.pi * times / 12) + 0.1 * np.random.default_rng(2).normal(size=96)
    fitted = RobustFilter(Level() + Season(12.0), robust=False).fit(times, values)
    again = clone(fitted)
    assert again.model is not fitted.model
    assert not hasattr(again, "log_likelihood")
    np.testing.assert_array_equal(again.fit(times, values).predict(times), fitted.predict(times))
    search = GridSearchCV(
        RobustFilter(Level()),
        {"model": [Level(), Level() + Season(12.0, harmonics=1)]},
        cv=TimeSeriesSplit(2),
        scoring="neg_mean_absolute_error",
    )
    search.fit(times, values)
    assert "season" in str([*search.best_estimator_.model.states])
    assert search.best_score_ > -0.3
    np.testing.assert_allclose(search.predict([96.0 + 3.0]), 1.0, atol=0.3)
