"""Weights, penalties, and what they make of a band when all is Gaussian."""

import pytest
import scipy.integrate
import scipy.stats
import torch

from rfa.estimation import LinearSDE
from rfa.estimation.robust_estimator import RobustWeight

from .models import irregular_times, matrix, papers_estimate


@pytest.mark.parametrize(
    ("robust_weight", "seen"),
    [
        (RobustWeight(16.0, 2.0, 1), 1),
        (RobustWeight(16.0, 2.0, 8), 3),
        (RobustWeight(8.0, None, 8), 1),
        (RobustWeight(1.0, None, 3, "welsch"), 2),
        (RobustWeight(640.0, None, 320), 320),
        (RobustWeight(5000.0, 2.0, 5000), 5000),
        (RobustWeight(1e-6, 1.0, 1), 1),
    ],
)
def test_consistency_is_scipys_quadrature(robust_weight, seen):
    root = scipy.stats.chi(seen)
    low, high = root.ppf(1e-15), root.isf(1e-15)
    points = [p for p in (1e-4, 1e-3, 1e-2, 0.1, root.mean()) if low < p < high]

    def mean(function) -> float:
        def integrand(r: float) -> float:
            s = torch.tensor(r * r, dtype=torch.float64, requires_grad=True)
            weight = robust_weight.log_weight(s).exp()
            (slope,) = torch.autograd.grad(weight, s)
            return root.pdf(r) * function(r * r, weight.item(), slope.item())

        return scipy.integrate.quad(integrand, low, high, points=points, epsabs=0, epsrel=1e-7, limit=200)[0]

    usual = mean(lambda s, w, slope: w)
    sensitivity = usual + 2 * mean(lambda s, w, slope: slope * s) / seen
    inflation = mean(lambda s, w, slope: w * w * s) / seen / sensitivity**2
    assert robust_weight.consistency(seen) == pytest.approx((usual, inflation), rel=1e-5)


def test_what_is_never_seen_is_not_there():
    """Three components of which one is ever seen are a model of that component: weights, estimate and band."""
    times, noise = irregular_times(12), matrix([[0.5]])
    alone = LinearSDE(matrix([[-0.4]]), matrix([[0.7]]), matrix([[1.0]]), noise)
    wide = LinearSDE(alone.dynamics, alone.diffusion, matrix([[1.0], [2.0], [0.3]]), 0.5 * torch.eye(3))
    observations = alone.simulate(times, torch.Generator().manual_seed(1), (0.2, 8.0)).observations
    start = matrix([0.2]), matrix([[0.6]])
    for prior in ("lyapunov", "riccati"):
        options = {"prior": prior, "nu": 8.0, "kappa": 2.0, "iterations": 3, "initial": start}
        expected = papers_estimate(alone, times, observations, **options)
        padded = torch.cat([observations, torch.full((12, 2), torch.nan)], dim=-1)
        found = papers_estimate(wide, times, padded, **options)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=1e-12)
