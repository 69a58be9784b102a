"""Paths along which each token sets the dynamics: their scan and its cost."""

import torch
from nn.by_hand import positive

from rfa.ops.content import TokenDynamics, cumulative_dynamics
from rfa.ops.dense import linear_scan

from .problems import located
from .written import Written


def test_the_path_costs_a_linear_number_of_operations():
    """Numbers written by all operations together: twice the length, twice as many."""
    totals = []
    for length in (2048, 4096):
        dynamics = TokenDynamics(torch.rand(1, 2, length), torch.rand(1, 2, length), torch.rand(1, 2, 4, length))
        mask = torch.rand(1, length) > 0.1
        positions = located(length, length, mask.device, None, None, mask, None)
        with Written() as written:
            cumulative_dynamics(dynamics, positions)
        totals.append(written.total)
    assert totals[1] / totals[0] < 2.01


def test_linear_scan():
    """Against the recurrence, step by step."""
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, 8, 13):
        factor = positive(generator, 3, 1, length, low=0.0)
        factor[..., ::3] = 0.0
        term = positive(generator, 3, 2, length, low=-1.0)
        state, expected = torch.zeros(3, 2, dtype=torch.float64), [term[..., :0]]
        for i in range(length):
            state = factor[..., i] * state + term[..., i]
            expected.append(state[..., None])
        torch.testing.assert_close(linear_scan(factor, term), torch.cat(expected, -1), rtol=1e-14, atol=1e-14)
        if length:
            assert torch.autograd.gradcheck(linear_scan, (factor.requires_grad_(), term.requires_grad_()))
