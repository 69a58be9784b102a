"""Normalised states by hand in numpy, and a clock's effect on robust weights."""

import torch
from ops import oracle

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, RobustFilterAttention
from rfa.ops.cumulative import clocked
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Parameters, Problem
from rfa.ops.reference import robust_weights

from .by_hand import assert_near, dot_product, hidden, merged, perturb, states

SIZE, HEADS = 16, 2
DECAY, ROPE = torch.tensor([0.05, 0.3]), rotary_frequencies(HEADS, SIZE // HEADS)
KINDS = {
    "filter": (RobustFilterAttention, {"decay": DECAY}),
    "dot product": (DotProductAttention, {"frequency": ROPE, "gates": "forget"}),
}


def layer_of(kind, dtype=torch.float64, **options):
    build, chosen = KINDS[kind]
    return perturb(build(SIZE, HEADS, **{**chosen, **options})).to(dtype)


def test_a_filter_by_hand():
    layer, x = layer_of("filter", normalise_states=True), hidden()
    q, k, v = states(layer, x)
    parameters = {key: value.detach() for key, value in layer.dynamics().items()}
    estimate, _ = oracle.filter_attention(q, k, v, **parameters, prior="riccati")
    assert_near(layer(x), merged(layer, estimate), 1e-9)


def test_dot_products_by_hand():
    layer, x = layer_of("dot product", normalise_states=True), hidden()
    assert_near(layer(x), dot_product(layer, x, frequency=ROPE, gates="forget"), 1e-6)  # float32 frequencies


def test_a_clock_changes_the_robust_weights():
    """They are those of the keys at the times of the clock."""
    options = {"frequency": torch.zeros(HEADS, SIZE // HEADS), "clock": "content"}
    layer, x = layer_of("filter", prior="lyapunov", **options), hidden()
    positions = checked_positions(2, 7, 7, x.device, None)
    q, k, _ = (torch.from_numpy(s) for s in states(layer, x))
    problem = Problem(Parameters(**layer.dynamics()), clocked(positions, layer.clock(x)), layer.options)
    torch.testing.assert_close(layer.robust_weights(x, positions), robust_weights(q, k, problem), rtol=1e-9, atol=1e-9)


def test_states_of_one_length():
    """Whatever the length of a token, and a state of zeros stays zero."""
    layer, x = layer_of("filter", normalise_states=True), hidden()
    scale = torch.nn.functional.softplus(layer.state_scale.raw_scale)
    for found in (layer.queries(x), layer.keys(100 * x)):
        length = found.square().mean(-1).sqrt()
        torch.testing.assert_close(length, scale[:, None].expand_as(length), rtol=1e-3, atol=0)  # the added 1e-6
    layer.state_scale(torch.zeros(1, HEADS, 1, SIZE, requires_grad=True)).sum().backward()
    assert layer.state_scale.raw_scale.grad.isfinite().all()


def test_tied_values_are_the_normalised_keys():
    layer, x = layer_of("filter", normalise_states=True, tie_key_value=True, innovation=False), hidden(length=1)
    expected = merged(layer, layer.keys(x).detach().numpy())  # the only key weighs one
    assert_near(layer(x), expected)
