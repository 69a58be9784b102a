"""Generation: a cache is only a shortcut."""

import copy
import pickle

import pytest
import torch
from cover import cover
from transformers import DynamicCache, StaticCache, set_seed

from rfa.models.packing import CACHE_NAME
from rfa.nn import FilterCache
from rfa.nn.cache_layer import Buffer

from .small import ONE_OF_EACH, PATHS, RELATIVE, assert_same, small, tokens

NEW = 5


@cover(1, name=["m2-sc-rfa", "b2-alibi", "x1-riccati"], use_cache=[True, False])
def test_generation_at_times_of_its_own(name, use_cache):
    """Each step sees the times of the tokens so far; the later ones belong to tokens to come."""
    model, ids = small(name), tokens(length=5)
    times = torch.tensor([[0.0, 0.5, 0.75, 2.0, 2.5, 4.0, 7.0, 7.25, 9.0, 9.5]]).expand(2, -1)
    expected = ids
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(expected, times=times[:, : expected.shape[1]], use_cache=False).logits
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
        made = model.generate(ids, times=times, max_new_tokens=NEW, do_sample=False, use_cache=use_cache)
        assert torch.equal(made, expected)
        with pytest.raises(ValueError, match=r"times: got shape \(2, 7\), expected \(8,\)"):
            model.generate(ids, times=times[:, :7], max_new_tokens=NEW, do_sample=False, use_cache=use_cache)


TIMES = torch.tensor([0.0, 0.5, 0.75, 2.0, 2.5, 4.0, 7.0, 7.25, 9.0], dtype=torch.float64)
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
SITUATIONS = {
    "plain": {},
    "left padding": {"attention_mask": PADDED},
    "left padding, times of each row": {"attention_mask": PADDED, "times": torch.stack([TIMES, 1.5 * TIMES + 1])},
    "times": {"times": TIMES},
    "times far off": {"times": 1e9 + TIMES},
    "segments": {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 5, 5], [2, 2, 2, 2, 2, 2, 0, 0, 0]])},
}


def decode(model, ids, chunks, cache=None, **given):
    """Logits, chunk after chunk; what is given of all tokens is given of those so far."""
    cache, logits = FilterCache() if cache is None else cache, []
    start = cache.get_seq_length()
    for length in chunks:
        end = start + length
        so_far = {name: value[..., :end] for name, value in given.items()}
        logits.append(model(ids[:, start:end], past_key_values=cache, **so_far).logits)
        start = end
    return torch.cat(logits, 1)


@cover(1, name=RELATIVE, situation=SITUATIONS)
def test_decoding_gives_the_full_logits(name, situation):
    model, ids, given = small(name), tokens(), SITUATIONS[situation]
    kept = given.get("attention_mask", torch.ones_like(ids)).bool()
    with torch.no_grad():
        whole = model(ids, use_cache=False, **given).logits
        for chunks in ((4, 1, 1, 1, 1, 1), (2, 3, 4)):
            assert_same(decode(model, ids, chunks, **given)[kept], whole[kept])


@pytest.mark.parametrize("name", PATHS)
def test_greedy_decoding_by_any_cache(name):
    """As by hand. A cache of fixed size reserves all memory at once, and no step takes more."""
    model, ids = small(name), tokens(length=5)
    options, expected = {"max_new_tokens": NEW, "do_sample": False}, ids
    with torch.no_grad():
        for _ in range(NEW):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    for use_cache in (True, False):
        assert torch.equal(model.generate(ids, use_cache=use_cache, **options), expected)
    made = model.generate(ids, cache_implementation="static", return_dict_in_generate=True, **options)
    assert torch.equal(made.sequences, expected)
    cache = made.past_key_values
    assert cache.get_max_length() == 5 + NEW - 1
    for layer in cache.layers:
        assert layer.get_max_length() == 5 + NEW - 1
        assert {held._storage.shape[2] for held in vars(layer).values() if isinstance(held, Buffer)} == {5 + NEW - 1}
    with pytest.raises(ValueError, match=r"past_key_values: got 10 tokens, expected at most 9, its max_length"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_empty_cache_of_transformers_becomes_ours(kind):
    """In place: a loop that keeps its own object goes on with it."""
    model, ids = small("m2-sc-rfa"), tokens()
    made = {"dynamic": lambda: DynamicCache(config=model.config), "static": lambda: StaticCache(model.config, 9)}
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = made[kind]()
        assert_same(decode(model, ids, (4, 1, 4), cache), expected)
        assert isinstance(cache, FilterCache)
        assert cache.get_max_length() == (9 if kind == "static" else -1)
    options = {"max_new_tokens": NEW, "do_sample": False}
    whole = model.generate(ids[:, :5], **options)
    assert torch.equal(model.generate(ids[:, :5], past_key_values=made[kind](), **options), whole)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_has_two_names(name):
    """transformers 5.24 renamed it. A cache that no layer fills would change nothing, without an error."""
    model, ids = small("m2-sc-rfa"), tokens()
    with torch.no_grad():
        whole, held = model(ids, use_cache=False).logits, FilterCache()
        first = model(ids[:, :5], **{name: held})
        assert getattr(first, name if hasattr(first, name) else CACHE_NAME) is held
        assert held.get_seq_length() == 5
        assert_same(model(ids[:, 5:], **{name: held}).logits, whole[:, 5:])
        prompt = model.generate(ids, max_new_tokens=3, do_sample=False, **{CACHE_NAME: FilterCache()})
        assert torch.equal(prompt, model.generate(ids, max_new_tokens=3, do_sample=False))
    with pytest.raises(ValueError, match=r"^cache: got 'given beside past_key_values', expected one of the two"):
        model(ids, cache=FilterCache(), past_key_values=FilterCache())


def test_caches_with_raw_keys_are_refused():
    model, ids = small("m2-sc-rfa"), tokens(length=5)
    states = torch.zeros(2, 4, 3, 16)
    filled = DynamicCache()
    filled.update(states, states, 0)
    expected = "a FilterCache, or an empty DynamicCache or StaticCache"
    for cache, held in ((filled, "3 tokens"), (DynamicCache(config=model.config, offloading=True), "offloaded")):
        with pytest.raises(ValueError, match=rf"^past_key_values: got DynamicCache \({held}\), expected {expected}"):
            model.generate(ids, past_key_values=cache, max_new_tokens=3)
    for implementation in ("offloaded", "quantized"):
        with pytest.raises(
            ValueError, match=rf"^cache_implementation: got '{implementation}', expected None, 'dynamic'"
        ):
            model.generate(ids, cache_implementation=implementation, max_new_tokens=3)


def test_caches_of_another_model_are_refused():
    model, other, ids = small("m2-sc-rfa"), small("m2-sc-rfa", seed=1), tokens()
    cache, left = FilterCache(), FilterCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        small("m2-sc-rfa", seed=2)(ids, past_key_values=left)  # of a model that is gone
        for filled in (cache, copy.deepcopy(cache), copy.copy(cache), left):
            with pytest.raises(ValueError, match=r"^past_key_values: got a cache of another model with 9 tokens"):
                other(ids[:, :1], past_key_values=filled)
        for again in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
            expected = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
            assert_same(model(ids[:, :1], past_key_values=again).logits, expected)
        cache.reset()
        assert_same(other(ids, past_key_values=cache).logits, other(ids).logits)


def test_gradient_checkpointing_in_training_takes_no_cache():
    """The layers would fill it twice. `generate` then decodes without one."""
    model, ids, cache = small("m2-sc-rfa"), tokens(), FilterCache()
    options = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(ids, **options)
        model(ids[:, :5], past_key_values=cache)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match=r"^past_key_values: got '5 tokens', expected an empty cache in training"):
        model(ids[:, 5:], past_key_values=cache)
    assert torch.equal(model.generate(ids, **options), expected)


