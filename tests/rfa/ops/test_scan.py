"""The scan against the recurrence, step by step."""

import pytest
import torch
from nn.by_hand import positive

from rfa.ops.cumulative import linear_scan


@pytest.mark.parametrize("length", [0, 1, 8, 13])
def test_linear_scan(length):
    generator = torch.Generator().manual_seed(0)
    factor = positive(generator, 3, 1, length, low=0.0)
    factor[..., ::3] = 0.0
    term = positive(generator, 3, 2, length, low=-1.0)
    state, expected = torch.zeros(3, 2, dtype=torch.float64), []
    for i in range(length):
        state = factor[..., i] * state + term[..., i]
        expected.append(state)
    found = linear_scan(factor, term)
    assert found.shape == term.shape
    if length:
        torch.testing.assert_close(found, torch.stack(expected, -1), rtol=1e-14, atol=1e-14)
        assert torch.autograd.gradcheck(linear_scan, (factor.requires_grad_(), term.requires_grad_()))
