"""Decoders of transformers with the filter in them: against the model itself, the operator, and themselves uncached."""

from functools import partial

import pytest
import torch
from cover import cover
from shapes import only_our_own_checks
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
)

import rfa
from integrations.hosts import NAMES, assert_generation_is_consistent, generate, host, tokens
from rfa.integrations import ReplacedAttention, replace_attention
from rfa.integrations.replace_attention import first_temperature

ALL = {
    "weight": "student_t",
    "prior": "lyapunov",
    "decay": 0.1,
    "learn_decay": True,
    "rotate_values": True,
    "innovation": True,
}
PLAIN = {"weight": "exponential", "prior": "lyapunov"}


def replaced(name, options=ALL, **fields):
    return replace_attention(host(name, **fields), **options)


def test_exponential_weights_and_keys_of_equal_norms_leave_a_model_as_it_was():
    """Qwen3's norms have weights of one at first. Their keys have equal norms, and so scores are dot products."""
    ids, model = tokens(), host("qwen3")
    with torch.no_grad():
        before = model(ids).logits
        after = replace_attention(model, weight="exponential", prior="lyapunov")(ids).logits
        other = replace_attention(host("qwen3"))(ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=2e-4)  # process noise begins at 1e-6, not at 0
    assert (other - before).abs().max() > 0.05


def test_first_temperature_has_the_slope_of_the_dot_product():
    """By a finite difference of the operator's log weights of two keys."""
    for weight in ("student_t", "exponential"):
        beta = first_temperature(0.3, 2, weight)
        step, key = 1e-3, torch.zeros(1, 1, 2, 4, dtype=torch.float64)
        key[..., 1, 0] = step  # its scalar product with the query is `step` larger
        query = torch.ones(1, 1, 1, 4, dtype=torch.float64)
        numbers = {"decay": 0.0, "process_noise": 0.0, "key_noise": 1.0, "query_noise": 1.0, "noise_floor": 0.01}
        numbers |= {"robustness": 4.0, "inverse_temperature": beta}
        given = {name: torch.tensor([number], dtype=torch.float64) for name, number in numbers.items()}
        value = torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]], dtype=torch.float64)
        query = query * 1e-4  # near a residual of 0
        share = rfa.robust_filter_attention(
            query, key, value, frequency=torch.zeros(1, 2), rotate_values=False, causal=False, weight=weight, **given
        )[0, 0, 0, 0]
        slope = 0.3 * (step * 1e-4 - step**2 / 2)  # of q.k - |k|^2 / 2
        assert torch.logit(share).item() == pytest.approx(slope, rel=1e-3)


