"""Saved, loaded, cast and found again by transformers' Auto classes."""

import pytest
import torch
from cover import cover
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rfa.models import RFAConfig, RFAForCausalLM, RFAModel

from .small import PATHS, small, tokens


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


@pytest.mark.parametrize("name", PATHS)
def test_round_trip_is_bitwise(name, tmp_path):
    model = moved(name)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RFAConfig)
    fields = {key: getattr(model.config, key) for key in RFAConfig.field_names()}
    assert {key: getattr(config, key) for key in RFAConfig.field_names()} == fields
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, RFAForCausalLM)
    assert not loaded.training
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


LEARNED = {
    **dict.fromkeys(("learn_frequencies", "learn_decay", "learn_horizon", "learn_noise_floor"), True),
    "horizon": 0.7,
    "process_noise_as": "steady_state",
}


def test_round_trip_of_learned_dynamics(tmp_path):
    model = moved("m2-sc-rfa", **LEARNED)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def in_full_precision(model):
    return {name: value for name, value in model.state_dict().items() if ".dynamics." in name or ".geometry." in name}


@cover(1, name=PATHS, dtype=[torch.bfloat16, torch.float16])
def test_a_load_in_half_precision_keeps_the_dynamics(name, dtype, tmp_path):
    model = moved(name)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.model.embed_tokens.weight.dtype == dtype
    assert loaded.model.layers[0].attention.query_projection.weight.dtype == dtype
    assert_same_state(in_full_precision(loaded), in_full_precision(model))
    assert loaded(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("name", PATHS)
def test_a_save_in_half_precision_keeps_the_dynamics(name, tmp_path):
    model = moved(name).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same_state(loaded.state_dict(), model.state_dict())


def test_the_decoder_without_head(tmp_path):
    model = moved("m2-sc-rfa")
    model.save_pretrained(tmp_path)
    decoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(decoder, RFAModel)
    expected = model.model(tokens()).last_hidden_state
    assert torch.equal(decoder(tokens()).last_hidden_state, expected)
