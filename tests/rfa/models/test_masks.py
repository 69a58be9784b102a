"""The attention mask: gaps between tokens take no time, and only zeros and ones are read."""

import pytest
import torch

from rfa.nn import FilterCache

from .small import ONE_OF_EACH, RELATIVE, assert_same, small, tokens

GAPS = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1], [1] * 11])


def with_gaps():
    """Two rows, the first one with padding before, between and within what is said, and its tokens alone."""
    ids = tokens(2, 11)
    return ids, ids[:1, GAPS[0].bool()]


@pytest.mark.parametrize("name", RELATIVE)
def test_a_row_with_gaps_is_its_tokens_alone(name):
    model, (ids, alone) = small(name), with_gaps()
    with torch.no_grad():
        expected, beside = model(alone).logits, model(ids[1:]).logits
        positions = (GAPS.cumsum(-1) - 1).clamp(min=0)
        for given in ({}, {"position_ids": positions}, {"position_ids": torch.arange(11)}):
            found = model(ids, attention_mask=GAPS, **given).logits
            assert_same(found[:1, GAPS[0].bool()], expected)
            assert_same(found[1:], beside)


def test_a_compiled_model_sees_gaps_too():
    model, (ids, alone) = small("m2-sc-rfa", num_hidden_layers=1), with_gaps()
    with torch.no_grad():
        expected = model(alone).logits
        found = torch.compile(model, backend="aot_eager")(ids, attention_mask=GAPS).logits
    assert_same(found[:1, GAPS[0].bool()], expected)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_conversation_in_a_batch(name):
    """Answers of different lengths are padded on the right, and the next turn follows, in a cache."""
    model, (ids, alone), cache = small(name), with_gaps(), FilterCache()
    with torch.no_grad():
        expected = model(alone).logits[0]
        parts = [
            model(ids[:, a:b], attention_mask=GAPS[:, :b], past_key_values=cache).logits
            for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11))
        ]
    assert_same(torch.cat(parts, 1)[0, GAPS[0].bool()], expected)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(
        model.generate(ids, attention_mask=GAPS, **options)[:1, 11:], model.generate(alone, **options)[:, 7:]
    )


def test_turns_that_are_not_relative_take_no_places():
    model, ids = small("b1-rope-as-released"), tokens(1, 4)
    for mask in ([1, 1, 1, 1], [1, 1, 1, 0]):  # padding on the right moves nothing
        found = model(ids, attention_mask=torch.tensor([mask]), position_ids=torch.arange(4)).logits
        assert_same(found[:, :3], model(ids[:, :3]).logits)
    with pytest.raises(ValueError, match=r"^position_ids: got '\[3\] at the first tokens', expected '?0, or none with"):
        model(ids, position_ids=torch.arange(3, 7))
    packed = torch.tensor([0, 1, 0, 1])
    for given in (
        {"attention_mask": torch.tensor([[0, 1, 1, 1]])},
        {"position_ids": packed},
        {"segment_ids": packed[None]},
    ):
        with pytest.raises(ValueError, match=r"expected none with frequencies='as_released'"):
            model(ids, **given)
