"""The variance of time-dependent noise against numerical integration and its own differential equation."""

import math

import numpy as np
import torch
from scipy import integrate

from rfa.dynamics import TimeDependentNoise, time_dependent_variance

EXPONENTIAL, WAVE = (0.35, 0.2, 0.0, 0.0), (0.4, 0.0, 2.0, 0.6)  # amplitude, rate, angular frequency, phase
# decay, sigma^2, tau, and the parts
CASES = {
    "all parts": (0.3, 0.5, 3.0, [EXPONENTIAL, WAVE]),
    "a damped wave": (0.3, 0.5, 3.0, [(0.4, 0.2, 2.0, 0.6)]),
    "a wave that dies first": (0.1, 0.5, 3.0, [(0.4, 1.3, 2.0, 0.6)]),
    "five parts": (
        0.3,
        0.1,
        3.0,
        [EXPONENTIAL, WAVE, (0.2, 5.0, 7.0, -2.0), (0.9, 0.6, 0.3, 1.0), (0.1, 0.6, 0.0, 0.0)],
    ),
    "resonance": (0.3, 0.5, 3.0, [(0.35, 0.6, 0.0, 0.0), (0.4, 0.6, 2.0, 0.6)]),
    "near resonance": (0.3, 0.0, 3.0, [(0.35, 0.6 + 1e-9, 0.0, 0.0), (0.4, 0.6 - 1e-9, 2.0, 0.6)]),
    "no decay": (0.0, 0.5, 3.0, [EXPONENTIAL, WAVE]),
    "no decay, no rate": (0.0, 0.5, 3.0, [(0.35, 0.0, 0.0, 0.0), (0.4, 0.0, 0.0, 0.6)]),
    "slow": (1e-9, 0.0, 3.0, [(0.35, 1e-8, 0.0, 0.0), (0.4, 0.0, 1e-9, 0.6)]),
    "a slow wave": (0.3, 0.0, 3.0, [(0.4, 0.0, 1e-7, -2.0)]),
    "a fast transient": (0.1, 0.0, 2.0, [(0.35, 50.0, 0.0, 0.0), (0.4, 30.0, 20.0, 0.6)]),
    "fast decay": (40.0, 0.5, 3.0, [EXPONENTIAL, WAVE]),
    "opposite phase": (0.3, 0.0, 0.7, [(0.4, 0.0, 0.5, math.pi)]),
    "no lag": (0.3, 0.5, 0.0, [EXPONENTIAL, WAVE]),
}


def tensors(decay, white, lag, parts):
    """The decay, sigma^2, the lag and the four fields of the noise."""
    return [torch.tensor(x, dtype=torch.float64) for x in (decay, white, lag, *zip(*parts, strict=True))]


def variance(decay, white, lag, *noise):
    return time_dependent_variance(decay, white, TimeDependentNoise(*noise), lag)


def rate(white, parts, s):
    """q(s) of appendix E.5 in this parametrisation."""
    return white + sum(a * np.exp(-kappa * s) * (1 + np.cos(nu * s + psi)) for a, kappa, nu, psi in parts)


def test_closed_form_is_the_integral_and_solves_the_lyapunov_equation():
    """`dV/dtau = -2 mu V + q(tau)`, by quadrature and by autograd."""
    exact = {"epsabs": 1e-13, "epsrel": 1e-12, "limit": 500}
    for name, (decay, sigma2, tau, parts) in CASES.items():

        def forcing(s, decay=decay, sigma2=sigma2, tau=tau, parts=parts):
            return math.exp(-2 * decay * (tau - s)) * rate(sigma2, parts, s)

        expected, _ = integrate.quad(forcing, 0, tau, **exact)
        mu, white, lag, *noise = tensors(*CASES[name])
        found = variance(mu, white, lag.requires_grad_(), *noise)
        # quad's own error is 1e-12; beside it a few roundings
        np.testing.assert_allclose(float(found), expected, rtol=1e-10, atol=1e-12, err_msg=name)
        if tau:
            (slope,) = torch.autograd.grad(found, lag)
            wanted = -2 * decay * float(found) + rate(sigma2, parts, tau)
            np.testing.assert_allclose(slope, wanted, rtol=1e-9, atol=1e-9, err_msg=name)


def test_gradients():
    """Also where a denominator vanishes; a decay below zero is a legal step for the difference quotient."""
    for name in CASES.keys() - {"slow", "no lag"}:
        inputs = [x.requires_grad_() for x in tensors(*CASES[name])]
        assert torch.autograd.gradcheck(variance, inputs, eps=1e-5, atol=1e-6, rtol=1e-5), name


def test_the_variance_is_never_negative():
    """Whatever the parameters, over eight orders of magnitude; zero parts included."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, *parts):
        sizes = 10 ** (low + (high - low) * torch.rand(20_000, *parts, generator=generator, dtype=torch.float64))
        return sizes * (torch.rand(20_000, *parts, generator=generator) > 0.1)

    mu, white, tau = (draw(-4, 4) for _ in range(3))
    psi = draw(-2, 2, 2) * torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    noise = TimeDependentNoise(draw(-4, 4, 2), draw(-4, 4, 2), draw(-4, 4, 2), psi)
    found = time_dependent_variance(mu, white, noise, tau)
    assert found.isfinite().all()
    assert (found >= 0).all()
    assert (found[(tau > 0) & (white > 0)] > 0).all()


def test_long_lags_in_single_precision():
    """Phases are formed in float64: at a lag of 1e6 a float32 phase is wrong by 0.06."""
    inputs = [x.float().requires_grad_() for x in tensors(0.0, 0.0, 1e6, [EXPONENTIAL, WAVE])]
    found = variance(*inputs)
    assert found.dtype == torch.float32
    tau, amplitude, kappa, nu, psi = (x.tolist() for x in inputs[2:])
    wave = amplitude[1] * (tau + (math.sin(nu[1] * tau + psi[1]) - math.sin(psi[1])) / nu[1])
    np.testing.assert_allclose(found.item(), 2 * amplitude[0] / kappa[0] + wave, rtol=1e-6)
    found.backward()
    assert all(bool(x.grad.isfinite().all()) for x in inputs)
