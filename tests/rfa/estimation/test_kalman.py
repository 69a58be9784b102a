"""With the Riccati prior and Gaussian weights the estimator is the Kalman filter and smoother: two oracles."""

import filterpy.kalman
import numpy as np
import pytest
import torch
from cover import cover

from rfa.estimation import LinearSDE

from .models import coupled, irregular_times, matrix, papers_estimate, rotating, statsmodels_of, trend, with_gaps

MODELS = {"rotating": rotating, "coupled": coupled, "trend": trend}
START = 4.0  # variance of the first state


def filterpys(sde: LinearSDE, times, observations):
    """Mean and covariance of filterpy's filter and of its smoother, and each moment's sum of squared innovations."""
    n = sde.state_size
    kalman = filterpy.kalman.KalmanFilter(dim_x=n, dim_z=sde.observation_size)
    kalman.x, kalman.P = np.zeros((n, 1)), START * np.eye(n)
    means, covariances, transitions, noises, missed = [], [], [], [], [0.0]
    for k, row in enumerate(observations.numpy()):
        if k:
            lag = (times[k] - times[k - 1]).item()
            kalman.F, kalman.Q = sde.transition(lag).numpy(), sde.covariance(lag).numpy()
            kalman.predict()
            transitions.append(kalman.F)
            noises.append(kalman.Q)
        here = ~np.isnan(row)
        if here.any():
            observation, noise = sde.observation.numpy()[here], sde.observation_noise.numpy()[np.ix_(here, here)]
            kalman.update(row[here][:, None], R=noise, H=observation)
        missed.append(missed[-1] + (kalman.y.T @ kalman.SI @ kalman.y).item() if here.any() else missed[-1])
        means.append(kalman.x[:, 0].copy())
        covariances.append(kalman.P.copy())
    filtered = np.array(means), np.array(covariances)
    mean, covariance = (part.copy() for part in filtered)
    for k in reversed(range(len(means) - 1)):  # Rauch, Tung and Striebel's smoother
        predicted = transitions[k] @ filtered[1][k] @ transitions[k].T + noises[k]
        gain = filtered[1][k] @ transitions[k].T @ np.linalg.inv(predicted)
        mean[k] += gain @ (mean[k + 1] - transitions[k] @ filtered[0][k])
        covariance[k] += gain @ (covariance[k + 1] - predicted) @ gain.T
    sums = np.array(missed[1:])
    return (*filtered, sums), (mean, covariance, np.full_like(sums, sums[-1]))


@cover(name=MODELS, regular=[True, False], gaps=[False, True])
def test_filter_and_smoother_are_filterpys(name, regular, gaps):
    sde = MODELS[name]()
    times = torch.arange(60, dtype=torch.float64) * 0.2 if regular else irregular_times(60)
    start = torch.zeros(sde.state_size), START * torch.eye(sde.state_size)
    observations = sde.simulate(times, torch.Generator().manual_seed(1), initial=start).observations
    if gaps:
        observations = with_gaps(observations)
    filtered, smoothed = filterpys(sde, times, observations)
    for direction, (mean, covariance, missed) in (("filter", filtered), ("smooth", smoothed)):
        found = papers_estimate(sde, times, observations, prior="riccati", initial=start, direction=direction)
        np.testing.assert_allclose(found.mean, mean, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found.covariance, covariance, rtol=1e-8, atol=1e-8)
        assert found.objective[-1].item() == pytest.approx(missed.sum(), rel=1e-8)  # the least sum of squares, of all


@pytest.mark.parametrize("gaps", [False, True], ids=["complete", "missing"])
def test_a_diffuse_start_is_statsmodels(gaps):
    """A local linear trend from nothing: the exact diffuse filter and smoother of statsmodels."""
    sde = trend()
    times = torch.arange(50, dtype=torch.float64)
    observations = sde.simulate(times, torch.Generator().manual_seed(3)).observations
    if gaps:
        observations[10:14] = torch.nan
    expected = statsmodels_of(sde, observations)
    found = papers_estimate(sde, times, observations, prior="riccati")
    np.testing.assert_allclose(found.mean[1:], expected.filtered_state.T[1:], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.covariance[1:], expected.filtered_state_cov.transpose(2, 0, 1)[1:], rtol=1e-8)
    smoothed = papers_estimate(sde, times, observations, prior="riccati", direction="smooth")
    np.testing.assert_allclose(smoothed.mean, expected.smoothed_state.T, rtol=1e-7, atol=1e-7)


def test_forecasts_are_the_transported_last_estimate():
    sde, times = coupled(), irregular_times(20)
    observations = sde.simulate(times, torch.Generator().manual_seed(4)).observations
    ahead = matrix([0.5, 4.0, 60.0])
    last = papers_estimate(sde, times, observations, prior="riccati")
    found = papers_estimate(sde, times, observations, prior="riccati", query_times=times[-1] + ahead)
    transition = sde.transition(ahead)
    expected = transition @ last.covariance[-1] @ transition.mT + sde.covariance(ahead)
    torch.testing.assert_close(found.mean, (transition @ last.mean[-1][:, None])[..., 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.weights, torch.ones(3, 20, dtype=torch.float64))
