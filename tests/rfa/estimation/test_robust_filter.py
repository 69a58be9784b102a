"""`RobustFilter`: updates, outliers, sensors, bad input, diagnostics, figures."""

import copy
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date, time

import numpy as np
import pandas as pd
import pytest
import torch
from cover import cover
from statsmodels.stats.diagnostic import acorr_ljungbox
from statsmodels.stats.stattools import jarque_bera

from rfa.estimation import Autoregression, Level, RobustFilter, Season, Trend, robust_estimate

from .series_models import column

NILE = column("nile.csv", "volume")
YEARS = np.arange(1871.0, 1971.0)
FIXED = {"sigma2.level": 1469.0, "sigma2.irregular": 15099.0}


def simulated(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Irregular times, a level with unit noise, and the level itself."""
    generator = np.random.default_rng(seed)
    times = generator.exponential(size=length).cumsum()
    level = (np.sqrt(0.2 * np.diff(times, prepend=0.0)) * generator.normal(size=length)).cumsum()
    return times, level + generator.normal(size=length), level


@cover(1, places=[[0], [1], [0, 1]], model=[Level(), Trend(), Level() + Season(7.0, harmonics=1)])
def test_wrong_readings_at_the_start_are_refused(model, places):
    """Nothing before them tells that they are wrong. The fit is that of the series without them."""
    random = np.random.default_rng(2)
    times = np.arange(80.0)
    values = (0.3 * random.normal(size=80)).cumsum() + random.normal(size=80)
    wrong, missing = values.copy(), values.copy()
    wrong[places], missing[places] = -9999.0, np.nan
    found, expected = (RobustFilter(model).fit(times, each) for each in (wrong, missing))
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, abs=0.05)
    smooth, without = found.smooth(), expected.smooth()
    assert smooth.outliers[places].all()
    assert (smooth.weights[places] < 1e-6).all()
    np.testing.assert_allclose(smooth.mean, without.mean, atol=0.1)
    later = found.update(80.0, 0.5)
    np.testing.assert_allclose(later.mean, found.filter().mean[-1:], atol=1e-8)  # the refused readings stay refused


@pytest.mark.parametrize("robust", [True, False])
def test_a_series_that_is_mostly_at_rest_keeps_its_scale(robust):
    """Solar power: half of the readings are zero, give or take little. The start must be wide for the others."""
    times = np.arange(480.0)
    random = np.random.default_rng(0)
    day = 800 * np.maximum(0, np.sin((times % 24 - 6) / 12 * np.pi))
    values = day * (1 + 0.02 * random.normal(size=480)) + 1e-4 * random.normal(size=480)
    found = RobustFilter(Level() + Season(24.0, harmonics=3), robust).fit(times, values)
    noon = found.forecast([480.0 + 12])
    assert noon.mean[0] == pytest.approx(800, abs=60)
    assert found.smooth().outliers.mean() < 0.15


def test_a_gap_that_nothing_survives():
    """The smoother before it is the filter: what comes later says nothing."""
    values = np.random.default_rng(0).normal(size=60)
    fixed = {"ar.L1": 0.5, "sigma2.ar": 1.0, "sigma2.irregular": 0.5}
    for gap in (460, 510, 520, 530, 600):  # precisions 0.5^(2 gap), subnormal and zero ones among them
        times = np.concatenate([np.arange(30.0), 29 + gap + np.arange(30.0)])
        found = RobustFilter(Autoregression(), robust=False).fit(times, values, fixed=fixed)
        assert found.smooth().mean[29] == pytest.approx(found.filter().mean[29], rel=1e-12)
        assert np.isfinite(RobustFilter(Autoregression()).fit(times, values, fixed=fixed).smooth().mean).all()
        given = found.sde, torch.from_numpy(times), torch.from_numpy(values)[:, None]
        for nu in (torch.inf, 16.0):
            assert robust_estimate(*given, nu=nu, direction="smooth").mean.isfinite().all()


def test_a_refused_series_leaves_the_filter_of_the_one_before():
    times, values = np.arange(30.0), np.random.default_rng(0).normal(size=30)
    filter = RobustFilter(Level()).fit(times, values)
    before = filter.filter().mean
    for bad in ({"fixed": {"sigma2.irregular": 0.0}}, {"max_steps": 0}, {"noise": -1.0}):
        with pytest.raises(ValueError, match=r"expected"):
            filter.fit(times[:20], values[:20], **bad)
    np.testing.assert_array_equal(filter.filter().mean, before)


def test_readings_almost_without_noise_have_no_negative_variance():
    """Five states are told apart by the first five readings, a billion times more exactly than they move."""
    times = np.arange(60.0)
    values = np.random.default_rng(0).normal(size=60).cumsum()
    fixed = {"sigma2.irregular": 1e-9, "sigma2.level": 0.3, "season": 2e-4}
    for robust in (True, False):
        found = RobustFilter(Level() + Season(24.0, harmonics=2), robust).fit(times, values, fixed=fixed).smooth()
        assert (found.variance >= 0).all()
        assert np.isfinite(found.interval(0.9)).all()
        np.testing.assert_allclose(found.mean, values, atol=0.1 if robust else 1e-3)


def test_several_sensors_read_at_once():
    """Two columns, or one with labels: a sensor's own noise. With equal noise, the mean of both has half of it."""
    times, values, _ = simulated(40)
    both = np.stack([values, values + 1], axis=1)
    fixed = {"sigma2.level": 0.2, "sigma2.irregular.a": 1.0, "sigma2.irregular.b": 1.0}
    wide = RobustFilter(Level(), robust=False).fit(times, both, sensor=["a", "b"], fixed=fixed)
    long = RobustFilter(Level(), robust=False)
    long.fit(np.repeat(times, 2), both.reshape(-1), sensor=["a", "b"] * 40, fixed=fixed)
    mean = RobustFilter(Level(), robust=False)
    mean.fit(times, values + 0.5, fixed={"sigma2.level": 0.2, "sigma2.irregular": 0.5})
    for found in (wide, long):
        np.testing.assert_allclose(found.filter().mean[1::2], mean.filter().mean, rtol=1e-7, atol=1e-7)
    assert long.filter().to_pandas()["sensor"].tolist() == ["a", "b"] * 40
    long.update(times[-1] + 1, 0.0, sensor="b")
    long.update(times[-1] + 1, 0.0, sensor="a")
    with pytest.raises(ValueError, match=r"time: got .* expected a time after"):
        long.update(times[-1] + 1, 0.0, sensor="b")


@pytest.mark.parametrize("robust", [False, True])
def test_simulated_paths_have_the_moments_of_the_forecast(robust):
    """Of a random walk the variance of a sum over times is known: `P 1'1 + q sum_ij min(i, j) + h r`."""
    times, values, _ = simulated(40)
    fixed = {"sigma2.level": 0.2, "sigma2.irregular": 1.0}
    found = RobustFilter(Level(), robust).fit(times, values, fixed=fixed)
    ahead = times[-1] + np.arange(1.0, 5.0)
    expected, paths = found.forecast(ahead), found.simulate(ahead, 40_000, generator=torch.Generator().manual_seed(0))
    assert paths.shape == (4, 40_000)
    error = 5 * np.sqrt(expected.variance / 40_000)
    assert (np.abs(paths.mean(axis=1) - expected.mean) < error).all()
    np.testing.assert_allclose(paths.var(axis=1), expected.variance, rtol=0.04)
    steps = np.arange(1.0, 5.0)
    last = expected.variance[0] - 0.2 - 1.0
    total = 16 * last + 0.2 * np.minimum.outer(steps, steps).sum() + 4.0
    assert paths.sum(axis=0).var() == pytest.approx(total, rel=0.04)
    again = found.simulate(ahead, 40_000, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(paths, again)


def test_known_offsets_noises_and_rows():
    """An offset is a shift of the values; a known noise adds to the sensor's; a row scales what a reading shows."""
    times, values, _ = simulated(30)
    fixed = {"sigma2.level": 0.2, "sigma2.irregular": 1.0}
    expected = RobustFilter(Level(), robust=False).fit(times, values, fixed=fixed).filter().states["level"]
    offset = np.linspace(0, 5, 30)
    shifted = RobustFilter(Level(), robust=False).fit(times, values + offset, offset=offset, fixed=fixed)
    np.testing.assert_allclose(shifted.filter().states["level"], expected, atol=1e-7)
    np.testing.assert_allclose(shifted.filter().mean, expected + offset, atol=1e-7)
    noisy = RobustFilter(Level(), robust=False)
    noisy.fit(times, values, noise=0.75, fixed={"sigma2.level": 0.2, "sigma2.irregular": 0.25})
    np.testing.assert_allclose(noisy.filter().states["level"], expected, atol=1e-7)
    rows = np.full((30, 1), 2.0)
    doubled = RobustFilter(Level(), robust=False)
    doubled.fit(times, 2 * values, observation=rows, fixed={"sigma2.level": 0.2, "sigma2.irregular": 4.0})
    np.testing.assert_allclose(doubled.filter().states["level"], expected, atol=1e-6)
    assert doubled.forecast(times[-1:] + 1, observation=[[2.0]]).mean == pytest.approx(2 * expected[-1:], abs=1e-6)


LATER = {"sensor": ["b"], "exog": [[1.0]], "offset": 50.0, "noise": [4.0], "observation": [[2.0]]}
CALLS = {
    "forecast": lambda f, **known: f.forecast([30.0], **known).mean,
    "predict": lambda f, **known: f.predict([30.0], **known),
    "simulate": lambda f, **known: f.simulate([30.0], 2, **known),
    "update": lambda f, **known: f.update(30.0, 50.0, **{name: np.ravel(x)[0] for name, x in known.items()}).mean,
}


@cover(1, name=LATER, call=CALLS.values())
def test_a_later_call_needs_what_the_fit_had(name, call):
    """Without it, it is refused by name. An offset or a noise of 0 must be said, unless `fit` had no other."""
    given = {"sensor": ["a", "b"] * 15, "offset": np.r_[0.0, np.full(29, 50.0)], "noise": 4.0}
    given |= {"exog": np.sin(np.arange(30.0)), "observation": np.full((30, 1), 2.0)}
    values, fixed = 50.0 + np.random.default_rng(0).normal(size=30), {"sigma2.level": 0.1}
    found = RobustFilter(Level()).fit(np.arange(30.0), values, fixed=fixed, **{name: given[name]})
    with pytest.raises(ValueError, match=f"^{name}: got .*, expected .*fit"):
        call(found)
    assert np.isfinite(call(found, **{name: LATER[name]})).all()
    found = RobustFilter(Level()).fit(np.arange(30.0), values, fixed=fixed, offset=0.0, noise=np.zeros(30), sensor=None)
    assert np.isfinite(call(found)).all()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copy_shares_nothing_that_changes(copied):
    times, values, _ = simulated(40)
    found, alone = (RobustFilter(Level()).fit(times, values) for _ in range(2))
    for each in (found, alone):
        each.update(times[-1] + 1, 0.0)
    other = copied(found)
    for step in range(2, 8):
        other.update(times[-1] + step, 50.0)
    expected, ahead = (each.forecast(times[-1] + [20.0]) for each in (alone, found))
    assert (ahead.mean, ahead.variance) == (expected.mean, expected.variance)
    assert (len(found.filter().mean), len(other.filter().mean)) == (41, 47)
    unfitted = copied(RobustFilter(Level())).fit(times, values)
    assert unfitted.log_likelihood == found.log_likelihood


def test_threads_may_read_beside_an_update():
    """Reading keeps what it computes. No reading is lost by it, and the result is that of one thread."""
    fixed = {"sigma2.level": 1.0, "sigma2.irregular": 1.0}
    found, alone = (RobustFilter(Level()).fit(NOW, NOW, fixed=fixed) for _ in range(2))
    ended, usual = threading.Event(), sys.getswitchinterval()

    def read():
        while not ended.is_set():
            found.forecast([1000.0])
            copy.copy(found).smooth()

    with ThreadPoolExecutor(2) as pool:
        sys.setswitchinterval(1e-5)
        try:
            readers = [pool.submit(read) for _ in range(2)]
            for step in range(3, 100):
                found.update(step, step % 7)
        finally:
            ended.set()
            sys.setswitchinterval(usual)
        for reader in readers:
            reader.result()
    for step in range(3, 100):
        alone.update(step, step % 7)
    np.testing.assert_allclose(found.filter().mean, alone.filter().mean, rtol=1e-12)


NOW = [0.0, 1.0, 2.0]
TWICE = pd.DataFrame(np.ones((3, 2)), columns=["a", "a"])
HOLED = pd.Series(["a", None, "b"], dtype="string")
BAD_FITS = [  # what is given to `fit` in the place of NOW, and what it says
    ({"values": TWICE, "sensor": ["a", "a"]}, "sensor: got the names a, a, expected a name"),
    ({"values": TWICE}, r"values: got a table with the columns a, a, .* sensor=list"),
    ({"values": np.ones((3, 2)), "sensor": ["a"]}, "sensor: got 1 labels beside 2 columns"),
    ({"values": [[1, np.nan]] * 3, "sensor": ["a", "b"]}, "no reading of b"),
    ({"values": [1.0, "2 kWh", "x"]}, "values: got text, 2 kWh in row 1, counted from 0, expected num"),
    ({"values": [[1, 2], [3, "x"], [4, 5]]}, "values: got text, x in row 1"),
    ({"values": [1, np.inf, 2]}, "values: got infinite values, inf in row 1"),
    ({"values": [1.0, 2e100, 3.0]}, "values: got numbers beyond 1e.100, 2e.100 in row 1"),
    ({"values": [1, None, date(2020, 1, 1)]}, "values: got values of type date, 2020-01-01 in row 2"),
    ({"values": {1.0, 2.0, 3.0}}, "values: got values of type set, "),
    ({"values": [1, 10**400, 2]}, "values: got values of type int, 1000.* in row 1"),
    ({"values": [1, None, 2j]}, "values: got values of type complex, 2j in row 2"),
    ({"values": [[1], [2, 3], [4]]}, "values: got rows of different lengths"),
    ({"values": pd.array([True, None, False], dtype="boolean")}, "values: got values of type bool"),
    ({"sensor": HOLED}, "sensor: got a missing label, nan in row 1, counted from 0"),
    ({"values": [np.nan] * 3}, "values: got missing values in all rows"),
    ({"times": [], "values": []}, "values: got no rows"),
    ({"times": pd.Series(["1", "2"])}, "times: got text, 1 in row 0.*pandas.to_datetime"),
    ({"times": ["2020-01-01"]}, "times: got text, 2020-01-01 in row 0, .*expected numbers or dates; pandas"),
    ({"times": [2**60, 2**60 + 1, 2**60 + 2]}, "times: got numbers that float64 does not hold, .* in row 1, .* pandas"),
    ({"times": [0, 1, 1e300]}, "times: got times beyond 1e.100, 1e.300 in row 2"),
    ({"times": [time(1), time(2), time(3)]}, "times: got values of type time, 01:00:00 in row 0"),
    ({"times": [0, np.nan, 2]}, "times: got NaN or infinite times, nan in row 1"),
    ({"times": [date(2020, 1, 1), date(3000, 1, 1)]}, "times: got dates that are too far, 3000-"),
    ({"times": [0, 2, 1]}, "times: got times that decrease, 1.0 in row 2"),
    ({"times": [0, 1, 1]}, "times: got two readings at one time, 1.0 in row 2.*sensor="),
    ({"exog": [1, np.inf, 2]}, "exog: got NaN or infinite values, inf in row 1"),
    ({"noise": -1.0}, "noise: got a negative variance, -1.0 in row 0"),
    ({"observation": [[1, 2]] * 3}, "observation: got 2 columns, expected 1, one for each state: level"),
    ({"fixed": [1.0]}, "fixed: got .1.0., expected values of parameters by name"),
    ({"fixed": {"sigma": 1.0}}, "fixed: got sigma, expected one of"),
    ({"fixed": {"level": -1.0}}, "fixed.sigma2.level.: got -1.0"),
    ({"fixed": {"sigma2.irregular": 0.0}}, "sigma2.irregular: got a reading without noise"),
]
BAD_CALLS = [  # of a filter that has seen NOW
    (lambda f: f.simulate(2, generator=3), "generator: got 3, expected a torch.Gen"),
    (lambda f: f.rolling_forecast([0, -1], [1, 2]), "origins: got no reading, -1.0 in row 1, .* from 0 to 2"),
    (lambda f: f.rolling_forecast([0], [1.5]), "targets: got no reading, 1.5 in row 0"),
    (lambda f: f.rolling_forecast([0, 1], [2]), r"origins: got shape \(2,\) beside \(1,\) of targets"),
    (lambda f: f.rolling_forecast([0, 1], [2, 1]), "targets: got a time before its origins, 1 in row 1"),
    (lambda f: f.forecast([date(2020, 1, 1)]), "query_times: got dates"),
    (lambda f: f.forecast([1.0]), "query_times: got .*before the last"),
    (lambda f: f.predict([]), "query_times: got no times, expected at least one"),
    (lambda f: f.predict(pd.date_range("2024", periods=1)), "query_times: got dates"),
    (lambda f: f.update(4.0, 1.0, sensor="b"), "sensor: got"),
    (lambda f: f.update(4.0, [1.0, 2.0]), "value: got shape"),
    (lambda f: f.update(4.0, 1e200), "value: got a number beyond"),
    (lambda f: f.filter().interval(2.0), "probability: got 2.0"),
    (lambda f: f.fit(pd.date_range("2020", periods=3), NOW, fixed=FIXED).forecast(100_000), "query_times: got 100000"),
    (lambda f: f.fit(NOW, NOW, exog=NOW, fixed=FIXED).forecast([4.0]), "exog: got 0 columns, expected 1, as in fit"),
    (lambda _: RobustFilter(Level(), False).fit(NOW, NOW, noise=1e308), "values: got a likelihood"),
    (lambda _: RobustFilter(Level()).filter(), "fit: got no series yet"),
    (lambda _: RobustFilter(3), "model: got 3, expected components"),
    (lambda _: RobustFilter(Level(), time_unit="month"), "time_unit: got month, expected one of"),
    (lambda _: Level() + Trend(), "model: got two components with a state level"),
]


def test_bad_input_raises_one_clear_error():
    fitted = RobustFilter(Level()).fit(NOW, NOW, fixed=FIXED)
    calls = [(lambda f, given=given: f.fit(**given), message) for given, message in BAD_FITS]
    for given, _ in BAD_FITS:
        given.setdefault("times", NOW), given.setdefault("values", NOW[: len(given["times"])])
        given.setdefault("fixed", FIXED)
    for call, message in calls + BAD_CALLS:
        with pytest.raises(ValueError, match=": got ") as error:
            call(fitted)
        assert re.search(message, str(error.value).translate({ord("'"): None, ord('"'): None}))


def test_edges():
    """One reading; a series that does not change; a start far from zero."""
    one = RobustFilter(Level()).fit([5.0], [3.0], fixed={"sigma2.level": 1.0, "sigma2.irregular": 1.0})
    assert one.forecast([6.0]).mean == pytest.approx([3.0])
    same = RobustFilter(Level()).fit(np.arange(20), np.full(20, 7.0))
    assert same.forecast(2).mean == pytest.approx([7.0, 7.0])
    with pytest.raises(ValueError, match="values: got 'innovations that are all equal', expected a series that varies"):
        RobustFilter(Level()).fit(np.arange(20), np.ones(20)).diagnostics()
    faded = RobustFilter(Autoregression()).fit(np.arange(60), np.full(60, 5.0))
    assert not faded.filter().outliers.any()
    assert faded.forecast(2).mean == pytest.approx([5.0, 5.0])
    pattern = RobustFilter(Level() + Season(7.0, 3)).fit(np.arange(35), np.tile([0.0, 1, 3, 2, 5, 1, 0], 5))
    assert all((variances >= 0).all() for variances in pattern.filter().state_variances.values())


def test_diagnostics_are_statsmodels(tmp_path):
    found = RobustFilter(Level(), robust=False).fit(YEARS, NILE, fixed=FIXED)
    tested = found.diagnostics(lags=8)
    innovations = found.filter().innovations[1:]
    np.testing.assert_array_equal(tested.innovations, innovations)
    ljung_box = acorr_ljungbox(innovations, lags=[8])
    assert tested.table["Ljung-Box"] == pytest.approx((ljung_box.lb_stat.iloc[0], ljung_box.lb_pvalue.iloc[0]))
    assert tested.table["Jarque-Bera"] == pytest.approx(jarque_bera(innovations)[:2])
    assert "100 readings, 0 of them outliers, 99 tested" in str(tested)
    assert tested.to_pandas().loc["NIS", "statistic"] == pytest.approx(np.mean(innovations**2))
    tested.plot().savefig(tmp_path / "diagnostics.png")
    assert (tmp_path / "diagnostics.png").stat().st_size > 10_000
    drawn = {line.get_label(): line.get_xdata() for line in found.smooth().plot().lines}
    assert len(drawn["reading"]) == len(drawn["estimate"]) == 100


def test_nis_and_nees_of_the_right_model_are_one():
    """And of noises four times too small they are not."""
    times, values, level = simulated(300, seed=3)
    right = {"sigma2.level": 0.2, "sigma2.irregular": 1.0}
    found = RobustFilter(Level(), robust=False).fit(times, values, fixed=right).diagnostics(level[:, None])
    assert found.nis == pytest.approx(1.0, abs=0.25)  # three standard errors: 3 sqrt(2 / 300)
    assert found.nees == pytest.approx(1.0, abs=0.5)  # states are correlated over about four readings
    assert found.table["NIS"][1] > 0.01
    wrong = {name: value / 4 for name, value in right.items()}
    found = RobustFilter(Level(), robust=False).fit(times, values, fixed=wrong).diagnostics(level[:, None])
    assert found.table["NIS"][1] < 1e-6
    assert found.nees > 2


def test_a_kalman_filter_takes_readings_as_they_are():
    """No weight bounds them: an estimate is linear in a reading."""
    plain = RobustFilter(Level(), robust=False).fit(range(30), np.arange(30.0) % 4)
    means = [copy.deepcopy(plain).update(30.0, value).mean for value in (1e60, 1e99)]
    np.testing.assert_allclose(means[1] / means[0], 1e39, rtol=1e-9)


def test_a_pickle_goes_on_without_the_compiler_that_made_it(monkeypatch):
    fitted = RobustFilter(Level()).fit(range(30), np.arange(30.0) % 4)
    stored, expected = pickle.dumps(fitted), fitted.update(30.0, 1.0).mean
    monkeypatch.setattr("rfa.estimation.readings_problem.can_run", lambda *tensors: False)
    np.testing.assert_allclose(pickle.loads(stored).update(30.0, 1.0).mean, expected, rtol=1e-6)
