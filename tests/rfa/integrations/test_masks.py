"""Masks of transformers, made by transformers itself, are read as the flags that they were made of."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from rfa.integrations.located import read_mask

PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1]])


def made(kind, length, attention_mask=None, cache=None, position_ids=None, make=create_causal_mask):
    config = LlamaConfig(sliding_window=2, num_hidden_layers=1)
    config._attn_implementation = kind
    embedded = torch.zeros(3, length, 4)
    return make(config, embedded, attention_mask, cache, position_ids=position_ids)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("cached", [0, 3])
def test_padding_is_found(kind, cached):
    cache = DynamicCache()
    if cached:
        cache.update(torch.zeros(3, 1, cached, 2), torch.zeros(3, 1, cached, 2), 0)
    mask = made(kind, 5 - cached, PADDED, cache)
    key_mask, segment_ids = read_mask(mask, 3, 5 - cached, 5)
    assert torch.equal(key_mask, PADDED.bool())
    assert segment_ids is None
    flags = read_mask(made(kind, 5 - cached, torch.ones(3, 5), cache), 3, 5 - cached, 5)
    assert flags == (None, None)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_packed_sequences_are_found(kind):
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    key_mask, segment_ids = read_mask(made(kind, 5, position_ids=position_ids), 3, 5, 5)
    assert key_mask is None
    assert segment_ids.tolist() == [[0, 0, 0, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]


def test_padding_between_packed_sequences_is_found():
    keep, ids = PADDED.bool(), torch.tensor([[0, 0, 1, 1, 2], [4, 4, 4, 4, 4], [0, 1, 1, 1, 1]])
    visible = torch.ones(5, 5).tril().bool() & keep[:, None] & (ids[:, None] == ids[:, :, None])
    key_mask, segment_ids = read_mask(visible[:, None], 3, 5, 5)
    assert torch.equal(key_mask, keep)
    same = (segment_ids[:, None] == segment_ids[:, :, None]) == (ids[:, None] == ids[:, :, None])
    assert same[keep[:, None] & keep[:, :, None]].all()


def test_a_compiler_reads_the_same():
    """Without a look at values: it cannot leave out what says nothing."""
    compiled = torch.compile(read_mask, backend="eager", fullgraph=True)
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    packed, padded = made("sdpa", 5, position_ids=position_ids), made("sdpa", 5, PADDED)
    key_mask, segment_ids = compiled(packed, 3, 5, 5)
    assert key_mask.all()
    assert torch.equal(segment_ids, read_mask(packed, 3, 5, 5).segment_ids)
    assert torch.equal(compiled(padded, 3, 5, 5).key_mask, PADDED.bool())
    last = compiled(padded[:, :, -1:], 3, 1, 5)
    assert torch.equal(last.key_mask, PADDED.bool())
    assert last.segment_ids is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (made("sdpa", 5, make=create_sliding_window_causal_mask), "another mask"),
        (torch.ones(3, 1, 2, 5, dtype=torch.bool), "another mask"),
        (torch.ones(3, 1, 5, 5, dtype=torch.bool), "another mask"),
        (torch.ones(3, 2, 5, 5, dtype=torch.bool), r"expected \(3, 5\) or"),
        (torch.ones(2, 5, dtype=torch.bool), r"expected \(3, 5\) or"),
        ("causal", "expected None or a tensor"),
    ],
)
def test_other_masks_are_refused(mask, message):
    queries = mask.shape[2] if isinstance(mask, torch.Tensor) and mask.dim() == 4 else 5
    with pytest.raises(ValueError, match=f"attention_mask: .*{message}"):
        read_mask(mask, 3, queries, 5)
