"""Limits in which the operator is something else that can be written down: RoPE, ALiBi, RoPER, the Kalman filter."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_are

from . import oracle
from .problems import EXACT, assert_same, attend, irregular_times, problem, within

# Nothing but "robustness" in the penalty: with the exponential kernel 1e14 leaves it below 1e-12 (nu -> infinity).
NO_PENALTY = {"weight": "exponential"}


def without_penalty(inputs):
    return {**inputs, "robustness": torch.full_like(inputs["robustness"], 1e14)}


def unit_norm(x):
    return x / x.norm(dim=-1, keepdim=True)


def rope(x, frequency, times):
    """exp(-i w t) x in complex numbers, returned as real channels."""
    z = torch.complex(*x.chunk(2, -1)) * torch.exp(-1j * frequency[:, None] * times[:, None])
    return torch.cat([z.real, z.imag], -1)


def assert_complex(output, expected, backend):
    """Of a size of order one."""
    np.testing.assert_allclose(oracle.as_complex(output.numpy()), expected, rtol=0, atol=within(EXACT, backend))


@pytest.mark.parametrize("timed", [True, False])
def test_rope_is_the_noiseless_undecayed_limit(timed, backend):
    """Unit norms, mu = sigma^2 = 0, exponential weight: dot-product softmax on rotated q and k (appendix C.1)."""
    inputs = problem(1, keys=7)
    for name in ("query", "key"):
        inputs[name] = unit_norm(inputs[name])
    for name in ("decay", "process_noise"):
        inputs[name].zero_()
    times = irregular_times(1, 7) if timed else torch.arange(7.0).double()
    q, k = (rope(inputs[name], inputs["frequency"], times) for name in ("query", "key"))
    total = inputs["key_noise"] + inputs["noise_floor"] + inputs["query_noise"]
    scale = 2 * inputs["inverse_temperature"] / (inputs["robustness"] * 3 * total)
    scores = scale[:, None, None] * (q @ k.mT)
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ inputs["value"]
    options = {"weight": "exponential", "rotate_values": False, **({"times": times} if timed else {})}
    assert_same(attend(inputs, backend, **options)[0], expected, backend)

    # Turning the values as well is RoPER.
    rotated = scores.softmax(-1) @ rope(inputs["value"], inputs["frequency"], times)
    options["rotate_values"] = True
    assert_same(attend(inputs, backend, **options)[0], rope(rotated, -inputs["frequency"], times), backend)


def steady_gain(mu, sigma2, r, dt):
    """By scipy's discrete algebraic Riccati equation."""
    f2 = math.exp(-2 * mu * dt)
    q = sigma2 * (dt if mu == 0 else -math.expm1(-2 * mu * dt) / (2 * mu))
    x = solve_discrete_are(np.sqrt([[f2]]), np.eye(1), np.array([[q]]), np.array([[r]]))[0, 0]
    return x / (x + r)


def test_uniform_riccati_is_alibi(backend):
    """q = k = 0: weights softmax(-beta lambda tau), lambda = -log(1 - K); slopes 2^(-8 h / H) by choice of noise."""
    heads = 4
    inputs = problem(6, heads=heads, keys=8)
    for name in ("query", "key"):
        inputs[name].zero_()
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    inputs["inverse_temperature"].fill_(1.0)
    inputs["decay"].zero_()  # keep the values undecayed, as in ALiBi; F = 1 and phi(1) = 1
    r = inputs["key_noise"] + inputs["noise_floor"]
    gain = -torch.expm1(-slopes)
    x = gain * r / (1 - gain)
    inputs["process_noise"] = x**2 / (x + r)
    lag = (torch.arange(8)[:, None] - torch.arange(8)).double()
    scores = torch.where(lag >= 0, -slopes.view(-1, 1, 1) * lag, -torch.inf)
    output, log_precision = attend(inputs, backend, prior="riccati", rotate_values=False)
    assert_same(output, scores.softmax(-1) @ inputs["value"], backend)
    # log c(tau) = log K - lambda tau also at the first key: the constant is the gain's logarithm.
    assert_same(log_precision, (scores.logsumexp(-1) + gain.log()[:, None]).expand(2, heads, 8), backend)


def test_irregular_kalman_filter_in_local_steady_state(backend):
    """nu -> infinity: each step a Kalman update with the gain of its own interval, started without information.

    x_i N_i = (1 - K_i) N_(i-1) F x_(i-1) + K_i z_i with N_i = (1 - K_i) N_(i-1) + K_i, N_0 = K_0: the filter's mean
    once N = 1, and before that its mean freed from the bias towards the zero it started at.
    """
    n = 40
    inputs = without_penalty(problem(8, batch=1, heads=2, keys=n, modes=1))
    inputs["decay"] = torch.tensor([0.2, 0.0], dtype=torch.float64)
    inputs["inverse_temperature"].fill_(1.0)
    times = irregular_times(8, n)
    output, log_precision = attend(inputs, backend, prior="riccati", times=times, **NO_PENALTY)
    observed = oracle.as_complex(inputs["value"].numpy())[0, :, :, 0]
    steps = times.diff().tolist()
    for h in range(2):
        mu, omega, sigma2 = (inputs[name][h].item() for name in ("decay", "frequency", "process_noise"))
        r = (inputs["key_noise"][h] + inputs["noise_floor"][h]).item()
        weight = steady_gain(mu, sigma2, r, steps[0])
        means, weights = [observed[h, 0]], [weight]
        for z, dt in zip(observed[h, 1:], steps, strict=True):
            gain = steady_gain(mu, sigma2, r, dt)
            predicted = np.exp((-mu + 1j * omega) * dt) * means[-1]
            old, weight = (1 - gain) * weight, (1 - gain) * weight + gain
            means.append((old * predicted + gain * z) / weight)
            weights.append(weight)
        assert_complex(output[0, h, :, :], np.array(means)[:, None], backend)
        np.testing.assert_allclose(log_precision[0, h].exp(), weights, rtol=within(EXACT, backend))
