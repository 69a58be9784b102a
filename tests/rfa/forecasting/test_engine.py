"""The engine against dense Gaussian computations, invariances, and what a forecaster has to withstand."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pytest
from statsmodels.regression.linear_model import burg
from statsmodels.tsa.stattools import pacf_burg

from rfa.forecasting.engine import MEMBERS, Series, SeriesForecast, forecast_panel, panel_widths, updated

PROBABILITIES = (0.05, 0.1, 0.5, 0.9, 0.95)
FORGETTING = 25  # MOST_DEGREES in kernels/constants.h
NAMES = ("drift", "level", "damped trend", "autoregression", "cycle")  # of the linear scale, as a state has them
DEGREES = 6  # BAND_DEGREES


def regular(values, period=0.0, h=6, **more) -> Series:
    n = len(values)
    times = np.arange(n + h, dtype=float)
    return Series(times[:n], np.asarray(values, float), period, ahead=times[n:], **more)


def forecast(series: Series, **options) -> SeriesForecast:
    found = forecast_panel([series], PROBABILITIES, **options)[0]
    assert not isinstance(found, str), found
    return found


def trend_season(n=96, seed=0, period=12, level=100.0):
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    return level + 0.4 * t + 8 * np.sin(2 * np.pi * t / period) + rng.normal(0, 1.5, n)


# What a state holds, and the same by dense algebra


class CarriedMember(NamedTuple):
    season: bool
    damping: float
    memory: float
    turn: float
    noise: np.ndarray  # of level, slope, autoregression, season
    scale: float
    logarithmic: bool
    adjusted: bool
    weight: float
    mean: np.ndarray
    covariance: np.ndarray
    variance: float
    evidence: float

    @property
    def base(self) -> int:
        """The states before the season's."""
        return 2 + (self.memory > 0) + (self.turn > 0)


