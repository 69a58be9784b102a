"""The steady-state Kalman gain against scipy's discrete algebraic Riccati equation and closed forms."""

import math

import numpy as np
import pytest
import torch
from cover import cover
from scipy.linalg import solve_discrete_are

from rfa.dynamics import riccati_gain, riccati_log_gain

CASES = [
    (0.3, 0.5, 0.5, 0.1),
    (0.0, 0.5, 0.5, 1.0),
    (2.0, 0.01, 3.0, 0.7),
    (0.05, 4.0, 0.2, 5.0),
    (1e-6, 1e-3, 1.0, 1.0),
]


def as_tensors(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype).unbind()


def test_scalar_riccati_equation():
    for mu, sigma2, r, dt in CASES:
        f = np.array([[math.exp(-mu * dt)]])
        q = sigma2 * (dt if mu == 0 else -math.expm1(-2 * mu * dt) / (2 * mu))
        x = solve_discrete_are(f.T, np.eye(1), np.array([[q]]), np.array([[r]]))[0, 0]
        found = riccati_gain(*as_tensors(mu, sigma2, r, dt)).item()
        assert found == pytest.approx(x / (x + r), rel=1e-10), (mu, sigma2, r, dt)  # the solver's error


def exact_root(mu, sigma2, r, dt):
    """x and r in 200 digits."""
    import mpmath

    with mpmath.workdps(200):
        mu, sigma2, r, dt = map(mpmath.mpf, (mu, sigma2, r, dt))
        q = sigma2 * (dt if mu == 0 else -mpmath.expm1(-2 * mu * dt) / (2 * mu))
        b = -r * mpmath.expm1(-2 * mu * dt) - q
        return (-b + mpmath.sqrt(b * b + 4 * q * r)) / 2, r


def exact_gain(*numbers):
    x, r = exact_root(*numbers)
    return float(x / (x + r))


def exact_rest(*numbers):
    x, r = exact_root(*numbers)
    return float(r / (x + r))


