"""Checks of transformers' `ModelTesterMixin` that no other file has; README.md has the list."""

import copy
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rfa.models import RFAForCausalLM, RFAForMaskedLM, RFAForSequenceClassification, RFAForTokenClassification, preset

from .small import PATHS, RELATIVE, SIZES, assert_same, small, tokens
from .test_persistence import assert_same_state, moved

HERE = Path(__file__).parent
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
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    assert set(index.values()) == shards
    assert ("lm_head.weight" in index) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(loaded.state_dict(), model.state_dict())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("name", PATHS)
def test_torch_save_and_pickle(name, tmp_path):
    model, other, ids = moved(name), small(name, seed=1), tokens()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    expected = model(ids).logits
    for again in (other, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(again(ids).logits, expected)
        assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("name", PATHS)
def test_a_row_alone_is_the_row_in_a_batch(name):
    model, ids = small(name), tokens(3)
    assert_same(torch.cat([model(row[None]).logits for row in ids]), model(ids).logits)
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", RELATIVE)
def test_right_padding_changes_nothing(name):
    model, ids = small(name), tokens()
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    assert_same(model(ids, attention_mask=mask).logits[:, :6], model(ids[:, :6]).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_tuples_are_dictionaries(kind):
    model, given = built(kind), {"output_hidden_states": True, "output_attentions": True}
    named = model(tokens(), **given)
    whole = model(tokens(), return_dict=False, **given)
    flat = tuple(value for value in named.values() if value is not None)
    assert len(whole) == len(flat)
    for first, second in zip(whole, flat, strict=True):
        for x, y in zip(*([x] if torch.is_tensor(x) else x for x in (first, second)), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", PATHS)
def test_hidden_states_and_weights_keep_their_gradients(name):
    model = small(name).train()
    output = model(tokens(), output_hidden_states=True, output_attentions=True)
    kept = [output.hidden_states[0], output.attentions[0]]
    kept[0].retain_grad()
    (output.logits.sum() + output.attentions[0].square().sum()).backward()
    assert kept[0].grad.isfinite().all()
    assert kept[0].grad.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_got_and_set(kind):
    model, new = built(kind), nn.Embedding(61, 32)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    model.set_input_embeddings(new)
    assert model.model.embed_tokens is model.get_input_embeddings() is new
    assert model.main_input_name == "input_ids"
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [70, 40])
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


def test_an_untied_head_grows_with_its_embedding():
    model = small("m2-sc-rfa", tie_word_embeddings=False)
    model.resize_token_embeddings(70)
    assert model.lm_head.weight.shape == (70, 32)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert model(tokens(vocabulary=70)).logits.shape[-1] == 70


@pytest.mark.parametrize("problem", ["regression", "single_label_classification", "multi_label_classification"])
def test_problem_types(problem):
    labels = {"regression": torch.rand(2, 3), "single_label_classification": torch.tensor([0, 2])}
    labels["multi_label_classification"] = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    losses = {"regression": nn.MSELoss(), "single_label_classification": nn.CrossEntropyLoss()}
    losses["multi_label_classification"] = nn.BCEWithLogitsLoss()
    model = built(RFAForSequenceClassification, num_labels=3, problem_type=problem)
    output = model(tokens(), labels=labels[problem])
    torch.testing.assert_close(output.loss, losses[problem](output.logits, labels[problem]))
    output.loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_made_without_memory_and_loaded(kind, tmp_path):
    model = built(kind)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = kind(model.config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in model.named_parameters()]
    loaded = kind.from_pretrained(tmp_path, low_cpu_mem_usage=True)
    assert_same_state(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", PATHS)
def test_every_tensor_is_a_parameter_or_a_buffer(name):
    for module in small(name).modules():
        assert not [key for key, value in vars(module).items() if torch.is_tensor(value)]


def test_a_head_of_another_size_is_new_if_asked_for(tmp_path):
    built(RFAForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        RFAForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    model = RFAForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model(tokens()).logits.shape == (2, 5)


def test_inputs_that_require_gradients():
    """For adapters on a frozen model with gradient checkpointing of the older kind."""
    model = small("m2-sc-rfa").train()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model(tokens(), labels=tokens()).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("layers.1." in name)


def test_the_list_names_tests_that_exist():
    """The right column of README.md."""
    sources = {path.relative_to(HERE.parent).as_posix(): path.read_text("utf-8") for path in HERE.parent.rglob("*.py")}
    ours = " ".join(line.split("|")[2] for line in (HERE / "README.md").read_text("utf-8").splitlines() if "|" in line)
    files = re.findall(r"`((?:\w+/)?test_\w+\.py)`", ours)
    assert len(files) > 30
    assert not [name for name in files if not {name, f"models/{name}"} & sources.keys()]
    defined = set(re.findall(r"def (test_\w+)", " ".join(sources.values())))
    assert not [name for name in re.findall(r"`(test_\w+)[`\[]", ours) if name not in defined]
