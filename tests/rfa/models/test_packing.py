"""Packed documents as transformers' tools describe them: packed equals separate."""

import math

import pytest
import torch
from cover import cover
from transformers import DataCollatorWithFlattening, LlamaConfig
from transformers.masking_utils import create_causal_mask

from rfa.models import RFAForMaskedLM, preset
from rfa.models.packing import CACHE_NAME, read_mask

from .small import RELATIVE, SINGLE, SIZES, assert_same, small, tokens

LENGTHS = (4, 1, 6)
FLATTENED = {
    "positions": {},
    "positions from 2": {"position_ids_start": 2},
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


SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 5, 5, 7, 7]])
PRESENT = torch.tensor([[1] * 11, [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]).bool()


def pairs(causal=True):
    """True where a query sees a key, `(2, 11, 11)`; padding is not seen."""
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    return same & PRESENT[:, None] & (torch.ones(11, 11).tril().bool() if causal else torch.tensor(True))


def by_transformers(kind):
    """transformers' own mask of packed rows, without padding."""
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = kind
    positions = torch.cat([torch.arange(n) for n in (4, 1, 6)]).expand(2, -1)
    return create_causal_mask(config, torch.zeros(2, 11, 4), None, None, position_ids=positions)


def added(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


FORMS = {
    "bool": lambda mask: mask[:, None],
    "without heads": lambda mask: mask,
    "integers": lambda mask: mask.long()[:, None],
    "floats": lambda mask: mask.float()[:, None],
    "added": lambda mask: added(mask)[:, None],
    "added in half precision": lambda mask: added(mask).clamp(min=-65504).half()[:, None],
    "padding sees nothing": lambda mask: (mask & PRESENT[:, :, None])[:, None],
    "padding sees itself": lambda mask: (mask | (torch.eye(11).bool() & ~PRESENT[:, None]))[:, None],
    "padding sees everything": lambda mask: (mask | ~PRESENT[:, :, None])[:, None],
    "documents sdpa": lambda mask: by_transformers("sdpa"),
    "documents eager": lambda mask: by_transformers("eager"),
}


@cover(1, name=RELATIVE, form=FORMS)
def test_a_mask_of_documents_is_separate_documents(name, form):
    model, ids = small(name), tokens(2, 11)
    segments, present = SEGMENTS, PRESENT
    if "documents" in form:
        segments, present = SEGMENTS[:1].expand(2, -1), PRESENT[:1].expand(2, -1)
    with torch.no_grad():
        found = model(ids, attention_mask=FORMS[form](pairs())).logits
        for row in range(2):
            for segment in segments[row].unique():
                own = (segments[row] == segment) & present[row]
                if own.any():
                    assert_same(found[row : row + 1, own], model(ids[row : row + 1, own]).logits)


def test_other_masks_of_pairs():
    """Of one sequence, also for all rows and after cached tokens; of both directions; of one row for all."""
    model, ids, triangle = small("m2-sc-rfa"), tokens(2, 11), torch.ones(1, 1, 11, 11).tril().bool()
    with torch.no_grad():
        whole = model(ids).logits
        assert torch.equal(model(ids, attention_mask=triangle).logits, whole)
        first = model(ids[:, :7], attention_mask=triangle[..., :7, :7], use_cache=True)
        given = {"past_key_values": first[CACHE_NAME], "attention_mask": triangle[..., 7:, :]}
        assert_same(model(ids[:, 7:], **given).logits, whole[:, 7:])
        released = small("b1-rope-as-released")
        assert torch.equal(released(ids, attention_mask=triangle).logits, released(ids).logits)
        both = RFAForMaskedLM(preset("m2-sc-rfa", **SIZES, causal=False)).eval()
        found = both(ids, attention_mask=pairs(causal=False)[:, None]).logits
        for own in (SEGMENTS[1] == 3) & PRESENT[1], SEGMENTS[1] == 5:
            assert_same(found[1:, own], both(ids[1:, own]).logits)
    packed = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match=r"^position_ids: got .*expected .*as in attention_mask"):
        model(ids, attention_mask=by_transformers("sdpa"), position_ids=packed.roll(1, 1))
    compiled = torch.compile(read_mask, backend="eager", fullgraph=True)
    for form in ("bool", "integers", "floats", "added"):  # values are not read
        mask = FORMS[form](pairs())
        key_mask, segments = compiled(mask, 2, 11, 11)
        assert torch.equal(key_mask, PRESENT)
        same = PRESENT[:, None] & PRESENT[:, :, None]
        given, found = (x[:, None] == x[:, :, None] for x in (SEGMENTS, segments))
        assert torch.equal(found[same], given[same])


PREFIX = torch.ones(11, 11).tril().bool() | (torch.arange(11) < 4)
REFUSED = {
    "prefix": (PREFIX.expand(2, 1, -1, -1), r"another mask: token 0 sees token 1 \(batch row 0\)"),
    "window": (torch.ones(11, 11).tril().triu(-3).bool().expand(2, 1, -1, -1), "token 4 sees token 1"),
    "both directions": (pairs(causal=False)[:, None], "token 0 sees token 1"),
    "not themselves": (torch.ones(11, 11).tril(-1).bool().expand(2, -1, -1), "token 0 does not see token 0"),
    "slopes": (-0.5 * torch.arange(11.0).sub(torch.arange(11.0)[:, None]).abs().expand(2, 1, -1, -1), "-0.5"),
    "numbers": (SEGMENTS[:, None, None].expand(-1, -1, 11, -1), "2, expected .?1 where"),
    "nan": (torch.full((2, 1, 11, 11), math.nan), "nan"),
    "heads": (torch.ones(2, 4, 11, 11).tril().bool(), r"shape \(2, 4, 11, 11\), expected \(2, 11\) or \(2, 1, 11"),
    "keys": (torch.ones(2, 1, 11, 12).tril().bool(), "shape"),
    "one row to be added": (torch.zeros(2, 11).masked_fill(~PRESENT, -1e9), "-1000000000.0"),
    "documents of keys": (SEGMENTS, "2, expected .?1 for"),
    "a list": ([[1] * 11] * 2, "list"),
    "other keys": (torch.ones(2, 12), "shape"),
}


@pytest.mark.parametrize(("mask", "says"), REFUSED.values(), ids=REFUSED)
def test_masks_that_are_no_documents_are_refused(mask, says):
    with pytest.raises(ValueError, match=f"^attention_mask: got .*{says}"):
        small("m2-sc-rfa")(tokens(2, 11), attention_mask=mask)


@pytest.mark.parametrize("name", ["m2-sc-rfa", "rfa", "c4-fox", "x5-content-clock"])
def test_a_document_of_a_cache_that_goes_on(name):
    """The last document begins among the cached tokens. Where several go on, one cache cannot tell them apart."""
    model, ids, mask = small(name), tokens(2, 11), by_transformers("sdpa")
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True, attention_mask=mask[..., :7, :7])[CACHE_NAME]
        found = model(ids[:, 7:], past_key_values=cache, attention_mask=mask[:, :, 7:]).logits
        assert_same(found, model(ids[:, 5:]).logits[:, 2:])
        cache = model(ids[:, :3], use_cache=True)[CACHE_NAME]
        with pytest.raises(ValueError, match=r"^attention_mask: .*expected .*one sequence a row"):
            model(ids[:, 3:], past_key_values=cache, attention_mask=mask[:, :, 3:])


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
    "real": ({"position_ids": torch.rand(1, 6)}, "position_ids", "an integer dtype"),
    "short positions": ({"position_ids": torch.arange(5)}, "position_ids", r"\(1, 6\)"),
    "three rows of positions": ({"position_ids": torch.zeros(3, 1, 6, dtype=torch.int64)}, "position_ids", r"\(3, 1"),
    "other segments": (
        {"position_ids": torch.tensor([0, 1, 2, 0, 1, 2]), "segment_ids": ROW},
        "position_ids",
        "as in seg",
    ),
    "numbers": ({"seq_idx": ROW}, "seq_idx", "not an argument"),
}


@pytest.mark.parametrize(("given", "name", "says"), FAULTS.values(), ids=FAULTS)
def test_what_contradicts_or_cannot_be(given, name, says):
    with pytest.raises(ValueError, match=rf"^{name}: .*{says}"):
        small("m2-sc-rfa")(ROW, **given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"position_ids": torch.arange(4, 8)}, "position_ids"),
        ({"position_ids": torch.tensor([5, 6, 0, 1])}, "position_ids"),
    ],
    ids=["another place", "a new document"],
)
def test_what_does_not_continue_a_cache(given, name):
    model, ids = small("m2-sc-rfa"), tokens()
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"^{name}: got .*, expected .*segment_ids of all tokens"):
        model(ids[:, 5:], past_key_values=cache, **given)
