"""The variance of time-dependent noise against numerical integration and its own differential equation."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from rfa.dynamics import TimeDependentNoise, noise_rate, time_dependent_variance

# decay, sigma^2, sigma_e^2, kappa, sigma_p^2, nu, psi, tau
CASES = {
    "all parts": (0.3, 0.5, 0.7, 0.2, 0.4, 2.0, 0.6, 3.0),
    "resonance": (0.3, 0.5, 0.7, 0.6, 0.4, 2.0, 0.6, 3.0),
    "near resonance": (0.3, 0.0, 0.7, 0.6 + 1e-9, 0.0, 2.0, 0.6, 3.0),
    "no decay": (0.0, 0.5, 0.7, 0.2, 0.4, 2.0, 0.6, 3.0),
    "no decay, no rate": (0.0, 0.5, 0.7, 0.0, 0.4, 0.0, 0.6, 3.0),
    "slow": (1e-9, 0.0, 0.7, 1e-8, 0.4, 1e-9, 0.6, 3.0),
    "a slow wave": (0.3, 0.0, 0.0, 1.0, 0.4, 1e-7, -2.0, 3.0),
    "a fast transient": (0.1, 0.0, 0.7, 50.0, 0.4, 20.0, 0.6, 2.0),
    "fast decay": (40.0, 0.5, 0.7, 0.2, 0.4, 2.0, 0.6, 3.0),
    "opposite phase": (0.3, 0.0, 0.0, 1.0, 0.4, 0.5, math.pi, 0.7),
    "no lag": (0.3, 0.5, 0.7, 0.2, 0.4, 2.0, 0.6, 0.0),
}


def tensors(*numbers):
    return [torch.tensor(x, dtype=torch.float64) for x in numbers]


def variance(decay, white, *rest):
    *noise, lag = rest
    return time_dependent_variance(decay, white, TimeDependentNoise(*noise), lag)


def rate(white, transient, kappa, periodic, nu, psi, s):
    """q(s) of appendix E.5 in this parametrisation."""
    return white + transient * math.exp(-kappa * s) + periodic * (1 + math.cos(nu * s + psi))


def by_quadrature(mu, white, transient, kappa, periodic, nu, psi, tau):
    value, _ = integrate.quad(
        lambda s: math.exp(-2 * mu * (tau - s)) * rate(white, transient, kappa, periodic, nu, psi, s),
        0,
        tau,
        epsabs=1e-13,
        epsrel=1e-12,
        limit=500,
    )
    return value


@pytest.mark.parametrize("name", CASES)
def test_closed_form_is_the_integral(name):
    # quad's own error is 1e-12; beside it a few roundings
    np.testing.assert_allclose(
        float(variance(*tensors(*CASES[name]))), by_quadrature(*CASES[name]), rtol=1e-10, atol=1e-12
    )


def test_the_paper_s_sum_of_exponentials():
    """`Re sum_j c_j (exp(gamma_j tau) - exp(-2 mu tau)) / (2 mu + gamma_j)`, literally, away from its poles."""
    mu, white, transient, kappa, periodic, nu, psi, tau = CASES["all parts"]
    terms = [(white + periodic, 0.0), (transient, -kappa), (periodic * np.exp(1j * psi), 1j * nu)]
    expected = sum(c * (np.exp(g * tau) - np.exp(-2 * mu * tau)) / (2 * mu + g) for c, g in terms).real
    np.testing.assert_allclose(float(variance(*tensors(*CASES["all parts"]))), expected, rtol=1e-13)


@pytest.mark.parametrize("name", [name for name in CASES if name != "no lag"])
def test_it_solves_the_lyapunov_equation(name):
    """`dV/dtau = -2 mu V + q(tau)` by autograd."""
    *rest, lag = tensors(*CASES[name])
    lag.requires_grad_()
    found = variance(*rest, lag)
    (slope,) = torch.autograd.grad(found, lag)
    mu, white, *noise = rest
    expected = -2 * mu * found + noise_rate(white, TimeDependentNoise(*noise), lag)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("slow", "no lag")])
def test_gradients(name):
    """Also where a denominator vanishes; a decay below zero is a legal step for the difference quotient."""
    inputs = [x.requires_grad_() for x in tensors(*CASES[name])]
    assert torch.autograd.gradcheck(variance, inputs, eps=1e-5, atol=1e-6, rtol=1e-5)


def test_rate_and_variance_are_never_negative():
    """Whatever the parameters, over eight orders of magnitude; zero parts included."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        sizes = 10 ** (low + (high - low) * torch.rand(20_000, generator=generator, dtype=torch.float64))
        return sizes * (torch.rand(20_000, generator=generator) > 0.1)

    mu, white, transient, kappa, periodic, nu, tau = (draw(-4, 4) for _ in range(7))
    psi = draw(-2, 2) * torch.randn(20_000, generator=generator, dtype=torch.float64)
    noise = TimeDependentNoise(transient, kappa, periodic, nu, psi)
    assert (noise_rate(white, noise, tau) >= 0).all()
    found = time_dependent_variance(mu, white, noise, tau)
    assert found.isfinite().all()
    assert (found >= 0).all()
    assert (found[(tau > 0) & (white > 0)] > 0).all()


def test_long_lags_in_single_precision():
    """Phases are formed in float64: at a lag of 1e6 a float32 phase is wrong by 0.06."""
    numbers = (0.0, 0.0, 0.7, 0.2, 0.4, 2.0, 0.6, 1e6)
    inputs = [x.float().requires_grad_() for x in tensors(*numbers)]
    found = variance(*inputs)
    assert found.dtype == torch.float32
    _, _, transient, kappa, periodic, nu, psi, tau = (x.item() for x in inputs)
    wave = periodic * (tau + (math.sin(nu * tau + psi) - math.sin(psi)) / nu)
    np.testing.assert_allclose(found.item(), transient / kappa + wave, rtol=1e-6)
    found.backward()
    assert all(bool(x.grad.isfinite()) for x in inputs)
