"""Default forecasts: components and scales chosen by rolling forecasts, free seasons, bands from past errors."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from cover import slow

from rfa.forecasting.choice import _seasons, choose
from rfa.forecasting.components import free_season
from rfa.forecasting.filter import forecast_channels
from rfa.forecasting.request import ForecastRequest
from rfa.forecasting.rolling import Channel, FittedChannel, Origins, PastErrors
from rfa.forecasting.scale import SCALES, allowed_scales
from rfa.forecasting.table import SeriesTable


def table(times, values, unit=""):
    values = np.asarray(values, dtype=np.float64).reshape(len(times), -1)
    lines = tuple(range(2, len(times) + 2))
    return SeriesTable(np.asarray(times, dtype=np.float64), values, ("x",), unit, lines=lines)


def daily_pattern(seed=0, days=3, amplitude=1.0):
    random = np.random.default_rng(seed)
    hours = np.arange(24.0 * days)
    return hours, random.normal(size=len(hours)).cumsum() * 0.1 + amplitude * np.sin(2 * np.pi * hours / 24)


def channel_of(one, scale="linear"):
    values = SCALES[scale].forth(one.values[:, 0])
    return Channel(one, values, (one.times, values))


def chosen(one, horizon, scales=("linear",)):
    query_times = np.linspace(float(one.times[-1]), float(one.times[-1]) + horizon, 25)[1:]
    return choose({scale: channel_of(one, scale) for scale in scales}, query_times, True, lambda done, most: None)


def forecast(one, steps, words=None, **options):
    request = ForecastRequest(file=Path("x.csv"), time="t", horizon="1", components=words, **options)
    return forecast_channels(request, one, float(one.times[-1]) + np.arange(1.0, steps + 1))[0]


def width(found):
    lower, upper = found.intervals[0.9]
    return upper - lower


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
    assert allowed_scales("x", values + 0.5, False, False, lines) == ["linear", "log"]
    assert allowed_scales("x", values, False, False, lines) == ["linear from 0", "log"]  # whole numbers: counts
    assert allowed_scales("x", values - 5, False, False, lines) == ["square root"]  # near zero: never negative
    assert allowed_scales("x", values - 6, False, False, lines) == ["linear"]
    ramp = np.arange(12.0)  # it has left zero, and rises along a line
    assert allowed_scales("x", ramp, False, False, range(12)) == ["linear from 0", "square root"]
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
    at, one = np.array([1.0, 12.0]), np.ones(2)
    widths = PastErrors(lags, errors, 300.0, 12.0).half_widths(0.9, at, one)
    np.testing.assert_allclose(widths, [1.645, 5 * 1.645], rtol=0.08)
    few = PastErrors(lags[:12], errors[:12], 1.0, 12.0).half_widths(0.9, at, one)
    np.testing.assert_allclose(few, 1.6449, rtol=1e-4)  # the model's


@pytest.mark.parametrize("deviation", [[1.0, 2.0, 3.0, 4.0], [1.0, 0.5, 2.0, 1.0]])
def test_bands_get_narrower_only_as_the_models_do(deviation):
    """Errors that become smaller along the horizon, beside a model's band that grows, and one that shrinks twice."""
    lags, deviation = np.tile([1.0, 20.0, 40.0, 60.0], 50), np.array(deviation)
    errors = np.tile([4.0, 2.0, 3.0, 1.0], 50)
    found = PastErrors(lags, errors, 1e9, 60.0).half_widths(0.9, lags[:4], deviation)
    assert (found >= PastErrors(lags, errors, 1e9, 60.0).half_widths(0.5, lags[:4], deviation)).all()
    assert (found[1:] / found[:-1] >= np.minimum(1, deviation[1:] / deviation[:-1]) - 1e-12).all()
    assert (found >= errors[:4] * deviation * (1 - 1e-12)).all()
    assert found[0] == pytest.approx(4 * deviation[0])


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


SPIKES = [[40, 80, 120], [100, 130, 150], [40, 60, 80, 110, 140], [161], [100, 101]]


@pytest.mark.parametrize("spikes", SPIKES)
@pytest.mark.parametrize("kind", ["day", "level", "trend"])
def test_refused_readings_do_not_widen_bands(kind, spikes):
    """The band is that of the same readings without spikes: of a level at least 3.3 times their noise of 1."""
    hours, noise = np.arange(162.0), np.random.default_rng(0).normal(size=162)
    part, word = {"day": (10 * np.sin(np.pi * hours / 12), "level"), "level": (0, "level"), "trend": (hours, "trend")}[
        kind
    ]
    words = [word, *(["season:1D:1"] if kind == "day" else [])]
    clean = part + noise
    spoilt = clean.copy()
    spoilt[spikes] += 50
    found, usual = (width(forecast(table(hours, values, "h"), 24, words)) for values in (spoilt, clean))
    np.testing.assert_allclose(found, usual, rtol=0.25)
    assert 3.3 < found.max() < (np.inf if kind == "trend" else 8)


