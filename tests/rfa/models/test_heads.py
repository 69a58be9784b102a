"""Classifiers and the masked language model: losses by hand, padding on either side, saved and loaded, learning."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rfa.models import (
    PRESETS,
    RFAForCausalLM,
    RFAForMaskedLM,
    RFAForSequenceClassification,
    RFAForTokenClassification,
    preset,
)
from rfa.models.packing import CACHE_NAME

from .small import SIZES, assert_same, tokens

PAD, MASK = 60, 59
SEQUENCES, TOKENS = RFAForSequenceClassification, RFAForTokenClassification
AUTO = {
    SEQUENCES: AutoModelForSequenceClassification,
    TOKENS: AutoModelForTokenClassification,
    RFAForMaskedLM: AutoModelForMaskedLM,
}


def built(kind, name="m2-sc-rfa", causal=True, labels=3, **sizes):
    torch.manual_seed(0)
    config = preset(name, **SIZES | sizes, causal=causal and kind is not RFAForMaskedLM)
    config.num_labels, config.pad_token_id = labels, PAD
    return kind(config).eval()


def padded(side):
    """A batch of two, the first one shorter by three."""
    ids, mask = tokens(vocabulary=MASK), torch.ones(2, 9, dtype=torch.int64)
    places = slice(0, 3) if side == "left" else slice(6, 9)
    ids[0, places], mask[0, places] = PAD, 0
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", AUTO)
def test_padding_changes_nothing(kind, causal, side):
    model, (ids, mask) = built(kind, causal=causal), padded(side)
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for row in range(2):
            own = mask[row].bool()
            alone = model(ids[row : row + 1, own]).logits[0]
            assert_same(together[row] if kind is SEQUENCES else together[row, own], alone)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_token_of_embeddings_and_without_a_padding_id(side):
    """The mask alone says which token takes part: embeddings have no ids, and a model may have no id of padding."""
    model, (ids, mask) = built(SEQUENCES), padded(side)
    with torch.no_grad():
        expected = torch.cat([model(ids[row : row + 1, mask[row].bool()]).logits for row in range(2)])
        embedded = model.model.embed_tokens(ids)
        model.config.pad_token_id = None
        assert_same(model(ids, attention_mask=mask).logits, expected)
        pairs = (torch.ones(9, 9).tril() * mask[:, None])[:, None]  # the same as a mask of all pairs
        for given in (mask, mask.bool(), pairs):
            assert_same(model(inputs_embeds=embedded, attention_mask=given).logits, expected)
        assert_same(model(inputs_embeds=embedded[1:]).logits, expected[1:])
        first = model(inputs_embeds=embedded[:, :6], attention_mask=mask[:, :6], use_cache=True)
        cached = {"past_key_values": first[CACHE_NAME], "attention_mask": mask}
        assert_same(model(inputs_embeds=embedded[:, 6:], **cached).logits[1:], expected[1:])
    with pytest.raises(ValueError, match=r"^attention_mask: got None, expected .*config.pad_token_id"):
        model(ids)


LOSSES = {
    RFAForCausalLM: torch.full((2, 9), -100),
    RFAForMaskedLM: torch.full((2, 9), -100),
    SEQUENCES: torch.full((2,), -100),
    TOKENS: torch.full((2, 9), -100),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_batch_without_a_target_costs_nothing(kind):
    """Loss 0 and gradients 0, also where the Trainer says that nothing is scored in the whole batch."""
    model, ids = built(kind), tokens(vocabulary=MASK)
    given = [{}]
    if kind is not SEQUENCES:
        given += [{"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(0)}]
        given += [{"num_items_in_batch": torch.tensor(7.0)}]  # of other processes
    for more in given:
        model.zero_grad()
        loss = model(ids, labels=LOSSES[kind], **more).loss
        assert loss.item() == 0
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert not any(gradient.count_nonzero() for gradient in gradients)
    if kind is RFAForCausalLM:  # the first label is nobody's target
        labels = LOSSES[kind].clone()
        labels[:, 0] = 5
        assert model(ids, labels=labels).loss == 0
        assert model(ids[:, :1], labels=ids[:, :1]).loss == 0


def test_losses_by_hand():
    ids = tokens(vocabulary=MASK)
    with torch.no_grad():
        numbers = torch.tensor([0.5, -1.0])
        output = built(SEQUENCES, labels=1)(ids, labels=numbers)
        torch.testing.assert_close(output.loss, F.mse_loss(output.logits[:, 0], numbers))
        each = torch.where(ids % 4 == 3, -100, ids % 3)
        output = built(TOKENS)(ids, labels=each)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits.flatten(0, 1), each.flatten()))
        output = built(RFAForMaskedLM)(ids, labels=torch.where(ids % 4 == 3, ids, -100))  # of the same places
        expected = F.cross_entropy(output.logits[ids % 4 == 3], ids[ids % 4 == 3])
        torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("kind", AUTO)
def test_auto_classes_find_the_models(kind):
    assert type(AUTO[kind].from_config(built(kind).config)) is kind


@pytest.mark.parametrize("name", ["m2-sc-rfa", "x1-riccati", "b1-rope", "b2-alibi"])
def test_a_bidirectional_model_sees_what_follows(name):
    model, ids = built(RFAForMaskedLM, name), tokens(vocabulary=MASK)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % MASK
    with torch.no_grad():
        first, second = model(ids).logits[:, 0], model(changed).logits[:, 0]
        assert not torch.allclose(first, second)
        output = model(ids, output_attentions=True)
    assert model.model(ids).past_key_values is None
    for weights in output.attentions:
        assert (weights > 0).all()


CAUSAL, OPEN = {"causal": True}, {"causal": False}
GATED = {"attention": PRESETS["c4-fox"]}
MULTI = {"problem_type": "multi_label_classification"}
SHORT, HALF = torch.zeros(5, dtype=torch.long), torch.zeros(2, dtype=torch.int32)
REFUSED = [
    (RFAForMaskedLM, CAUSAL, {}, "causal: got True, expected False for a masked"),
    (RFAForCausalLM, OPEN, {}, "causal: got False, expected True for a causal"),
    (RFAForMaskedLM, OPEN, {"use_cache": True}, "use_cache: got True, expected False with causal=False"),
    (RFAForMaskedLM, {**OPEN, "clock": "content"}, {}, "clock: got 'content', expected 'times' with causal=False"),
    (RFAForMaskedLM, {**OPEN, **GATED}, {}, "gates: got 'forget', expected None with causal=False"),
    (RFAForMaskedLM, OPEN, {"labels": tokens(2, 4)}, r"labels: got .*, expected torch.int64 \(2, 9\)"),
    *((SEQUENCES, {}, {"labels": torch.full((2,), n)}, f"labels: got {n}, expected ids from 0 to 2") for n in (3, -1)),
    *((TOKENS, {}, {"labels": torch.full((2, 9), n)}, f"labels: got {n}, expected ids from 0 to 2") for n in (3, -1)),
    *((SEQUENCES, {}, {"labels": wrong}, "labels: got .*, expected torch.int64") for wrong in (SHORT, HALF)),
    *((kind, {}, {"labels": [0, 1]}, "labels: .*expected a tensor") for kind in (SEQUENCES, TOKENS)),
    (SEQUENCES, MULTI, {"labels": torch.ones(2, 3).long()}, r"labels: got .*, expected floating-point \(2, 3\)"),
    (SEQUENCES, MULTI, {"labels": torch.ones(2)}, r"labels: got .*, expected floating-point \(2, 3\)"),
    (TOKENS, {"num_labels": 1}, {"labels": torch.full((2, 9), 5)}, "labels: got 5, expected ids from 0 to 0"),
]


@pytest.mark.parametrize(("kind", "fields", "given", "says"), REFUSED)
def test_what_a_head_refuses(kind, fields, given, says):
    fields = {**SIZES, "num_labels": 3, "pad_token_id": PAD, **fields}
    with pytest.raises(ValueError, match=f"^{says}"):
        kind(preset("m2-sc-rfa", **fields))(tokens(), **given)