@cover(1, name=ONE_OF_EACH, given=[{}, {"attention_mask": PADDED[:, :5]}, {"times": TIMES.expand(2, -1)}])
def test_beams_with_a_cache_are_beams_without(name, given):
    model, ids = small(name), tokens(length=5)
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "pad_token_id": 0, **given}
    assert torch.equal(model.generate(ids, use_cache=True, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("name", ["m2-sc-rfa", "x1-riccati", "b1-rope"])
def test_a_conversation_goes_on_from_its_cache(name, monkeypatch):
    """The second prompt contains the first and its answer; only what is new is read."""
    model, ids, more = small(name), tokens(length=5), tokens(length=3, seed=2)
    options, cache = {"max_new_tokens": 4, "do_sample": False}, FilterCache()
    answer = model.generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == 8  # the last token has been drawn, but not read
    prompt, read = torch.cat([answer, more], 1), []
    expected = model.generate(prompt, use_cache=False, **options)
    model.model.embed_tokens.register_forward_hook(lambda _, given, __: read.append(given[0].shape[1]))
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)
    assert read == [4, 1, 1, 1]


@cover(1, name=["m2-sc-rfa", "x1-riccati", "b1-rope"], chunk=[1, 2, 4])
def test_a_prompt_read_in_chunks(name, chunk):
    model, ids = small(name), tokens(length=5)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": PADDED[:, :5]}
    made = model.generate(ids, prefill_chunk_size=chunk, **options)
    assert torch.equal(made, model.generate(ids, use_cache=False, **options))


def test_a_cache_is_made_only_without_gradients_or_on_demand():
    model, ids = small("m2-sc-rfa"), tokens()
    assert model(ids).past_key_values is None
    with torch.no_grad():
        assert isinstance(model(ids).past_key_values, FilterCache)
        assert model(ids).past_key_values.get_seq_length() == 9
        assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 9


# Samples, beams, assistants, and what generation returns

# the ids of prompts are below the pad, which generation would take for padding
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 60}


def prompts(batch, length):
    return tokens(batch, length, vocabulary=60)


def made(model, ids, seed=0, **options):
    set_seed(seed)
    return model.generate(ids, **{**GREEDY, **options})


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_assisted_decoding_is_greedy(name):
    """The assistant's tokens that were refused are cut off both caches."""
    model, assistant, ids = small(name), small("b1-rope", seed=1), prompts(1, 5)
    expected = made(model, ids, max_new_tokens=8)
    for helper in (assistant, small(name)):
        assert torch.equal(made(model, ids, assistant_model=helper, max_new_tokens=8), expected)


def test_a_continuation_from_embeddings():
    """As a conversation goes on, but with embeddings in the place of tokens."""
    model, ids = small("m2-sc-rfa"), prompts(2, 5)
    embed = model.get_input_embeddings()
    first = made(model, None, inputs_embeds=embed(ids), return_dict_in_generate=True)
    whole = made(model, ids, max_new_tokens=8)
    assert torch.equal(first.sequences, whole[:, 5:9])
    both = torch.cat([embed(ids), embed(first.sequences)], 1)
    second = made(model, None, inputs_embeds=both, past_key_values=first.past_key_values)
    assert torch.equal(second, whole[:, 9:])
