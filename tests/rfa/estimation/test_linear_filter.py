"""`RobustFilter` of linear models against filterpy, statsmodels and a textbook filter, and what a tracker needs."""

import copy
import pickle
import threading

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from filterpy.common import Q_continuous_white_noise
from filterpy.kalman import KalmanFilter
from scipy.linalg import expm

from rfa.estimation import LinearSDE, RobustFilter

from .trackers import ALONE, DIFFUSION, SENSORS, START, A, F, H, Q, R, readings_of, tracker, two_sensors


def filterpy_tracker():
    other = KalmanFilter(4, 2)
    other.F, other.Q, other.H, other.R, other.x, other.P = F, Q, H, R, START[0].copy(), START[1].copy()
    return other


def textbook(times, readings, start, at_first=True, sensor=None):
    """The Kalman filter of `two_sensors`, sensor by sensor, and its log-likelihood."""
    mean, covariance, last, total, found = *start, times[0], 0.0, []
    for k, (time, row) in enumerate(zip(times, readings, strict=True)):
        if k or not at_first:
            phi = expm(A * (time - last))
            block = expm(np.block([[-A, DIFFUSION], [np.zeros((4, 4)), A.T]]) * (time - last))
            mean, covariance = phi @ mean, phi @ covariance @ phi.T + block[4:, 4:].T @ block[:4, 4:]
        last = time
        for name, part in (("gps", row[:2]), ("radar", row[2:])):
            if sensor is not None:
                part = row[: len(SENSORS[0][name])] if sensor[k] == name else row[:0]
            seen = ~np.isnan(part)
            if not seen.any():
                continue
            rows, noise = SENSORS[0][name][seen], SENSORS[1][name][np.ix_(seen, seen)]
            variance = rows @ covariance @ rows.T + noise
            error, gain = part[seen] - rows @ mean, covariance @ rows.T @ np.linalg.inv(variance)
            total -= (error @ np.linalg.solve(variance, error) + np.linalg.slogdet(2 * np.pi * variance)[1]) / 2
            mean, covariance = mean + gain @ error, covariance - gain @ variance @ gain.T
        found.append((mean, covariance))
    return np.array([x for x, _ in found]), np.array([x for _, x in found]), total


def irregular(length=60, seed=1):
    rng = np.random.default_rng(seed)
    times, readings = np.cumsum(rng.exponential(0.7, length)), rng.normal(size=(length, 5)).cumsum(0)
    readings[rng.random(readings.shape) < 0.3] = np.nan
    readings[5] = np.nan
    return times, readings


def test_filter_and_smoother_are_those_of_filterpy():
    z, times = readings_of(80), 0.5 * np.arange(80)
    mean, covariance, *_ = filterpy_tracker().batch_filter(z)
    smoothed, smoothed_covariance, *_ = filterpy_tracker().rts_smoother(mean, covariance)
    found = tracker().filter(times, z)
    past = tracker().smooth(times, z)
    for ours, theirs in ((found, (mean, covariance)), (past, (smoothed, smoothed_covariance))):
        np.testing.assert_allclose(ours.states, theirs[0], rtol=0, atol=1e-10)
        np.testing.assert_allclose(ours.state_covariances, theirs[1], rtol=0, atol=1e-10)
    other = filterpy_tracker()
    total = 0.0
    for row in z:
        other.predict()
        other.update(row)
        total += other.log_likelihood
    assert found.log_likelihood == pytest.approx(total, abs=1e-9)  # the density, with 2 pi


def test_the_first_step_is_a_choice():
    """A first reading of 1: 0.8 by updating first, 0.928 by predicting first."""
    model = LinearSDE.discrete([[1.5]], [[1.0]], [[1.0]], [[0.25]])
    for place, expected in (("reading", 0.8), ("before", 3.25 / 3.5), (-2.0, (1.5**4 + 3.25) / (1.5**4 + 3.5))):
        live = RobustFilter(model, robust=False, start=([0.0], [[1.0]]), start_at=place)
        assert live.update(0.0, [1.0]).states == pytest.approx(expected), place


