"""The shapes in the annotations of `rfa.models`, checked in one call of each way (tests/conftest.py)."""

import jaxtyping
import pytest
import torch

from rfa.models import RFAForCausalLM
from rfa.nn import FilterCache

from .small import PATHS, small, tokens

LENGTH = 9


@pytest.mark.parametrize("name", PATHS)
def test_every_way_into_a_model(name):
    model, ids = small(name), tokens(length=LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :2] = 0
    segments = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]).expand(2, LENGTH)
    times = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)).cumsum(-1)
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask.bool()}, {"segment_ids": segments}):
        assert model(ids, **given).logits.shape == (2, LENGTH, 61)
    for given in (times, times[0], torch.arange(LENGTH)):
        assert model(ids, times=given, labels=ids).loss.shape == ()
    embeds = model.get_input_embeddings()(ids)
    assert model(inputs_embeds=embeds, logits_to_keep=torch.tensor([0, 3])).logits.shape == (2, 2, 61)


@pytest.mark.parametrize("name", PATHS)
def test_decoding(name):
    model, ids, cache = small(name), tokens(length=LENGTH), FilterCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        cache.reorder_cache(torch.tensor([1, 0]))
        assert model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits.shape == (2, 1, 61)
    assert model.generate(ids, max_new_tokens=2, num_beams=2, do_sample=False).shape == (2, LENGTH + 2)


def test_a_wrong_shape_is_an_error():
    model: RFAForCausalLM = small("b1-rope")
    with pytest.raises(jaxtyping.TypeCheckError):
        model(tokens(), segment_ids=torch.ones(2, 3, 4, dtype=torch.int64))
