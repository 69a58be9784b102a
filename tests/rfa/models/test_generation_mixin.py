"""Checks of transformers' `GenerationTesterMixin` that no other file has; README.md has the list."""

import pytest
import torch
from cover import cover
from transformers import GenerationMixin, set_seed

from rfa.models import RFAForCausalLM
from rfa.nn import FilterCache

from .small import PATHS, small
from .small import tokens as any_tokens

# the ids of prompts are below the pad, which generation would take for padding
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 60}


def tokens(batch=2, length=9):
    return any_tokens(batch, length, vocabulary=60)


def made(model, ids, seed=0, **options):
    set_seed(seed)
    return model.generate(ids, **{**GREEDY, **options})


def test_text_from_nothing():
    """Without a prompt a text begins with the token of the beginning."""
    model = small("m2-sc-rfa")
    first = torch.tensor([[7]])
    assert torch.equal(made(model, None, bos_token_id=7), made(model, first))


@cover(1, name=PATHS, options=[{}, {"top_k": 10, "top_p": 0.7, "temperature": 0.7}, {"num_return_sequences": 3}])
def test_samples_with_a_cache_are_samples_without(name, options):
    model, ids = small(name), tokens(length=5)
    drawn = made(model, ids, do_sample=True, **options)
    assert drawn.shape == (2 * options.get("num_return_sequences", 1), 9)
    assert torch.equal(drawn, made(model, ids, do_sample=True, use_cache=False, **options))
    assert torch.equal(drawn, made(model, ids, do_sample=True, cache_implementation="static", **options))


@pytest.mark.parametrize("name", ["m2-sc-rfa", "x1-riccati", "b1-rope", "c4-fox"])
def test_sampled_beams(name):
    model, ids = small(name), tokens(length=5)
    options = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0}
    drawn = made(model, ids, **options)
    assert drawn.shape[0] == 4
    assert torch.equal(drawn, made(model, ids, use_cache=False, **options))


@cover(1, name=["m2-sc-rfa", "x1-riccati", "b1-rope"], num_beams=[1, 2], use_cache=[True, False])
def test_everything_that_generation_can_return(name, num_beams, use_cache):
    """Scores are the logits of a forward pass over the text so far; states and weights have its shapes."""
    model, ids = small(name), tokens(length=5)
    wanted = dict.fromkeys(["output_scores", "output_logits", "output_attentions", "output_hidden_states"], True)
    options = {"num_beams": num_beams, "use_cache": use_cache, "return_dict_in_generate": True, **wanted}
    output = made(model, ids, **options)
    assert torch.equal(output.sequences, made(model, ids, num_beams=num_beams))
    assert len(output.logits) == len(output.scores) == len(output.attentions) == len(output.hidden_states) == 4
    rows = 2 * num_beams
    for step, (weights, states) in enumerate(zip(output.attentions, output.hidden_states, strict=True)):
        queries = 1 if use_cache and step else 5 + step
        assert [w.shape for w in weights] == [(rows, 4, queries, 5 + step)] * 2
        assert [state.shape for state in states] == [(rows, queries, 32)] * 3
    if num_beams == 1:
        whole = model(output.sequences).logits[:, 4:-1]
        torch.testing.assert_close(torch.stack(output.logits, 1), whole, rtol=0, atol=1e-4)  # float32 of two paths
    assert (output.past_key_values is not None) == use_cache


@pytest.mark.parametrize("name", PATHS)
def test_assisted_decoding_is_greedy(name):
    """The assistant's tokens that were refused are cut off both caches."""
    model, assistant, ids = small(name), small("b1-rope", seed=1), tokens(1, 5)
    expected = made(model, ids, max_new_tokens=8)
    for helper in (assistant, small(name)):
        assert torch.equal(made(model, ids, assistant_model=helper, max_new_tokens=8), expected)


def test_prompt_lookup_ends_at_the_end():
    model, ids = small("m2-sc-rfa"), tokens(1, 4).repeat(1, 3)
    plain = made(model, ids, max_new_tokens=8)
    end = int(plain[0, 14])
    options = {"max_new_tokens": 8, "eos_token_id": end}
    assert torch.equal(made(model, ids, prompt_lookup_num_tokens=3, **options), made(model, ids, **options))


def test_a_continuation_from_embeddings():
    """As a conversation goes on, but with embeddings in the place of tokens."""
    model, ids = small("m2-sc-rfa"), tokens(length=5)
    embed = model.get_input_embeddings()
    first = made(model, None, inputs_embeds=embed(ids), return_dict_in_generate=True)
    whole = made(model, ids, max_new_tokens=8)
    assert torch.equal(first.sequences, whole[:, 5:9])
    both = torch.cat([embed(ids), embed(first.sequences)], 1)
    second = made(model, None, inputs_embeds=both, past_key_values=first.past_key_values)
    assert torch.equal(second, whole[:, 9:])


@cover(1, name=["m2-sc-rfa", "b2-alibi"], kept=[0, 1])
def test_logits_to_keep_change_nothing(name, kept):
    model, ids = small(name), tokens(length=5)
    assert torch.equal(made(model, ids, logits_to_keep=kept), made(model, ids))


def test_what_a_past_holds():
    """Keys and values of each layer, with a place for each token and `2 d` channels of each head."""
    model, ids = small("m2-sc-rfa"), tokens()
    with torch.no_grad():
        past = model(ids).past_key_values
    assert isinstance(past, FilterCache)
    assert len(past) == len(past.layers) == 2
    for layer in past.layers:
        assert layer.keys.shape == layer.values.shape == (2, 4, 9, 16)
    assert past.get_seq_length() == past.get_seq_length(1) == 9
    assert past.get_mask_sizes(3, 0) == (12, 0)


def test_the_methods_of_generation_are_transformers_own():
    """The class says itself that it generates, as tools look it up."""
    assert issubclass(RFAForCausalLM, GenerationMixin)
    assert RFAForCausalLM.generate is GenerationMixin.generate
    assert RFAForCausalLM.can_generate()


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}])
def test_processors_of_logits(penalty):
    model, ids = small("m2-sc-rfa"), tokens(length=5)
    assert torch.equal(made(model, ids, **penalty), made(model, ids, use_cache=False, **penalty))
