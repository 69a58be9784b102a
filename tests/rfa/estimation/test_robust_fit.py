"""`RobustFilter.fit`: units of time, series far from zero, series without outliers, parameters given back."""

import json

import numpy as np
import pytest
import torch
from cover import cover

from rfa.estimation import Autoregression, Cycle, Level, RobustFilter, Season, Trend

MODELS = {
    "level": lambda unit: Level(),
    "trend": lambda unit: Trend(),
    "damped trend": lambda unit: Trend(damped=True),
    "season": lambda unit: Level() + Season(12.0 * unit),
    "cycle": lambda unit: Level() + Cycle(12.0 * unit),
    "autoregression": lambda unit: Level() + Autoregression(),
    "autoregression alone": lambda unit: Autoregression(),
}


@cover(1, name=MODELS, robust=[True, False])
def test_the_unit_of_time_changes_nothing(name, robust):
    """A factor per unit may be 1 - 1e-12 or 0. Parameters give the same fit back, through JSON too."""
    model, random, level = MODELS[name], np.random.default_rng(0), np.zeros(120)
    for k in range(1, 120):
        level[k] = 0.8 * level[k - 1] + random.normal()
    values = level + 2 * np.sin(2 * np.pi * np.arange(120) / 12) + 0.3 * random.normal(size=120)

    def moments(unit, fixed=None):
        found = RobustFilter(model(unit), robust).fit(unit * np.arange(120), values, fixed=fixed)
        ahead = found.forecast(unit * np.arange(120, 132))
        diffuse_slopes = name == "trend"  # the density of one has a unit, which holds that of time
        return (
            found,
            found.log_likelihood + diffuse_slopes * np.log(unit),
            np.concatenate([ahead.mean, ahead.variance**0.5]),
        )

    _, total, expected = moments(1.0)
    for unit in (1e-9, 1e4):
        found, likelihood, ahead = moments(unit)
        assert likelihood == pytest.approx(total, abs=2e-6)
        np.testing.assert_allclose(ahead, expected, rtol=0, atol=1e-4)  # a search ends at steps of 1e-7 nats
        again, likelihood, same = moments(unit, json.loads(json.dumps(found.parameters)))
        np.testing.assert_allclose(same, ahead, rtol=1e-6, atol=1e-7)
        assert robust or likelihood == pytest.approx(total, abs=2e-6)
        assert found.standard_errors.keys() == found.parameters.keys()
        torch.testing.assert_close(found.model.to_sde(found.parameters).dynamics, again.sde.dynamics, rtol=1e-6, atol=0)