@cover(1, name=NAMES, options=[ALL, PLAIN, {}, {"decay": 0.2}])
def test_generation_is_the_same_without_a_cache_in_chunks_and_padded(name, options):
    assert_generation_is_consistent(replaced(name, options))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beams_crop_and_fixed_size_caches(name):
    model, ids = replaced(name), tokens()
    beams = {"num_beams": 3, "max_new_tokens": 8, "num_return_sequences": 2}
    assert torch.equal(generate(model, ids, **beams), generate(model, ids, use_cache=False, **beams))
    assert torch.equal(generate(model, ids), generate(model, ids, cache_implementation="static"))
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        cache.crop(-4)
        again = model(ids[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(again, model(ids).logits[:, 5:], rtol=1e-4, atol=1e-4)
    assistant = host(name)
    assert torch.equal(generate(model, ids[:1], assistant_model=assistant), generate(model, ids[:1]))


def test_a_cache_keeps_the_heads_of_the_keys_and_serves_again():
    model, ids, cache = replaced("llama"), tokens(), DynamicCache()
    generate(model, ids, past_key_values=cache)
    assert cache.layers[1].keys.shape == cache.layers[1].values.shape == (2, 2, 14, 8)
    with torch.no_grad():  # other parameters, after a reset
        for layer in model.model.layers:
            layer.self_attn.dynamics.raw_decay.add_(3.0)
    cache.reset()
    assert torch.equal(generate(model, ids, past_key_values=cache), generate(model, ids, use_cache=False))


@cover(1, name=NAMES, implementation=["sdpa", "eager", "flash"])
def test_packed_sequences_are_as_separate_ones(name, implementation):
    model, ids = replaced(name), tokens(1, 11)
    if implementation == "flash":  # its masks: none for packed sequences
        model.config._attn_implementation_internal = "no masks"
    else:
        model.set_attn_implementation(implementation)
    position_ids = torch.cat([torch.arange(4), torch.arange(7)])[None]
    with torch.no_grad():
        apart = torch.cat([model(part).logits for part in ids.split((4, 7), dim=1)], 1)
        for use_cache in (False, True):  # with an empty cache transformers' own masks would forget the sequences
            together = model(ids, position_ids=position_ids, use_cache=use_cache).logits
            torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_is_the_operator_on_the_models_states(own):
    """All options; shared keys; the frequencies of the model's RoPE, or others for each head of keys."""
    frequency = torch.tensor([[0.0, 0.1, 0.2, 0.3], [1.0, 2.0, 3.0, 4.0]])
    model = replaced("llama", ALL | ({"frequency": frequency} if own else {}))
    layer, x = model.model.layers[0].self_attn, torch.randn(2, 7, 32)
    heads = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
    query, key, value = (states.unflatten(-1, (-1, 8)).transpose(1, 2) for states in heads)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    dynamics = layer.dynamics()
    expected = frequency[1] if own else -(10000.0 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(dynamics["frequency"][3], expected)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[0, :2] = False
    estimate = rfa.robust_filter_attention(query, key, value, key_mask=keep, **dynamics)
    expected = layer.o_proj((estimate - value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, attention_mask=keep.long())[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_gradient(name):
    """Gradient checkpointing changes none of them."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if name == "gpt2" else {}
    model, ids = replaced(name, **dropout), tokens(4, 12)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append({key: weight.grad.clone() for key, weight in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, key
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-6)


def test_dynamics_stay_in_full_precision_and_dropout_drops():
    model = replaced("llama", attention_dropout=0.5)
    layer, ids = model.model.layers[0].self_attn, tokens()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.to(torch.bfloat16).eval()
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert {x.dtype for x in layer.dynamics.state_dict().values()} == {torch.float32}
    assert model(ids).logits.dtype == torch.bfloat16


def test_some_layers_keep_the_models_attention():
    model = replace_attention(host("qwen2"), layers=[1], decay=torch.tensor([0.0, 0.1, 0.2, 0.3]))
    kinds = [isinstance(layer.self_attn, ReplacedAttention) for layer in model.model.layers]
    assert kinds == [False, True]
    ids = tokens()
    assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False))


def bert():
    return BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32))


def crossed():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, add_cross_attention=True, vocab_size=9))


def on_meta():
    return host("llama").to("meta")


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (bert, {}, "model: got 'BertModel', expected a decoder of transformers with LlamaAttention"),
        (lambda: None, {}, "model: got 'NoneType', expected a decoder"),
        (lambda: replaced("llama"), {}, "model: got 'LlamaForCausalLM, replaced already'"),
        (crossed, {}, "model: got .*which is cross attention"),
        (partial(host, "qwen2", **WINDOW), {}, "model: got .*sliding window of 4"),
        (partial(host, "gpt2", n_embd=28), {}, "model: got .*7 channels a head.*even"),
        (partial(host, "llama"), {"layers": [2]}, r"layers: got \[2\], expected some of \[0, 1\]"),
        (partial(host, "llama"), {"layers": []}, "layers: got"),
        (partial(host, "llama"), {"layers": 1}, "layers: got 1,"),
        (partial(host, "llama"), {"layers": ["a", 0]}, r"layers: got \['a', 0\]"),
        (partial(host, "llama"), {"decay": None}, "decay: got None, expected a number or a tensor"),
        (partial(host, "llama"), {"decay": "a"}, "decay: got 'a'"),
        (partial(host, "llama"), {"innovation": "no"}, "innovation: got 'no', expected True or False"),
        (on_meta, {}, "model: got 'LlamaForCausalLM on the device meta', expected a model with weights"),
        (partial(host, "llama"), {"weight": "gaussian"}, "weight: got 'gaussian'"),
        (partial(host, "llama"), {"prior": "flat"}, "prior: got 'flat'"),
        (partial(host, "llama"), {"backend": "gpu"}, "backend: got 'gpu'"),
        (partial(host, "llama"), {"decay": -1.0}, "decay: got"),
        (partial(host, "llama"), {"decay": torch.ones(3)}, r"decay: .*\(4,\)"),
        (partial(host, "llama"), {"frequency": torch.ones(4, 4)}, r"frequency: got \(4, 4\), expected shape \(2, 4\)"),
        (partial(host, "llama"), {"frequency": "own"}, "frequency: got 'own'"),
        (
            partial(host, "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            {},
            "frequency: got \"'host' with RoPE of type 'dynamic'",
        ),
        (
            partial(host, "llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
            {},
            "frequency: got \"'host' with RoPE of type 'yarn'",
        ),
        (partial(host, "llama", attention_dropout=0.1), {"backend": "cpu"}, "backend: got 'cpu'.*dropout"),
    ],
)
def test_what_is_not_served_is_refused_and_changes_nothing(model, options, message):
    model = model()
    before = [type(module) for module in model.modules()] if model else []
    with only_our_own_checks(), pytest.raises(ValueError, match=message):
        replace_attention(model, **options)
    assert before == ([type(module) for module in model.modules()] if model else [])
