"""The nonlinear filter against textbook filters, filterpy, and the linear robust filter."""

import math
import warnings

import numpy as np
import pytest
import scipy.optimize
import torch
from filterpy.kalman import ExtendedKalmanFilter, KalmanFilter, MerweScaledSigmaPoints, UnscentedKalmanFilter

from rfa.estimation import LinearSDE, NonlinearModel, RobustFilter, Sensor
from rfa.estimation.gaussian import NoiseScale, infer_scale

from .models import looped

GAP = 0.5
F = np.kron(np.eye(2), [[1, GAP], [0, 1]])
Q = np.kron(np.eye(2), [[GAP**3 / 3, GAP**2 / 2], [GAP**2 / 2, GAP]]) * 0.2
H = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0.5]])
R = np.array([[1.0, 0.3], [0.3, 2]])
START = np.array([1.0, 0, -1, 0.5]), np.diag([4.0, 1, 4, 1])
SIGMA = {"method": "sigma_points", "alpha": 0.7, "beta": 2.0, "kappa": 1.0}
METHODS = {"jacobian": {}, "iterated": {"iterations": 3}, "sigma": SIGMA, "iterated sigma": SIGMA | {"iterations": 2}}


def readings(length=30, gaps=True):
    """Of two random walks with an outlier, from 20 on elsewhere, some missing."""
    z = np.cumsum(np.random.default_rng(0).standard_normal((length, 2)), axis=0)
    z[8] += 40
    z[20:] += 100
    if gaps:
        z[12], z[15, 0], z[25, 1] = np.nan, np.nan, np.nan
    return z


def linear_filter(noise=R, robust=True, weights="reading", **options):
    sensor = Sensor(lambda x: H @ x, noise, jacobian=lambda x: H)
    model = NonlinearModel(lambda x, dt: F @ x, Q, sensor, transition_jacobian=lambda x, dt: F, **options)
    return RobustFilter(model, robust, start=START, start_at=0.0, weights=weights)


def kalman(z):
    """A Kalman filter by the formulas of the books: means, covariances and the log likelihood."""
    mean, covariance, found, likelihood = *START, [], 0.0
    for row in z:
        mean, covariance = F @ mean, F @ covariance @ F.T + Q
        seen = ~np.isnan(row)
        if seen.any():
            shown, noise = H[seen], R[np.ix_(seen, seen)]
            variance = shown @ covariance @ shown.T + noise
            gain, error = covariance @ shown.T @ np.linalg.inv(variance), row[seen] - shown @ mean
            mean, covariance = mean + gain @ error, covariance - gain @ shown @ covariance
            size = error @ np.linalg.inv(variance) @ error + np.log(np.linalg.det(2 * np.pi * variance))
            likelihood -= size / 2
        found.append((mean, covariance))
    return *(np.stack(x) for x in zip(*found, strict=True)), likelihood


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_linear_model_is_the_kalman_filter(options):
    z = readings()
    found = linear_filter(**options, robust=False).filter(GAP * np.arange(1, 31), z)
    mean, covariance, likelihood = kalman(z)
    np.testing.assert_allclose(found.states, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.state_covariances, covariance, rtol=0, atol=1e-10)
    assert found.log_likelihood == pytest.approx(likelihood, abs=1e-8)


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_smoothing_is_that_of_filterpy(options):
    z, other = readings(gaps=False), KalmanFilter(4, 2)
    other.x, other.P, other.F, other.Q, other.H, other.R = START[0], START[1], F, Q, H, R
    mean, covariance, *_ = other.rts_smoother(*other.batch_filter(z)[:2])
    found = linear_filter(**options, robust=False).smooth(GAP * np.arange(1, 31), z)
    np.testing.assert_allclose(found.states, mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.state_covariances, covariance, rtol=0, atol=1e-9)