def test_process_noises_of_filterpy():
    """A discrete Q has rank 1; the continuous form is what `LinearSDE` integrates, also over irregular gaps."""
    drift, density = np.array([[0.0, 1.0], [0.0, 0.0]]), np.diag([0.0, 1.0])
    continuous = LinearSDE(drift, density, np.eye(1, 2), np.eye(1))
    np.testing.assert_allclose(continuous.covariance(1.0), Q_continuous_white_noise(2, 1.0, 1.0), atol=1e-14)
    noise = continuous.covariance(0.5).numpy()
    step = LinearSDE.discrete([[1.0, 0.5], [0.0, 1.0]], noise, np.eye(1, 2), np.eye(1), 0.5)
    times, z = np.array([0.0, 0.5, 2.0, 2.5]), np.array([1.0, 2.0, 0.0, 1.0])
    ours, other = (RobustFilter(x, robust=False).filter(times, z) for x in (continuous, step))
    np.testing.assert_allclose(ours.state_covariances[1:], other.state_covariances[1:], atol=1e-12)
    np.testing.assert_allclose(ours.states[1:], other.states[1:], atol=1e-12)


@pytest.mark.parametrize("labelled", [False, True])
def test_several_sensors_partly_missing_at_irregular_times(labelled):
    times, z = irregular()
    sensor, given = None, z
    if labelled:
        sensor = np.where(np.arange(60) % 3 == 0, "gps", "radar")
        given = np.where(
            (sensor == "gps")[:, None], np.pad(z[:, :2], ((0, 0), (0, 1)), constant_values=np.nan), z[:, 2:]
        )
    mean, covariance, total = textbook(times, given, START, sensor=sensor)
    options = {"robust": False, "start": START, "start_at": "reading"}
    found = two_sensors(**options).filter(times, given, sensor=sensor)
    np.testing.assert_allclose(found.states, mean, atol=1e-9)
    np.testing.assert_allclose(found.state_covariances, covariance, atol=1e-9)
    assert found.log_likelihood == pytest.approx(total, abs=1e-8)
    assert found.mean.shape == found.innovations.shape == given.shape
    joint = LinearSDE(A, DIFFUSION, np.vstack([H, ALONE]), torch.block_diag(*map(torch.tensor, SENSORS[1].values())))
    if not labelled:  # stacked in one sensor they say the same
        stacked = RobustFilter(joint, **options).smooth(times, z)
        np.testing.assert_allclose(stacked.states, two_sensors(**options).smooth(times, z).states, atol=1e-8)
        assert stacked.log_likelihood == pytest.approx(total, abs=1e-8)


def test_rows_of_sensors_may_have_different_lengths():
    rows, padded = [[1.0, 2.0], [1.0, 2.0, 3.0]], [[1.0, 2.0, np.nan], [1.0, 2.0, 3.0]]
    found = [two_sensors().filter([0.0, 1.0], x, sensor=["gps", "radar"]).states for x in (rows, padded)]
    np.testing.assert_array_equal(*found)
    with pytest.raises(ValueError, match=r"shape .2,. in row 0', expected 3 components of its sensor"):
        two_sensors().filter([0.0, 1.0], rows, sensor=["radar", "gps"])


