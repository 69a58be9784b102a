"""Packed documents as transformers' tools describe them: packed equals separate."""

import pytest
import torch
from cover import cover
from transformers import DataCollatorWithFlattening

from .small import RELATIVE, SINGLE, assert_same, small, tokens

LENGTHS = (4, 1, 6)
FLATTENED = {
    "positions": {},
    "positions from 2": {"position_ids_start": 2},
    "numbers": {"return_position_ids": False, "return_seq_idx": True},
    "lengths": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "everything": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
}


def documents():
    return [tokens(1, length, seed=length)[0] for length in LENGTHS]


def flattened(**options):
    return DataCollatorWithFlattening(**options)([{"input_ids": ids.tolist()} for ids in documents()])


@cover(1, name=RELATIVE, options=FLATTENED)
def test_flattened_batches_are_separate_documents(name, options):
    """Logits, the loss and gradients; the first token of a document is not scored."""
    model, batch = small(name), flattened(**FLATTENED[options])
    packed = model(**batch)
    packed.loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    separate = [model(ids[None], labels=ids[None], num_items_in_batch=sum(LENGTHS) - 3) for ids in documents()]
    assert_same(packed.logits[0], torch.cat([output.logits[0] for output in separate]))
    loss = sum(output.loss for output, length in zip(separate, LENGTHS, strict=True) if length > 1)
    assert_same(packed.loss, loss)
    loss.backward()
    for key, parameter in model.named_parameters():
        # sums over all tokens in another order: some ten roundings
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=10 * SINGLE, atol=SINGLE)


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 7 + [0] * 2])
COUNTING = {
    "from 0": {"position_ids": torch.arange(9)},
    "from 7": {"position_ids": torch.arange(7, 16)[None]},
    "of each row": {"position_ids": torch.stack([torch.arange(9), torch.arange(3, 12)])},
    "padding counts": {"position_ids": torch.arange(9), "attention_mask": PADDED},
    "padding does not": {
        "position_ids": torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 1, 1]]),
        "attention_mask": PADDED,
    },
    "one sequence": {"seq_idx": torch.full((2, 9), 3, dtype=torch.int32)},
}


@pytest.mark.parametrize("given", COUNTING.values(), ids=COUNTING)
def test_counting_positions_change_nothing(given):
    model, ids = small("m2-sc-rfa"), tokens()
    plain = {name: value for name, value in given.items() if name == "attention_mask"}
    kept = plain.get("attention_mask", torch.ones_like(ids)).bool()
    assert torch.equal(model(ids, **given).logits[kept], model(ids, **plain).logits[kept])


@pytest.mark.parametrize("form", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["m2-sc-rfa", "c4-fox"])
def test_a_mask_of_all_pairs_is_read(name, form):
    """Documents and padding in one mask `(batch, 1, length, length)`, as collators of packed data make it."""
    model, ids = small(name), tokens(2, 11)
    segment_ids = torch.tensor([[0] * 4 + [1] * 7, [0] * 2 + [1] * 5 + [2] * 4])
    attention_mask = torch.ones(2, 11, dtype=torch.int64)
    attention_mask[0, 9:] = 0
    visible = torch.ones(11, 11, dtype=torch.bool).tril() & (segment_ids[:, :, None] == segment_ids[:, None])
    visible = (visible & attention_mask.bool()[:, None])[:, None]
    mask = visible if form == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    with torch.no_grad():
        expected = model(ids, attention_mask=attention_mask, segment_ids=segment_ids).logits
        found = model(ids, attention_mask=mask).logits
    present = attention_mask.bool()
    assert_same(found[present], expected[present])