@pytest.mark.parametrize("direction", ["filter", "smooth"])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_linear_model_is_the_linear_robust_filter(options, direction):
    """With an outlier, a jump, missing rows and components, irregular times."""
    rates = np.kron(np.eye(2), [[0.0, 1], [0, 0]]), np.diag([0, 0.2, 0, 0.2]), H, R
    sde, z = LinearSDE(*map(torch.tensor, rates)), readings()
    times = np.cumsum(np.random.default_rng(1).uniform(0.2, 1.8, 30))
    start = tuple(map(torch.tensor, START))
    mean, covariance, weights = looped(sde, torch.tensor(times), torch.tensor(z), start, direction)
    model = NonlinearModel(
        lambda x, dt: sde.transition(dt) @ torch.as_tensor(x),
        lambda dt: sde.covariance(dt),
        Sensor(lambda x: torch.tensor(H) @ torch.as_tensor(x), R),
        **options,
    )
    found = getattr(RobustFilter(model, start=START, start_at="reading", weights="reading"), direction)(times, z)
    np.testing.assert_allclose(found.states, mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(found.state_covariances, covariance, rtol=0, atol=1e-8)
    np.testing.assert_allclose(found.weights, weights)


def test_challengers_are_those_of_the_linear_filter():
    """A jump behind a smaller error, whose challenger ends for another; one that goes on, with a row missing."""
    behind, moving = (np.cumsum(np.random.default_rng(0).standard_normal((30, 2)), axis=0) for _ in range(2))
    behind[8] += 20
    behind[9:] += 1e4
    moving[8:] += 40 + 30 * np.arange(22)[:, None]
    moving[9] = np.nan
    linear = RobustFilter(LinearSDE.discrete(F, Q, H, R, GAP), start=START, start_at=0.0)
    for z in (behind, moving):
        found, expected = (live.filter(GAP * np.arange(1, 31), z) for live in (linear_filter(), linear))
        np.testing.assert_allclose(found.states, expected.states, rtol=1e-9, atol=1e-7)
        np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)


def test_updates_one_by_one_are_the_filter():
    times, z = GAP * np.arange(1, 31), readings()
    whole, live = (linear_filter(np.diag(R.diagonal()), weights="auto") for _ in range(2))
    expected = whole.filter(times, z)
    rows = [live.update(*row) for row in zip(times, z, strict=True)]
    for name in ("states", "weights", "innovations", "outliers", "variance"):
        np.testing.assert_array_equal([getattr(row, name) for row in rows], getattr(expected, name))
    assert sum(row.log_likelihood for row in rows) == pytest.approx(expected.log_likelihood)
    ahead = live.forecast(times[-1] + GAP * np.arange(1, 4))
    np.testing.assert_allclose(ahead.states[2], np.linalg.matrix_power(F, 3) @ expected.states[-1], atol=1e-10)
    shown = H @ expected.state_covariances[-1] @ H.T + np.diag(R.diagonal())
    np.testing.assert_allclose(live.forecast(times[-1:]).variance[0], shown.diagonal())


def test_sensors_of_one_time_are_one_stacked_reading():
    times, z = np.repeat(GAP * np.arange(1, 31), 2), readings()
    rows = zip("ab", H[:, None], R.diagonal(), strict=True)
    sensors = {name: Sensor(lambda x, h=h: h @ x, [noise], lambda x, h=h: h) for name, h, noise in rows}
    model = NonlinearModel(lambda x, dt: F @ x, Q, sensors, transition_jacobian=lambda x, dt: F)
    options = {"start": START, "start_at": 0.0}
    found = RobustFilter(model, robust=False, **options).filter(times, z.reshape(-1, 1), sensor=["a", "b"] * 30)
    stacked = linear_filter(np.diag(R.diagonal()), robust=False).filter(times[::2], z)
    rows = RobustFilter(model, robust=False, **options).filter(times[::2], z)  # of both sensors
    np.testing.assert_allclose(found.states[1::2], stacked.states, atol=1e-10)
    np.testing.assert_allclose(rows.states, stacked.states, atol=1e-10)
    assert found.log_likelihood == pytest.approx(stacked.log_likelihood)
    smooth, both = (RobustFilter(model, **options) for _ in "ab")
    found = smooth.smooth(times, z.reshape(-1, 1), sensor=["a", "b"] * 30)
    rows = both.smooth(times[::2], z)
    np.testing.assert_allclose(found.states[1::2], found.states[::2], atol=1e-10)
    np.testing.assert_allclose(rows.states, found.states[::2], atol=1e-10)
    np.testing.assert_allclose(rows.weights.ravel(), found.weights.ravel(), atol=1e-10)
    np.testing.assert_allclose(both.predict([3.25]), smooth.predict([3.25]), atol=1e-10)


