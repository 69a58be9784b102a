"""The modes of a head against complex arithmetic and the matrix exponential; frequency banks against numpy formulas."""

import itertools
import math

import numpy as np
import pytest
import torch

from rfa.dynamics import (
    partitioned_frequencies,
    rope_frequencies,
    rotary_frequencies,
    rotate,
    spectral_decay,
)

SHAPES = [(1, 2), (4, 6), (8, 32), (3, 10)]
# Banks may be kept in float32: one rounding of a power.
ROUNDING = 3e-7


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


def test_rotate_is_complex_multiplication():
    x, frequency, *each = states(0)
    for times, inverse in itertools.product(each, (False, True)):
        actual = rotate(x, frequency, times, inverse=inverse)
        # One product of unit-size numbers: a few units in the last place.
        np.testing.assert_allclose(actual, rotated(x, frequency, times, -1 if inverse else 1), rtol=0, atol=1e-14)


def test_far_times_keep_float32_accuracy():
    """At t = 1e6 an angle held in float32 is wrong by 0.06; only float32 roundings are allowed."""
    x, frequency, _, _ = states(2, dtype=torch.float32)
    times = 1e6 + torch.arange(5)
    actual = rotate(x, frequency, times)
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual, rotated(x, frequency, times, 1), rtol=0, atol=2e-6)


def test_banks_of_conjugate_pairs():
    """RoPE's, the same in each head, and the partitioned one: ascending, cut into bands, head 0 slowest."""
    for (heads, modes), base in itertools.product(SHAPES, (10000.0, 500.0)):
        rope, partitioned = (bank(heads, modes, base) for bank in (rope_frequencies, partitioned_frequencies))
        for bank in (rope, partitioned):
            assert bank.shape == (heads, modes)
            assert torch.equal(bank[:, 0::2], -bank[:, 1::2])
        expected = np.tile(base ** (-np.arange(modes // 2) / (modes / 2)), (heads, 1))
        np.testing.assert_allclose(rope[:, 0::2], expected, rtol=ROUNDING)
        count = heads * modes // 2
        expected = np.sort(base ** (-np.arange(count) / count)).reshape(heads, modes // 2)
        np.testing.assert_allclose(partitioned[:, 0::2], expected, rtol=ROUNDING)


def test_damping_follows_the_fastest_mode_of_each_band():
    frequency = partitioned_frequencies(8, 32)
    for damping, zero_heads in itertools.product((0.0, 0.05, 5.0), (0, 2)):
        expected = damping * frequency.abs().amax(1)
        expected[:zero_heads] = 0
        torch.testing.assert_close(spectral_decay(frequency, damping, zero_heads), expected, rtol=ROUNDING, atol=0)


def test_damping_sees_negative_frequencies():
    frequency = torch.tensor([[0.1, -0.9], [0.2, 0.4]])
    torch.testing.assert_close(spectral_decay(frequency, 2.0, 0), torch.tensor([1.8, 0.8]), rtol=ROUNDING, atol=0)


def test_numbers_out_of_range():
    for bank in (rope_frequencies, rotary_frequencies, partitioned_frequencies):
        for base in (1.0, -2.0, 0.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="base: got"):
                bank(2, 4, base)
        for modes in (0,) if bank is rotary_frequencies else (0, 1, 3, 7):  # pairs
            with pytest.raises(ValueError, match=f"modes: got {modes}"):
                bank(2, modes)
    bank = partitioned_frequencies(4, 4)
    for damping in (-0.05, math.inf, math.nan):
        with pytest.raises(ValueError, match="damping: got"):
            spectral_decay(bank, damping)
    with pytest.raises(ValueError, match="zero_heads: got -1"):
        spectral_decay(bank, 0.05, zero_heads=-1)