def test_masks_of_all_pairs_that_are_no_documents():
    model, ids = small("m2-sc-rfa"), tokens(1, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    prefix, window = causal.clone(), causal & ~causal.tril(-3)
    prefix[:3, :3] = True
    for mask in (prefix, window):
        with pytest.raises(ValueError, match="attention_mask: got 'another mask', expected padding, or packed"):
            model(ids, attention_mask=mask[None, None])
    with pytest.raises(ValueError, match=r"attention_mask: got 'shape \(1, 6, 6\)'"):
        model(ids, attention_mask=causal[None])


def test_positions_beside_a_cache():
    """Those of the new tokens, as transformers' generation and many scripts pass them."""
    model, ids = small("m2-sc-rfa"), tokens()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    counted = mask.cumsum(-1) - 1
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for positions in (counted, torch.arange(9).expand(2, -1)):
            first = model(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5], use_cache=True)
            given = {"attention_mask": mask, "past_key_values": first.past_key_values}
            assert_same(model(ids[:, 5:], position_ids=positions[:, 5:], **given).logits, whole[:, 5:])
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, position_ids=counted, **options), model.generate(ids, **options))


ROW = torch.zeros(1, 6, dtype=torch.int64)
FAULTS = {
    "jump": ({"position_ids": torch.tensor([0, 1, 2, 5, 6, 9])}, "position_ids", "2 followed by 5"),
    "fall": ({"position_ids": torch.tensor([4, 5, 6, 3, 4, 5])}, "position_ids", "restart at 0 or 4"),
    "real": ({"position_ids": torch.rand(1, 6)}, "position_ids", "real times are no positions"),
    "short positions": ({"position_ids": torch.arange(5)}, "position_ids", r"\(1, 6\)"),
    "three rows of positions": ({"position_ids": torch.zeros(3, 1, 6, dtype=torch.int64)}, "position_ids", r"\(3, 1"),
    "short numbers": ({"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}, "seq_idx", r"\(1, 6\)"),
    "too few": ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "cu_seq_lens_q", "0 to 6"),
    "falling": ({"cu_seq_lens_k": torch.tensor([0, 4, 2, 6])}, "cu_seq_lens_k", r"\[0, 4, 2, 6\]"),
    "no zero": ({"cu_seq_lens_q": torch.tensor([2, 6])}, "cu_seq_lens_q", "0 to 6"),
    "real lengths": ({"cu_seq_lens_q": torch.tensor([0.0, 6.0])}, "cu_seq_lens_q", "integers"),
    "keys apart": (
        {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])},
        "cu_seq_lens_k",
        r"\[0, 3\].*\[0, 2\], as in cu_seq_lens_q",
    ),
    "longest": ({"cu_seq_lens_q": torch.tensor([0, 2, 6]), "max_length_q": 3}, "max_length_q", "at least 4"),
    "longest alone": ({"max_length_k": 6}, "max_length_k", "cu_seq_lens_q"),
    "another number": (
        {"position_ids": torch.tensor([0, 1, 2, 0, 1, 2]), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]])},
        "position_ids",
        r"\[0, 3\].*\[0, 2\], as in seq_idx",
    ),
    "other segments": (
        {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]]), "segment_ids": ROW},
        "seq_idx",
        "as in segment_ids",
    ),
}


@pytest.mark.parametrize(("given", "name", "says"), FAULTS.values(), ids=FAULTS)
def test_what_contradicts_or_cannot_be(given, name, says):
    with pytest.raises(ValueError, match=f"^{name}: got .*, expected .*") as error:
        small("m2-sc-rfa")(ROW, **given)
    assert error.match(says)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"position_ids": torch.arange(4, 8)}, "position_ids"),
        ({"position_ids": torch.tensor([5, 6, 0, 1])}, "position_ids"),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1]] * 2)}, "seq_idx"),
    ],
    ids=["another place", "a new document", "two documents"],
)
def test_what_does_not_continue_a_cache(given, name):
    model, ids = small("m2-sc-rfa"), tokens()
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"^{name}: got .*, expected .*segment_ids of all tokens"):
        model(ids[:, 5:], past_key_values=cache, **given)


def test_lengths_are_of_one_row():
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got 'a batch of 2', expected a batch of one row"):
        small("m2-sc-rfa")(tokens(), cu_seq_lens_q=torch.tensor([0, 9]))
