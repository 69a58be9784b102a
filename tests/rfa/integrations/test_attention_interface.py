"""The attention "rfa" of transformers against its formula, the operator, and generation without a cache."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, OlmoConfig, OlmoForCausalLM

import rfa
from integrations.hosts import NAMES, assert_generation_is_consistent, generate, host, padded, tokens
from rfa.integrations import student_t_attention

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": 0}
OTHERS = {"olmo": (OlmoConfig, OlmoForCausalLM), "gemma": (GemmaConfig, GemmaForCausalLM)}
LAYER = nn.Identity()  # without `is_causal`, which then is True


def model_of(name):
    if name in OTHERS:
        torch.manual_seed(0)
        config, kind = OTHERS[name]
        model = kind(config(**SIZES | ({"head_dim": 8} if name == "gemma" else {}))).eval()
    else:
        model = host(name)
    model.set_attn_implementation("rfa")
    return model


def states(queries=9):
    query, key, value = (torch.randn(2, heads, length, 8) for heads, length in ((4, queries), (2, 9), (2, 9)))
    return query, key, value


def test_it_is_its_formula_and_the_operator_without_rotation():
    query, key, value = states()
    got, weights = student_t_attention(LAYER, query, key, value, None, scaling=0.7)
    assert weights is None
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    freedom = 4 * 8 / 2
    score = -0.7 * freedom / 2 * torch.log1p(torch.cdist(query, key).square() / freedom)
    earlier = torch.ones(9, 9).tril().bool()
    expected = score.masked_fill(~earlier, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(got.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
    numbers = dict.fromkeys(("decay", "process_noise", "key_noise", "query_noise"), 0.0)
    numbers |= {"noise_floor": 1.0, "robustness": 4.0, "inverse_temperature": 0.7 * freedom / 10}
    given = {name: torch.full((4,), number) for name, number in numbers.items()}
    same = rfa.robust_filter_attention(query, key, value, frequency=torch.zeros(4, 4), **given)
    torch.testing.assert_close(got.transpose(1, 2), same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_generation_is_the_same_without_a_cache_and_padded(name):
    model, ids = model_of(name), tokens()
    logits = assert_generation_is_consistent(model)
    if name in NAMES:
        assert (logits - host(name)(ids).logits).abs().max() > 0.05
    beams = {"num_beams": 3}
    assert torch.equal(generate(model, ids, **beams), generate(model, ids, use_cache=False, **beams))


def test_it_is_chosen_by_name_and_trains(tmp_path):
    host("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rfa").train()
    ids = tokens()
    torch.testing.assert_close(model(ids).logits, model_of("llama")(ids).logits)
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
    query, key, value = states()
    dropped = student_t_attention(LAYER, query, key, value, None, dropout=0.5)[0]
    assert not torch.equal(dropped, student_t_attention(LAYER, query, key, value, None)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": False}, "is_causal: got False"),
        ({"softcap": 50.0}, "softcap: got 50.0"),
        ({"s_aux": torch.zeros(4)}, "s_aux: got"),
    ],
)
def test_other_attention_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        student_t_attention(LAYER, *states(), None, **options)


def test_windows_and_caches_of_fixed_size_are_refused():
    """A window is named as such, and so is the cache where there is padding too."""
    longer, mask = padded(tokens(), 3)
    for ids, given in ((tokens(), {}), (longer, {"attention_mask": mask})):
        with pytest.raises(ValueError, match="past_key_values: got 'a cache of fixed size'"):
            generate(model_of("llama"), ids, cache_implementation="static", **given)
    windowed = host("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    windowed.set_attn_implementation("rfa")
    with pytest.raises(ValueError, match="sliding_window: got 4, expected None, or 9"):
        windowed(tokens())
    same = host("qwen2")
    same.set_attn_implementation("rfa")
    assert torch.equal(windowed(tokens()[:, :4]).logits, same(tokens()[:, :4]).logits)


def test_weights_are_refused():
    model = model_of("llama")
    with pytest.raises(ValueError, match="output_attentions: got True"):
        model(tokens(), output_attentions=True)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    model.config._attn_implementation_internal = "rfa"  # the setter looks at this first
    with pytest.raises(ValueError, match="output_attentions: got True"):
        model(tokens())
