"""Gradients with respect to everything, where eigenvalues are equal, entries are zero, directions unknown."""

import math

import pytest
import torch
from cover import cover
from torch.autograd.functional import jacobian
from torch.func import jacfwd

from rfa.estimation import LinearSDE, robust_estimate

from .models import EYE, coupled, matrix, papers_estimate, rotating, trend

MODELS = {"rotating": rotating, "coupled": coupled, "trend": trend}
PRIORS, STARTS = ["lyapunov", "riccati"], ["leave_one_out", "query", "recursive"]


@cover(name=MODELS, nu=[math.inf, 5.0], direction=["filter", "smooth"], known=[False, True], prior=PRIORS, start=STARTS)
def test_by_finite_differences(name, nu, direction, known, prior, start):
    given = MODELS[name]()
    n, m = given.state_size, given.observation_size
    times = matrix([0.0, 0.4, 0.9, 1.5, 1.9])
    observations = given.simulate(times, torch.Generator().manual_seed(3)).observations

    def estimate(dynamics, diffusion, observation, noise, seen, mean):
        sde = LinearSDE(dynamics, diffusion @ diffusion.mT, observation, noise @ noise.mT)
        initial = (mean, torch.eye(n, dtype=torch.float64)) if known else None
        found = papers_estimate(
            sde, times, seen, prior=prior, nu=nu, direction=direction, initial=initial, start=start, iterations=2
        )  # fmt: skip
        return found.mean[2:], found.covariance[2:], found.objective  # three states need three moments

    roots = (torch.linalg.cholesky(x + 1e-3 * torch.eye(len(x))) for x in (given.diffusion, given.observation_noise))
    diffusion, noise = roots
    inputs = [given.dynamics, diffusion, given.observation, noise, observations, torch.full((n,), 0.3).double()]
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    assert observations.shape == (5, m)
    assert torch.autograd.gradcheck(estimate, inputs, eps=1e-6, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_of_series_that_share_a_model():
    """The gradient of a sum over series is the sum of their gradients."""
    times = torch.arange(6, dtype=torch.float64) / 3
    observations = rotating().simulate(times, torch.Generator().manual_seed(0), sample_shape=(3,)).observations

    def gradient(seen):
        noise = (0.25 * EYE).requires_grad_()
        sde = LinearSDE(rotating().dynamics, rotating().diffusion, EYE, noise)
        found = papers_estimate(sde, times, seen, prior="riccati", nu=5.0, start="leave_one_out")
        return torch.autograd.grad(found.mean.square().sum() + found.covariance.sum(), noise)[0]

    torch.testing.assert_close(gradient(observations), sum(gradient(series) for series in observations))


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_forward_mode(prior):
    """Of a row of the observations and of decay, frequency and noises."""
    z = torch.randn(6, 2, dtype=torch.float64)
    z[2] = torch.nan

    def estimate(row, numbers):
        decay, frequency, diffusion, noise = numbers
        sde = LinearSDE(frequency * matrix([[0.0, -1.0], [1.0, 0.0]]) - decay * EYE, diffusion * EYE, EYE, noise * EYE)
        seen = torch.cat([z[:3], row[None], z[4:]])
        options = {"nu": 8.0, "prior": prior, "start": "leave_one_out", "iterations": 2, "return_weights": False}
        return robust_estimate(sde, matrix([0.0, 0.4, 0.5, 1.3, 2.0, 2.1]), seen, **options).mean

    given = z[3], torch.tensor([0.3, 2.0, 0.25, 0.2], dtype=torch.float64)
    for found, expected in zip(jacfwd(estimate, (0, 1))(*given), jacobian(estimate, given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
