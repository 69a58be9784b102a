"""Scores of predictive distributions against numerical integrals, sampling and counting."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch.distributions import Laplace, Normal, StudentT

from rfa.forecasting.scores import central_interval, crps, forecast_scores

LOC, SCALE = torch.tensor([0.3, -2.0, 5.0]).double(), torch.tensor([1.0, 0.2, 3.0]).double()
TARGETS = torch.tensor([0.3, -1.0, -4.0]).double()  # at the centre, five and three scales away
DISTRIBUTIONS = {
    "normal": (Normal(LOC, SCALE), lambda i: scipy.stats.norm(LOC[i], SCALE[i])),
    "student_t": (
        StudentT(torch.tensor([1.5, 4.0, 30.0]).double(), LOC, SCALE),
        lambda i: scipy.stats.t([1.5, 4.0, 30.0][i], LOC[i], SCALE[i]),
    ),
}


def test_crps_of_many_degrees_of_freedom_in_single_precision():
    """It is that of a normal distribution."""
    ones, targets = torch.ones(3), torch.tensor([0.0, 1.0, 1e20])
    found = crps(StudentT(1e7 * ones, 0 * ones, ones), targets)
    expected = crps(Normal(0 * ones, ones), targets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"^present: got shape \(6,\)"):
        forecast_scores(Normal(0 * ones, ones), targets, torch.ones(6, dtype=torch.bool))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_crps_is_its_integral(name):
    distribution, frozen = DISTRIBUTIONS[name]
    found = crps(distribution, TARGETS)
    for i, y in enumerate(TARGETS.tolist()):
        one = frozen(i)
        below, _ = scipy.integrate.quad(lambda x, one=one: one.cdf(x) ** 2, -np.inf, y, epsabs=1e-10)
        above, _ = scipy.integrate.quad(lambda x, one=one: one.sf(x) ** 2, y, np.inf, epsabs=1e-10)
        assert found[i].item() == pytest.approx(below + above, rel=1e-6)  # the accuracy of the quadrature


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_are_scipys(name):
    distribution, frozen = DISTRIBUTIONS[name]
    for level in (0.5, 0.9):
        lower, upper = central_interval(distribution, level)
        expected = np.array([frozen(i).interval(level) for i in range(3)])
        np.testing.assert_allclose(np.stack([lower, upper], 1), expected, rtol=1e-9)


def test_scores_are_means_over_known_targets():
    """A standard normal at 0, 1 and 2; a missing target and one that does not count change nothing."""
    targets = torch.tensor([0.0, 1.0, 2.0, math.nan, 100.0])
    distribution = Normal(torch.zeros(5), torch.ones(5))
    found = forecast_scores(distribution, targets, torch.tensor([True, True, True, True, False]))
    assert found.mse == pytest.approx(5 / 3)
    assert found.nll == pytest.approx(0.5 * math.log(2 * math.pi) + 5 / 6, rel=1e-6)
    assert found.coverage == pytest.approx(2 / 3)  # 2 lies outside 1.645
    assert found.targets == 3
    samples = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    energy = (samples[:, None] - targets[:3]).abs().mean(0) - (samples - samples.roll(1)).abs().mean() / 2
    assert found.crps == pytest.approx(energy.mean().item(), abs=0.01)  # about three standard errors of the samples


def test_bad_input():
    one = Normal(torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"^targets: got shape \(2,\), expected \(1,\)"):
        forecast_scores(one, torch.zeros(2))
    with pytest.raises(ValueError, match=r"^targets: got none"):
        forecast_scores(one, torch.tensor([math.nan]))
    with pytest.raises(ValueError, match=r"^level: got 1"):
        central_interval(one, 1.0)
    with pytest.raises(ValueError, match=r"^distribution: got Laplace"):
        crps(Laplace(torch.zeros(1), torch.ones(1)), torch.zeros(1))
    with pytest.raises(ValueError, match=r"^distribution: got a Student-t with df = 1"):
        crps(StudentT(torch.ones(1)), torch.zeros(1))
