"""Tracks of Stone Soup, with two sensors, missed detections, a jump and angles, are those of `RobustFilter`."""

from datetime import datetime, timedelta

import numpy as np
import pytest

pytest.importorskip("stonesoup")

from stonesoup.models.measurement.linear import LinearGaussian
from stonesoup.models.measurement.nonlinear import CartesianToBearingRange
from stonesoup.models.transition.linear import CombinedLinearGaussianTransitionModel, ConstantVelocity
from stonesoup.predictor.kalman import KalmanPredictor, SqrtKalmanPredictor
from stonesoup.types.detection import Detection
from stonesoup.types.hypothesis import SingleHypothesis
from stonesoup.types.state import GaussianState, SqrtGaussianState, State

from rfa.estimation import NonlinearModel, RobustFilter, Sensor
from rfa.integrations.stonesoup import RobustUpdater

MEAN, COVARIANCE = np.array([-60, 1, 1, 0.0]), np.diag([9, 1, 9, 1.0])
MODELS = {
    "gps": LinearGaussian(4, (0, 2), np.diag([4.0, 4.0])),
    "radar": CartesianToBearingRange(4, np.array([0, 2]), np.diag([0.03**2, 4.0])),  # angles are about pi here
}
MOTION = CombinedLinearGaussianTransitionModel([ConstantVelocity(0.05)] * 2)
SECONDS = np.cumsum(np.r_[0, np.tile([0.5, 1.5, 1.0], 20)])
TIMES = [datetime(2026, 1, 1) + timedelta(seconds=s) for s in SECONDS]


def motion(gap):
    return [np.asarray(of(time_interval=timedelta(seconds=gap))) for of in (MOTION.matrix, MOTION.covar)]


def sensor_of(model, **options):
    h, slope = (lambda x, of=of: of(State(x)).astype(float) for of in (model.function, model.jacobian))
    return Sensor(lambda x: h(x)[:, 0], model.covar(), jacobian=slope, **options)


def test_one_updater_of_two_tracks_is_two_robust_filters():
    updater, predictor, random = RobustUpdater(), KalmanPredictor(MOTION), np.random.default_rng(0)
    tracks, truths = [[GaussianState(MEAN, COVARIANCE, timestamp=TIMES[0])] for _ in range(2)], [MEAN, MEAN]
    labels, there = np.resize(["gps", "gps", "radar"], 61), np.setdiff1d(np.arange(1, 61), [8, 9, 42])
    readings = np.full((2, 61, 2), np.nan)
    for k in range(1, 61):
        (F, Q), model = motion(SECONDS[k] - SECONDS[k - 1]), MODELS[labels[k]]
        for i, track in enumerate(tracks):
            truths[i] = F @ truths[i] + random.multivariate_normal(0 * MEAN, Q) - [60 * (k == 40), 0, 0, 0]  # a jump
            noise = random.choice([1, 20], p=[0.9, 0.1]) * np.sqrt(model.covar().diagonal()) * random.normal(size=2)
            track.append(predictor.predict(track[-1], timestamp=TIMES[k]))
            if k in there:
                seen = model.function(State(truths[i])) + noise[:, None]
                readings[i, k], detection = seen[:, 0], Detection(seen, TIMES[k], measurement_model=model)
                track[-1] = updater.update(SingleHypothesis(track[-1], detection))
    sensors = {name: sensor_of(model, angle=[name == "radar", False]) for name, model in MODELS.items()}
    process = lambda x, dt: motion(dt)[0] @ x, lambda dt: motion(dt)[1]
    functions = NonlinearModel(*process, sensors, transition_jacobian=lambda x, dt: motion(dt)[0])
    for values, track in zip(readings, tracks, strict=True):
        found = RobustFilter(functions, start=(MEAN, COVARIANCE), start_at=0.0).filter(SECONDS, values, sensor=labels)
        close = {"rtol": 1e-4, "atol": 1e-4}  # Stone Soup's Jacobian is a difference quotient
        np.testing.assert_allclose([x.state_vector[:, 0] for x in track], found.states, **close)
        np.testing.assert_allclose([x.covar for x in track], found.state_covariances, **close)
        np.testing.assert_allclose([track[k].weights for k in there], found.weights[there], **close)


def test_roots_of_covariances_are_refused():
    before = SqrtKalmanPredictor(MOTION).predict(SqrtGaussianState(MEAN, COVARIANCE, timestamp=TIMES[0]), TIMES[1])
    detection = Detection(np.zeros((2, 1)), TIMES[1], measurement_model=MODELS["gps"])
    with pytest.raises(ValueError, match="prediction: got 'the root of a covariance', expected a covariance"):
        RobustUpdater().update(SingleHypothesis(before, detection))
