"""Options of the states of any layer, by hand in numpy; layers some of whose heads have gates or a clock."""

import pytest
import torch
from cover import cover
from ops import oracle

from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, RobustFilterAttention
from rfa.ops.cumulative import clocked
from rfa.ops.positions import checked_positions
from rfa.ops.problem import Parameters, Problem
from rfa.ops.reference import robust_weights

from .by_hand import EXACT, assert_near, dot_product, hidden, merged, perturb, states

SIZE, HEADS = 16, 2
DECAY, ROPE = torch.tensor([0.05, 0.3]), rotary_frequencies(HEADS, SIZE // HEADS)
KINDS = {
    "filter": (RobustFilterAttention, {"decay": DECAY}),
    "dot product": (DotProductAttention, {"frequency": ROPE, "gates": "forget"}),
}
OPTIONS = {"unit states": {"normalise_states": True}, "taps": {"taps": True}, "output gain": {"output_gain": True}}


def layer_of(kind, dtype=torch.float64, **options):
    build, chosen = KINDS[kind]
    return perturb(build(SIZE, HEADS, **{**chosen, **options})).to(dtype)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_filter_by_hand(option):
    layer, x = layer_of("filter", **OPTIONS[option]), hidden()
    q, k, v = states(layer, x)
    parameters = {key: value.detach() for key, value in layer.dynamics().items()}
    estimate, _ = oracle.filter_attention(q, k, v, **parameters, prior="riccati")
    assert_near(layer(x), merged(layer, estimate, x), 1e-9)


@pytest.mark.parametrize("option", OPTIONS)
def test_dot_products_by_hand(option):
    layer, x = layer_of("dot product", **OPTIONS[option]), hidden()
    assert_near(layer(x), dot_product(layer, x, frequency=ROPE, gates="forget"), 1e-6)  # float32 frequencies


def test_taps_of_a_filter_by_hand_at_irregular_times():
    """The token before is turned by the time in between, values too unless they do not turn."""
    for turns in (True, False):
        layer, x = layer_of("filter", taps=True, rotate_values=turns), hidden()
        times = torch.tensor([0.0, 0.5, 0.7, 2.0, 2.5, 4.0, 7.0], dtype=torch.float64)
        q, k, turned = states(layer, x, times)
        layer.dynamics.frequency, frequency = torch.zeros_like(layer.dynamics.frequency), layer.dynamics.frequency
        v = turned if turns else states(layer, x, times)[2]
        layer.dynamics.frequency = frequency
        parameters = {key: value.detach() for key, value in layer.dynamics().items()}
        options = {"prior": "riccati", "rotate_values": turns}
        estimate, _ = oracle.filter_attention(q, k, v, times=times[None], **parameters, **options)
        assert_near(layer(x, times=times), merged(layer, estimate), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_taps_of_share_zero_are_the_layer_without(kind):
    layer, x = layer_of(kind, taps=True), hidden()
    plain = layer_of(kind)
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if not name.startswith("taps.")})
    torch.nn.init.zeros_(layer.taps.weight)
    torch.nn.init.constant_(layer.taps.bias, -100.0)
    torch.testing.assert_close(layer(x), plain(x), rtol=EXACT, atol=EXACT)


def test_taps_and_a_clock_change_the_robust_weights():
    """They are those of the tapped keys at the times of the clock."""
    options = {"frequency": torch.zeros(HEADS, SIZE // HEADS), "clock": "content", "taps": True}
    layer, x = layer_of("filter", prior="lyapunov", **options), hidden()
    positions = checked_positions(2, 7, 7, x.device, None)
    q, k, _ = (torch.from_numpy(s) for s in states(layer, x))
    found = layer.robust_weights(x, positions)
    expected = robust_weights(
        q, k, Problem(Parameters(**layer.dynamics()), clocked(positions, layer.clock(x)), layer.options)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("logit", "share"), [(-100.0, 0.0), (100.0, 1.0)])
def test_a_gain_of_one_takes_the_step_and_a_gain_of_zero_none(logit, share):
    layer, x = layer_of("filter", output_gain=True), hidden()
    torch.nn.init.zeros_(layer.output_gain.weight)
    torch.nn.init.constant_(layer.output_gain.bias, logit)
    plain = layer_of("filter")
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if not name.startswith("output_gain.")})
    bias = layer.output_projection.bias
    torch.testing.assert_close(layer(x), share * (plain(x) - bias) + bias, rtol=EXACT, atol=EXACT)


def test_the_gain_is_that_of_the_query():
    """The tokens in another order, as queries of their own, have the same gains."""
    layer, x = layer_of("filter", output_gain=True), hidden()
    found = layer(x, query_states=x.flip(1), query_times=torch.arange(7.0).flip(0))
    torch.testing.assert_close(found, layer(x).flip(1), rtol=EXACT, atol=EXACT)


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


ROPE_OF_FOUR = rotary_frequencies(4, SIZE // 4)
GATED = {
    "gates": (DotProductAttention, {"frequency": ROPE_OF_FOUR, "gates": "forget"}, "gate_projection."),
    "gates with a sink": (
        DotProductAttention,
        {"frequency": ROPE_OF_FOUR, "gates": "forget", "sink": True},
        "gate_projection.",
    ),
    "clock of a filter": (RobustFilterAttention, {"clock": "content"}, "clock."),
    "clock of a dot product": (DotProductAttention, {"frequency": ROPE_OF_FOUR, "clock": "content"}, "clock."),
}


def heads_of(layer, x):
    """The estimate of each head before the output projection."""
    found, estimate = [], layer.estimate
    layer.estimate = lambda *states, **given: found.append(estimate(*states, **given)) or found[0]
    layer(x)
    del layer.estimate
    return found[0]


@cover(1, gated=[1, 2, 3], kind=GATED)
def test_each_head_is_that_of_a_layer_of_one_kind(kind, gated):
    """The first heads are those of a layer without gates, the last ones those of a layer with gates."""
    build, options, own = GATED[kind]
    some = perturb(build(SIZE, 4, gated_heads=gated / 4, **options)).double()
    every = build(SIZE, 4, **options).double()
    none = build(SIZE, 4, **{n: x for n, x in options.items() if n not in ("gates", "clock")}).double()
    shared = {n: x for n, x in some.state_dict().items() if not n.startswith(own)}
    none.load_state_dict(shared)
    gates = {n: torch.randn_like(x) for n, x in every.state_dict().items() if n.startswith(own)}
    gates = {n: torch.cat([x[: 4 - gated], some.state_dict()[n]]) for n, x in gates.items()}
    every.load_state_dict({**shared, **gates})
    x = hidden()
    expected = torch.cat([heads_of(none, x)[:, : 4 - gated], heads_of(every, x)[:, 4 - gated :]], 1)
    torch.testing.assert_close(heads_of(some, x), expected, rtol=EXACT, atol=EXACT)