def test_starts_states_and_forecasts_are_those_of_statsmodels():
    z, parameters = readings_of(50)[:, 0], [0.7, 0.1, 0.02]
    other = sm.tsa.UnobservedComponents(z, "lltrend", use_exact_diffuse=True)
    result = other.smooth(parameters)
    model = LinearSDE.discrete([[1.0, 1.0], [0.0, 1.0]], np.diag([0.1, 0.02]), np.eye(1, 2), [[0.7]])
    found = RobustFilter(model, robust=False).fit(np.arange(50.0), z)
    assert found.log_likelihood == pytest.approx(result.llf, abs=1e-8)
    np.testing.assert_allclose(found.filter().states[2:], result.filtered_state.T[2:], atol=1e-8)
    np.testing.assert_allclose(found.smooth().states, result.smoothed_state.T, atol=1e-8)
    assert np.isinf(found.filter().state_covariances[0, 1, 1])
    ahead, theirs = found.forecast(5), result.get_forecast(5)
    np.testing.assert_allclose(ahead.mean, theirs.predicted_mean, atol=1e-8)
    np.testing.assert_allclose(ahead.variance, theirs.var_pred_mean, atol=1e-8)
    signal = result.get_prediction(50, 54, signal_only=True).var_pred_mean  # without the noise of readings
    np.testing.assert_allclose(ahead.state_covariances[:, 0, 0], signal, atol=1e-8)
    assert result.predicted_state.shape == (2, 51)  # of each reading from those before, and one more
    np.testing.assert_allclose(ahead.states[0], result.predicted_state[:, -1], atol=1e-8)
    approximate = sm.tsa.UnobservedComponents(z, "lltrend").smooth(parameters)
    assert approximate.loglikelihood_burn == 2
    left_out = np.log(2 * np.pi)  # two readings, of which nothing is known but their scale
    assert found.log_likelihood == pytest.approx(approximate.llf - left_out, abs=1e-5)
    other = sm.tsa.UnobservedComponents(z, "lltrend")
    other.ssm.initialize_known(np.array([1.0, 0.5]), np.diag([2.0, 3.0]))
    other.ssm.loglikelihood_burn = 0
    result = other.smooth(parameters)
    known = RobustFilter(model, robust=False, start=([1.0, 0.5], np.diag([2.0, 3.0])), start_at="reading")
    known.fit(np.arange(50.0), z)
    assert known.log_likelihood == pytest.approx(result.llf, abs=1e-8)
    np.testing.assert_allclose(known.filter().states, result.filtered_state.T, atol=1e-8)


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("weights", ["reading", "component"])
def test_update_equals_filtering_again(robust, start, weights):
    times, z = irregular(40)
    z[[12, 20, 21]] += 60.0
    place = None if start is None else times[0] - 1.0
    model = LinearSDE(A, DIFFUSION, SENSORS[0], {"gps": np.diag([1.0, 2.0]), "radar": SENSORS[1]["radar"]})
    options = {"robust": robust, "start": start, "start_at": place, "weights": weights}
    whole = RobustFilter(model, **options).filter(times, z)
    assert whole.weights.shape == (40, 2 if weights == "reading" else 5)
    one, some = RobustFilter(model, **options), RobustFilter(model, **options).fit(times[:10], z[:10])
    later = some.update(times[10:], z[10:])
    tolerance = {"rtol": 1e-7, "atol": 1e-8}
    for k, (time, row) in enumerate(zip(times, z, strict=True)):
        row = one.update(float(time), row)
        for name in ("states", "weights", "variance", "innovations", "outliers"):
            if np.isfinite(whole.state_covariances[k]).all():
                np.testing.assert_allclose(getattr(row, name), getattr(whole, name)[k], **tolerance)
    np.testing.assert_allclose(later.states, whole.states[10:], **tolerance)
    np.testing.assert_allclose(some.forecast([99.0]).mean, one.forecast([99.0]).mean, **tolerance)
    assert one.forecast([99.0], sensor="radar").mean.shape == (1, 3)
    back = some.predict([times[0], 99.0], sensor="gps")
    np.testing.assert_allclose(back[0], some.smooth().mean[0, :2], **tolerance)
    for_sensor = one.update(100.0, z[0, 2:], "radar"), some.update(100.0, [*z[0, 2:]], sensor="radar")
    again = one.update(101.0, z[0, 2:], ["radar"]), some.update(101.0, torch.tensor(z[0, 2:]), sensor="radar")
    for ours, other in (for_sensor, again):
        assert ours.weights.shape == (() if weights == "reading" else (3,))
        assert ours.mean.shape == ours.readings.shape == (3,)
        for name in ("states", "mean", "variance", "innovations", "weights", "readings", "log_likelihood"):
            np.testing.assert_allclose(getattr(ours, name), getattr(other, name), **tolerance)


