"""Paths along which each token sets the dynamics: their scan, their cost, and what a token can forget."""

import torch
from nn.by_hand import positive

from rfa.ops.content import Noises, TokenDynamics, content_filter_attention, cumulative_dynamics
from rfa.ops.dense import linear_scan

from .problems import located
from .written import Written

HEADS = 2


def test_a_token_that_forgets():
    """With an enormous decay at token 3, values up to it reach nothing behind it."""
    generator = torch.Generator().manual_seed(0)
    decay = positive(generator, 2, HEADS, 7)
    decay[..., 3] = 1e4
    dynamics = TokenDynamics(decay, positive(generator, 2, HEADS, 7), positive(generator, 2, HEADS, 4, 7))
    query, key, value = torch.randn(3, 2, HEADS, 7, 8, generator=generator, dtype=torch.float64)
    options = {
        "dynamics": dynamics,
        "noises": Noises(*(torch.ones(HEADS, dtype=torch.float64) for _ in Noises._fields)),
        "positions": located(7, 7, query.device, None, None, None, None),
    }
    before = content_filter_attention(query, key, value, **options)
    value[:, :, :4] += 1
    after = content_filter_attention(query, key, value, **options)
    assert torch.equal(before[:, :, 4:], after[:, :, 4:])
    assert (before[:, :, :4] != after[:, :, :4]).any(-1).all()


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
