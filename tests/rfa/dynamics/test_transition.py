"""Rotation and decay against complex arithmetic and the matrix exponential."""

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from rfa.dynamics import decay_kernel, rotate


def states(seed, batch=2, heads=3, length=5, modes=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, length, 2 * modes, generator=g, dtype=torch.float64).to(dtype)
    frequency = torch.randn(heads, modes, generator=g, dtype=torch.float64).to(dtype)
    shared = torch.randn(length, generator=g, dtype=torch.float64).to(dtype)
    batched = torch.randn(batch, length, generator=g, dtype=torch.float64).to(dtype)
    return x, frequency, shared, batched


def rotated(x, frequency, times, sign):
    """exp(sign i w t) x in complex float64."""
    x, frequency, times = (np.asarray(a.double()) for a in (x, frequency, times))
    modes = x.shape[-1] // 2
    angle = np.einsum("hk,bt->bhtk", frequency, np.atleast_2d(times))
    z = np.exp(sign * 1j * angle) * (x[..., :modes] + 1j * x[..., modes:])
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_rounded_once(dtype):
    x, frequency, times, _ = states(1, dtype=torch.float32)
    x = x.to(dtype)
    actual = rotate(x, frequency, times)
    assert actual.dtype == dtype
    assert torch.equal(actual, rotate(x.float(), frequency, times).to(dtype))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("timing", [0, 1])
def test_rotate_is_complex_multiplication(timing, inverse):
    x, frequency, *times = states(0)
    actual = rotate(x, frequency, times[timing], inverse=inverse)
    # One product of unit-size numbers: a few units in the last place.
    np.testing.assert_allclose(actual, rotated(x, frequency, times[timing], -1 if inverse else 1), rtol=0, atol=1e-14)


def test_far_times_keep_float32_accuracy():
    """At t = 1e6 an angle held in float32 is wrong by 0.06; only float32 roundings are allowed."""
    x, frequency, _, _ = states(2, dtype=torch.float32)
    times = 1e6 + torch.arange(5)
    actual = rotate(x, frequency, times)
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual, rotated(x, frequency, times, 1), rtol=0, atol=2e-6)


def test_gradients_of_rotate():
    x, frequency, shared, batched = (a.requires_grad_() for a in states(4, 1, 2, 3, 2))
    for times in (shared, batched):
        for inverse in (False, True):
            assert torch.autograd.gradcheck(lambda *a, i=inverse: rotate(*a, inverse=i), (x, frequency, times))


def test_rotation_and_decay_are_the_matrix_exponential():
    """exp(A tau) of the real 2x2 process of one mode."""
    mu, omega = 0.3, 1.7
    x = torch.tensor([[[[0.8, -1.1]]]], dtype=torch.float64)
    for tau in (0.0, 0.4, 3.0):
        lag = torch.tensor([tau], dtype=torch.float64)
        frequency = torch.tensor([[omega]], dtype=torch.float64)
        moved = decay_kernel(torch.tensor(mu, dtype=torch.float64), lag) * rotate(x, frequency, lag)
        expected = expm(np.array([[-mu, -omega], [omega, -mu]]) * tau) @ x.numpy().ravel()
        np.testing.assert_allclose(moved.ravel(), expected, rtol=0, atol=1e-13)  # expm's own error
