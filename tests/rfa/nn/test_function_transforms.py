"""`torch.func` through every layer: forward mode says what reverse mode does, and `vmap` what a loop does."""

import pytest
import torch
from cover import some
from torch.func import functional_call, grad, jvp, vmap

from rfa.appendix import CoupledFilterAttention

from .layers import HEADS, SIZE, build

LENGTH = 5
NAMES = ["learned", "clock, horizon", "precision", "noise", "routing", "content", "clock", "b1", "RoPER with decay"]
NAMES += ["clock of slopes", "b3", "learned slopes", "forget gate", "unit states", "gains", "coupled"]


def made(name, dtype):
    """A function of parameters and two samples to a number, and what it is called with."""
    layer = CoupledFilterAttention(SIZE, HEADS).to(dtype) if name == "coupled" else build(name, dtype)
    parameters = {n: x.detach() for n, x in layer.named_parameters()}
    states = torch.randn(2, LENGTH, SIZE, dtype=dtype)
    weights = torch.randn(LENGTH, SIZE, dtype=dtype)

    def loss(parameters, states):
        given = (states, 0.5 * states.flip(1)) if name == "coupled" else (states,)
        return (functional_call(layer, parameters, given) * weights).sum()

    return loss, parameters, states


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_reverse_mode(name):
    """In float64, of all parameters and of the input at once."""
    loss, parameters, states = made(name, torch.float64)
    given = (parameters, states)
    directions = ({n: torch.randn_like(x) for n, x in parameters.items()}, torch.randn_like(states))
    leaves = {n: x.clone().requires_grad_() for n, x in parameters.items()}, states.clone().requires_grad_()
    loss(*leaves).backward()
    expected = (leaves[1].grad * directions[1]).sum()
    for n, x in leaves[0].items():
        expected = expected + (0.0 if x.grad is None else (x.grad * directions[0][n]).sum())
    torch.testing.assert_close(jvp(loss, given, directions)[1], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", some(NAMES, 11))
def test_a_gradient_for_each_sample(name):
    """In float32, on the kernels that "auto" takes: their sums of order 1 differ by some eps = 1.2e-7 each."""
    loss, parameters, states = made(name, torch.float32)
    found = vmap(grad(lambda p, x: loss(p, x[None])), (None, 0))(parameters, states)
    for i in range(2):
        leaves = {n: x.clone().requires_grad_() for n, x in parameters.items()}
        loss(leaves, states[i : i + 1]).backward()
        for n, x in leaves.items():
            expected = torch.zeros_like(x) if x.grad is None else x.grad
            torch.testing.assert_close(found[n][i], expected, rtol=1e-4, atol=1e-5)
