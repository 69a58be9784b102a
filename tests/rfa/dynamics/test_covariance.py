"""phi, Sigma and the steady state against high precision and an ODE solver."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from rfa.dynamics import accumulated_variance, covariance, steady_state_variance

DECAYS = [0.0, 1e-30, 1e-12, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 10.0]
LAGS = [1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 1e3, 1e6]
GRID = np.array(list(itertools.product(DECAYS, LAGS)))


def grid(dtype):
    decay, lag = torch.tensor(GRID, dtype=dtype).T.clone()
    return decay.requires_grad_(), lag.requires_grad_()


def high_precision(f, decay, lag):
    """f(mu, tau, x = 2 mu tau) at the rounded inputs, 400 digits, as float64; mu = 0 is taken at 1e-60."""
    with mpmath.workdps(400):
        pairs = zip(decay.tolist(), lag.tolist(), strict=True)
        exact = [(mpmath.mpf(mu) or mpmath.mpf(10) ** -60, mpmath.mpf(tau)) for mu, tau in pairs]
        return np.array([float(f(mu, tau, 2 * mu * tau)) for mu, tau in exact])


def value(mu, tau, x):
    return (1 - mpmath.exp(-x)) / (2 * mu)


def by_decay(mu, tau, x):
    return tau * mpmath.exp(-x) / mu - (1 - mpmath.exp(-x)) / (2 * mu**2)


def by_lag(mu, tau, x):
    return mpmath.exp(-x)


def by_decay_twice(mu, tau, x):
    return -2 * tau**2 * mpmath.exp(-x) / mu - 2 * tau * mpmath.exp(-x) / mu**2 + (1 - mpmath.exp(-x)) / mu**3


def by_both(mu, tau, x):
    return -2 * tau * mpmath.exp(-x)


def by_lag_twice(mu, tau, x):
    return -2 * mu * mpmath.exp(-x)


def assert_accurate(actual, f, decay, lag, units, dtype, scale=0.0):
    """To `units` in the last place, and x more for the rounding of x = 2 mu tau under the exponential.

    Where the quantity dies away as exp(-x), `scale` is its size before that: an error of `units` in the last
    place of it is harmless, since the derivative is added to others of that size.
    """
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    expected = high_precision(f, decay, lag)
    decay, lag = (a.detach().double().numpy() for a in (decay, lag))
    bound = eps * ((units + np.minimum(2 * decay * lag, 800)) * np.abs(expected) + units * scale) + tiny
    error = np.abs(actual.detach().double().numpy() - expected)
    worst = int(np.argmax(error / bound))
    assert error[worst] <= bound[worst], (GRID[worst], actual[worst].item(), expected[worst])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_and_its_gradients(dtype):
    decay, lag = grid(dtype)
    phi = accumulated_variance(decay, lag)
    assert_accurate(phi, value, decay, lag, 4, dtype)  # one expm1, one quotient
    by_mu, by_tau = torch.autograd.grad(phi.sum(), (decay, lag), create_graph=True)
    assert_accurate(by_tau, by_lag, decay, lag, 8, dtype, scale=1.0)
    assert_accurate(by_mu, by_decay, decay, lag, 16, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_of_phi(dtype):
    decay, lag = grid(dtype)
    by_mu, by_tau = torch.autograd.grad(accumulated_variance(decay, lag).sum(), (decay, lag), create_graph=True)
    mu_mu, mu_tau = torch.autograd.grad(by_mu.sum(), (decay, lag), retain_graph=True)
    tau_mu, tau_tau = torch.autograd.grad(by_tau.sum(), (decay, lag))
    if dtype == torch.float64:
        # float32 is checked for finiteness below: tau^3 and 1 / mu^3 use up its range within the grid.
        mu, tau = decay.detach().numpy(), lag.detach().numpy()
        assert_accurate(mu_mu, by_decay_twice, decay, lag, 100, dtype)  # three like terms: two digits may go
        assert_accurate(mu_tau, by_both, decay, lag, 16, dtype, scale=2 * tau)
        assert_accurate(tau_mu, by_both, decay, lag, 16, dtype, scale=2 * tau)
        assert_accurate(tau_tau, by_lag_twice, decay, lag, 16, dtype, scale=2 * np.maximum(mu, 1e-40))
    for second in (mu_mu, mu_tau, tau_mu, tau_tau):
        assert bool(torch.isfinite(second).all())


ALL_MODES = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}


def test_gradcheck_and_gradgradcheck_of_phi():
    decay = torch.tensor([[-0.4], [0.0], [0.01], [0.2], [1.5]], dtype=torch.float64, requires_grad=True)
    lag = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(accumulated_variance, (decay, lag), **ALL_MODES)
    assert torch.autograd.gradgradcheck(accumulated_variance, (decay, lag), check_fwd_over_rev=True)


PARAMETERS = [(0.0, 0.7, 0.4, 0.05), (0.3, 0.5, 0.1, 0.0), (0.3, 0.5, 2.0, 0.01), (2.0, 0.0, 1.0, 0.2)]


def test_covariance_solves_the_lyapunov_equation():
    """dS/dt = -2 mu S + sigma^2 from S(0) = eta^2; the floor is added to the solution."""
    lags = np.linspace(0, 6, 13)
    for mu, sigma2, eta2, floor in PARAMETERS:

        def slope(t, s, mu=mu, sigma2=sigma2):
            return -2 * mu * s + sigma2

        solution = solve_ivp(slope, (0, 6), [eta2], t_eval=lags, rtol=1e-11, atol=1e-13)
        given = torch.tensor([mu, sigma2, eta2, floor], dtype=torch.float64)
        actual = covariance(*given, torch.from_numpy(lags))
        np.testing.assert_allclose(actual, solution.y[0] + floor, rtol=1e-9)  # solve_ivp's accumulated error


def test_steady_state():
    decay = torch.tensor([0.5, 2.0, 1e-8, 0.0, 0.0], dtype=torch.float64)
    noise = torch.tensor([0.3, 0.0, 0.2, 0.4, 0.0], dtype=torch.float64)
    steady = steady_state_variance(decay, noise)
    expected = torch.tensor([0.3, 0.0, 1e7, torch.inf, 0.0], dtype=torch.float64)
    torch.testing.assert_close(steady, expected, rtol=1e-14, atol=0)  # one quotient
    late = noise[:2] * accumulated_variance(decay[:2], torch.tensor(1e3, dtype=torch.float64))
    torch.testing.assert_close(late, steady[:2], rtol=1e-14, atol=0)


def test_phi_of_long_lags_has_no_derivative_by_the_lag():
    """exp(-x) to all digits: as the product of lag and moment it was a rounding of one, 1e-9 instead of 1e-53."""
    lag = torch.tensor([120.0, 1e4], requires_grad=True)
    accumulated_variance(torch.tensor(0.3), lag).sum().backward()
    np.testing.assert_allclose(lag.grad, [math.exp(-72.0), 0.0], rtol=1e-4, atol=0)  # of x = 72, rounded
