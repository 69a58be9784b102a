"""Options of every attention layer in a language model: dropout of weights, and grouped keys and values."""

import pytest
import torch

from rfa.models import RFAConfig, RFATimeSeriesConfig

from .small import EXACT, assert_same, small, tokens


@pytest.mark.parametrize("preset", ["m2-sc-rfa", "b1-rope", "c4-fox"])
def test_a_model_with_groups_decodes_with_a_cache_as_without(preset):
    model = small(preset, num_key_value_heads=2, dtype=torch.float64)
    key = model.model.layers[0].attention.key_projection
    assert key.out_features == 32  # two of four heads of sixteen channels
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        first = model(ids[:, :5], use_cache=True)
        rest = model(ids[:, 5:], past_key_values=first.past_key_values)
    assert_same(torch.cat([first.logits, rest.logits], 1), expected, EXACT)


@pytest.mark.parametrize("preset", ["m2-sc-rfa", "b1-rope"])
def test_dropout_is_for_training(preset):
    ids = tokens()
    model, plain = small(preset, attention_dropout=0.5), small(preset)
    with torch.no_grad():
        assert_same(model(ids).logits, plain(ids).logits)
        assert not torch.allclose(model.train()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("dropout", {"attention_dropout": 1.0}),
        ("backend", {"attention_dropout": 0.1, "backend": "cpu"}),
    ],
)
@pytest.mark.parametrize("family", [RFAConfig, RFATimeSeriesConfig])
def test_options_that_do_not_fit_are_named(name, fields, family):
    with pytest.raises(ValueError, match=rf"^{name}: .*expected"):
        family(**fields)