def test_robust_filter_holds_where_the_kalman_filter_does_not():
    clean, z = readings_of(400), readings_of(400)
    rng = np.random.default_rng(3)
    wrong = rng.random(400) < 0.1
    z[wrong] += rng.normal(size=(wrong.sum(), 2)) * 50
    times = 0.5 * np.arange(400)
    best = tracker().filter(times, clean).states
    found, kalman = tracker(robust=True).filter(times, z), tracker().filter(times, z)
    error = [np.abs(x.states - best)[:, [0, 2]].mean() for x in (found, kalman)]
    assert error[0] < 0.25 * error[1]
    assert found.outliers[wrong].mean() > 0.8
    assert found.outliers[~wrong].mean() < 0.02
    assert found.log_likelihood > kalman.log_likelihood + 1000
    z[200, 0] = 1e250
    past = tracker(robust=True).smooth(times, z)
    assert np.abs(past.states - tracker().smooth(times, clean).states)[:, [0, 2]].mean() < error[0]


def test_weights_of_components_and_sensors_are_apart():
    """A wrong x leaves y its weight, and a sensor in a burst leaves the other one alone."""
    model = LinearSDE.discrete(F, Q, H, np.diag([1.0, 2.0]), 0.5)
    z, times = readings_of(60), 0.5 * np.arange(60)
    z[30, 0] += 100.0
    found = RobustFilter(model, weights="component", start=START, start_at="before").filter(times, z)
    assert (found.weights[30] < 0.1).tolist() == [True, False]
    assert found.outliers[30].tolist() == [True, False]
    alone = RobustFilter(LinearSDE.discrete(F, Q, H[:1], [[1.0]], 0.5), start=START, start_at="before")
    both = LinearSDE.discrete(F, Q, {"x": H[:1], "y": H[1:]}, {"x": [[1.0]], "y": [[2.0]]}, 0.5)
    pair = RobustFilter(both, start=START, start_at="before").smooth(times, z)
    np.testing.assert_allclose(pair.weights[:, 0], alone.smooth(times, z[:, 0]).weights, atol=1e-9)  # independent axes


def test_known_inputs_move_the_state():
    """As filterpy's `predict(u)`; in continuous time the input is held over the gap."""
    by, u, z, times = np.kron(np.eye(2), [[0.1], [0.4]]), readings_of(30, 2), readings_of(30), np.arange(30) / 2
    other, means, path = filterpy_tracker(), [], [np.zeros(4)]
    other.B = by
    for row, push in zip(z, u, strict=True):
        other.predict(push)
        other.update(row)
        means.append(other.x)
        path.append(F @ path[-1] + by @ push)
    np.testing.assert_allclose(tracker(control_matrix=by).filter(times, z, control=u).states, means, atol=1e-10)
    last, live = tracker(control_matrix=by).smooth(times, z, control=u), tracker(control_matrix=by)
    free = tracker().smooth(times, z - np.array(path[1:]) @ H.T).states + path[1:]
    np.testing.assert_allclose(last.states, free, atol=1e-8)
    for k in range(30):
        row = live.update(times[k], z[k], control=u[k])
    np.testing.assert_allclose(row.states, means[-1], atol=1e-10)
    held = RobustFilter(LinearSDE(A, DIFFUSION, H, R), start=START, start_at=0.0, control_matrix=np.eye(4)[:, [1, 3]])
    moved = held.forecast([2.0], control=[[1.0, 2.0]]).states[0] - expm(A * 2) @ START[0]
    np.testing.assert_allclose(moved, [2.0, 2.0, 4.0, 4.0], atol=1e-12)