def test_inputs_tracks_and_noises_are_those_of_the_linear_filter():
    """The second track has other readings, and ends early. Times are dates."""
    by, u, z = np.kron(np.eye(2), [[0.1], [0.4]]), readings(gaps=False)[8:20, ::-1], readings()[6:18]
    days = np.datetime64("2024-01-01") + np.arange(12)
    tracks, mask = np.stack([z, z + 1.0]), np.arange(12) < np.array([12, 7])[:, None]
    model = NonlinearModel(lambda x, dt, u: F @ x + by @ u, Q, Sensor(lambda x: H @ x, R), method="sigma_points")
    linear = LinearSDE.discrete(F, Q, H, R)
    options = {"robust": False, "start": START, "start_at": days[0] - 1}
    pair = RobustFilter(model, **options), RobustFilter(linear, control_matrix=by, **options)
    for direction in ("filter", "smooth"):
        ours, other = (getattr(x, direction)(days, tracks, control=u, mask=mask) for x in pair)
        for name in ("states", "state_covariances", "mean", "variance", "innovations", "log_likelihood"):
            np.testing.assert_allclose(getattr(ours, name), getattr(other, name), rtol=0, atol=1e-8)
    wrong = [
        RobustFilter(x.model, control_matrix=x.control_matrix, **(options | {"robust": True, "weights": "reading"}))
        for x in pair
    ]
    ours, other = (x.smooth(days, z, control=u) for x in wrong)
    np.testing.assert_allclose(ours.states, other.states, rtol=0, atol=1e-7)
    np.testing.assert_allclose(ours.weights[~np.isnan(z).all(1)], other.weights[~np.isnan(z).all(1)], atol=1e-8)
    ours, other = (x.forecast(days[-1:] + 1, control=u[:1]) for x in pair)
    np.testing.assert_allclose(ours.states, other.states, atol=1e-8)
    ours, other = (x.fit(days, z, control=u, noises=["observation_noise"]).parameters for x in pair)
    assert ours["observation_noise"] == pytest.approx(other["observation_noise"], rel=1e-4)
    assert ours["observation_noise"] > 5


def weighed(mean, covariance, z, known, kind):
    """Weights of a reading `H x + e` with a diagonal R, the covariance that they add, and its log evidence."""

    def scale(key, error, variance):
        error = torch.tensor(error)[None]
        before = known.get(key) or NoiseScale.prior(error)
        found = infer_scale(before.expected(), error, torch.tensor(variance)[None], torch.ones_like(error, dtype=bool))
        known[key] = before.updated(found)
        known["gain"] = found.gain_ratio.item()
        return found.weight.item(), found.scatter[0].numpy(), found.log_evidence.item()

    deviation, error = R.diagonal() ** 0.5, z - H @ mean
    rows = H / deviation[:, None]
    across = covariance @ rows.T
    weight, scatter, evidence = scale("all", error / deviation, rows @ across)
    whole = np.full(2, weight), across @ scatter @ across.T, evidence
    if kind == "reading":
        return whole
    weights, total, added = [], 0.0, np.zeros((4, 4))
    for j in range(2):
        across = covariance @ rows[j]
        variance = rows[j] @ across
        weight, scatter, one = scale(j, error[[j]] / deviation[j], variance[None, None])
        gain, between = across / (variance + 1 / weight), np.outer(across, across) * scatter
        error = error - H @ gain * error[j] / deviation[j]
        covariance, added, total = covariance - np.outer(gain, across) + between, added + between, total + one
        weights.append(weight)
    known["odds"] = known.get("odds", 0.0) + total - evidence
    return whole if kind == "auto" and known["odds"] <= 0 else (np.array(weights), added, total)


