"""Attention weights and log precisions: they give the estimates of the fused kernels again."""

import numpy as np
import pytest
import torch
from cover import cover
from nn.by_hand import assert_near, states
from ops import oracle

from rfa.models import PRESETS
from rfa.nn import FilterCache
from rfa.nn.projections import merge_heads

from .small import EXACT, RELATIVE, SIZES, assert_same, small, tokens

PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 5, 5], [2, 2, 2, 2, 2, 2, 0, 0, 0]])
GIVEN = {"plain": {}, "padding": {"attention_mask": PADDED}, "segments": {"segment_ids": SEGMENTS}}


def seen(given):
    """`(batch, queries, keys)`, by hand."""
    visible = torch.ones(2, 9, 9).tril().bool()
    if "attention_mask" in given:
        visible = visible & PADDED.bool()[:, None]
    if "segment_ids" in given:
        visible = visible & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    return visible


@cover(1, name=RELATIVE, given=GIVEN)
def test_rows_sum_to_one_over_the_keys_that_are_seen(name, given):
    model, ids, given = small(name, train_length=4), tokens(), GIVEN[given]
    output, plain = model(ids, output_attentions=True, **given), model(ids, **given)
    assert_same(output.logits, plain.logits)
    assert plain.attentions is plain.log_precisions is None
    visible = seen(given)[:, None]
    assert len(output.attentions) == SIZES["num_hidden_layers"]
    for weights in output.attentions:
        assert weights.shape == (2, 4, 9, 9)
        assert not weights.masked_select(~visible).any()
        torch.testing.assert_close(weights.sum(-1), visible.any(-1).float().expand(2, 4, 9))
    assert (output.log_precisions is not None) == PRESETS[name].has_precision()
    for log_precision in output.log_precisions or ():
        assert log_precision.shape == (2, 4, 9)
        assert torch.equal(log_precision == -torch.inf, ~visible.any(-1).expand(2, 4, 9))


@pytest.mark.parametrize("name", ["b1-rope", "b2-alibi", "c4-fox"])
def test_weights_times_values_are_the_estimate(name):
    """Of a layer whose values neither turn nor decay, from its own output."""
    model, ids = small(name, dtype=torch.float64, num_hidden_layers=1), tokens()
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]
        layer, found = model.model.layers[0].attention, []
        layer.register_forward_hook(lambda _, args, output: found.append((args[0], output)))
        model(ids)
        states, output = found[0]
        values = layer.values(states, layer.keys(states))
        assert_same(layer.output_projection(merge_heads(weights @ values)), output, EXACT)


def test_weights_and_precisions_of_the_filter_are_the_oracles():
    """Of the first layer. Weights are estimates of values that are rows of the identity, without their decay."""
    model, ids = small("m2-sc-rfa", dtype=torch.float64), tokens()
    block = model.model.layers[0]
    output = model(ids, output_attentions=True, output_hidden_states=True)
    query, key, _ = states(block.attention, block.attention_norm(output.hidden_states[0]).detach())
    dynamics = {name: value.detach() for name, value in block.attention.dynamics().items()}
    rows = np.concatenate([np.eye(9), np.zeros((9, 9))], -1) + np.zeros((*query.shape[:2], 9, 18))
    decayed, log_precision = oracle.filter_attention(query, key, rows, **dynamics, rotate_values=False)
    lag = torch.arange(9.0)[:, None] - torch.arange(9.0)
    left = (-dynamics["decay"][:, None, None] * lag.clamp(min=0)).exp()
    assert_near(output.attentions[0].detach() * left, decayed[..., :9], 1e-6)  # frequencies in float32
    assert_near(output.log_precisions[0].detach(), log_precision, 1e-6)


@pytest.mark.parametrize("name", ["m2-sc-rfa", "b1-rope", "x6-content-dynamics"])
def test_decoding_gives_the_rows_of_the_whole(name):
    model, ids, cache = small(name, train_length=4), tokens(), FilterCache()
    with torch.no_grad():
        whole = model(ids, output_attentions=True)
        model(ids[:, :6], past_key_values=cache)
        rest = model(ids[:, 6:], past_key_values=cache, output_attentions=True)
        made = model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    for row, expected in zip(rest.attentions, whole.attentions, strict=True):
        assert_same(row, expected[:, :, 6:])
    for row, expected in zip(rest.log_precisions or (), whole.log_precisions or (), strict=True):
        assert_same(row, expected[:, :, 6:])
    assert [step[0].shape for step in made.attentions] == [(2, 4, 9, 9), (2, 4, 1, 10)]


def test_what_cannot_be_recorded():
    model, ids = small("m2-sc-rfa").train(), tokens()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"^output_attentions: got True, expected False under torch"):
        model(ids, output_attentions=True)
