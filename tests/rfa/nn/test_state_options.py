"""Normalised states, dropout and shared keys, by hand in numpy."""

import math

import pytest
import torch
from ops import oracle

from rfa.dynamics import rotary_frequencies
from rfa.models import PRESETS
from rfa.nn import DotProductAttention, RobustFilterAttention
from rfa.ops.positions import checked_positions

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


# Dropout, shared keys and what a layer lacks, by preset

HIDDEN, KEYS = 16, 9


def layer(preset, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return PRESETS[preset].build(HIDDEN, HEADS, 4, **options).to(dtype)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    times = torch.rand(2, KEYS, generator=generator, dtype=torch.float64).add(0.2).cumsum(1)
    states = torch.randn(2, KEYS, HIDDEN, generator=generator).to(dtype)
    mask = torch.ones(2, KEYS, dtype=torch.bool)
    mask[1, 2] = False
    return states, times, mask


@pytest.mark.parametrize("preset", ["m2-sc-rfa", "b1-rope", "b3-decayed-rope"])
def test_dropout_is_right_on_average_and_off_outside_training(preset):
    attention, plain = layer(preset, dropout=0.4), layer(preset)
    keys, times, mask = data()
    expected = plain(keys, times=times, key_mask=mask)
    torch.testing.assert_close(attention.eval()(keys, times=times, key_mask=mask), expected)
    attention.train()
    with torch.no_grad():
        many = attention(keys.repeat(1000, 1, 1), times=times.repeat(1000, 1), key_mask=mask.repeat(1000, 1))
    draws = many.unflatten(0, (1000, 2))
    error = draws.std(0) / math.sqrt(1000)
    assert ((draws.mean(0) - expected).abs() <= 5 * error + 1e-9).all()  # five standard errors
    assert draws.std(0).max() > 0.01
    one = attention(keys, times=times, key_mask=mask)
    one.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


def test_nothing_that_positions_have_may_stand_beside_them():
    attention, (keys, times, mask) = layer("m2-sc-rfa"), data()
    positions = checked_positions(2, KEYS, KEYS, keys.device, times, None, mask)
    torch.testing.assert_close(attention(keys, positions=positions), attention(keys, times=times, key_mask=mask))
    for name, value in (("times", times), ("key_mask", mask)):
        with pytest.raises(ValueError, match=rf"^{name}: got 'given beside positions'"):
            attention(keys, positions=positions, **{name: value})
