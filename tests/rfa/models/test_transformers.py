"""What users of transformers expect of a model, beside its loss."""

import copy
import subprocess
import sys

import pytest
import torch
from cover import slow
from scripts import with_tests
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

from .small import RELATIVE, SINGLE, SIZES, assert_same, small, tokens


def test_hidden_states_of_every_block():
    model, ids = small("m2-sc-rfa"), tokens()
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 3  # before the first block, between the two, and the final ones
    embedded = model.model.input_projection(model.model.embed_tokens(ids))
    assert torch.equal(output.hidden_states[0], embedded)
    assert torch.equal(output.hidden_states[1], model.model.layers[0](embedded))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert model(ids).hidden_states is None


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


@pytest.mark.parametrize("argument", ["attenton_mask", "token_type_ids"])
def test_arguments_that_would_change_nothing(argument):
    model, ids = small("m2-sc-rfa"), tokens()
    for called in (model, model.model):
        with pytest.raises(ValueError, match=f"{argument}: not an argument"):
            called(ids, **{argument: torch.zeros_like(ids) + 1})


@pytest.mark.parametrize("name", RELATIVE)
def test_packed_documents_are_separate_documents(name):
    model, ids = small(name), tokens()
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 5, 5], [2, 2, 2, 2, 2, 2, 0, 0, 0]])
    packed = model(ids, segment_ids=segments).logits
    for row in range(2):
        for segment in segments[row].unique():
            own = segments[row] == segment
            assert_same(packed[row : row + 1, own], model(ids[row : row + 1, own]).logits)


@pytest.mark.parametrize("name", ["m2-sc-rfa", "b2-alibi"])
def test_generation_from_embeddings(name):
    model, ids = small(name), tokens(length=5)
    options = {"max_new_tokens": 4, "do_sample": False}
    whole = model.generate(ids, **options)
    times = torch.arange(9.0).expand(2, -1)
    for more in ({}, {"times": times}):
        made = model.generate(inputs_embeds=model.model.embed_tokens(ids), **options, **more)
        assert torch.equal(made, whole[:, 5:])


def test_an_untied_head_is_initialised(tmp_path):
    model = small("m2-sc-rfa", vocab_size=500, tie_word_embeddings=False)
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(32**-0.5, rel=0.03)  # 16,000 numbers
    small("m2-sc-rfa", vocab_size=500).save_pretrained(tmp_path)
    untied = RFAForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)  # its weight is in no file
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert_same(untied(tokens()).logits, small("m2-sc-rfa", vocab_size=500)(tokens()).logits)


COMPILED = """
import itertools
import torch
from models.small import assert_same, small, tokens

# one layer: the next would be traced as the first
for name, masked in itertools.product(("m2-sc-rfa", "x1-riccati", "b1-rope", "b2-alibi"), (False, True)):
    model, ids = small(name, num_hidden_layers=1), tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"labels": ids, "use_cache": False, **({"attention_mask": mask} if masked else {})}
    expected = model(ids, **given)
    expected.loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **given)
    assert_same(output.logits, expected.logits)
    output.loss.backward()
    for key, parameter in model.named_parameters():
        assert_same(parameter.grad, gradients[key])
"""


@slow
def test_compiled_in_one_graph():
    """In a process of its own: the shape checks of the test run cannot be traced, and users do not have them.

    `aot_eager` traces forward and backward as the default backend does, without its code generation.
    """
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=with_tests(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