@pytest.mark.parametrize("kind", ["reading", "component", "auto"])
def test_weights_are_those_of_infer_scale(kind):
    z, live = readings(gaps=False)[:20], linear_filter(np.diag(R.diagonal()), weights=kind)
    z[1::4, 1] += 25 * (-1) ** np.arange(5)
    found = live.filter(GAP * np.arange(1, 21), z)
    mean, covariance, known, total = *START, {}, 0.0
    for k in range(20):
        mean, covariance = F @ mean, F @ covariance @ F.T + Q
        weights, added, evidence = weighed(mean, covariance, z[k], known, kind)
        noise = np.diag(R.diagonal() / weights)
        gain = covariance @ H.T @ np.linalg.inv(H @ covariance @ H.T + noise)
        mean, covariance = mean + gain @ (z[k] - H @ mean), covariance - gain @ H @ covariance + added
        total += evidence - np.log(2 * np.pi * R.diagonal()).sum() / 2
        np.testing.assert_allclose(found.states[k], mean, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.state_covariances[k], covariance, rtol=0, atol=1e-10)
        np.testing.assert_allclose(np.broadcast_to(found.weights[k], 2), weights, rtol=0, atol=1e-10)
        if kind == "reading":
            weight, spread = found.weights[k], found.found.spread[k, 0]
            np.testing.assert_allclose((spread + 1) / (spread + 1 / weight), known["gain"], rtol=1e-9)
    assert found.weights.min() < 0.01
    assert found.log_likelihood == pytest.approx(total, abs=1e-8)
    if kind == "auto":
        assert known["odds"] > 0
        blind = {
            "a": Sensor(lambda x: H @ x, R.diagonal(), lambda x: H),
            "b": Sensor(lambda x: [0, 0], [1, 1], lambda x: 0 * H),
        }
        both = NonlinearModel(lambda x, dt: F @ x, Q, blind, lambda x, dt: F)
        rows = np.column_stack([z, 0 * z])  # of a sensor that sees nothing
        both = RobustFilter(both, start=START, start_at=0.0).filter(GAP * np.arange(1, 21), rows)
        np.testing.assert_allclose(both.weights[:, :2], found.weights, rtol=0, atol=1e-10)


def test_a_wrong_component_leaves_the_others_their_weight():
    z = readings(gaps=False)[:20]
    z[12, 0] += 60
    live = linear_filter(np.diag([1.0, 2]), weights="component")
    weights = live.filter(GAP * np.arange(1, 21), z).weights
    assert weights[12, 0] < 0.01
    assert weights[12, 1] > 0.5
    z[12, 0] = 1e250
    assert np.abs(live.filter(GAP * np.arange(1, 21), z).states[12:, 0]).max() < 10


def test_wrong_readings_that_agree_are_no_jump_and_a_jump_is_one():
    """Three wrong ones may be believed at the third, but not after them."""
    times, z = GAP * np.arange(1, 31), np.random.default_rng(5).standard_normal((30, 2))
    clean = linear_filter().filter(times, z).states
    for count, later in ((2, 10), (3, 13)):
        wrong = z.copy()
        wrong[10 : 10 + count] += 60
        found = linear_filter().filter(times, wrong).states
        assert np.abs(found - clean)[later:].max() < 5
    jumped = z + 60 * (np.arange(30) >= 10)[:, None]
    assert np.abs(linear_filter().filter(times, jumped).states - clean)[14:, [0]].min() > 50
    walk = NonlinearModel(lambda x, dt: x, [[0.1]], Sensor(lambda x: x, [1.0], lambda x: [[1]]), lambda x, dt: [[1]])
    z = np.where(np.isin(np.arange(20), [10, 11]), 1e6, z[:20, 0])
    assert np.abs(RobustFilter(walk, start=([0.0], [[1.0]]), start_at=0.0).filter(np.arange(20.0), z).states).max() < 5