class CarriedLags(NamedTuple):
    changes: bool
    mean: float
    variance: float
    coefficients: np.ndarray
    recent: np.ndarray  # the newest first
    weight: float

    def ahead(self, h: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance by powers of the companion matrix of the values less their line or mean."""
        order = len(self.recent)
        polynomial = np.r_[1, -self.coefficients]
        if self.changes:
            polynomial = np.convolve(polynomial, [1, -1])
        constant = self.mean * (1 - self.coefficients.sum())
        companion = np.eye(max(order, 1), k=-1)
        companion[0, :order] = -polynomial[1:]
        power, mean, variance = np.eye(len(companion)), [], []
        state, seen = np.r_[self.recent, [0] * (not order)], 0.0
        for _ in range(h):
            seen += power[0, 0] ** 2
            state = companion @ state
            state[0] += constant
            power = companion @ power
            mean.append(state[0])
            variance.append(self.variance * seen)
        return np.array(mean), np.array(variance)


def carried(found: SeriesForecast) -> tuple[float, int, list[CarriedMember], list[CarriedLags]]:
    """The widening of the bands, the waves of the season, and the filters and autoregressions of a state."""
    numbers = list(np.frombuffer(found.state))
    numbers, (_, _, widening, waves, _, _, _, count) = numbers[11:], numbers[2:10]
    members, lags = [], []
    for _ in range(int(count)):
        season, damping, memory, turn, *noise, scale, logarithmic, lagged, adjusted, weight, size = numbers[:14]
        state, numbers = numbers[14 : 14 + int(size)], numbers[14 + int(size) :]
        if lagged:
            (changes, middle, variance, order), state = state[:4], np.array(state[4:])
            lags.append(CarriedLags(bool(changes), middle, variance, *np.split(state, [int(order)]), weight))
            continue
        n = 2 + (memory > 0) + (turn > 0) + (int(waves) if season else 0)
        mean, covariance = np.zeros(n), np.zeros((n, n))
        for i in range(n):
            mean[i], state = state[0], state[1:]
            covariance[i, : i + 1] = covariance[: i + 1, i] = state[: i + 1]
            state = state[i + 1 :]
        squares, degrees, evidence = state[6:9]
        flags, moments = (bool(logarithmic), bool(adjusted)), (mean, covariance, squares / degrees, evidence)
        members.append(
            CarriedMember(bool(season), damping, memory, turn, np.array(noise), scale, *flags, weight, *moments)
        )
    assert numbers == [0, 0, 0, 0, 1, 0] * 2  # no free seasons
    return widening, int(waves), members, lags


def rows(times, member: CarriedMember, waves: int, period: float) -> np.ndarray:
    """What a reading at each time sees of the state."""
    seen = np.zeros((len(times), len(member.mean)))
    seen[:, 0] = 1
    base = member.base
    if member.memory:
        seen[:, 2] = 1
    for j in range(waves if member.season else 0):
        phase = 2 * np.pi * (j // 2 + 1) * np.asarray(times) / period
        last = 2 * (j // 2 + 1) == period
        seen[:, base + j] = np.cos(phase) if last else math.sqrt(2) * (np.sin(phase) if j % 2 else np.cos(phase))
    return seen


def steps(member: CarriedMember, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """Transition and noise over a whole number of steps, step by step: the slope moves before the level."""
    n, base = len(member.mean), member.base
    one, noise = np.eye(n), np.diag([member.noise[0], 0, *[0] * (base - 2), *[member.noise[3]] * (n - base)])
    if member.damping:
        one[0, 1], one[1, 1], noise[1, 1] = member.damping, member.damping, member.noise[1]
    if member.memory:
        one[2, 2], noise[2, 2] = member.memory * math.cos(member.turn), member.noise[2]
    if member.turn:
        one[3, 3], noise[3, 3] = one[2, 2], noise[2, 2]
        one[2, 3] = member.memory * math.sin(member.turn)
        one[3, 2] = -one[2, 3]
    transition, total = np.eye(n), np.zeros((n, n))
    for _ in range(lag):
        transition, total = one @ transition, one @ total @ one.T + noise
    return transition, total


def spread(x) -> float:
    return np.quantile(np.abs(x), 0.25) / 0.3186


def season_start(y, times, waves: int, period: float) -> np.ndarray:
    """The medians of phases, less those of the period around, bounded and shrunk, as coefficients of waves."""
    found: list[list[float]] = [[] for _ in range(int(period))]
    for time, value in zip(times, y, strict=True):
        inside = times[0] + period / 2 - 1 <= time <= min(times[-1] - period / 2 + 1, times[0] + 10 * period)
        if inside:
            around = y[np.abs(times - time) <= period / 2 + 1e-9]
            found[int(time) % int(period)].append(value - np.median(around))
    bound = 3 * spread(np.concatenate(found))
    phases = [np.median(np.clip(x, -bound, bound)) * len(x) / (len(x) + 2) if x else 0 for x in found]
    member = CarriedMember(True, 0, 0, 0, np.zeros(4), 1, False, False, 1, np.zeros(2 + waves), np.zeros(0), 1, 0)
    return np.array(phases) @ rows(np.arange(period), member, waves, period)[:, 2:] / period


def start(y, times, member: CarriedMember, name: str, waves: int, period: float):
    """Mean and covariance of the first state, in units of the first variance, and that variance."""
    slope = step = spread(np.diff(y) / np.sqrt(np.maximum(np.diff(times), 1)))
    later = times[None] - times[:, None] - period
    i, j = np.nonzero(np.abs(later) < 0.5)
    if period and len(i) >= 4:
        step = min(step, spread(y[j] - y[i]))
    first = y[: max(5, int(period))]
    level = np.median(first)
    variance = step**2 / member.scale
    deviations = [2 * max(spread(first - level), slope), {"level": 0, "damped trend": 0.5}.get(name, 1) * slope]
    mean = [level, 0]
    if member.memory:
        deviations += [math.sqrt(variance * member.noise[2] / (1 - member.memory**2))] * (member.base - 2)
        mean += [0] * (member.base - 2)
    if member.season:
        deviations += [0.5 * slope / math.sqrt(waves)] * waves
        mean += season_start(y, times, waves, period).tolist()
    return np.array(mean), np.diag(np.square(deviations)) / variance, variance


def dense(y, times, member: CarriedMember, name: str, waves: int, period: float):
    """The last state, its covariance, the error's variance and the evidence: a joint density, conditioned."""
    count, n = len(y), len(member.mean)
    mean, prior, variance = start(y, times, member, name, waves, period)
    means, joint = np.zeros(count * n), np.zeros((count * n, count * n))
    covariance = prior
    for t in range(count):
        block = slice(t * n, t * n + n)
        if t:
            transition, noise = steps(member, round(times[t] - times[t - 1]))
            before = slice((t - 1) * n, t * n)
            mean, covariance = transition @ mean, transition @ covariance @ transition.T + noise
            joint[block, : t * n] = transition @ joint[before, : t * n]
            joint[: t * n, block] = joint[block, : t * n].T
        means[block], joint[block, block] = mean, covariance
    seen = np.zeros((count, count * n))
    for t, row in enumerate(rows(times, member, waves, period)):
        seen[t, t * n : t * n + n] = row
    readings = seen @ joint @ seen.T + np.eye(count)
    errors = y - seen @ means
    squares, degrees, evidence = 2 * variance, 2.0, 0.0
    for t in range(count):
        gain = np.linalg.solve(readings[:t, :t], readings[:t, t])
        innovation, own = errors[t] - gain @ errors[:t], readings[t, t] - gain @ readings[:t, t]
        total = own * squares / degrees
        evidence -= 0.5 * (innovation**2 / total + math.log(total))
        forget = min(1, FORGETTING / degrees)
        squares, degrees = forget * (squares + innovation**2 / own), forget * (degrees + 1)
    last = slice((count - 1) * n, count * n)
    cross = joint[last] @ seen.T
    gain = np.linalg.solve(readings, cross.T).T
    return means[last] + gain @ errors, joint[last, last] - gain @ cross.T, squares / degrees, evidence


@pytest.mark.parametrize("period", [0.0, 4.0, 7.0])
def test_members_are_gaussian_densities(period):
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.choice([1, 1, 1, 2, 3], 60)).astype(float)
    values = np.cumsum(rng.normal(0, 1, 60)) + 3 * np.cos(2 * np.pi * times / (period or 9)) - 20
    values[[5, 17]] = np.nan
    found = forecast(Series(times, values, period, ahead=times[-1] + np.array([1.0, 2.0, 5.0])), robust=False)
    read = ~np.isnan(values)
    widening, waves, members, lags = carried(found)
    unit = np.frombuffer(found.state)[1]
    assert [m.season for m in members] == [bool(period)] * 4 + [False] or period == 0
    total, deviation, season = np.zeros((3, 3))
    for member, name in zip(members, NAMES, strict=True):
        mean, covariance, variance, evidence = dense(values[read] / unit, times[read], member, name, waves, period)
        np.testing.assert_allclose(member.mean, mean, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(member.covariance, covariance, rtol=1e-6, atol=1e-8 * np.abs(covariance).max())
        assert member.variance == pytest.approx(variance, rel=1e-8)
        assert member.evidence == pytest.approx(evidence, rel=1e-8)
        for k, lag in enumerate((1, 2, 5)):
            transition, noise = steps(member, lag)
            row = rows([times[-1] + lag], member, waves, period)[0]
            total[k] += member.weight * row @ transition @ mean * unit
            if name == "drift":  # whose season is taken away before
                season[k] = row[member.base :] @ mean[member.base :]
            spread = row @ (transition @ covariance @ transition.T + noise) @ row + 1
            deviation[k] += member.weight * math.sqrt(spread * variance) * unit
    assert [each.changes for each in lags] == [False, True]
    for each in lags:
        mean, variance = each.ahead(5)
        total += each.weight * (mean[[0, 1, 4]] + season) * unit
        deviation += each.weight * np.sqrt(variance[[0, 1, 4]]) * unit
    np.testing.assert_allclose(found.mean, total, rtol=1e-7)
    z = NormalDist().inv_cdf(0.95)
    heavy = z + (z**3 + z) / (4 * DEGREES) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * DEGREES**2)
    np.testing.assert_allclose(found.quantiles[:, 4] - found.mean, heavy * widening * deviation, rtol=1e-7)


