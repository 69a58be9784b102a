"""Generation: a cache is only a shortcut."""

import pytest
import torch
import torch.nn.functional as F
from nn.by_hand import only_our_own_checks

from .small import EXACT, NAMES, RELATIVE, SINGLE, assert_same, small, tokens

NEW = 5


def greedy_by_hand(model, ids, steps):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_cached_greedy_is_uncached_greedy(name):
    model, ids = small(name), tokens(length=5)
    options = {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        expected = greedy_by_hand(model, ids, NEW)
        assert torch.equal(model.generate(ids, use_cache=True, **options), expected)
        assert torch.equal(model.generate(ids, use_cache=False, **options), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("prefill", "dtype", "tolerance"),
    [(1, torch.float64, EXACT), (4, torch.float64, EXACT), (8, torch.float32, SINGLE)],
)
def test_prefill_and_decode_give_the_full_logits(name, prefill, dtype, tolerance):
    model, ids = small(name, dtype=dtype), tokens()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        output = model(ids[:, :prefill], use_cache=True)
        logits = [output.logits]
        for t in range(prefill, ids.shape[1]):
            output = model(ids[:, t : t + 1], past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
    assert output.past_key_values.get_seq_length() == ids.shape[1]
    assert_same(torch.cat(logits, 1), whole, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_with_times_of_their_own(name):
    """Times are those of all tokens, the cached ones included."""
    model, ids = small(name), tokens()
    times = torch.tensor([0.0, 0.5, 0.75, 2.0, 2.5, 4.0, 7.0, 7.25, 9.0])
    with torch.no_grad():
        whole = model(ids, times=times, use_cache=False).logits
        first = model(ids[:, :4], times=times[:4], use_cache=True)
        second = model(ids[:, 4:], times=times, past_key_values=first.past_key_values)
    assert_same(torch.cat([first.logits, second.logits], 1), whole)


@pytest.mark.parametrize("name", RELATIVE)
def test_generation_from_prompts_of_unequal_length(name):
    model, short, long = small(name), tokens(1, 3), tokens(1, 6, seed=1)
    batch = torch.cat([F.pad(short, (3, 0)), long])
    mask = torch.ones_like(batch)
    mask[0, :3] = 0
    with torch.no_grad():
        made = model.generate(batch, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert torch.equal(made[:1, 3:], greedy_by_hand(model, short, NEW))
        assert torch.equal(made[1:], greedy_by_hand(model, long, NEW))


@pytest.mark.parametrize("name", ["m2-sc-rfa", "b2-alibi", "x1-riccati"])
@pytest.mark.parametrize("use_cache", [True, False])
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
        with only_our_own_checks(), pytest.raises(ValueError, match=r"times: got shape \(2, 7\), expected \(8,\)"):
            model.generate(ids, times=times[:, :7], max_new_tokens=NEW, do_sample=False, use_cache=use_cache)


def test_a_cache_of_fixed_size_is_refused():
    """Its empty places would take part as keys."""
    model, ids = small("m2-sc-rfa"), tokens(length=5)
    with pytest.raises(ValueError, match="past_key_values: got StaticCache"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")


def test_sampling_and_beams_run():
    model, ids = small("m2-sc-rfa"), tokens(length=5)
    assert tuple(model.generate(ids, max_new_tokens=3, do_sample=True).shape) == (2, 8)
    cached = model.generate(ids, max_new_tokens=4, num_beams=3, do_sample=False, use_cache=True)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=4, num_beams=3, do_sample=False, use_cache=False))


def test_a_cache_is_made_only_without_gradients_or_on_demand():
    model, ids = small("m2-sc-rfa"), tokens()
    assert model(ids).past_key_values is None
    with torch.no_grad():
        assert model(ids).past_key_values.get_seq_length() == 9
        assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 9
