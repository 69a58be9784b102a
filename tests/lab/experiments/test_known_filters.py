"""Filters with the true model, against the library's Kalman filter and filterpy's, row by row."""

import math

import filterpy.kalman
import numpy as np
import pytest
import torch

from rfa.estimation import robust_estimate
from rfa_lab.data.simulated_series import PROCESSES, SimulatedSetting
from rfa_lab.recipes.series_contestants import FILTERS, best_soft, filter_predictor, known_filter, score


def drawn(process, seed=0, **changes):
    setting = SimulatedSetting(process=process, length=12, forecasts=3, **changes)
    return setting, setting.batch(2, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("process", PROCESSES)
def test_kalman_is_the_estimate_without_robust_weights(process):
    setting, batch = drawn(process)
    sde = setting.sde
    found = known_filter("kalman", sde, batch)
    start = torch.zeros(sde.state_size, dtype=torch.float64)
    spread = 1e-9 * torch.eye(len(start)).double() if process == "tracker" else sde.stationary_covariance()
    expected = robust_estimate(sde, batch.times, batch.values, nu=math.inf, initial=(start, spread))
    torch.testing.assert_close(found.mean, expected.mean @ sde.observation.mT, atol=1e-9, rtol=1e-9)
    shown = (sde.observation @ expected.covariance @ sde.observation.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found.variance, shown, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["informed", "wolf"])
def test_noises_are_filterpys(name):
    setting, batch = drawn("tracker", outliers=0.4, channels="first")
    sde, soft = setting.sde, 3.0
    found = known_filter(name, sde, batch, soft)
    plain = filterpy.kalman.KalmanFilter(4, 2)
    plain.x, plain.P, plain.H = np.zeros(4), 1e-9 * np.eye(4), sde.observation.numpy()
    noise = sde.observation_noise.numpy()
    for k in range(batch.times.shape[1]):
        if k:
            lag = batch.times[0, k] - batch.times[0, k - 1]
            plain.predict(F=sde.transition(lag).numpy(), Q=sde.covariance(lag).numpy())
        reading = batch.values[0, k].numpy()
        if not np.isnan(reading).any():
            error = reading - plain.H @ plain.x
            scale = np.diag(batch.noise[0, k].numpy() ** 2)
            scale = scale if name == "informed" else (1 + error @ np.linalg.inv(noise) @ error / soft) * np.eye(2)
            plain.update(reading, R=noise @ scale)
        torch.testing.assert_close(found.mean[0, k], torch.from_numpy(plain.H @ plain.x), atol=1e-8, rtol=1e-8)


def test_who_knows_more_errs_less():
    setting = SimulatedSetting(length=40, outliers=0.2, size=20.0)
    errors = {name: score(filter_predictor(name), setting, 60) for name in FILTERS}
    mse = {name: found["filter"]["mse"] for name, found in errors.items()}
    assert mse["informed"] < min(mse["robust"], mse["wolf"])
    assert max(mse["robust"], mse["wolf"]) < mse["kalman"] / 5
    assert 0.85 < errors["informed"]["forecast"]["coverage"] < 0.95  # 480 forecasts: two standard errors are 3 %


def test_wolf_takes_the_best_of_its_values():
    setting = SimulatedSetting(length=20, outliers=0.2, size=20.0)
    best = best_soft(setting, 30)
    errors = {
        soft: sum(part["mse"] for part in score(filter_predictor("wolf", soft), setting, 30, True).values())
        for soft in (best, 1.0, 32.0)
    }
    assert min(errors, key=errors.get) == best
