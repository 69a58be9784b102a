"""What sets the controls apart: each is a baseline in a limit, and leaves it where it should."""

import pytest
import torch
from cover import cover
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rfa.dynamics import rotary_frequencies
from rfa.nn import Yarn
from rfa.ops.positions import checked_positions

from .small import EXACT, SIZES, assert_same, small, tokens

TRAINED = SIZES["train_length"]


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


@pytest.mark.parametrize("name", ["c2-window", "c3-yarn"])
def test_up_to_the_training_length_it_is_b1(name):
    control, rope = as_(name, "b1-rope")
    ids = tokens(length=TRAINED)
    assert torch.equal(logits(control, ids), logits(rope, ids))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert_same(logits(control, ids, attention_mask=mask)[1], logits(rope, ids, attention_mask=mask)[1])
    beyond = tokens(length=TRAINED + 1)
    assert (logits(control, beyond) - logits(rope, beyond)).abs().max() > 1e-4


@cover(1, modes=[8, 32, 64], trained=[16, 128, 512, 4096], scale=[1.5, 2.0, 8.0])
def test_yarn_is_transformers_own(modes, trained, scale):
    config = LlamaConfig(hidden_size=2 * modes, num_attention_heads=1, head_dim=2 * modes)
    original = {"original_max_position_embeddings": trained, "rope_theta": 10000.0}
    config.rope_parameters = {"rope_type": "yarn", "factor": scale, **original}
    expected, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    frequency, unit = rotary_frequencies(1, modes), torch.zeros(1, 1, 1, 2 * modes, dtype=torch.float64)
    unit[..., :modes] = 1.0  # 1 + 0i in each mode
    length = round(scale * trained)
    yarn = Yarn(trained)
    found = yarn.scale(checked_positions(1, length, length, torch.device("cpu"), None))
    assert found is not None
    assert found.unique().tolist() == [scale]
    turned = yarn.rotate(unit, frequency, torch.tensor([[1.0]]), found[:, -1:])[0, 0, 0]
    real, imaginary = turned.chunk(2)
    # float32 powers, in the angles and in transformers' numbers
    torch.testing.assert_close(torch.atan2(imaginary, real).float(), expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(torch.hypot(real, imaginary), torch.full_like(real, temperature), rtol=1e-12, atol=0)


def test_yarn_measures_each_sequence():
    """Padding and the other texts of a pack do not make a text longer."""
    model, ids = small("c3-yarn", dtype=torch.float64), tokens(length=20)
    mask = (torch.arange(27) >= torch.tensor([7, 7])[:, None]).long()
    padded = logits(model, torch.cat([ids[:, :7], ids], 1), attention_mask=mask)[:, 7:]
    assert_same(padded, logits(model, ids), EXACT)
    segments = torch.tensor([[0] * 20 + [1] * 5] * 2)
    packed = logits(model, torch.cat([ids, ids[:, :5]], 1), segment_ids=segments)
    assert_same(packed, torch.cat([logits(model, ids), logits(model, ids[:, :5])], 1), EXACT)


def test_a_cache_beyond_the_training_length_is_refused_by_yarn():
    model, ids = small("c3-yarn"), tokens(length=TRAINED + 1)
    with torch.no_grad():
        past = model(ids[:, :-1], use_cache=True).past_key_values
        whole = model(ids, use_cache=True)
        assert_same(whole.logits, model(ids, use_cache=False).logits)
        with pytest.raises(ValueError, match="got 'a sequence of 18 keys'"):
            model(ids[:, -1:], past_key_values=whole.past_key_values)
        with pytest.raises(
            ValueError, match="past_key_values: got 'a sequence of 17 keys', expected at most train_length"
        ):
            model(ids[:, -1:], past_key_values=past)


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
