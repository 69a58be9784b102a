"""What sets the controls apart: each is a baseline in a limit, and leaves it where it should."""

import pytest
import torch
from cover import cover

from .small import EXACT, SIZES, assert_same, small, tokens


def as_(name, other, **options):
    """The model `name` with the weights of the model `other`, and that one."""
    model, base = small(name, **options), small(other, **options)
    weights = {key: value for key, value in base.state_dict().items() if "geometry" not in key}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("geometry" in key or "gate_projection" in key for key in missing)
    return model, base


def logits(model, ids, **given):
    with torch.no_grad():
        return model(ids, **given).logits


def test_nope_is_rope_that_does_not_turn():
    nope, rope = as_("c1-nope", "b1-rope", dtype=torch.float64)
    for layer in rope.model.layers:
        layer.attention.geometry.frequency.zero_()
    assert_same(logits(nope, tokens(length=20)), logits(rope, tokens(length=20)), EXACT)


def test_without_forgetting_it_is_nope():
    fox, nope = as_("c4-fox", "c1-nope", dtype=torch.float64)
    ids = tokens(length=20)
    assert (logits(fox, ids) - logits(nope, ids)).abs().max() > 1e-3
    for layer in fox.model.layers:
        torch.nn.init.zeros_(layer.attention.gate_projection.weight)
        torch.nn.init.constant_(layer.attention.gate_projection.bias, 100.0)  # 1 - f = 4e-44
    assert_same(logits(fox, ids), logits(nope, ids), EXACT)


def test_constant_gains_are_alibi():
    """`log K + sum log(1 - K)` is linear in the lag where the content says nothing: c7."""
    gains, alibi = as_("x4-content-riccati", "c7-rope-alibi-innovation", dtype=torch.float64)
    ids = tokens(length=20)
    assert (logits(gains, ids) - logits(alibi, ids)).abs().max() > 1e-3
    for layer, other in zip(gains.model.layers, alibi.model.layers, strict=True):
        torch.nn.init.zeros_(layer.attention.gate_projection.weight)
        remembered = torch.exp(-other.attention.slopes())
        layer.attention.gate_projection.bias.data.copy_(torch.log(remembered / (1 - remembered)))
    assert_same(logits(gains, ids), logits(alibi, ids), EXACT)


@cover(
    1,
    situation=["plain", "segments", "padding", "irregular"],
    name=[
        "c4-fox",
        "x3-rotation-riccati",
        "x4-content-riccati",
        "c7-rope-alibi-innovation",
        "x5-content-clock",
        "c8-fox-clock",
    ],
)
def test_fused_gradients_are_the_dense_ones(name, situation):
    """float32 on the fused kernel against float64 in autograd code, every parameter."""
    ids = tokens(length=37)
    given = {
        "plain": {},
        "segments": {"segment_ids": torch.tensor([[0, 1] * 9 + [2] * 19, [3] * 37])},
        "padding": {"attention_mask": (torch.arange(37) >= torch.tensor([0, 7])[:, None]).long()},
        "irregular": {"times": torch.arange(37.0) ** 1.3},
    }[situation]
    seen = given.get("attention_mask", torch.ones_like(ids)).bool()
    gradients = []
    for dtype in (torch.float32, torch.float64):
        model = small(name, dtype=dtype).train()
        model(ids, labels=ids.masked_fill(~seen, -100), **given).loss.backward()
        gradients.append({key: parameter.grad.double() for key, parameter in model.named_parameters()})
    for key, expected in gradients[1].items():
        error = (gradients[0][key] - expected).norm()
        # a thousand roundings of 1.2e-7 or less; key biases have no gradient but rounding
        assert error <= 1e-4 * expected.norm() + 1e-7, (key, error, expected.norm())


@pytest.mark.parametrize(("name", "learned"), [("x3-rotation-riccati", 2), ("x6-content-dynamics", 4)])
def test_noises_are_learned_as_dynamics(name, learned):
    """Slopes are noises. The map from the content to dynamics is a projection, and learns as one."""
    model = small(name)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    found = [names[id(parameter)].rsplit(".", 1)[1] for parameter in model.sde_parameters()]
    assert len(found) == learned * SIZES["num_hidden_layers"]
    assert all(key.startswith("raw_") for key in found)
