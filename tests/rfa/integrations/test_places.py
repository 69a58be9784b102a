"""Padding, packed sequences and caches of replaced models: a row is as it is alone, or it is refused."""

import copy
import pickle
from functools import partial

import pytest
import torch
from cover import cover
from transformers import DynamicCache

from integrations.hosts import NAMES, generate, host, tokens
from rfa.integrations import replace_attention
from rfa.integrations.located import read_mask

TURNED = {"decay": 0.1, "rotate_values": True, "innovation": True}
RICCATI = {"prior": "riccati", "decay": 0.2, "weight": "exponential"}
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)  # float32, other orders of sums


def replaced(name, options=TURNED, **fields):
    return replace_attention(host(name, **fields), **options)


def spaced(ids, mask):
    """The tokens of each row where the mask is 1, and their positions as `generate` counts them."""
    rows = torch.zeros_like(mask)
    rows[mask.bool()] = ids.flatten()
    return rows, (mask.cumsum(-1) - 1).clamp(min=0)


HOLES = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])


@cover(1, name=NAMES, options=[TURNED, RICCATI])
def test_padding_takes_no_time_between_tokens(name, options):
    """Whole; in chunks, some of which begin or end in padding; in a cache whose rows change their places."""
    model, ids = replaced(name, options), tokens()
    rows, positions = spaced(ids, HOLES)
    with torch.no_grad():
        alone = model(ids).logits.flatten(0, 1)
        close(model(rows, attention_mask=HOLES, position_ids=positions).logits[HOLES.bool()], alone)
        if name != "gpt2":  # its embedding of positions counts padding, as that of the model before does
            close(model(rows, attention_mask=HOLES).logits[HOLES.bool()], alone)
        cache, parts = DynamicCache(), []
        for start, end in ((0, 4), (4, 6), (6, 9), (9, 11), (11, 12)):
            given = {"attention_mask": HOLES[:, :end], "position_ids": positions[:, start:end]}
            if start == 11:
                given = {key: x.flip(0) for key, x in given.items()}
                cache.reorder_cache(torch.tensor([1, 0]))
                parts.append(model(rows[:, start:end].flip(0), past_key_values=cache, **given).logits.flip(0))
            else:
                parts.append(model(rows[:, start:end], past_key_values=cache, **given).logits)
        close(torch.cat(parts, 1)[HOLES.bool()], alone)
    after = generate(model, rows, attention_mask=HOLES)[:, rows.shape[1] :]
    assert torch.equal(after, generate(model, ids)[:, ids.shape[1] :])


RESTARTS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
NUMBERS = torch.tensor([[2, 2, 2, 2, 5, 5, 5, 5, 5]])
PACKED = {
    "positions": {"position_ids": RESTARTS},
    "segments": {"segment_ids": NUMBERS},
}


@cover(1, given=PACKED, padded=["nothing", "the end", "between"])
def test_packed_sequences_beside_padding_are_separate(given, padded):
    """By each argument that can say so. Padding at the end of a sequence belongs to none."""
    model, ids = replaced("llama"), tokens(1)
    mask = torch.ones_like(ids)
    mask[0, {"nothing": [], "the end": [8], "between": [3]}[padded]] = 0
    with torch.no_grad():
        apart = torch.cat([model(part).logits for part in ids.split((4, 5), dim=1)], 1)
        for use_cache in (False, True):
            together = model(ids, attention_mask=mask, use_cache=use_cache, **PACKED[given]).logits
            close(together[mask.bool()], apart[mask.bool()])


def shown(lengths):
    """The mask of all pairs of a packed row."""
    return torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10]])}, "position_ids: got '2 followed by 5"),
        ({"position_ids": RESTARTS, "attention_mask": shown((3, 6))}, "position_ids: .*as in attention_mask"),
        ({"position_ids": RESTARTS, "segment_ids": torch.zeros_like(NUMBERS)}, "position_ids: .*as in segment_ids"),
        ({"segment_ids": NUMBERS[:, 1:]}, "segment_ids: got shape"),
        ({"times": torch.arange(9.0)}, "times: got 'given'"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "cu_seq_lens_q: got 'given'"),
        ({"output_attentions": True}, "output_attentions: got True"),
    ],
)
def test_what_would_be_lost_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        replaced("llama")(tokens(1), **given)
    with pytest.raises(ValueError, match=r"attention_mask: got .*expected None or a tensor"):
        read_mask("causal", 1, 9, 9)


INSIDE = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"position_ids": torch.arange(5)[None]}, "position_ids: .*continue"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, {}, "past_key_values: got 'a cache of packed sequences'"),
        ({}, {"attention_mask": INSIDE}, "attention_mask: got 'new padding between cached tokens'"),
        ({"attention_mask": INSIDE[:, :4]}, {}, "attention_mask: got 'new padding between cached tokens'"),
    ],
)
def test_what_a_cache_cannot_continue_is_refused_and_changes_nothing(first, then, message):
    model, ids, cache = replaced("llama"), tokens(1), DynamicCache()
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache, **first)
        with pytest.raises(ValueError, match=message):
            model(ids[:, 4:], past_key_values=cache, **then)
    assert cache.get_seq_length() == 4


def test_a_cache_serves_the_model_that_filled_it():
    """And the model goes on with copies and with what was saved."""
    model, ids, caches = replaced("llama"), tokens(), []
    with torch.no_grad():
        for owner in (model, host("llama"), replaced("llama", {"decay": 0.5})):
            caches.append(DynamicCache())
            owner(ids[:, :6], past_key_values=caches[-1])
        own, *others = caches
        for other in (*others, copy.deepcopy(others[1])):
            with pytest.raises(ValueError, match="past_key_values: got '6 tokens of another model'"):
                model(ids[:, 6:], past_key_values=other)
        last = model(ids).logits[:, 6:]
        for cache in (copy.deepcopy(own), pickle.loads(pickle.dumps(own)), own):
            close(model(ids[:, 6:], past_key_values=cache).logits, last)