@pytest.mark.parametrize("changes", [False, True])
def test_lags_are_by_burg(changes):
    """Coefficients and order as statsmodels' recursion and a corrected Akaike criterion give them."""
    rng = np.random.default_rng(1)
    x = np.zeros(160)
    for t in range(2, 160):
        x[t] = 1.5 * x[t - 1] - 0.8 * x[t - 2] + rng.normal()
    found = forecast(regular(x - 40, h=12), robust=False)
    unit = np.frombuffer(found.state)[1]
    lags = carried(found)[3][changes]
    values = np.diff(x) if changes else x - 40
    mean = values.sum() / (len(values) + 15 * changes)
    n, best = len(values), np.inf
    kept = 1 - pacf_burg(values - mean, nlags=32, demean=False)[0] ** 2
    for order in range(33):
        own = burg(values - mean, order, demean=False)[0] if order else np.zeros(0)
        square = np.mean((values - mean) ** 2) * np.prod(kept[1 : order + 1])
        criterion = n * math.log(square) + 2 * (order + 1) * n / (n - order - 2)
        if criterion < best:
            best, coefficients, variance = criterion, own, square * n / (n - order - 1)
    assert len(coefficients) >= 2
    np.testing.assert_allclose(lags.coefficients, coefficients, rtol=1e-7, atol=1e-9)
    assert lags.mean * unit == pytest.approx(mean)
    assert lags.variance * unit**2 == pytest.approx(variance)
    np.testing.assert_allclose(lags.recent[:2] * unit, (x - 40)[:-3:-1])