def test_a_rate_is_given_in_the_place_of_its_factor():
    times, values = np.arange(40.0), np.random.default_rng(0).normal(size=40)
    fixed = {"sigma2.ar": 1.0, "sigma2.irregular": 1.0}
    factor, rate = (
        RobustFilter(Autoregression()).fit(times, values, fixed=fixed | each)
        for each in ({"ar.L1": 0.5}, {"ar.L1.rate": np.log(2)})
    )
    assert rate.parameters == pytest.approx(factor.parameters, rel=1e-12)
    assert rate.log_likelihood == pytest.approx(factor.log_likelihood, rel=1e-12)
    for wrong, message in (
        ({"ar.L1.rate": 0.0}, r"fixed\['ar.L1.rate'\]: got 0.0, expected a decay rate > 0"),
        ({"ar.L1.rate": 1.0, "ar.L1": 0.5}, "fixed: got 'ar.L1.rate and ar.L1', expected one of them"),
        ({"sigma2.ar.rate": 1.0}, "fixed: got 'sigma2.ar.rate', expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            RobustFilter(Autoregression()).fit(times, values, fixed=wrong)


@cover(1, unit=[1.0, 1e-3, 1e9], offset=[0.0, 50.0, 1e7])
def test_a_stationary_component_alone_explains_a_series_far_from_zero(offset, unit):
    """Its start is far from all readings. They are no outliers, but those far from the others are."""
    random, level = np.random.default_rng(0), np.zeros(200)
    for k in range(1, 200):
        level[k] = 0.9 * level[k - 1] + random.normal()
    values = offset + level + 0.5 * random.normal(size=200)
    times = unit * np.arange(200)
    robust, gaussian = (RobustFilter(Autoregression(), way).fit(times, values) for way in (True, False))
    assert robust.log_likelihood > gaussian.log_likelihood - 0.1
    assert not robust.filter().outliers.any()
    wave = RobustFilter(Cycle(8 * unit)).fit(times, values)
    assert wave.log_likelihood > gaussian.log_likelihood - 20
    for size in (25.0, 1e5):
        spoilt = np.where(np.arange(200) % 9 == 4, values + size, values)
        found = RobustFilter(Autoregression()).fit(times, spoilt)
        assert (found.filter().outliers == (spoilt != values)).all()
        np.testing.assert_allclose(found.smooth().mean, offset + level, atol=4)


@cover(1, robust=[True, False], model=[Level() + Season(24.0, 1), Season(24.0, 1) + Autoregression()])
def test_a_long_series_has_the_maximum_of_a_direct_search(model, robust, monkeypatch):
    """The noise grows, so that the last readings alone have another maximum."""
    random, count = np.random.default_rng(3), 6000
    times = np.arange(count) * 1.0
    noise = np.where(times < 3000, 0.5, 1.5)
    values = (
        0.1 * random.normal(size=count).cumsum() + np.sin(2 * np.pi * times / 24) + noise * random.normal(size=count)
    )
    values[random.random(count) < 0.01] += 100.0 * robust
    quick = RobustFilter(model, robust).fit(times, values)
    monkeypatch.setattr("rfa.estimation.parameter_search._BLOCK_READINGS", count)
    direct = RobustFilter(model, robust).fit(times, values)
    assert quick.converged
    assert quick.log_likelihood == pytest.approx(direct.log_likelihood, abs=1e-2)
    for name, error in direct.standard_errors.items():
        if np.isfinite(error):
            assert quick.parameters[name] == pytest.approx(direct.parameters[name], abs=0.05 * error)


@pytest.mark.parametrize(("share", "most"), [(0.0, 1.3), (0.2, 1.9), (0.35, 6.0)])
def test_many_wrong_readings_do_not_hide_behind_the_noise_that_they_cause(share, most):
    """The noise is that of the others, and bands are not too wide."""
    random = np.random.default_rng(5)
    level, noise, wrong = 0.1 * random.normal(size=600).cumsum(), random.normal(size=600), random.random(600) < share
    values = level + np.where(wrong, 10.0, 1.0) * noise
    fitted = RobustFilter(Level()).fit(np.arange(600), values)
    assert 0.6 < fitted.parameters["sigma2.irregular"] < most


def test_a_noise_of_two_sizes_is_no_noise_with_wrong_readings():
    """By day it is ten times that of the night: good readings stay in the fit, and bands hold them."""
    random, hours = np.random.default_rng(0), np.arange(960)
    values = np.where(hours % 24 < 12, 3.0, 0.3) * random.normal(size=960)
    found = RobustFilter(Level()).fit(hours, values).filter()
    assert np.nanmean(np.abs(found.innovations) < 1.645) > 0.83


@pytest.mark.parametrize("robust", [True, False])
def test_a_long_series_whose_end_is_stuck(robust):
    """The last readings have no noise, the others have."""
    random, count = np.random.default_rng(1), 6000
    level = 0.1 * random.normal(size=count).cumsum()
    values = level + random.normal(size=count)
    values[3900:] = values[3900]
    found = RobustFilter(Level(), robust).fit(np.arange(count), values)
    direct = RobustFilter(Level(), robust).fit(
        np.arange(count), values, fixed={"sigma2.irregular": 0.64, "sigma2.level": 0.01}
    )
    assert found.log_likelihood > direct.log_likelihood - 1 or found.parameters["sigma2.irregular"] > 0.3
