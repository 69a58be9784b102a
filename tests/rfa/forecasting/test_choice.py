"""Default forecasts: components and scales chosen by rolling forecasts, free seasons, bands from past errors."""

import warnings

import numpy as np
import pytest
import torch
from cover import slow

from rfa.forecasting.choice import _seasons, choose
from rfa.forecasting.components import free_season
from rfa.forecasting.rolling import Channel, FittedChannel, Origins, PastErrors
from rfa.forecasting.scale import SCALES, allowed_scales
from rfa.forecasting.table import SeriesTable


def table(times, values, unit=""):
    values = torch.as_tensor(values, dtype=torch.float64).reshape(len(times), -1)
    return SeriesTable(torch.as_tensor(times, dtype=torch.float64), values, ("x",), unit)


def daily_pattern(seed=0, days=3, amplitude=1.0):
    random = np.random.default_rng(seed)
    hours = np.arange(24.0 * days)
    return hours, random.normal(size=len(hours)).cumsum() * 0.1 + amplitude * np.sin(2 * np.pi * hours / 24)


def channel_of(one, scale="linear"):
    values = SCALES[scale].forth(one.values[:, 0].numpy())
    return Channel(one, values, (one.times.numpy(), values))


def chosen(one, horizon, scales=("linear",)):
    query_times = np.linspace(float(one.times[-1]), float(one.times[-1]) + horizon, 25)[1:]
    return choose({scale: channel_of(one, scale) for scale in scales}, query_times, True, lambda done, most: None)


@pytest.mark.parametrize(("unit", "scale"), [("h", 1.0), pytest.param("min", 1e6, marks=slow)])
def test_a_daily_pattern_is_found_in_any_unit_and_through_an_outlier(unit, scale):
    hours, values = daily_pattern()
    values[30] = 1000.0
    minutes = 60 if unit == "min" else 1
    words, _, tried = chosen(table(hours * minutes, scale * values, unit), 24.0 * minutes)
    assert words[-1].startswith("season:1D:")
    assert tried[" + ".join(words)] < 0.6 * tried["level"]


@slow
def test_a_wandering_level_has_no_season():
    hours, values = daily_pattern(amplitude=0.0, days=14)
    for unit in ("h", ""):  # of numbers nothing is known of days
        words = chosen(table(hours, values, unit), 12.0).words
        assert not any(word.startswith("season") for word in words)


def test_a_wave_of_unknown_period_is_found_among_numbers():
    times = np.arange(120.0)
    values = 3 * np.sin(2 * np.pi * times / 11.3) + 0.5 * np.random.default_rng(0).normal(size=120)
    words = chosen(table(times, values), 11.0).words
    assert float(words[-1].removeprefix("cycle:")) == pytest.approx(11.3, rel=0.1)


def test_a_trend_that_ends_is_not_followed_far():
    """One-step errors would favour the trend; those of the horizon do not."""
    times, random = np.arange(300.0), np.random.default_rng(1)
    slope = np.where(times % 60 < 30, 1.0, -1.0)
    values = slope.cumsum() + 0.1 * random.normal(size=300)
    _, _, near = chosen(table(times, values), 2.0)
    far = chosen(table(times, values), 40.0).tried
    assert near["trend"] < near["level"]
    assert far["trend"] > far["level"]


def test_seasons_are_tried_where_most_values_are_equal():
    """As of solar power, which is 0 at night: 14 of 24 hours."""
    hours = np.arange(24.0 * 8)
    values = np.clip(np.sin(2 * np.pi * (hours % 24 - 7) / 20), 0, None)
    values = values.round(3) * np.random.default_rng(0).uniform(0.8, 1, len(hours))
    assert np.median(values) == 0
    assert chosen(table(hours, values, "h"), 24.0).words[-1].startswith("season:1D")
    assert chosen(table(hours, 0 * values + 0.1, "h"), 24.0) == (["level"], "linear", {})


def test_peaks_that_return_are_no_outliers():
    """Each December is far above the other months."""
    days, random = np.arange(0.0, 365.2425 * 10, 30.436875), np.random.default_rng(2)
    values = 20 + np.where(np.arange(len(days)) % 12 == 11, 40.0, 0.0) + random.normal(size=len(days))
    found = chosen(table(days, values, "D"), 365.0)
    assert found.words[-1].startswith("season:365.2425D")
    assert found.tried[" + ".join(found.words)] < 2


def test_a_free_season_may_be_longer_than_the_readings_that_are_fitted():
    """As a week of readings each five minutes, of which the last 1,000 are fitted."""
    hours = np.arange(24.0 * 7 * 6)
    values = np.where(hours % 168 < 120, np.sin(2 * np.pi * hours / 24), 3.0) + 0.1 * np.random.default_rng(0).normal(
        size=len(hours)
    )
    whole = channel_of(table(hours, values, "h"))
    recent = Channel(whole.table.rows(slice(-150, None)), whole.values[-150:], whole.past)
    found = choose({"linear": recent}, hours[-1] + np.arange(1.0, 49.0), True, lambda done, most: None)
    assert found.words[-1] == "season:7D:free"


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_a_season_that_grows_with_the_level_is_filtered_by_its_logarithm(kind):
    days, random = np.arange(0.0, 365.2425 * 8, 30.436875), np.random.default_rng(2)
    wave = 0.4 * np.sin(2 * np.pi * days / 365.2425)
    values = np.exp(3 + days / 1500 + wave) if kind == "log" else 30 + days / 100 + 10 * wave
    values = values * np.exp(0.02 * random.normal(size=len(days)))
    assert chosen(table(days, values, "D"), 365.0, ("linear", "log")).scale == kind


