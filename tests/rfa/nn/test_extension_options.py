"""What holds for every extension of appendix E as an option of the layer, the cache and the model."""

import pytest
import torch
from cover import cover
from models.small import small, tokens
from shapes import only_our_own_checks

from rfa.models import RFAForCausalLM, preset
from rfa.models.flat import DEFAULTS as FLAT
from rfa.models.flat import flatten
from rfa.nn import FilterCache, RobustFilterAttention

from .by_hand import EXACT, hidden
from .cached import IRREGULAR, SITUATIONS, read
from .extended import DEFAULTS, EXTENSIONS, HEADS, SIZE, build


def test_defaults_leave_the_layer_as_it_is():
    torch.manual_seed(0)
    plain = RobustFilterAttention(SIZE, HEADS)
    torch.manual_seed(0)
    named = RobustFilterAttention(SIZE, HEADS, **DEFAULTS)
    assert plain.state_dict().keys() == named.state_dict().keys()
    assert not [name for name in plain.state_dict() if "noise." in name or "tempering" in name]
    assert torch.equal(plain(hidden(dtype=torch.float32)), named(hidden(dtype=torch.float32)))


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_parameter_gets_a_gradient(name):
    layer = build(torch.float32, **EXTENSIONS[name])
    generator = torch.Generator().manual_seed(2)
    layer(hidden(dtype=torch.float32)).mul(torch.randn(2, 7, SIZE, generator=generator)).sum().backward()
    for path, parameter in layer.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


@cover(1, situation=SITUATIONS, name=EXTENSIONS)
def test_chunks_are_the_whole(name, situation):
    layer, x, given = build(**EXTENSIONS[name]), hidden(length=9), SITUATIONS[situation]
    kept = given.get("key_mask", torch.ones(2, 9, dtype=torch.bool))
    with torch.no_grad():
        whole = layer(x, **given)
        pieces, _ = read(layer, x, **given)
    torch.testing.assert_close(pieces[kept], whole[kept], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_rows_without_keys_leave_gradients_finite(name):
    layer, x = build(torch.float32, **EXTENSIONS[name]), hidden(dtype=torch.float32)
    mask = torch.arange(7) >= torch.tensor([[0], [3]])
    layer(x, key_mask=mask)[mask].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step", {"step": "precise"}),
        ("noise", {"noise": "coloured"}),
        ("aggregation", {"aggregation": "mixture"}),
        ("prior", {"step": "precision", "prior": "flat"}),
        ("prior", {"step": "precision", "prior": "riccati"}),
        ("query_noise_in_bias", {"step": "precision", "query_noise_in_bias": True}),
        ("noise", {"noise": "time_dependent", "prior": "flat"}),
        ("noise", {"noise": "time_dependent", "prior": "riccati"}),
        ("prior", {"aggregation": "routing", "prior": "riccati"}),
        ("gate", {"aggregation": "routing", "gate": False}),
        ("query_noise_in_bias", {"aggregation": "routing", "query_noise_in_bias": True}),
        ("horizon", {"aggregation": "routing", "horizon": 0.7}),
        ("step", {"aggregation": "routing", "step": "precision"}),
        ("source_prior", {"source_prior": "exponential"}),
    ],
    ids=str,
)
def test_choices_that_exclude_each_other(name, options):
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: got .*expected"):
        RobustFilterAttention(SIZE, HEADS, **options)
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"\b{name}\b"):
        preset("m2-sc-rfa", **options)


def test_routing_has_neither_another_weight_nor_a_fused_backend():
    for name, given in (("weight", "exponential"), ("backend", "cpu")):
        with pytest.raises(ValueError, match=rf"^{name}: got '{given}'"):
            RobustFilterAttention(SIZE, HEADS, aggregation="routing", **{name: given})
    with pytest.raises(ValueError, match="score"):
        preset("m2.1-exponential", aggregation="routing")


def test_noise_on_irregular_times_has_no_fused_backend():
    layer, x = build(torch.float32, noise="time_dependent", backend="cpu"), hidden(length=9, dtype=torch.float32)
    assert layer(x).isfinite().all()
    for given in ({}, {"past_key_values": FilterCache()}):
        with torch.no_grad(), pytest.raises(ValueError, match="backend: got 'cpu' with time-dependent noise"):
            layer(x, times=IRREGULAR, **given)


@pytest.mark.parametrize("override", [{name: value} for name, value in [
    ("tie_key_value", True), ("step", "precision"), ("noise", "time_dependent"), ("aggregation", "routing"),
]], ids=str)  # fmt: skip
def test_in_the_model(override, tmp_path):
    model, ids = small("m2-sc-rfa", **override).train(), tokens()
    output = model(ids, labels=ids)
    assert (output.logits - small("m2-sc-rfa")(ids).logits).abs().max() > 1e-7
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval().save_pretrained(tmp_path)
    again = RFAForCausalLM.from_pretrained(tmp_path)
    assert {name: (FLAT | flatten(again.config.attention))[name] for name in DEFAULTS} == {**DEFAULTS, **override}
    assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=next(iter(override))):
        preset("b1-rope", **override)
