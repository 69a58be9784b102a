"""Saved folders of replaced models: loaded with their options, or refused."""

import copy
import json
import pickle

import pytest
import torch
from cover import cover
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from integrations.hosts import NAMES, host, tokens
from rfa.integrations import load_replaced, replace_attention

FREQUENCY = torch.tensor([[0.0, 0.1, 0.2, 0.3], [1.0, 2.0, 3.0, 4.0]])
OPTIONS = {
    "defaults": {},
    "all": {"decay": 0.1, "learn_decay": True, "rotate_values": True, "innovation": True},
    "weight": {"weight": "exponential"},
    "prior": {"prior": "lyapunov", "decay": torch.tensor([0.0, 0.1, 0.2, 0.3])},
    "layers": {"layers": [1]},
}


def trained(name, **options):
    model = replace_attention(host(name), **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


@cover(1, name=NAMES, options=OPTIONS, size=["50GB", "10KB"])
def test_a_saved_model_is_loaded_with_its_options(name, options, size, tmp_path):
    """GPT-2 ties its head. Small files make several shards."""
    model, ids = trained(name, **OPTIONS[options]), tokens()
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path, max_shard_size=size)
    again = load_replaced(tmp_path)
    assert not again.training
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.generate(ids, do_sample=False).shape == (2, 12)


@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_model_is_pickled_whole(name, tmp_path):
    """Also after it was used: a cache's notes are no part of it."""
    model, ids = trained(name, decay=0.1), tokens()
    expected = model(ids).logits
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for again in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(again(ids).logits, expected)
        assert torch.equal(again.generate(ids, max_new_tokens=3, do_sample=False), generated)


def test_files_of_two_saves_are_refused(tmp_path):
    replace_attention(host("llama")).save_pretrained(tmp_path)
    trained("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"folder: .*beside its parts"):
        load_replaced(tmp_path)


def test_frequencies_are_saved_where_the_models_own_would_be_refused(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    model = replace_attention(host("llama", rope_parameters=rope), frequency=FREQUENCY)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    again = load_replaced(tmp_path, backend="reference")
    assert again.dtype == torch.bfloat16
    layer = again.model.layers[1].self_attn
    assert layer.backend == "reference"
    assert torch.equal(layer.dynamics.frequency, FREQUENCY.repeat_interleave(2, 0))


@cover(1, dtype=["auto", "float32", torch.float32, torch.float16], device_map=[None, "cpu", "auto", {"": "cpu"}])
def test_dtype_and_devices_as_of_the_host(dtype, device_map, tmp_path):
    """The dynamics stay in float32, and so do the rotary frequencies of a layer that was not replaced."""
    model, ids = trained("llama", layers=[1]), tokens()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    again = load_replaced(tmp_path, dtype=dtype, device_map=device_map)
    expected = {"auto": torch.bfloat16, "float32": torch.float32}.get(dtype, dtype)
    assert (again.dtype, again.device.type) == (expected, "cpu")
    assert {x.dtype for x in again.model.layers[1].self_attn.dynamics.parameters()} == {torch.float32}
    wide = trained("llama", layers=[1])
    wide.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    tolerance = 0.0 if expected == torch.float32 else 0.1 if expected == torch.bfloat16 else 0.02  # 2^-8 and 2^-11
    logits = wide(ids).logits
    torch.testing.assert_close(again(ids).logits.float(), logits, rtol=0, atol=tolerance * float(logits.abs().max()))


@pytest.mark.parametrize(
    "given", [{"dtype": "int8"}, {"dtype": torch.int64}, {"dtype": "half of it"}, {"device_map": "x"}]
)
def test_unknown_dtypes_and_devices_are_refused(given, tmp_path):
    replace_attention(host("llama")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{next(iter(given))}: got "):
        load_replaced(tmp_path, **given)


def test_other_options_than_the_saved_ones_are_refused(tmp_path):
    """Also by `replace_attention`, to a model of the saved configuration."""
    trained("llama", innovation=True).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="innovation: got False, expected True"):
        replace_attention(again)
    replace_attention(again, innovation=True)


def test_a_configuration_that_models_share_stays_as_it_was():
    config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    first, second = (LlamaForCausalLM(config) for _ in range(2))
    replace_attention(first, innovation=True)
    replace_attention(second)
    assert not hasattr(config, "rfa_attention")
    assert first.config.rfa_attention["innovation"]
    assert first.config is first.model.config is first.model.layers[0].self_attn.config


SAVED = {"weight": "student_t", "prior": "riccati", "learn_decay": False, "rotate_values": False}
SAVED |= {"innovation": False, "layers": [0, 1]}
FAULTS = {
    "a model before": ({"rfa_attention": None}, "folder: .*expected config.json with rfa_attention"),
    "a text": ({"rfa_attention": "student_t"}, r"config\.rfa_attention: got 'student_t'"),
    "one more": ({"rfa_attention": SAVED | {"backend": "cpu"}}, r"config\.rfa_attention: got"),
    "a number": ({"rfa_attention": SAVED | {"innovation": 1}}, r"config\.rfa_attention: got"),
    "another weight": ({"rfa_attention": SAVED | {"weight": "gaussian"}}, "weight: got 'gaussian'"),
    "other layers": ({"rfa_attention": SAVED | {"layers": [0, 7]}}, r"layers: got \[0, 7\]"),
    "fewer layers": ({"rfa_attention": SAVED | {"layers": [1]}}, "folder: got 'foreign: model.layers.0"),
    "learned decay": ({"rfa_attention": SAVED | {"learn_decay": True}}, "folder: got 'missing: .*raw_decay"),
    "another size": ({"hidden_size": 64, "head_dim": 16}, "folder: .*expected weights"),
    "a decoder alone": ({"architectures": ["LlamaModel"]}, "folder: got 'LlamaModel'"),
    "code": ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "folder: .*custom code"),
}


@pytest.mark.parametrize(("fields", "message"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_configuration_is_refused(fields, message, tmp_path):
    replace_attention(host("llama")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    given = json.loads(file.read_text())
    assert given["rfa_attention"] == SAVED
    file.write_text(json.dumps(given | fields))
    (tmp_path / "own.py").write_text("raise RuntimeError('code was run')")
    with pytest.raises(ValueError, match=message):
        load_replaced(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "folder: .*expected config.json"),
        ("model.safetensors", "damaged", "folder: .*expected weights"),
        ("model.safetensors", None, "folder: .*no file named model.safetensors"),
        ("", None, "folder: .*a folder on this machine"),
    ],
)
def test_damaged_files_are_refused(name, text, message, tmp_path):
    replace_attention(host("llama")).save_pretrained(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    elif name:
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=message):
        load_replaced(tmp_path if name else tmp_path / "nothing")
