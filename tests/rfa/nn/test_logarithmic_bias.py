"""KERPLE's bias: by hand, the limit in which the robust filter has it, its gradients, and bad input."""

import numpy as np
import pytest
import torch

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.filter_attention import robust_filter_attention
from rfa.ops.positions import checked_positions

from .by_hand import assert_near, dot_product, hidden, perturb
from .layers import IRREGULAR

SIZE, HEADS = 16, 2
ROPE = rotary_frequencies(HEADS, SIZE // HEADS)


def layer_of(dtype=torch.float64, **options):
    return perturb(DotProductAttention(SIZE, HEADS, logarithmic=True, **options)).to(dtype)


@pytest.mark.parametrize("times", [None, IRREGULAR[:7]])
@pytest.mark.parametrize("options", [{}, {"frequency": ROPE}, {"frequency": ROPE, "rotate_values": True}], ids=str)
def test_the_layer_by_hand(options, times):
    layer, x = layer_of(**options), hidden()
    expected = dot_product(layer, x, logarithmic=True, times=times, **options)
    assert_near(layer(x, times=times), expected, 1e-5)  # float32 frequencies and numbers of the bias


def test_the_filter_without_decay_is_kerple():
    """`-beta log Sigma` is the bias, and Gaussian residuals of keys of one length are dot products.

    With m2.5's zero frequencies, no decay, no gate, and nu to infinity the score is
    `-beta log(sigma^2 tau + eta^2 + sigma_0^2) - beta |q - k|^2 / d`.
    """
    generator = torch.Generator().manual_seed(0)
    modes, one = 3, torch.ones(HEADS, dtype=torch.float64)
    query, key, value = torch.randn(3, 2, HEADS, 9, 2 * modes, generator=generator, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True)
    beta, noise, key_noise, floor = 0.7 * one, torch.tensor([0.3, 2.0]).double(), 0.4 * one, 0.05 * one
    numbers = {"decay": 0 * one, "frequency": torch.zeros(HEADS, modes).double(), "process_noise": noise}
    numbers |= {"key_noise": key_noise, "query_noise": one, "noise_floor": floor, "inverse_temperature": beta}
    found = robust_filter_attention(query, key, value, robustness=1e9 * one, gate=False, **numbers)
    scale = (2 * beta / modes * np.sqrt(2 * modes))[:, None, None]  # 2 beta q.k / d as a score over sqrt(2 d)
    bias, positions = (beta, noise / (key_noise + floor)), checked_positions(2, 9, 9, query.device, None)
    expected = decayed_dot_product_attention(scale * query, key, value, positions=positions, logarithmic=bias)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # 1 / nu, times residuals of order 10


def test_a_new_layer_starts_as_published():
    numbers = torch.stack(DotProductAttention(512, 256, logarithmic=True).logarithmic())
    for found, most in zip(numbers, (2.0, 1.0), strict=True):
        assert found.min() >= 0.01 - 1e-6
        assert 0.9 * most < found.max() < most + 1e-6
        assert abs(float(found.mean()) - most / 2) < 0.1 * most  # five deviations of the mean of 256 uniform numbers