def test_predict_and_simulate():
    z, times = readings_of(40), 0.5 * np.arange(40)
    found = tracker(robust=True).fit(times, z)
    mean, deviation = found.predict([30.0, 3.0, 19.5], return_std=True)
    ahead = found.forecast([30.0])
    np.testing.assert_allclose(mean[0], ahead.mean[0])
    np.testing.assert_allclose(deviation[0] ** 2, ahead.variance[0])
    np.testing.assert_allclose(mean[1:], found.smooth().mean[[6, 39]], atol=1e-9)
    drawn = found.simulate([20.0, 22.0], 20_000, generator=torch.Generator().manual_seed(0))
    expected = found.forecast([20.0, 22.0])
    assert drawn.shape == (2, 20_000, 2)
    np.testing.assert_allclose(drawn.mean(1), expected.mean, atol=5 * expected.variance.max() ** 0.5 / 20_000**0.5)
    np.testing.assert_allclose(drawn.var(1), expected.variance, rtol=0.06)
    lower, upper = expected.interval(0.9)
    assert ((drawn > lower[:, None]) & (drawn < upper[:, None])).mean() == pytest.approx(0.9, abs=0.01)


def test_noises_by_maximum_likelihood():
    """As statsmodels' search; the robust fit is not misled by outliers."""
    z, times = readings_of(300)[:, 0], np.arange(300.0)
    model = LinearSDE.discrete([[1.0, 1.0], [0.0, 1.0]], np.diag([0.0, 1.0]), np.eye(1, 2), [[1.0]])
    found = RobustFilter(model, robust=False).fit(times, z, noises="all")
    result = sm.tsa.UnobservedComponents(z, "strend", use_exact_diffuse=True).fit(disp=False)
    assert found.converged
    assert found.log_likelihood == pytest.approx(result.llf, abs=1e-3)
    names = ["observation_noise", "process_noise"]
    np.testing.assert_allclose([found.parameters[x] for x in names], result.params, rtol=0.02)
    spoilt = z.copy()
    spoilt[10::20] += 500.0
    robust = RobustFilter(model).fit(times, spoilt, noises=["observation_noise", "process_noise"]).parameters
    np.testing.assert_allclose([robust[x] for x in names], result.params, rtol=0.4)


@pytest.mark.parametrize("unit", [1e-6, 1e3, 1e6])
def test_noises_in_other_units_than_the_readings(unit):
    model, rng = LinearSDE.discrete([[1.0]], [[1.0]], [[1.0]], [[1.0]]), np.random.default_rng(0)
    z = np.cumsum(rng.standard_normal(200)) + rng.standard_normal(200)
    z[rng.random(200) < 0.2] += 30.0
    found, same = (RobustFilter(model).fit(np.arange(200), x, noises="all") for x in (unit * z, z))
    expected = {name: x * unit**2 for name, x in same.parameters.items()}
    assert found.parameters == pytest.approx(expected, rel=1e-4)
    assert found.fit(np.arange(200), unit * z, noises="all").parameters == pytest.approx(expected, rel=1e-4)


def test_a_noise_that_vanishes():
    """Readings around a constant have no process noise. One of a round of a robust fit may be back in the next."""
    model, rng = LinearSDE.discrete([[1.0]], [[1.0]], [[1.0]], [[1.0]]), np.random.default_rng(0)
    z = rng.standard_normal(200)
    found = RobustFilter(model, robust=False).fit(np.arange(200), z, noises="all")
    assert found.converged
    assert found.parameters["process_noise"] < 1e-6
    assert found.parameters["observation_noise"] == pytest.approx(np.var(z, ddof=1), rel=1e-4)
    assert not RobustFilter(model, robust=False).fit(np.arange(200), z, noises="all", max_steps=5).converged
    rng = np.random.default_rng(228)
    z = np.cumsum(rng.standard_normal(40)) + 0.5 * rng.standard_normal(40)
    z[rng.random(40) < 0.15] += 8 * rng.standard_normal()
    robust = RobustFilter(model).fit(np.arange(40), z, noises="all")
    assert not robust.filter().outliers.any()
    plain = RobustFilter(model, robust=False).fit(np.arange(40), z, noises="all")
    assert robust.parameters == pytest.approx(plain.parameters, rel=1e-2)


