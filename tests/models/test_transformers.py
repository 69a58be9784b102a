"""What users of transformers expect of a model, beside its loss."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cover import slow

from rfa.models import RFAForCausalLM

from .small import RELATIVE, assert_same, small, tokens


def test_hidden_states_of_every_block():
    model, ids = small("m2-sc-rfa"), tokens()
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 3  # before the first block, between the two, and the final ones
    embedded = model.model.input_projection(model.model.embed_tokens(ids))
    assert torch.equal(output.hidden_states[0], embedded)
    assert torch.equal(output.hidden_states[1], model.model.layers[0](embedded))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert model(ids).hidden_states is None


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
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