# Bearing and range


def polar(x):
    return torch.stack([torch.atan2(x[2], x[0]), torch.hypot(x[0], x[2])])


def polar_numpy(x):
    return np.array([math.atan2(x[2], x[0]), math.hypot(x[0], x[2])])


def polar_jacobian(x):
    a, b, square = x[0], x[2], x[0] ** 2 + x[2] ** 2
    return np.array([[-b / square, 0, a / square, 0], [a / square**0.5, 0, b / square**0.5, 0]])


NOISE = np.array([0.02**2, 0.3**2])
PATH = np.stack([10 - 0.2 * np.arange(24), np.full(24, -0.4), 0.6 - 0.05 * np.arange(24), np.full(24, -0.1)], axis=1)
STARTING = np.array([10.0, -0.4, 0.6, -0.1]), np.diag([1, 0.1, 1, 0.1])


def wrapped(z, y):
    return np.array([math.remainder(z[0] - y[0], 2 * math.pi), z[1] - y[1]])


def polar_filter(observation=polar, jacobian=None, start=STARTING, residual=None, robust=True, **options):
    sensor = Sensor(observation, NOISE, jacobian, angle=[True, False], residual=residual)
    model = NonlinearModel(lambda x, dt: F @ x, Q * 0.01, sensor, lambda x, dt: F, **options)
    return RobustFilter(model, robust, start=start, start_at=0.0)


def scene():
    z = np.stack([polar_numpy(x) for x in PATH]) + NOISE**0.5 * np.random.default_rng(4).standard_normal((24, 2))
    z[15] += [1.5, 0]
    return z


@pytest.mark.parametrize("direction", ["filter", "smooth"])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_scene_turned_by_180_degrees(options, direction):
    """Behind, the bearings jump between -pi and pi, and `residual` or `angle` wraps them. Signs change only."""
    times, z = GAP * np.arange(1, 25), scene()
    turned = z + np.array([math.pi, 0])
    turned[:, 0] = (turned[:, 0] + math.pi) % (2 * math.pi) - math.pi
    assert np.ptp(turned[:, 0]) > 6
    functions, start = (polar_numpy, polar_jacobian), (-STARTING[0], STARTING[1])
    ahead = getattr(polar_filter(*functions, **options), direction)(times, z)
    for residual in (wrapped, None):
        behind = getattr(polar_filter(*functions, start, residual, **options), direction)(times, turned)
        np.testing.assert_allclose(behind.states, -ahead.states, rtol=0, atol=1e-8)
        np.testing.assert_allclose(behind.innovations, ahead.innovations, rtol=0, atol=1e-7)
        np.testing.assert_allclose(behind.state_covariances, ahead.state_covariances, rtol=0, atol=1e-8)
    assert np.abs(ahead.states - PATH)[:, [0, 2]].max() < 1
    assert ahead.weights[15, 0] < 0.01