def exact_log_gain(*numbers):
    import mpmath

    x, r = exact_root(*numbers)
    return mpmath.log(x / (x + r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_keep_their_digits(dtype):
    """Small gains (where the root cancels), gains near one, no decay, long and short intervals."""
    exponents = [-8.0, -4.0, 0.0, 4.0]
    for mu in (0.0, 1e-4, 1.0):
        for noise in exponents:
            for interval in (1e-3, 1.0, 1e3):
                for r in (1e-2, 1.0, 1e2):
                    numbers = as_tensors(mu, 10**noise, r, interval, dtype=dtype)
                    expected = exact_gain(*(x.item() for x in numbers))
                    actual = riccati_gain(*numbers)
                    assert actual.dtype == dtype
                    # A handful of roundings, none amplified: 32 units in the last place.
                    assert actual.item() == pytest.approx(expected, rel=32 * torch.finfo(dtype).eps), numbers


def test_gradients():
    numbers = [
        torch.tensor(c, dtype=torch.float64, requires_grad=True)
        for c in zip(*(CASES[i] for i in (0, 2, 3)), strict=True)
    ]
    assert torch.autograd.gradcheck(riccati_gain, numbers)
    assert torch.autograd.gradgradcheck(riccati_gain, numbers)


def test_gradient_in_the_decay_at_zero_decay():
    decay, *rest = as_tensors(0.0, 0.5, 0.3, 0.8)
    decay = decay.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(riccati_gain(decay, *rest), decay)
    step = 1e-8  # one-sided in exact arithmetic: the error is step times a curvature of order one
    slope = (exact_gain(step, 0.5, 0.3, 0.8) - exact_gain(0.0, 0.5, 0.3, 0.8)) / step
    assert gradient.item() == pytest.approx(slope, rel=1e-6)


@cover(1, dtype=[torch.float32, torch.float64], mu=[0.0, 0.5], noise=[1e-22, 1e-36], r=[1e-35, 1e-20, 1.0])
def test_process_noise_far_below_the_root_of_the_smallest_number(r, noise, mu, dtype):
    """`sigma^2 dt` below 1e-19, which float32 cannot square: values and gradients in 200 digits."""
    import mpmath

    numbers = [x.clone().requires_grad_() for x in as_tensors(mu, noise, r, 0.7, dtype=dtype)]
    log_gain, log_rest = riccati_log_gain(*numbers)
    exact = [x.item() for x in numbers]
    gain = exact_gain(*exact)
    # The logarithms of two noises, some 80 in float32, are subtracted: each off by half a unit in its last place.
    tolerance = 200 * torch.finfo(dtype).eps
    assert log_gain.exp().item() == pytest.approx(gain, rel=tolerance)
    rest = math.log1p(-gain) if gain < 0.5 else math.log(exact_rest(*exact))
    assert log_rest.item() == pytest.approx(rest, rel=tolerance)
    gradients = torch.autograd.grad(log_gain, numbers[1:3])
    for i, gradient in zip((1, 2), gradients, strict=True):
        with mpmath.workdps(200):
            step = mpmath.mpf(exact[i]) * mpmath.mpf(10) ** -60
            moved = [mpmath.mpf(x) + (step if k == i else 0) for k, x in enumerate(exact)]
            slope = (exact_log_gain(*moved) - exact_log_gain(*exact)) / step
        assert gradient.item() == pytest.approx(float(slope), rel=tolerance), i


def test_gradients_of_a_tiny_noise_beside_a_large_one_stay_in_range():
    """`d log(1 - K) / dr = 1 / r` where K is nearly 1; on the way float32 made `0 * inf` of it."""
    mu, sigma2, r, dt = (x.requires_grad_() for x in as_tensors(0.0, 639.0, 5.8e-36, 1.5e7, dtype=torch.float32))
    log_gain, log_rest = riccati_log_gain(mu, sigma2, r, dt)
    by_r, by_noise = torch.autograd.grad(log_gain + log_rest, (r, sigma2))
    assert by_r.item() == pytest.approx(1 / 5.8e-36, rel=1e-5)
    assert by_noise.item() == pytest.approx(-1 / 639.0, rel=1e-5)


def test_gradients_where_the_stationary_variance_is_the_measurement_noise():
    """There `c = g`, and the argument of the hyperbolic sine is 0."""
    numbers = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, 1.0, 1.0, 1.0)]
    assert torch.autograd.gradcheck(riccati_gain, numbers)
    log_gain, log_rest = riccati_log_gain(*numbers)
    for found, wanted in zip(torch.autograd.grad(log_gain, numbers), gradients_of_log_gain(), strict=True):
        assert float(found) == pytest.approx(wanted, rel=1e-12)
    assert float(log_gain.exp() + log_rest.exp()) == pytest.approx(1.0, rel=1e-15)


def gradients_of_log_gain():
    """Of log K by mu, sigma^2, r and dt at (0.5, 1, 1, 1): `d log y = (dg (1 + y) / y - dc) / (y + g / y)`, y^2 = g."""
    e = math.exp(-1.0)
    g = 1 - e
    y = math.sqrt(g)
    of_g, of_c = (2 * (e - g), g, -g, e), (2 * e, 0.0, 0.0, e)
    return [(a * (1 + y) / y - b) / (2 * y) / (1 + y) for a, b in zip(of_g, of_c, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_without_process_noise_are_finite(dtype):
    """Noise of zero counts as the smallest number, whose square is none."""
    decay, measurement, interval = (torch.tensor([x], dtype=dtype, requires_grad=True) for x in (0.36, 7.9, 5200.0))
    parts = riccati_log_gain(decay, torch.zeros(1, dtype=dtype), measurement, interval)
    gradients = torch.autograd.grad(sum(part.sum() for part in parts), (decay, measurement, interval))
    assert all(x.isfinite().all() for x in gradients), gradients
    # log K = log(q phi / r) where F is 0: its gradients are -1 / mu and -1 / r
    for gradient, wanted in zip(gradients, (-1 / 0.36, -1 / 7.9, 0.0), strict=True):
        assert abs(float(gradient) - wanted) < 1e-5
