"""Saved, loaded, cast and found again by transformers' Auto classes."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rfa.models import RFAConfig, RFAForCausalLM, RFAModel, preset

from .small import NAMES, SIZES, small, tokens


def moved(name, **overrides):
    """A model whose every parameter, dynamics included, is no longer at its start."""
    model = small(name, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_bitwise(name, tmp_path):
    model = moved(name)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RFAConfig)
    fields = {key: getattr(model.config, key) for key in RFAConfig.__annotations__}
    assert {key: getattr(config, key) for key in RFAConfig.__annotations__} == fields
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, RFAForCausalLM)
    assert not loaded.training
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


LEARNED = {"learn_frequencies": True, "learn_decay": True, "horizon": 0.7, "learn_horizon": True}


def test_round_trip_of_learned_dynamics(tmp_path):
    model = moved("m2-sc-rfa", **LEARNED)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def in_full_precision(model):
    return {name: value for name, value in model.state_dict().items() if ".dynamics." in name or ".geometry." in name}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_load_in_half_precision_keeps_the_dynamics(name, dtype, tmp_path):
    model = moved(name)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.model.embed_tokens.weight.dtype == dtype
    assert loaded.model.layers[0].attention.query_projection.weight.dtype == dtype
    assert_same_state(in_full_precision(loaded), in_full_precision(model))
    assert loaded(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_save_in_half_precision_keeps_the_dynamics(name, tmp_path):
    model = moved(name).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same_state(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_made_in_half_precision_has_the_same_dynamics(name):
    config = preset(name, **{**SIZES, "num_attention_heads": 16, "hidden_size": 64})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert_same_state(in_full_precision(model), in_full_precision(RFAForCausalLM(config)))


def test_the_decoder_without_head(tmp_path):
    model = moved("m2-sc-rfa")
    model.save_pretrained(tmp_path)
    decoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(decoder, RFAModel)
    expected = model.model(tokens()).last_hidden_state
    assert torch.equal(decoder(tokens()).last_hidden_state, expected)


def test_the_file_says_what_it_is(tmp_path):
    preset("m3-sc-rfa", **SIZES).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "rfa"
    attention = written["attention"]
    assert (attention["kind"], attention["steady_state"]) == ("filter", 0.5)
    assert attention["decay"] == {"kind": "spectral", "damping": 5.0, "zero_heads": 0}


def test_a_damaged_file_is_refused(tmp_path):
    preset("m3-sc-rfa", **SIZES).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"spectral"', '"spectrum"'))
    with pytest.raises(ValueError, match="decay"):
        AutoConfig.from_pretrained(tmp_path)