def test_short_series_with_spikes_and_changes_that_are_no_spikes():
    """Refused readings of a short series leave its band, five in a row nearly; a level that has moved widens it."""
    hours, noise = np.arange(162.0), np.random.default_rng(1).normal(size=162)
    short = noise[:24].copy()
    short[[8, 14, 20]] += 50
    assert width(forecast(table(hours[:24], short, "h"), 6, ["level"])).max() < 8
    burst = noise + 50 * ((hours >= 80) & (hours < 85))
    assert width(forecast(table(hours, burst, "h"), 24, ["level"])).max() < 20
    moved = noise + 30 * (hours >= 120)
    assert width(forecast(table(hours, moved, "h"), 24, ["level"])).max() > 30


def test_spikes_count_as_a_share_of_the_readings():
    """Of 200 errors from 0 to 1, 0.9 of all forecasts where a tenth of all readings are refused: all that are left."""
    errors = np.linspace(0, 1, 201)
    for refused, level in ((0.0, 0.9), (0.04, 0.9 / 0.96), (0.1, 1.0), (0.5, 1.0)):
        past = PastErrors(np.ones(201), errors, 1e9, 1.0, refused)
        assert past.half_widths(0.9, np.ones(1), np.ones(1)) == pytest.approx(level)


def test_a_daily_wave_is_a_season_and_a_fitted_cycle_is_named():
    """A week of hours, whose periodogram has 23 h and no day; and a wave that no calendar has."""
    random, hours = np.random.default_rng(0), np.arange(162.0)
    words = chosen(table(hours, 10 * np.sin(np.pi * hours / 12) + random.normal(size=162), "h"), 24.0).words
    assert words[-1].startswith("season:1D")
    one = table(hours, 3 * np.sin(2 * np.pi * hours / 14.5) + 0.5 * random.normal(size=162), "h")
    details = forecast(one, 12).details
    period = 2 * np.pi / details["parameters"]["frequency.cycle"]
    assert details["components"] == f"level + ar + cycle:{period:.4g}h"
    assert period == pytest.approx(14.5, rel=0.02)
    assert min(details["tried"], key=details["tried"].get) == details["components"]


def test_what_decides_is_the_error_with_its_penalties():
    """Of a level and an autoregression without noise of their own: 4 parameters are 8 %, a season a ninth more."""
    hours, values = daily_pattern()
    one = channel_of(table(hours, values, "h"))
    tried = chosen(one.table, 24.0).tried
    for words, season in ((["level", "ar"], 1.0), (["level", "season:1D:2"], 1 / 0.9)):
        fitted = FittedChannel.of(one, words, False, max_steps=15)
        origins = Origins.of(one, 24.0)
        error = np.abs(fitted.rolling(origins)[0] - one.values[origins.targets]).mean()
        penalty = (1 + 0.02 * len(fitted.filter.parameters)) * season
        assert tried[" + ".join(words)] == pytest.approx(error * penalty, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_no_forecast_of_counts_is_negative(seed):
    counts = np.random.default_rng(seed).poisson(5 + seed, size=60)
    found = forecast(table(np.arange(60.0), counts), 12, ["level"])
    assert found.intervals[0.9][0].min() >= 0
    free = forecast(table(np.arange(60.0), counts + 1e-9), 12, ["level"])  # no whole numbers
    assert any("--counts" in note for note in found.notes) == (free.intervals[0.9][0].min() < 0)


@pytest.mark.parametrize("word", ["damped-trend", "trend", "level"])
@pytest.mark.parametrize("kind", ["growth", "walk", "fall"])
def test_growth_on_a_logarithmic_scale_is_bounded_by_the_readings(kind, word):
    """20 hours, and 400 hours ahead: at most as far above the largest as the readings differ, or ten times."""
    random, hours = np.random.default_rng(3), np.arange(20.0)
    logs = {"growth": hours / 5, "walk": 0.3 * random.normal(size=20).cumsum(), "fall": -hours / 5}[kind]
    values = np.exp(logs + 0.05 * random.normal(size=20))
    found = forecast(table(hours, values, "h"), 400, [word], positive=True)
    lower, upper = found.intervals[0.9]
    most = values.max() * max(10, values.max() / values.min())
    assert (lower > 0).all()
    assert (lower <= found.mean).all()
    assert (found.mean <= upper).all()
    assert upper.max() <= most * (1 + 1e-9)
    assert found.mean.max() <= values.max() * np.sqrt(values.max() / values.min()) * (1 + 1e-9)
    assert any("growth" in note for note in found.notes) == (upper.max() > 0.9 * most)


def test_what_has_not_converged_is_said():
    """The likelihood of a line without noise has no maximum."""
    line = 2 * np.arange(30.0) + 0.5
    noted = [
        any("converged" in note for note in forecast(table(np.arange(30.0), y), 3, ["trend"]).notes)
        for y in (line, line + np.random.default_rng(0).normal(size=30))
    ]
    assert noted == [True, False]
