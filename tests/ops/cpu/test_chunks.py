"""Keys of a path whose lags are split at the last one of their chunk: lags before a long gap keep their digits."""

import pytest
import torch

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
