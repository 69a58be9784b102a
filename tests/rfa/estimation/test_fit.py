"""Maximum likelihood of the noises: published values, recovery, robustness."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from cover import some

from rfa.estimation import LinearSDE, fit, log_likelihood

from .models import coupled, matrix, rotating, statsmodels_of
from .series_models import column


def level(process: float, measurement: float) -> LinearSDE:
    return LinearSDE(matrix([[0.0]]), matrix([[process]]), matrix([[1.0]]), matrix([[measurement]]))


def test_the_published_values_of_the_nile():
    """Durbin and Koopman's local level: 15,099 and 1,469, standard errors 3,146 and 1,280."""
    flow = torch.from_numpy(column("nile.csv", "volume"))[:, None]
    found = fit(level(1000.0, 10000.0), torch.arange(len(flow)), flow)
    assert found.converged
    assert found.parameters["observation_noise[0]"] == pytest.approx(15099, rel=0.01)
    assert found.parameters["diffusion[0]"] == pytest.approx(1469, rel=0.01)
    assert found.standard_errors["observation_noise[0]"] == pytest.approx(3146, rel=0.01)
    assert found.standard_errors["diffusion[0]"] == pytest.approx(1280, rel=0.01)
    assert found.log_likelihood == pytest.approx(-632.5456, abs=1e-3)
    assert found.sde.diffusion.item() == pytest.approx(found.parameters["diffusion[0]"])


def test_recovery_of_tied_parameters():
    """Equal entries stay equal: one decay, one process and one measurement noise, within three standard errors."""
    true, times = rotating(), torch.arange(60, dtype=torch.float64) * 0.2
    observations = true.simulate(times, torch.Generator().manual_seed(0), sample_shape=(4,)).observations
    found = fit(rotating(decay=0.6, process=0.2, measurement=1.0), times, observations)
    assert found.converged
    assert list(found.parameters) == ["decay[0,1]", "diffusion[0,1]", "observation_noise[0,1]"]
    for (name, value), expected in zip(found.parameters.items(), (0.3, 0.25, 0.25), strict=True):
        assert abs(value - expected) < 3 * found.standard_errors[name], name
    assert found.sde.dynamics[0, 1].item() == -2.0  # the frequency is not free
    assert found.log_likelihood >= log_likelihood(true, times, observations).sum().item()


def test_no_row_is_left_out_where_the_start_is_known():
    found = log_likelihood(level(0.0, 1.0), matrix([0.0]), matrix([[3.0]]), initial=(matrix([0.0]), matrix([[1.0]])))
    assert found.item() == pytest.approx(scipy.stats.norm(0, math.sqrt(2)).logpdf(3.0), rel=1e-12)  # -3.5155
    sde = rotating()
    mean, covariance, seen = matrix([0.5, -1.0]), matrix([[2.0, 0.3], [0.3, 1.0]]), matrix([[1.0, 2.0]])
    student = scipy.stats.multivariate_t(mean, covariance + sde.observation_noise, df=4.0)
    robust = log_likelihood(sde, matrix([0.0]), seen, nu=4.0, initial=(mean, covariance))
    assert robust.item() == pytest.approx(student.logpdf(seen[0]), rel=1e-10)


@pytest.mark.parametrize("gaps", [False, True], ids=["complete", "missing"])
def test_likelihood_from_a_known_start_is_statsmodels(gaps):
    sde, times = coupled(), torch.arange(40, dtype=torch.float64)
    observations = sde.simulate(times, torch.Generator().manual_seed(3), sample_shape=(2,)).observations
    if gaps:
        observations[:, [0, 7, 8]] = torch.nan
        observations[:, 20, 1] = torch.nan
    start = matrix([0.5, -1.0, 0.2]), matrix([[2.0, 0.3, 0.0], [0.3, 1.0, 0.0], [0.0, 0.0, 3.0]])
    expected = [statsmodels_of(sde, series, start=start).llf for series in observations]
    found = log_likelihood(sde, times, observations, initial=start)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    one_each = start[0].expand(2, 3), start[1]
    torch.testing.assert_close(log_likelihood(sde, times, observations, initial=one_each), found)


def test_a_variance_beside_which_the_noise_is_lost_is_named():
    sde = LinearSDE(-torch.eye(1), torch.eye(1), torch.ones(2, 1), torch.eye(2))
    observations = torch.ones(5, 2).index_fill(0, torch.tensor([0]), torch.nan)
    with pytest.raises(ValueError, match=r"initial: got a variance of the prediction of up to 1e\+18"):
        log_likelihood(sde, torch.arange(5.0), observations, initial=(torch.zeros(1), matrix([[1e18]])))


def test_a_likelihood_without_a_maximum_does_not_converge():
    """All zeros: the smaller the noises the likelier, without end."""
    for sde in (level(1.0, 1.0), LinearSDE(-torch.eye(1), torch.eye(1), torch.ones(2, 1), torch.eye(2))):
        found = fit(sde, torch.arange(12.0), torch.zeros(12, sde.observation_size))
        assert not found.converged
        assert found.log_likelihood > log_likelihood(sde, torch.arange(12.0), torch.zeros(12, sde.observation_size))
        assert all(0 < value < math.inf for value in found.parameters.values())
        assert not any(math.isnan(error) for error in found.standard_errors.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"free": ()}, "^free: got nothing, expected some of decay"),
        ({"free": ("drift",)}, "free: got"),
        ({"free": ("decay",)}, "^free: got decay, expected positive entries"),
        ({"observations": torch.full((5, 1), torch.nan)}, "nothing but missing"),
        (
            {"sde": LinearSDE(torch.zeros(2, 1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))},
            r"^sde: got batch dimensions \(2,\), expected one model",
        ),
        ({"nu": "x"}, "nu: got 'x'"),
        ({"observations": [[0.0]] * 5}, "observations: got list, expected a tensor"),
    ],
)
def test_bad_input(given, message):
    legal = {"sde": level(1.0, 1.0), "times": torch.arange(5.0), "observations": torch.zeros(5, 1)}
    with pytest.raises(ValueError, match=message):
        fit(**(legal | given))


@pytest.mark.parametrize(("offset", "unit"), some([(1e6, 1.0), (0.0, 1.0), (0.0, 1e-9)], 1))
def test_a_noise_of_zero_has_no_error_and_takes_none_from_the_others(offset, unit):
    generator = torch.Generator().manual_seed(1)
    times = torch.arange(20, dtype=torch.float64)
    walk = 0.3 * torch.randn(20, 1, generator=generator, dtype=torch.float64).cumsum(0)
    sde = level(0.1 * unit**2, unit**2)
    found = fit(sde, times, unit * walk + offset, max_steps=30)
    assert found.parameters["observation_noise[0]"] < 1e-6 * unit**2
    assert math.isinf(found.standard_errors["observation_noise[0]"])
    variance = found.parameters["diffusion[0]"]
    assert found.standard_errors["diffusion[0]"] == pytest.approx(variance * (2 / 19) ** 0.5, rel=0.01)