def test_a_drift_lasts_as_long_as_the_series():
    members = carried(forecast(regular(trend_season(500) - 1000), robust=False))[2]
    assert members[NAMES.index("drift")].damping == pytest.approx(math.exp(-0.1 / 499))


def test_gaussian_smoothing():
    """Without weights, the smoothed value is the conditional mean given all readings."""
    rng = np.random.default_rng(5)
    values = -50 + np.cumsum(rng.normal(0, 1, 30)) + rng.normal(0, 1, 30)
    values[7] = np.nan
    found = forecast(regular(values), robust=False)
    unit = np.frombuffer(found.state)[1]
    _, waves, members, _ = carried(found)
    leading = int(np.frombuffer(found.state)[6])
    member, name = members[leading], NAMES[leading]
    read = np.flatnonzero(~np.isnan(values))
    mean, covariance, _ = start(values[read] / unit, read.astype(float), member, name, waves, 0)
    row = rows([0], member, waves, 0)[0]
    states = [np.eye(len(mean))]
    for _ in range(29):
        states.append(steps(member, 1)[0] @ states[-1])
    means = np.array([row @ s @ mean for s in states])
    joint = np.zeros((30, 30))
    for i in range(30):
        now = states[i] @ covariance @ states[i].T + steps(member, i)[1]
        for j in range(i, 30):
            joint[i, j] = joint[j, i] = row @ states[j - i] @ now @ row
    gain = np.linalg.solve(joint[np.ix_(read, read)] + np.eye(29), joint[read]).T
    np.testing.assert_allclose(found.fitted, (means + gain @ (values[read] / unit - means[read])) * unit, rtol=1e-7)
    half = 1.6449 * np.sqrt((np.diag(joint - gain @ joint[read]) + 1) * member.variance) * unit
    np.testing.assert_allclose(found.high - found.fitted, half, rtol=1e-6)


