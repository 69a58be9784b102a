"""Frequency banks and damping against numpy formulas."""

import math

import numpy as np
import pytest
import torch
from cover import cover

from rfa.dynamics import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay

BANKS = [rope_frequencies, partitioned_frequencies]
SHAPES = [(1, 2), (4, 6), (8, 32), (3, 10)]
# Banks may be kept in float32: one rounding of a power.
ROUNDING = 3e-7


@cover(1, bank=BANKS, shape=SHAPES)
def test_conjugate_pairs_are_adjacent(bank, shape):
    heads, modes = shape
    frequency = bank(heads, modes)
    assert frequency.shape == (heads, modes)
    assert torch.equal(frequency[:, 0::2], -frequency[:, 1::2])
    assert bool((frequency[:, 0::2] > 0).all())


@cover(1, shape=SHAPES, base=[10000.0, 500.0])
def test_rope_bank(shape, base):
    heads, modes = shape
    expected = base ** (-np.arange(modes // 2) / (modes / 2))
    for head in rope_frequencies(heads, modes, base=base):
        np.testing.assert_allclose(head[0::2], expected, rtol=ROUNDING)


@cover(1, shape=SHAPES, base=[10000.0, 500.0])
def test_partitioned_bank(shape, base):
    """Sorted ascending, cut into bands, head 0 slowest."""
    heads, modes = shape
    count = heads * modes // 2
    expected = np.sort(base ** (-np.arange(count) / count)).reshape(heads, modes // 2)
    positive = partitioned_frequencies(heads, modes, base)[:, 0::2]
    np.testing.assert_allclose(positive, expected, rtol=ROUNDING)
    assert bool((positive.flatten().diff() > 0).all())
    assert positive.max().item() == 1.0


@cover(1, zero_heads=[0, 2], damping=[0.0, 0.05, 5.0])
def test_damping_follows_the_fastest_mode_of_each_band(damping, zero_heads):
    frequency = partitioned_frequencies(8, 32)
    expected = damping * frequency.abs().amax(1)
    expected[:zero_heads] = 0
    decay = spectral_decay(frequency, damping, zero_heads)
    assert decay.shape == (8,)
    torch.testing.assert_close(decay, expected, rtol=ROUNDING, atol=0)


def test_damping_sees_negative_frequencies():
    frequency = torch.tensor([[0.1, -0.9], [0.2, 0.4]])
    torch.testing.assert_close(spectral_decay(frequency, 2.0, 0), torch.tensor([1.8, 0.8]), rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("bank", [rope_frequencies, rotary_frequencies, partitioned_frequencies])
def test_a_base_or_a_number_of_modes_that_makes_no_bank(bank):
    for base in (1.0, -2.0, 0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="base: got"):
            bank(2, 4, base)
    for modes in (0,) if bank is rotary_frequencies else (0, 1, 3, 7):  # pairs
        with pytest.raises(ValueError, match=f"modes: got {modes}"):
            bank(2, modes)


def test_numbers_out_of_range():
    bank = partitioned_frequencies(4, 4)
    for damping in (-0.05, math.inf, math.nan):
        with pytest.raises(ValueError, match="damping: got"):
            spectral_decay(bank, damping)
    with pytest.raises(ValueError, match="zero_heads: got -1"):
        spectral_decay(bank, 0.05, zero_heads=-1)
