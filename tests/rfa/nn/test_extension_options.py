"""What holds for every extension of appendix E as an option of the layer, the cache and the model."""

import pytest
import torch
from models.small import small, tokens

from rfa.models import RFAForCausalLM, preset
from rfa.models.flat import DEFAULTS as FLAT
from rfa.models.flat import flatten
from rfa.nn import FilterCache, RobustFilterAttention

from .by_hand import hidden
from .layers import HEADS, IRREGULAR, SIZE, build

DEFAULTS = {"tie_key_value": False, "step": "learned", "noise": "constant", "aggregation": "consensus"}


def test_defaults_leave_the_layer_as_it_is():
    torch.manual_seed(0)
    plain = RobustFilterAttention(SIZE, HEADS)
    torch.manual_seed(0)
    named = RobustFilterAttention(SIZE, HEADS, **DEFAULTS)
    assert plain.state_dict().keys() == named.state_dict().keys()
    assert not [name for name in plain.state_dict() if "noise." in name or "tempering" in name]
    assert torch.equal(plain(hidden(dtype=torch.float32)), named(hidden(dtype=torch.float32)))


def test_noise_on_irregular_times_has_no_fused_backend():
    layer, x = build("noise", torch.float32, backend="cpu"), hidden(length=9, dtype=torch.float32)
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