# Invariances


def assert_equal(one: SeriesForecast, other: SeriesForecast, factor=1.0, shift=0.0, rtol=1e-6):
    for name in ("mean", "quantiles", "fitted", "low", "high"):
        np.testing.assert_allclose(getattr(other, name), getattr(one, name) * factor + shift, rtol=rtol, err_msg=name)
    np.testing.assert_allclose(one.weights, other.weights, atol=1e-5)


@pytest.mark.parametrize(
    ("level", "factor", "shift", "origin"),
    [(100, 3.7, 0, 0), (100, 1e200, 0, 0), (-400, 1, -300, 0), (100, 1, 0, 24_000)],
)
def test_scale_shift_and_origin_of_time(level, factor, shift, origin):
    """Only negative readings may be shifted: they are on the linear scale alone."""
    y, times = trend_season(level=level), origin + np.arange(102.0)
    moved = Series(times[:96], factor * y + shift, 12.0, ahead=times[96:])
    assert_equal(forecast(regular(y, 12)), forecast(moved), factor, shift)


def test_rows_of_nan_are_gaps():
    y = trend_season()
    gone = np.random.default_rng(1).random(96) < 0.25
    gone[[0, -1]] = False
    y[gone] = np.nan
    with_rows = forecast(regular(y, 12))
    without = forecast(Series(np.flatnonzero(~gone).astype(float), y[~gone], 12.0, ahead=96 + np.arange(6.0)))
    for name in ("mean", "quantiles"):
        np.testing.assert_allclose(getattr(with_rows, name), getattr(without, name), rtol=1e-8)
    np.testing.assert_allclose(with_rows.fitted[~gone], without.fitted, rtol=1e-6)
    assert np.isfinite(with_rows.fitted[gone]).all()
    assert np.isnan(with_rows.weights[gone]).all()


def test_order_and_workers():
    panel = [regular(trend_season(30 + 3 * i, seed=i), 12) for i in range(150)]
    once = forecast_panel(panel, PROBABILITIES)
    backwards = forecast_panel(panel[::-1], PROBABILITIES, workers=3)[::-1]
    np.testing.assert_equal(once, backwards)


# Wrong readings


def test_spikes_are_refused_and_bands_stay():
    y = trend_season()
    clean = forecast(regular(y, 12))
    spoilt = y.copy()
    spoilt[[20, 50, 80, 93]] *= [10, 0.1, 10, 0.1]
    found = forecast(regular(spoilt, 12))
    assert np.flatnonzero(found.outliers).tolist() == [20, 50, 80, 93]
    np.testing.assert_allclose(found.mean, clean.mean, rtol=0.02)
    np.testing.assert_allclose(found.fitted, clean.fitted, rtol=0.03)
    wide, usual = (x.quantiles[:, 4] - x.quantiles[:, 0] for x in (found, clean))
    assert (wide < 1.3 * usual).all()
    y[-1] *= 10  # what comes later cannot tell that it is wrong
    np.testing.assert_allclose(forecast(regular(y, 12)).mean, clean.mean, rtol=0.05)


def test_jumps_are_no_spikes():
    rng = np.random.default_rng(4)
    y = np.r_[np.full(30, 20.0), np.full(30, 60.0)] + rng.normal(0, 1, 60)
    found = forecast(regular(y))
    assert not found.outliers.any()
    assert np.abs(found.mean - 60).max() < 3
    assert np.abs(found.fitted[:30] - 20).max() < 4
    assert np.abs(found.fitted[30:] - 60).max() < 4


# Seasons and regressors


@pytest.mark.parametrize("period", [7, 24, 365.25])
def test_season_is_found(period):
    n = int(3.2 * period) + 20
    t = np.arange(n)
    y = 100 + 20 * np.sin(2 * np.pi * t / period) + np.random.default_rng(0).normal(0, 2, n)
    found = forecast(regular(y, period, h=int(period)))
    truth = 100 + 20 * np.sin(2 * np.pi * (n + np.arange(int(period))) / period)
    assert np.abs(found.mean - truth).mean() < 3


