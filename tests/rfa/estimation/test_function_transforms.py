"""Forward-mode differentiation through the estimators: both backends say what reverse mode does."""

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.func import jacfwd

from rfa.estimation import LinearSDE, robust_estimate

TURN = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)
TIMES = torch.tensor([0.0, 0.4, 0.5, 1.3, 2.0, 2.1], dtype=torch.float64)


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_forward_mode(prior):
    """Of a row of the observations and of decay, frequency and noises."""
    z = torch.randn(6, 2, dtype=torch.float64)
    z[2] = torch.nan

    def estimate(row, numbers):
        decay, frequency, diffusion, noise = numbers
        sde = LinearSDE(frequency * TURN - decay * EYE, diffusion * EYE, EYE, noise * EYE)
        seen = torch.cat([z[:3], row[None], z[4:]])
        options = {"nu": 8.0, "prior": prior, "start": "leave_one_out", "iterations": 2, "return_weights": False}
        return robust_estimate(sde, TIMES, seen, **options).mean

    given = z[3], torch.tensor([0.3, 2.0, 0.25, 0.2], dtype=torch.float64)
    for found, expected in zip(jacfwd(estimate, (0, 1))(*given), jacobian(estimate, given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