def test_jacobians_given_are_those_of_jacfwd_and_steps_those_of_filterpy():
    times, z = GAP * np.arange(1, 25), scene()
    functions = ((), {}), ((polar_numpy, polar_jacobian), {}), ((polar_numpy,), SIGMA)
    own, given, sigma = (polar_filter(*x, robust=False, **options).filter(times, z) for x, options in functions)
    np.testing.assert_allclose(own.states, given.states, rtol=0, atol=1e-10)
    extended = ExtendedKalmanFilter(4, 2)
    extended.x, extended.P, extended.F, extended.Q, extended.R = *STARTING, F, Q * 0.01, np.diag(NOISE)
    points = MerweScaledSigmaPoints(4, 0.7, 2.0, 1.0)
    other = UnscentedKalmanFilter(4, 2, GAP, polar_numpy, lambda x, dt: F @ x, points)
    other.x, other.P, other.Q, other.R = *STARTING, Q * 0.01, np.diag(NOISE)
    for k, row in enumerate(z[:10]):
        extended.predict()
        extended.update(row, polar_jacobian, polar_numpy)
        np.testing.assert_allclose(given.states[k], extended.x, atol=1e-10)
        np.testing.assert_allclose(given.state_covariances[k], extended.P, atol=1e-10)
        other.predict()
        other.sigmas_f = points.sigma_points(other.x, other.P)  # filterpy leaves Q out of the points of the reading
        other.update(row)
        np.testing.assert_allclose(sigma.innovations[k], other.y / np.sqrt(other.S.diagonal()), atol=1e-9)
        np.testing.assert_allclose(sigma.states[k], other.x, atol=1e-9)
        np.testing.assert_allclose(sigma.state_covariances[k], other.P, atol=1e-9)


def test_iterations_find_the_most_probable_state():
    """Of a precise reading: the gradient of the posterior vanishes. One step is far from it."""
    reading, mean, covariance = np.array([0.9, 3.0]), np.array([3.0, 0, 0, 0]), np.eye(4)
    noise = np.array([0.01, 0.01]) ** 2

    def slope(iterations):
        sensor = Sensor(polar_numpy, noise, polar_jacobian, angle=[True, False])
        model = NonlinearModel(lambda x, dt: x, 0 * Q, sensor, iterations=iterations)
        live = RobustFilter(model, robust=False, start=(mean, covariance), start_at="reading")
        found = live.update(0.0, reading)
        x = found.states
        return np.abs(mean - x + polar_jacobian(x).T @ ((reading - polar_numpy(x)) / noise)).max(), found.innovations

    (far, before), (near, after) = slope(1), slope(50)
    assert near < 1e-6
    assert far > 100
    np.testing.assert_array_equal(before, after)  # what earlier readings predict


def test_an_iteration_that_goes_too_far_is_halved():
    """Gauss-Newton steps of an arc tangent diverge from 3. The readings are of the angle 0, far more precise."""
    sensor = Sensor(np.arctan, [1e-4], lambda x: [1 / (1 + x**2)])
    model = NonlinearModel(lambda x, dt: x, [[0.0]], sensor, lambda x, dt: [[1.0]], iterations=10)
    found = RobustFilter(model, robust=False, start=([3.0], [[100.0]]), start_at="reading").update(0.0, [0.0])
    cost = scipy.optimize.minimize_scalar(lambda x: (x - 3) ** 2 / 100 + np.arctan(x) ** 2 / 1e-4, bounds=(-5, 5))
    assert found.states[0] == pytest.approx(cost.x, abs=1e-4)


def test_a_filter_that_diverges_says_so_once():
    z = np.cumsum(np.full((60, 2), 50.0), axis=0) ** 2
    with pytest.warns(UserWarning, match="diverged: 20 readings in a row, up to time 11,") as caught:
        found = linear_filter(robust=False).filter(GAP * np.arange(3, 63), z)
    assert len(caught) == 1
    assert np.isfinite(found.states).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_filter().filter(GAP * np.arange(1, 31), readings())
        z = np.random.default_rng(0).standard_normal((200, 2)) + 50 * (np.arange(200) % 5 == 0)[:, None]
        linear_filter(robust=False).filter(GAP * np.arange(1, 201), z)  # never so many in a row


# Bad input