@pytest.mark.parametrize("level", [100.0, -100.0])
def test_day_and_week_together(level):
    """Weekends without the day's wave, and a day that is no sum of six waves."""
    rng, t = np.random.default_rng(0), np.arange(24 * 7 * 6)
    day = np.where((t % 24 > 7) & (t % 24 < 18), 10.0, 0.0) + 8 * (t % 24 == 12)
    truth = level + day * np.where(t // 24 % 7 < 5, 1, 0.1)
    y = truth + rng.normal(0, 0.5, len(t))
    y[[300, 500]] += 80
    cut = len(t) - 48
    series = Series(t[:cut] * 1.0, y[:cut], 24.0, ahead=t[cut:] * 1.0, second_period=168.0)
    found = forecast(series)
    assert np.abs(found.mean - truth[cut:]).mean() < 0.8
    assert sum(weight for name, (weight, _) in found.members.items() if "free season" in name) > 0.9
    later = updated(
        forecast(series._replace(times=t[: cut - 24] * 1.0, values=y[: cut - 24], ahead=t[cut - 24 : cut] * 1.0)).state,
        t[cut - 24 : cut] * 1.0, y[cut - 24 : cut], t[cut:] * 1.0, PROBABILITIES,
    )  # fmt: skip
    assert np.abs(later.mean - truth[cut:]).mean() < 0.9
    assert np.abs(later.one_step - truth[cut - 24 : cut]).mean() < 0.9


def test_regressors():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 1))
    y = 50 + 4 * x[:, 0] + rng.normal(0, 0.5, 80)
    ahead = np.array([[2.0], [-2.0], [0.0]])
    found = forecast(regular(y, h=3, regressors=x, ahead_regressors=ahead))
    np.testing.assert_allclose(found.mean, 50 + 4 * ahead[:, 0], atol=1)
    with pytest.raises(ValueError, match="regressors"):
        updated(found.state, [80.0], [50.0], [81.0], PROBABILITIES)


# Going on


@pytest.mark.parametrize(("period", "level"), [(0.0, 100.0), (12.0, 100.0), (4.0, -500.0)])
def test_updates(period, level):
    y = trend_season(90, period=int(period) or 12, level=level)
    y[70] *= 5
    before = forecast(regular(y[:70], period))
    again = updated(before.state, np.zeros(0), np.zeros(0), 70 + np.arange(6.0), PROBABILITIES)
    np.testing.assert_allclose(again.mean, before.mean, rtol=1e-12)
    np.testing.assert_allclose(again.quantiles, before.quantiles, rtol=1e-12)
    times, ahead = np.arange(70.0, 90.0), 90 + np.arange(6.0)
    whole = updated(before.state, times, y[70:], ahead, PROBABILITIES)
    assert whole.outliers.tolist() == [True, *[False] * 19]
    state = before.state
    for t in range(70, 90):
        step = updated(state, np.array([float(t)]), y[t : t + 1], np.arange(t + 1.0, t + 7), PROBABILITIES)
        assert step.one_step[0] == pytest.approx(whole.one_step[t - 70])
        assert step.fitted[0] == pytest.approx(whole.fitted[t - 70])
        state = step.state
    assert_equal(step._replace(fitted=0, low=0, high=0, weights=0), whole._replace(fitted=0, low=0, high=0, weights=0))
    fitted_again = forecast(regular(y, period))
    np.testing.assert_allclose(whole.mean, fitted_again.mean, atol=4)


# What has to be withstood