def test_scales_that_values_allow():
    values, lines = np.array([6.0, 5.0, np.nan, 7.0]), (2, 3, 4, 6)
    assert allowed_scales("x", values, False, False, lines) == ["linear", "log"]
    assert allowed_scales("x", values - 5, False, False, lines) == ["square root"]  # near zero: never negative
    assert allowed_scales("x", values - 6, False, False, lines) == ["linear"]
    ramp = np.arange(12.0)  # it has left zero, and rises along a line
    assert allowed_scales("x", ramp, False, False, range(12)) == ["linear", "square root"]
    assert allowed_scales("x", values - 5, False, True, lines) == ["square root"]
    with pytest.raises(ValueError, match=r"^positive: got \"0 in row 3 of 'x'\", expected values above 0; --counts"):
        allowed_scales("x", values - 5, True, False, lines)
    with pytest.raises(ValueError, match=r"^counts: got \"-1 in row 3 of 'x'\", expected values of at least 0"):
        allowed_scales("x", values - 6, False, True, lines)


def test_a_free_season_is_the_median_of_earlier_periods():
    times = np.arange(0.0, 30.0)
    values = times % 7 + 100 * (times // 7)
    values[8], values[22:25] = 1e6, np.nan  # an outlier, and a gap
    found = free_season(times, values, 7.0, np.array([30.0, 36.0, 37.0, 44.0]), 29.0)
    rows = [[23, 16, 9, 2], [29, 22, 15, 8, 1], [23, 16, 9, 2], [23, 16, 9, 2]]
    np.testing.assert_allclose(found, [np.nanmedian(values[row]) for row in rows])
    assert np.isnan(free_season(times, values, 7.0, times[:7])).all()
    between = free_season(times, values, 7.0, np.array([20.25]))
    np.testing.assert_allclose(between, (106 + 29.5) / 2)  # the last reading until 13.25; between 6 and 100


@pytest.mark.parametrize("days", [3, 8])
def test_rolling_forecasts_know_nothing_of_later_readings(days):
    """What comes after an origin does not move its forecast, given the parameters."""
    hours = np.arange(24.0 * days)
    values, cut = np.random.default_rng(0).normal(size=len(hours)), 24.0 * days - 20
    first, second = table(hours, values, "h"), table(hours, np.where(hours < cut, values, values + 50), "h")
    known, found = None, []
    for one in (first, second):
        options = {} if known is None else {"fixed": known}
        fitted = FittedChannel.of(channel_of(one), ["level", "season:1D:free"], False, **options)
        known = fitted.filter.parameters
        origins = Origins.of(fitted.channel, 24.0)
        found.append([x[origins.rows < cut] for x in fitted.rolling(origins)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6, atol=1e-6)  # the diffuse start is by the scale
    assert len(found[0][0]) > 50


def test_a_rolling_forecast_is_that_of_a_filter_that_ends_there():
    hours, values = daily_pattern(days=8)
    words = ["level", "ar", "season:1D:3"]
    whole = FittedChannel.of(channel_of(table(hours, values, "h")), words, True)
    origins = Origins.of(whole.channel, 24.0)
    mean, variance = whole.rolling(origins)
    row = int(origins.rows[origins.rows < 150].max())
    own = origins.rows == row
    short = table(hours[: row + 1], values[: row + 1], "h")
    ahead = FittedChannel.of(channel_of(short), words, True, fixed=whole.filter.parameters).filter.forecast(
        hours[origins.targets[own]]
    )
    np.testing.assert_allclose(mean[own], ahead.mean, atol=1e-4)  # the diffuse start is by the scale of the series
    np.testing.assert_allclose(variance[own], ahead.variance, rtol=1e-4)


def test_bands_hold_the_errors_that_were_made():
    """Errors far larger than the model's after half of the horizon."""
    random = np.random.default_rng(0)
    lags = np.tile(np.arange(1.0, 13.0), 300)
    errors = np.abs(random.normal(size=len(lags)) * np.where(lags < 7, 1.0, 5.0))
    widths = PastErrors(lags, errors, 300.0, 12.0).half_widths(0.9, np.array([1.0, 12.0]))
    np.testing.assert_allclose(widths, [1.645, 5 * 1.645], rtol=0.08)
    few = PastErrors(lags[:12], errors[:12], 1.0, 12.0).half_widths(0.9, np.array([1.0, 12.0]))
    np.testing.assert_allclose(few, 1.6449, rtol=1e-4)  # the model's


def test_nothing_is_compared_where_nothing_can_be():
    """Four readings and a horizon that reaches over all of them; no wave of fewer than four readings is tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(table(np.arange(4.0), [1.0, 2.0, 4.0, 3.0]), 3.0) == (["level"], "linear", {})
        tried = chosen(table(np.arange(19.0), np.sin(2.5 * np.arange(19.0))), 1.0).tried
    assert tried
    assert not any("cycle" in words for words in tried)


@pytest.mark.parametrize(("until", "free"), [(20, True), (24, False)])
def test_a_free_season_has_readings_at_the_phases_that_are_asked_for(until, free):
    """Readings of the day alone show no night."""
    hours = np.arange(24.0 * 14)
    hours = hours[(hours % 24 >= 8) & (hours % 24 < 20)]
    at = 14 * 24 + np.arange(8.0, until)
    found = _seasons(channel_of(table(hours, np.cos(hours), "h")), at)
    assert (["season:1D:free"] in found) == free