def test_a_call_that_raises_leaves_the_filter_as_it_was():
    def observation(x):
        return x[:1] * (math.nan if x[0] > 5 else 1.0)

    model = NonlinearModel(
        lambda x, dt: x + (math.nan if dt > 5 else 0.0), np.eye(1), {"radar": Sensor(observation, [1.0])},
        method="sigma_points",
    )  # fmt: skip
    live = RobustFilter(model, robust=False, start=(np.zeros(1), np.eye(1)), start_at="reading")
    live.update(0.0, [0.1])
    before = live.forecast([1.0]).states
    for call, message in (
        (lambda: live.update(9.0, [1.0]), "transition: got 'NaN or infinite values'.*, at time 9"),
        (lambda: live.update([1.0, 2.0, 3.0], [[50.0]] * 3), "observation of radar: got 'NaN .* at time 2.0 in row 1"),
        (lambda: live.update(-1.0, [1.0]), "time: got -1.0, expected a time not before the last one"),
        (lambda: live.update(1.0, [1.0, 2.0]), r"reading: got 'shape \(1, 2\)', expected 1 components"),
        (lambda: live.update(1.0, [math.inf]), "reading: got an infinite value at 1.0"),
        (lambda: live.update(1.0, [1.0], sensor="sonar"), "sensor: got .'sonar'., expected"),
        (lambda: live.update(math.nan, [1.0]), "time: got"),
        (lambda: live.simulate([1.0]), "model: got a nonlinear model"),
        (lambda: live.export("x.onnx"), "model: got a nonlinear model, expected a linear one for `export`"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        np.testing.assert_array_equal(live.forecast([1.0]).states, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": np.diag([1.0, 0])}, "observation_noise: got .an eigenvalue of 0., expected a positive definite"),
        ({"method": "particles"}, "method: got 'particles'"),
        ({"weights": "row"}, "weights: got 'row'"),
        ({"weights": "component"}, "weights: got 'component', expected .* diagonal"),
        ({"iterations": 0}, "iterations: got 0"),
        ({"method": "sigma_points", "kappa": -5.0}, "kappa: got -5.0"),
    ],
)
def test_a_model_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        linear_filter(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"process_noise": lambda dt: -np.eye(2)}, "process_noise: got an eigenvalue of -1"),
        ({"process_noise": "white"}, "process_noise: got str .*, expected numbers"),
        ({"sensors": Sensor(lambda x: x, [1, 1], lambda x: np.eye(2), residual=lambda z, y: z[:1])}, "residual: got"),
        ({"transition": lambda x, dt: x[:1]}, "transition"),
        ({"transition_jacobian": lambda x, dt: np.eye(3)}, r"transition, jacobian: got 'shape \(3, 3\)'"),
        ({"transition": lambda x: x}, "transition: got a function that fails"),
        ({"transition_jacobian": None}, "transition: got a function that PyTorch cannot differentiate"),
        ({"sensors": Sensor(lambda x: x, [1.0], lambda x: np.eye(2))}, "observation: got .2 components.*expected 1,"),
    ],
)
def test_functions_that_do_not_fit(change, message):
    sensor = Sensor(lambda x: x, [1.0, 1.0], lambda x: np.eye(2))
    options = {"transition": lambda x, dt: np.array([x[0], x[1]]), "process_noise": np.eye(2), "sensors": sensor}
    options |= {"transition_jacobian": lambda x, dt: np.eye(2)}
    live = RobustFilter(NonlinearModel(**(options | change)), start=(np.zeros(2), np.eye(2)), start_at=0.0)
    with pytest.raises(ValueError, match=message):
        live.update(1.0, np.zeros(1 if "observation" in message else 2))


def test_a_transition_with_a_control_asks_for_it():
    model = NonlinearModel(lambda x, dt, u: x + dt * u, np.eye(1), Sensor(lambda x: x, [1.0]))
    live = RobustFilter(model, start=([0.0], np.eye(1)), start_at=0.0)
    for call in (lambda: live.update(1.0, [1.0]), lambda: live.filter([1.0], [[1.0]]), lambda: live.forecast([1.0])):
        with pytest.raises(ValueError, match="control: got None, expected an input for each row"):
            call()