def test_bad_series_give_reasons_and_the_others_go_on():
    good = regular(trend_season(40), 12)
    t = np.arange(5.0)
    bad = {
        "inf in row 2": regular([1, 2, np.inf, 4, 5]),
        "no reading": regular([np.nan] * 5),
        "got 1.0 in row 2": good._replace(times=np.r_[0, 1, 1, 3:40.0]),
        "expected one time for each": Series(t, np.zeros(4), ahead=np.array([9.0])),
        "ahead: got": Series(t, t, ahead=np.array([4.0])),
        "ahead: got no time": Series(t, t),
        "period": regular(t, -1.0),
        "not numbers": good._replace(values=np.array(["a"] * 40)),
        "regressors": regular(t, regressors=np.full((5, 1), np.nan), ahead_regressors=np.zeros((6, 1))),
        "expected both": regular(t, regressors=np.zeros((5, 1))),
    }
    seen = []
    found = forecast_panel([good, *bad.values(), good], PROBABILITIES, progress=seen.append)
    for reason, said in zip(bad, found[1:-1], strict=True):
        assert isinstance(said, str)
        assert reason in said
    np.testing.assert_equal(found[0].mean, forecast(good).mean)
    np.testing.assert_equal(found[0].mean, found[-1].mean)
    assert seen == [len(bad) + 2]


ODD = {
    "one": [3.0],
    "three": [3.0, 4.0, 3.5],
    "zero": [0.0],
    "constant": [7.0] * 30,
    "counts": [0, 0, 3, 0, 0, 0, 1, 0, 0.0],
    "tiny": [1e-300, 2e-300, 1e-300, 2e-300],
    "huge": [1e300, -1e300] * 4,
}


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
def test_few_or_odd_readings(values):
    for period in (0.0, 12.0):
        found = forecast(regular(values, period))
        assert np.isfinite(found.quantiles).all()
        assert (np.diff(found.quantiles, axis=1) >= 0).all()
        assert sum(weight for weight, _ in found.members.values()) == pytest.approx(1)
        assert set(found.members) <= set(MEMBERS)
        if len(values) < 4:
            assert "wide band" in found.note
            assert found.quantiles[0, 4] - found.quantiles[0, 0] >= 0.5 * abs(values[-1])


def test_bands_are_monotone_and_grow():
    many = [i / 100 for i in range(1, 100)]
    for y in (trend_season(60) - 500, np.random.default_rng(0).normal(0, 1, 25)):  # on the linear scale
        quantiles = forecast_panel([regular(y, 12)], many)[0].quantiles
        assert (np.diff(quantiles, axis=1) > 0).all()
        assert (np.diff(quantiles[:, -5] - quantiles[:, 4]) > -1e-9).all()


def test_bands_hold():
    rng = np.random.default_rng(0)
    panel, future = [], []
    for _ in range(300):
        y = np.cumsum(rng.normal(0, 1, 46)) + rng.normal(0, 1, 46)
        panel.append(regular(y[:40]))
        future.append(y[40:])
    quantiles = np.stack([one.quantiles for one in forecast_panel(panel, PROBABILITIES)])
    inside = (quantiles[..., 0] < future) & (future < quantiles[..., 4])
    assert 0.86 < inside.mean() < 0.95


def test_own_errors_widen_by_their_standard_deviation():
    """On noise the filters are right: the widening is the mean of ten prior origins of 1.2, and 16 of 1."""
    rng = np.random.default_rng(0)
    panel = [regular(rng.normal(0, 1, 200), h=12) for _ in range(150)]
    found = [carried(one)[0] for one in forecast_panel(panel, PROBABILITIES)]
    assert np.mean(found) == pytest.approx((10 * 1.2 + 16) / 26, abs=0.03)


def test_bands_of_a_kind_learn_from_rows_held_back():
    rng = np.random.default_rng(0)
    sd = np.r_[np.ones(34), 3 * np.ones(6)]  # the last rows are three times as uncertain as any before
    panel = [regular(rng.normal(0, sd) - 50) for _ in range(120)]
    widths = panel_widths(panel)
    assert list(widths) == [panel[0].kind]
    assert 1.6 < widths[panel[0].kind] < 3 ** (100 / 125)  # 100 series, and 25 of factor 1
    assert panel_widths(panel[::-1], workers=2) == widths
    assert panel_widths(panel[:19]) == {}
    usual, wide = (forecast_panel(panel, PROBABILITIES, widths=w) for w in (None, {panel[0].kind: 2.0}))
    for one, other in zip(usual, wide, strict=True):
        np.testing.assert_allclose(other.quantiles - other.mean[:, None], 2 * (one.quantiles - one.mean[:, None]))
        again = updated(other.state, np.zeros(0), np.zeros(0), panel[0].ahead, PROBABILITIES)
        np.testing.assert_allclose(again.quantiles, other.quantiles)