def test_tensors_in_single_precision():
    """The compiled filter takes numbers in float64."""
    single = (torch.tensor(x, dtype=torch.float32) for x in (F, Q, H, R))
    z, times = readings_of(20), 0.5 * np.arange(20)
    models = LinearSDE.discrete(*single, 0.5), MODEL
    found = (RobustFilter(model, start=START, start_at="reading").filter(times, z).states for model in models)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_kinds_names_and_dates():
    z, days = readings_of(30), pd.date_range("2024-01-01", periods=30, freq="12h")
    frame = pd.DataFrame(z, days, ["x", "y"])
    names = ["x", "vx", "y", "vy"]
    found = tracker(state_names=names, robust=True).fit(frame)
    plain = tracker(robust=True).fit(0.5 * np.arange(30), z)
    assert [list(found.filter().states), list(found.smooth().mean)] == [names, ["x", "y"]]
    assert found.filter().states.index.equals(days)
    np.testing.assert_allclose(found.filter().states, plain.filter().states, atol=1e-9)
    assert found.forecast(2).mean.index[1] == pd.Timestamp("2024-01-16 12:00")
    late = found.update(pd.Timestamp("2024-01-16"), z[0])
    np.testing.assert_allclose(late.states, plain.update(15.0, z[0]).states, atol=1e-9)
    assert torch.equal(plain.fit(0.5 * np.arange(30), torch.tensor(z)).filter().readings, torch.tensor(z))
    copied, pickled = copy.copy(plain), pickle.loads(pickle.dumps(plain))
    rows = [x.update(50.0, z[1]).states for x in (copied, pickled, plain)]
    np.testing.assert_array_equal(rows[0], rows[2])
    np.testing.assert_array_equal(rows[1], rows[2])
    again = plain.set_params(robust=False).filter(0.5 * np.arange(30), z)
    np.testing.assert_array_equal(again.states, tracker().filter(0.5 * np.arange(30), z).states)


def test_threads_share_a_filter():
    """Each reading is used once: the log densities of a random walk do not depend on the order of equal readings."""
    live = RobustFilter(LinearSDE.discrete([[1.0]], [[0.0]], [[1.0]], [[1.0]]), robust=False)
    live.update(0.0, [1.0])
    row = np.array([1.0])
    work = [threading.Thread(target=lambda: [live.update(0.0, row) for _ in range(500)]) for _ in range(4)]
    for each in work:
        each.start()
    for each in work:
        each.join()
    assert live.forecast([0.0]).state_covariances.item() == pytest.approx(1 / 2001, rel=1e-9)


