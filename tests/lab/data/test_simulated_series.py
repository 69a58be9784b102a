"""Simulated series against the moments of their processes, and against what the filter with the true model expects."""

import math

import pytest
import torch

from rfa.estimation import robust_estimate
from rfa_lab.data.simulated_series import PROCESSES, SimulatedSetting, simulate_series


def drawn(series=400, seed=0, **chosen):
    return simulate_series(SimulatedSetting(**chosen), series, torch.Generator().manual_seed(seed))


def test_an_oscillators_signal_has_its_stationary_variance_and_covariance():
    """`sigma^2 / (2 mu) = 1`, and `exp(-mu tau) cos(omega tau)` between two times."""
    found = drawn(4000, length=2, forecasts=0)
    first, second = found.signal[:, 0, 0], found.signal[:, 1, 0]
    assert first.var().item() == pytest.approx(1.0, abs=0.07)  # three standard errors of 4,000 draws
    lag = found.times[:, 1]
    expected = (torch.exp(-0.05 * lag) * torch.cos(lag)).mean().item()
    assert (first * second).mean().item() == pytest.approx(expected, abs=0.07)
    assert lag.mean().item() == pytest.approx(0.5, abs=0.025)


@pytest.mark.parametrize(("outliers", "size", "burst"), [(0.1, 10.0, 1), (0.3, 5.0, 4), (0.0, 10.0, 1)])
def test_errors_have_the_setting_of_the_readings(outliers, size, burst):
    found = drawn(length=200, outliers=outliers, size=size, burst=burst)
    error = (found.values - found.signal)[..., 0]
    wrong = found.wrong[..., 0]
    assert error[~wrong].var().item() == pytest.approx(0.2, rel=0.03)
    assert wrong.double().mean().item() == pytest.approx(outliers, abs=0.01)
    assert wrong[:, 0].double().mean().item() == pytest.approx(outliers, abs=0.06)  # a run may have begun before
    if outliers:
        assert error[wrong].var().item() == pytest.approx(0.2 * size**2, rel=0.1)


def test_wrong_readings_of_one_channel():
    found = drawn(process="tracker", channels="first", outliers=0.5)
    assert found.wrong[..., 0].any()
    assert not found.wrong[..., 1].any()


@pytest.mark.parametrize("process", PROCESSES)
def test_the_true_models_filter_knows_its_own_error(process):
    """Without wrong readings the Kalman filter's squared error is what it says; forecasts included."""
    setting = SimulatedSetting(process=process, length=30, outliers=0.0)
    found = simulate_series(setting, 300, torch.Generator().manual_seed(1))
    at = torch.cat([found.times[:, -1:], found.query_times], dim=-1)
    estimate = robust_estimate(setting.sde, found.times, found.values, nu=math.inf, query_times=at)
    row = setting.sde.observation
    signal = torch.cat([found.signal[:, -1:], found.future], dim=1)
    error = (estimate.mean @ row.mT - signal).square().sum(-1)
    expected = (row @ estimate.covariance @ row.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert (error / expected).mean().item() == pytest.approx(1.0, abs=0.12)  # 300 series: three standard errors


def test_a_seed_gives_the_same_series_and_times_increase():
    one, two = drawn(seed=3), drawn(seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert (torch.cat([one.times, one.query_times], -1).diff(dim=-1) > 0).all()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("process", "walk"),
        ("outliers", 1.0),
        ("channels", "second"),
    ],
)
def test_bad_settings(name, given):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        SimulatedSetting(**{name: given})