def test_refused_rows_held_back_do_not_count():
    rng = np.random.default_rng(0)
    panel = [regular(rng.normal(0, 1, 40) - 50) for _ in range(40)]
    clean = panel_widths(panel)[panel[0].kind]
    for one in panel:
        one.values[-3] -= 60
    assert panel_widths(panel)[panel[0].kind] == pytest.approx(clean, rel=0.1)


@pytest.mark.parametrize("probabilities", [[0.0], [1.0], [float("nan")]])
def test_bad_probabilities(probabilities):
    with pytest.raises(ValueError, match="probabilities"):
        forecast_panel([], probabilities)
    with pytest.raises(ValueError, match="workers"):
        forecast_panel([], [0.5], workers=0)


def test_a_refused_update_says_why_and_changes_nothing():
    state = forecast(regular(np.arange(40.0) % 7)).state
    for given, says in (
        ((b"", [40.0], [3.0]), "state"),
        ((state, [39.0], [3.0]), r"times: got 39\.0"),
        ((state, [40.0], [1e200]), r"values: got .* do not overflow"),
    ):
        with pytest.raises(ValueError, match=says):
            updated(*given, np.arange(41.0, 44), PROBABILITIES)
    assert np.isfinite(updated(state, [40.0], [3.0], np.arange(41.0, 44), PROBABILITIES).mean).all()


def test_states_that_somebody_wrote():
    """A state may come from a file: one number of it or another length leads nowhere but to a refusal or to numbers."""
    numbers = np.frombuffer(forecast(regular(trend_season(), 12.0)).state)
    rng, refused = np.random.default_rng(0), 0
    for each in range(400):
        damaged = numbers.copy()
        at = each % 30 if each < 210 else rng.integers(len(numbers))
        damaged[at] = rng.choice([np.nan, np.inf, -1.0, 1e300, 2.0**31, 7.0, 0.0, 1e6])
        damaged = damaged[: rng.integers(len(numbers))] if each % 10 == 0 else damaged
        try:
            found = updated(damaged.tobytes(), np.zeros(0), np.zeros(0), np.arange(1e4, 1e4 + 3), PROBABILITIES)
        except ValueError as error:
            refused += str(error).startswith(("state: ", "ahead: "))
        else:
            assert found.mean.shape == (3,)
    assert refused > 60


@pytest.mark.parametrize("robust", [True, False])
def test_a_series_that_repeats_itself_exactly_goes_on(robust):
    """Changes over a period are rounding alone, and so is what a filter expects."""
    k = np.arange(75)
    y = 5 + 3 * np.sin(k * np.pi / 6) + k % 3
    np.testing.assert_allclose(forecast(regular(y[:72], 12.0, h=3), robust=robust).mean, y[72:], atol=1e-3)


def test_few_readings_do_not_explode():
    """Six points on a line: on a logarithmic scale their growth would go on without end."""
    found = forecast(regular(10.0 * np.arange(1, 7), h=12))
    assert 60 < found.mean[-1] < 200


def test_rare_sales_are_a_level():
    """One in twenty weeks has a sale; the last one has."""
    ratios = []
    for seed in range(20):
        draws = np.random.default_rng(seed)
        y = np.where(draws.random(100) < 0.05, 100.0, 0.0)
        y[-1] = 100
        ratios.append(forecast(regular(y, h=4)).mean.mean() / y.mean())
    assert np.median(ratios) < 2
