"""Tracks of Stone Soup, with missed detections, a jump and angles, are those of `RobustFilter`."""

from datetime import datetime, timedelta

import numpy as np
import pytest

pytest.importorskip("stonesoup")

from stonesoup.models.measurement.linear import LinearGaussian
from stonesoup.models.measurement.nonlinear import CartesianToBearingRange
from stonesoup.models.transition.linear import CombinedLinearGaussianTransitionModel, ConstantVelocity
from stonesoup.predictor.kalman import KalmanPredictor
from stonesoup.types.detection import Detection
from stonesoup.types.hypothesis import SingleHypothesis
from stonesoup.types.state import GaussianState, State

from rfa.estimation import NonlinearModel, RobustFilter, Sensor
from rfa.integrations.stonesoup import RobustUpdater

MEAN, COVARIANCE = np.array([-60, 1, 1, 0.0]), np.diag([9, 1, 9, 1.0])
RADAR = CartesianToBearingRange(4, (0, 2), np.diag([0.03**2, 4.0]))  # angles are about pi here
TIMES = [datetime(2026, 1, 1) + k * timedelta(seconds=1) for k in range(61)]


@pytest.mark.parametrize("model", [LinearGaussian(4, (0, 2), np.diag([4.0, 4.0])), RADAR])
def test_one_updater_of_two_tracks_is_two_robust_filters(model):
    motion = CombinedLinearGaussianTransitionModel([ConstantVelocity(0.05)] * 2)
    F, Q = (np.asarray(of(time_interval=TIMES[1] - TIMES[0])) for of in (motion.matrix, motion.covar))
    updater, predictor, random = RobustUpdater(), KalmanPredictor(motion), np.random.default_rng(0)
    tracks, truths = [[GaussianState(MEAN, COVARIANCE, timestamp=TIMES[0])] for _ in range(2)], [MEAN, MEAN]
    readings, there = np.full((2, 61, 2), np.nan), np.setdiff1d(np.arange(1, 61), [8, 9, 42])
    for k in range(1, 61):
        for i, track in enumerate(tracks):
            truths[i] = F @ truths[i] + random.multivariate_normal(0 * MEAN, Q) - [60 * (k == 40), 0, 0, 0]  # a jump
            noise = random.choice([1, 20], p=[0.9, 0.1]) * np.sqrt(model.covar().diagonal()) * random.normal(size=2)
            track.append(predictor.predict(track[-1], timestamp=TIMES[k]))
            if k in there:
                seen = model.function(State(truths[i])) + noise[:, None]
                readings[i, k], detection = seen[:, 0], Detection(seen, TIMES[k], measurement_model=model)
                track[-1] = updater.update(SingleHypothesis(track[-1], detection))
    h, slope = (lambda x, of=of: of(State(x)).astype(float) for of in (model.function, model.jacobian))
    sensor = Sensor(lambda x: h(x)[:, 0], model.covar(), jacobian=slope, angle=[model is RADAR, False])
    functions = NonlinearModel(lambda x, dt: F @ x, Q, sensor, transition_jacobian=lambda x, dt: F)
    for values, track in zip(readings, tracks, strict=True):
        found = RobustFilter(functions, start=(MEAN, COVARIANCE), start_at=0.0).filter(np.arange(61.0), values)
        close = {"rtol": 1e-4, "atol": 1e-4}  # Stone Soup's Jacobian is a difference quotient
        np.testing.assert_allclose([x.state_vector[:, 0] for x in track], found.states, **close)
        np.testing.assert_allclose([x.covar for x in track], found.state_covariances, **close)
        np.testing.assert_allclose([track[k].weights for k in there], found.weights[there], **close)
