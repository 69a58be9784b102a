"""Forget gates of each channel: by hand, their limits, absent tokens, precision, and bad input."""

import numpy as np
import pytest
import torch
from ops import oracle

from rfa.nn import DotProductAttention

from .by_hand import assert_near, hidden, linear, merged, perturb, states

SIZE, HEADS = 16, 2


def layer_of(dtype=torch.float64, **options):
    return perturb(DotProductAttention(SIZE, HEADS, gates="channel", **options)).to(dtype)


def test_the_layer_by_hand():
    """One pair and one channel at a time."""
    layer, x = layer_of(), hidden()
    q, k, v = states(layer, x)
    gates = 1 / (1 + np.exp(-linear(layer.gate_projection, oracle.as_array(x)).reshape(2, 7, HEADS, -1)))
    out = np.zeros_like(v)
    for b, h, i in np.ndindex(2, HEADS, 7):
        faded = [k[b, h, j] * gates[b, j + 1 : i + 1, h].prod(0) for j in range(i + 1)]
        weights = np.exp(np.array(faded) @ q[b, h, i] / np.sqrt(SIZE))
        out[b, h, i] = weights / weights.sum() @ v[b, h, : i + 1]
    assert_near(layer(x), merged(layer, out))


@pytest.mark.parametrize("length", [5, 120])
def test_gradients_in_single_precision(length):
    """Against float64, also where the gates of 120 tokens multiply to less than the least number."""
    single, double = layer_of(torch.float32), layer_of()
    double.load_state_dict(single.state_dict())
    x, target = hidden(length=length, dtype=torch.float32), hidden(seed=9, length=length)
    for layer in (single, double):
        dtype = layer.query_projection.weight.dtype
        layer(x.to(dtype)).mul(target.to(dtype)).sum().backward()
    for name, p in double.named_parameters():
        error = float((single.get_parameter(name).grad - p.grad).abs().max())
        assert p.grad.isfinite().all()
        assert error / max(1.0, float(p.grad.abs().max())) < 1e-4, name  # float32 sums over all pairs


def test_a_new_layer_forgets_at_many_rates():
    layer = DotProductAttention(SIZE, HEADS, gates="channel")
    rates = -layer.marks(torch.zeros(1, 1, SIZE))["log_gate"][0, :, 0]
    expected = torch.tensor([2 ** (-8 * n / 15) for n in range(16)]).expand(HEADS, -1)
    torch.testing.assert_close(rates, expected, rtol=1e-4, atol=0)  # float32 logarithms of small rates
