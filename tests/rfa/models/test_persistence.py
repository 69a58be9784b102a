"""Saved, loaded, cast and found again by transformers' Auto classes."""

import copy
import pickle

import pytest
import torch
from cover import cover
from transformers import AutoConfig, AutoModelForCausalLM

from rfa.models import (
    RFAConfig,
    RFAForCausalLM,
    RFAForMaskedLM,
    RFAForSequenceClassification,
    RFAForTokenClassification,
    preset,
)

from .small import ONE_OF_EACH, PATHS, SIZES, small, tokens


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


def in_full_precision(model):
    return {name: value for name, value in model.state_dict().items() if ".dynamics." in name or ".geometry." in name}


@cover(1, name=ONE_OF_EACH, dtype=[torch.bfloat16, torch.float16])
def test_a_load_in_half_precision_keeps_the_dynamics(name, dtype, tmp_path):
    model = moved(name)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.model.embed_tokens.weight.dtype == dtype
    assert loaded.model.layers[0].attention.query_projection.weight.dtype == dtype
    assert_same_state(in_full_precision(loaded), in_full_precision(model))
    assert loaded(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_save_in_half_precision_keeps_the_dynamics(name, tmp_path):
    model = moved(name).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same_state(loaded.state_dict(), model.state_dict())


KINDS = [RFAForCausalLM, RFAForMaskedLM, RFAForSequenceClassification, RFAForTokenClassification]


def built(kind, **fields):
    torch.manual_seed(0)
    config = preset("m2-sc-rfa", **SIZES, causal=kind is not RFAForMaskedLM, pad_token_id=60)
    for name, value in fields.items():
        setattr(config, name, value)
    return kind(config).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_round_trip(tied, tmp_path):
    """`max_shard_size`: several safetensors files with an index, and none of another format."""
    model = moved("m2-sc-rfa", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    files = {path.name for path in tmp_path.iterdir()}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) > 3
    assert files == {*shards, "config.json", "generation_config.json", "model.safetensors.index.json"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_torch_save_and_pickle(name, tmp_path):
    model, other, ids = moved(name), small(name, seed=1), tokens()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    expected = model(ids).logits
    for again in (other, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(again(ids).logits, expected)
        assert again.lm_head.weight is again.model.embed_tokens.weight


@cover(1, kind=KINDS, size=[70, 40])
def test_vocabularies_of_another_size(kind, size, tmp_path):
    """The numbers of the tokens that remain do not change, and the model is saved and loaded with the new size."""
    model = built(kind)
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(size)
    common = min(size, 61)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
    assert torch.equal(model.get_input_embeddings().weight[:common], before[:common])
    ids = tokens(vocabulary=common)[:1]
    output = model(ids)
    if (head := model.get_output_embeddings()) is not None:
        assert head.weight is model.get_input_embeddings().weight
        assert output.logits.shape[-1] == len(head.bias) == size
    model.save_pretrained(tmp_path)
    assert torch.equal(kind.from_pretrained(tmp_path)(ids).logits, output.logits)
