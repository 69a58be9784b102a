"""What adapters and quantisation find in a model: which layers they take, and how far int8 moves the outputs."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from .small import ONE_OF_EACH, PATHS, assert_same, small, tokens

# torch.ao has 8 bits for weights and 7 for activations, with one scale a layer: a few per cent after two blocks
INT8 = 0.08


def relative_error(actual, expected):
    return float((actual - expected).detach().square().mean().sqrt() / expected.detach().square().mean().sqrt())


def linear_layers(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name", ["m2-sc-rfa", "c4-fox", "x6-content-dynamics"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_int8_takes_every_layer(name):
    """All projections and the feed-forward network; not a gate, whose sums over tokens need full precision."""
    model, ids = small(name), tokens()
    expected, found = model(ids).logits, linear_layers(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(quantised.get_submodule(layer)) is nn.Linear for layer in found)
    assert len(found) == 2 * 6 + 3  # blocks; the projections around them; the head
    assert 0 < relative_error(quantised(ids).logits, expected) < INT8
    assert quantised.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_lora_without_target_modules(name):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(small(name), peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    trained = [key for key, parameter in adapted.named_parameters() if parameter.requires_grad]
    places = {key.split(".lora_")[0].rsplit(".", 1)[1] for key in trained}
    assert places == {"query_projection", "value_projection"}


@pytest.mark.parametrize("name", PATHS)
def test_lora_in_every_linear_layer(name):
    """Adapters that are not zero get gradients, and are the same when they are merged into the weights."""
    peft = pytest.importorskip("peft")
    model, ids = small(name, num_hidden_layers=1), tokens()
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    trained = {key: parameter for key, parameter in adapted.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for key, parameter in trained.items():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    logits = adapted(input_ids=ids, labels=ids).logits
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert not [key for key, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()]
    assert_same(adapted.merge_and_unload()(ids).logits, logits)


@pytest.mark.parametrize("options", [{"trainable_token_indices": [3, 5]}, {"modules_to_save": ["embed_tokens"]}])
def test_a_head_without_its_bias_is_said(options, tmp_path):
    """PEFT drops the bias of a tied head. An untied one keeps it, merged and saved too."""
    peft = pytest.importorskip("peft")
    ids, config = tokens(), partial(peft.LoraConfig, task_type="CAUSAL_LM", r=2, **options, ensure_weight_tying=True)
    tied, untied = small("rfa"), small("rfa", tie_word_embeddings=False)
    torch.nn.init.normal_(untied.lm_head.bias)
    with pytest.warns(UserWarning, match="^lm_head: got .* without a bias, .*tie_word_embeddings=False"):
        peft.get_peft_model(tied, config())
    expected = untied(ids).logits
    with warnings.catch_warnings(record=True) as said:
        adapted = peft.get_peft_model(untied, config())
        assert_same(adapted(input_ids=ids).logits, expected)
        adapted.merge_and_unload().save_pretrained(tmp_path)
    assert not [each for each in said if "without a bias" in str(each.message)]
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["m2-sc-rfa", "b1-rope"])
@pytest.mark.parametrize("tuning", ["prompt", "p-tuning"])
def test_prompts_in_front_of_a_cache(tuning, name, padded):
    """peft puts prompts before the first token. With a cache and without one the same tokens follow."""
    peft = pytest.importorskip("peft")
    model, ids = small(name), tokens(2, 6)
    of = {"prompt": peft.PromptTuningConfig, "p-tuning": partial(peft.PromptEncoderConfig, encoder_hidden_size=8)}
    tuned = peft.get_peft_model(model, of[tuning](task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    cached = tuned.generate(**options, return_dict_in_generate=True, output_logits=True)
    whole = tuned.generate(**options, use_cache=False, return_dict_in_generate=True, output_logits=True)
    for one, other in zip(cached.logits, whole.logits, strict=True):
        assert_same(one, other)