ONE_LINE = r"^[^\n]*$"
MODEL = LinearSDE.discrete(F, Q, H, R, 0.5)
ONES = np.ones((2, 2))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: LinearSDE(np.eye(3)[:2], Q, H, R), "dynamics: got shape (2, 3)"),
        (lambda: LinearSDE.discrete(F, -Q, H, R), "process_noise: got an eigenvalue of"),
        (lambda: LinearSDE.discrete(F, Q, np.eye(3), R), "observation: got shape (3, 3)"),
        (lambda: LinearSDE.discrete(F, Q, H, R, cross_covariance=R), "cross_covariance: got a matrix"),
        (lambda: LinearSDE(A, DIFFUSION, {"gps": H}, {"radar": R}), "observation_noise: got [radar]"),
        (lambda: RobustFilter(LinearSDE(A, DIFFUSION, H, np.ones((2, 2)))), "observation_noise: got a singular R"),
        (lambda: tracker(start_at=None), "start_at: got None, expected reading, before (one step)"),
        (lambda: two_sensors(start=START, start_at="before"), "start_at: got before"),
        (lambda: tracker(start=(START[0][:3], START[1])), "start: got a mean of shape (3,)"),
        (lambda: tracker(weights="component"), "weights: got component"),
        (lambda: tracker().filter([0, 1.0], np.ones((2, 3))), "readings: got shape (2, 3), expected (times, 2)"),
        (lambda: tracker().filter([0, 1.0, 2.0], ONES), "times: got shape (3,), expected (2,)"),
        (lambda: tracker().filter([1.0, 0.5], ONES), "times: got times that decrease"),
        (lambda: tracker().filter([0.0, 0.7], ONES), "times: got 0.7 in row 1, expected gaps of whole steps"),
        (lambda: tracker(start_at=3.0).filter([0.0], np.ones((1, 2))), "times: got 0.0, expected a time not before"),
        (lambda: tracker().filter([0.0], np.ones((1, 2)), control=[[1.0]]), "control: got an input"),
        (lambda: tracker().filter([0.0], np.ones((1, 2)), mask=[1]), "mask: got int64 of shape (1,)"),
        (lambda: two_sensors().filter([0.0], [[1.0, 2, 3]], sensor="gps"), "numbers beyond the components"),
        (lambda: tracker().filter([0.0], [[np.inf, 0.0]]), "readings: got an infinite value at 0.0"),
        (lambda: tracker().fit([0.0], np.ones((1, 2)), noises=["Q"]), "noises: got [Q]"),
        (lambda: tracker().fit([0.0], np.full((1, 2), np.nan), noises="all"), "readings: got no reading"),
        (lambda: tracker().smooth(), "fit: got None"),
        (lambda: tracker().forecast(3), "query_times: got 3"),
        (
            lambda: tracker(start_at=0.0).fit([0.0], np.ones((1, 2))).predict([-1.0]),
            "query_times: got -1.0, expected a time not before the last one, or the start",
        ),
        (lambda: tracker().fit([0.0, 0.5], ONES).predict([0.3]), "expected gaps of whole steps"),
        (
            lambda: two_sensors().update(0.0, np.ones(3)),
            "reading: got shape (1, 3), expected 5 components of all sensors, or `sensor=` beside those of one",
        ),
        (lambda: RobustFilter(MODEL).simulate([1.0]), "simulate: got a state of which nothing is known"),
        (lambda: RobustFilter(MODEL).forecast([1.0]), "forecast: got a state of which nothing is known"),
        (
            lambda: tracker(start_at=0.0).forecast(pd.to_datetime(["2024-01-01"])),
            "start_at: got numbers, expected dates",
        ),
        (
            lambda: tracker().fit([0.0, 0.5], readings_of(2)).predict([1e9, 0.3]),
            "query_times: got 0.3, expected gaps of",
        ),
        (lambda: tracker().diagnostics(), "model: got a linear or nonlinear model"),
        (lambda: tracker(start=(np.ones((3, 4)), START[1])).update(0.0, [1.0, 2.0]), "start: got 3 tracks"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        call()
    assert says in str(error.value).replace("'", "")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((0.5, np.zeros(2)), "time: got 0.5, expected a time not before the last one"),
        ((1.7, np.zeros(2)), "time: got 1.7, expected gaps of whole steps of 0.5"),
        ((2.0, np.zeros(3)), "reading: got shape (1, 3), expected 2 components"),
        ((2.0, np.array([np.inf, 0.0])), "reading: got an infinite value at 2.0"),
        ((np.nan, np.zeros(2)), "time: got nan"),
        (([2.0, 1.5], np.zeros((2, 2))), "time: got times that decrease"),
        (("monday", np.zeros(2)), "time: got text"),
    ],
)
def test_a_refused_update_changes_nothing(given, says):
    live = tracker(robust=True).fit([0.0, 0.5], ONES)
    live.update(1.0, np.ones(2))
    before = pickle.dumps(live.__getstate__()["_state"])
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        live.update(*given)
    assert says in str(error.value).replace("'", "")
    assert pickle.dumps(live.__getstate__()["_state"]) == before
    live.fit([0.0], np.ones((1, 2)))
    with pytest.raises(ValueError, match="readings"):
        live.fit([0.0], np.ones((1, 3)))
    assert live.filter().states.shape == (1, 4)


def test_states_that_no_reading_tells_are_said():
    with pytest.warns(UserWarning, match="observation: no reading tells vy of a diffuse start"):
        hidden = RobustFilter(LinearSDE(np.zeros((2, 2)), np.eye(2), [[1.0, 0.0]], [[1.0]]), state_names=["x", "vy"])
    found = hidden.filter([0.0, 1.0], [1.0, 2.0])
    assert np.isinf(found.state_covariances[1, 1, 1])
    assert np.isfinite(found.variance).all()
