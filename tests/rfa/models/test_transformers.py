"""What users of transformers expect of a model, beside its loss."""

import copy

import pytest
import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

import rfa.models
from rfa.models import (
    RFAForCausalLM,
    RFAForMaskedLM,
    RFAForSequenceClassification,
    RFAForTimeSeries,
    RFAForTokenClassification,
    RFAModel,
    RFATimeSeriesConfig,
    preset,
)

from .small import SINGLE, SIZES, assert_same, small, tokens

HEADS = [kind for kind in vars(rfa.models).values() if isinstance(kind, type) and issubclass(kind, PreTrainedModel)]
HEADS = [kind for kind in HEADS if kind is not RFAModel]  # which has no loss


def examples(kind):
    """Four, with different numbers of targets where a token is one."""
    ids = tokens(4, 9)
    if kind is RFAForTimeSeries:
        times = torch.arange(9.0).expand(4, -1)
        given = {"times": times, "values": times.sin()[..., None], "query_times": times[:, -2:] + 1}
        given["targets"] = (times[:, -2:] + 1).sin()[..., None]
    elif kind is RFAForSequenceClassification:
        given = {"input_ids": ids, "labels": ids[:, 0] % 3}
    elif kind is RFAForTokenClassification:
        given = {"input_ids": ids, "labels": ids % 3}
    else:
        given = {"input_ids": ids, "labels": ids.clone()}
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(ids)
        if given["labels"].dim() == 2:
            given["labels"] = given["labels"].masked_fill(torch.arange(9) >= torch.tensor([[9], [4], [6], [2]]), -100)
    return given


@pytest.mark.parametrize("kind", HEADS)
def test_the_trainer_takes_the_steps_of_plain_descent(kind, tmp_path):
    """Two steps of two batches each, by the default collator: the same as of all four examples at once."""
    torch.manual_seed(0)
    if kind is RFAForTimeSeries:
        config = RFATimeSeriesConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, span=10.0)
    else:
        config = preset("m2-sc-rfa", **SIZES, causal=kind is not RFAForMaskedLM, pad_token_id=60, num_labels=3)
        config.classifier_dropout = 0.0
    model, given = kind(config).train(), examples(kind)
    plain = copy.deepcopy(model)
    for _ in range(2):
        loss = plain(**given).loss
        loss.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.05 * (torch.zeros(1) if parameter.grad is None else parameter.grad)
        plain.zero_grad()
    arguments = TrainingArguments(
        tmp_path,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        label_names=["targets"] if kind is RFAForTimeSeries else None,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{name: x[row] for name, x in given.items()} for row in range(4)]
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    assert trainer.train().global_step == 2
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=SINGLE, msg=name)
    with torch.no_grad():
        expected = float(plain.eval()(**given).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=10 * SINGLE)
    trainer.save_model(tmp_path / "saved")  # the Trainer has added fields of its own to the configuration
    loaded = kind.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("argument", ["attenton_mask", "token_type_ids"])
def test_arguments_that_would_change_nothing(argument):
    model, ids = small("m2-sc-rfa"), tokens()
    for called in (model, model.model):
        with pytest.raises(ValueError, match=f"{argument}: not an argument"):
            called(ids, **{argument: torch.zeros_like(ids) + 1})


def test_an_untied_head_is_initialised(tmp_path):
    model = small("m2-sc-rfa", vocab_size=500, tie_word_embeddings=False)
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.03)  # 16,000 numbers
    small("m2-sc-rfa", vocab_size=500).save_pretrained(tmp_path)
    untied = RFAForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)  # its weight is in no file
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert_same(untied(tokens()).logits, small("m2-sc-rfa", vocab_size=500)(tokens()).logits)
