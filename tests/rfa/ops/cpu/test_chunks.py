"""Keys of a path whose lags are split at the last one of their chunk: lags before a long gap keep their digits."""

import pytest
import torch

from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions

from ..problems import assert_same, attend, problem

KEYS = 64
GAP = 1e7  # a variance of this size has an error of 0.5 in float32


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_lags_before_a_gap_inside_a_chunk(prior, absent):
    """Head 0 does not decay, so its variance grows along the gap; the chunk's last key may be an absent one at 0."""
    inputs = problem(3, keys=KEYS, modes=8)
    inputs |= {name: 1e-3 + 0 * inputs[name] for name in ("key_noise", "query_noise", "noise_floor")}
    inputs["frequency"] = 0 * inputs["frequency"]  # in float32 they would not know a phase after the gap
    times = torch.arange(KEYS, dtype=torch.float64)
    times[20:] += GAP
    options = {"times": times, "prior": prior}
    if absent:
        mask = torch.ones(2, KEYS, dtype=torch.bool)
        mask[:, 31::32] = False
        options["key_mask"] = mask
    exact, rough = attend(inputs, "reference", **options), attend(inputs, "cpu", **options)
    assert_same(rough, exact, "cpu")


@pytest.mark.parametrize("causal", [True, False])
def test_dot_products_have_a_gradient_at_a_decay_of_zero(causal):
    inputs, times = problem(5, keys=KEYS, modes=8), torch.arange(KEYS, dtype=torch.float64) ** 1.1
    positions, found = checked_positions(2, KEYS, KEYS, times.device, times), []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        decay = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        states = [inputs[name].to(dtype) for name in ("query", "key", "value")]
        options = {"positions": positions, "slopes": torch.full((2,), 0.1), "causal": causal, "backend": backend}
        out = decayed_dot_product_attention(*states, decay=decay, **options)
        (out.double() * inputs["value"].cos()).sum().backward()
        found.append(decay.grad)
    assert found[1].abs().min() > 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)  # sums of float32 over 64 x 64 pairs
