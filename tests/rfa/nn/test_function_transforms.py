"""`torch.func` through every layer: forward mode says what reverse mode does, and `vmap` what a loop does."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from rfa.appendix import CoupledFilterAttention
from rfa.nn import ContentFilterAttention, DotProductAttention, RobustFilterAttention

SIZE, HEADS, LENGTH = 8, 2, 5
FREQUENCY, RATES = torch.tensor([[0.3, -0.3, 0.7, -0.7], [1.1, -1.1, 2.0, -2.0]]), torch.tensor([0.1, 0.4])
LAYERS = {
    "filter": (RobustFilterAttention, {"learn_frequency": True, "learn_decay": True}),
    "riccati": (RobustFilterAttention, {"prior": "riccati", "horizon": 0.5, "learn_horizon": True}),
    "precision": (RobustFilterAttention, {"step": "precision"}),
    "time-dependent noise": (RobustFilterAttention, {"noise": "time_dependent"}),
    "routing": (RobustFilterAttention, {"aggregation": "routing"}),
    "content": (ContentFilterAttention, {}),
    "clock": (RobustFilterAttention, {"prior": "riccati", "clock": "content"}),
    "coupled": (CoupledFilterAttention, {}),
    "RoPE": (DotProductAttention, {"frequency": FREQUENCY}),
    "RoPER": (DotProductAttention, {"frequency": FREQUENCY, "rotate_values": True}),
    "clock of slopes": (DotProductAttention, {"frequency": FREQUENCY, "slopes": RATES, "clock": "content"}),
    "decay": (DotProductAttention, {"frequency": FREQUENCY, "decay": RATES}),
    "slopes": (DotProductAttention, {"slopes": RATES, "learn_slopes": True}),
    "window": (DotProductAttention, {"window": 3}),
    "forget": (DotProductAttention, {"gates": "forget"}),
    "unit states": (RobustFilterAttention, {"normalise_states": True}),
    "taps": (RobustFilterAttention, {"taps": True, "learn_frequency": True}),
    "output gain": (RobustFilterAttention, {"output_gain": True}),
    "logarithmic": (DotProductAttention, {"logarithmic": True}),
    "channel": (DotProductAttention, {"gates": "channel"}),
    "gain": (DotProductAttention, {"gates": "gain", "slopes": RATES}),
}


def made(name, dtype):
    """A function of parameters and two samples to a number, and what it is called with."""
    build, options = LAYERS[name]
    layer = build(SIZE, HEADS, **options).to(dtype)
    parameters = {n: x.detach() for n, x in layer.named_parameters()}
    states = torch.randn(2, LENGTH, SIZE, dtype=dtype)
    weights = torch.randn(LENGTH, SIZE, dtype=dtype)

    def loss(parameters, states):
        given = (states, 0.5 * states.flip(1)) if build is CoupledFilterAttention else (states,)
        return (functional_call(layer, parameters, given) * weights).sum()

    return loss, parameters, states


@pytest.mark.parametrize("name", LAYERS)
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


@pytest.mark.parametrize("name", LAYERS)
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
