"""Bad input: `ValueError`, one line, which names the argument."""

import pytest
import torch

from rfa.models import RFAConfig, RFATimeSeriesConfig, preset
from rfa.models.flat import flatten

from .small import NAMES, SIZES, small, tokens

# the field that is named, and what is wrong with it; all refused from a filter's defaults
VALUES = [
    ("score", {"score": "cosine"}),
    ("prior", {"prior": "ricatti"}),
    ("frequencies", {"frequencies": "random"}),
    ("initial_slopes", {"initial_slopes": "steep", "prior": "riccati"}),
    ("hidden_size", {"hidden_size": "32"}),
    ("hidden_size", {"hidden_size": 33}),
    ("hidden_size", {"hidden_size": 36, "num_attention_heads": 4}),  # nine modes: no pairs
    (
        "hidden_size",
        {
            "hidden_size": 36,
            "num_attention_heads": 4,
            "frequencies": "none",
            "decay": "none",
            "learn_frequencies": True,
        },
    ),
    ("vocab_size", {"vocab_size": 0}),
    ("num_attention_heads", {"num_attention_heads": 0}),
    ("train_length", {"train_length": 1}),
    ("frequency_base", {"frequency_base": 1.0}),
    ("damping", {"damping": -0.1}),
    ("damping", {"damping": "strong"}),
    ("steady_state", {"steady_state": -1.0}),
    ("zero_heads", {"zero_heads": -1}),
    ("zero_heads", {"zero_heads": 9}),
    ("horizon", {"horizon": -1.0}),
    ("noise_parts", {"noise": "time_dependent", "noise_parts": 0}),
    ("gate", {"gate": "off"}),
    ("rotate_values", {"rotate_values": 1}),
]
COMBINATIONS = [
    ("learn_horizon", {"learn_horizon": True}),
    ("initial_slopes", {"initial_slopes": "alibi"}),
    ("prior", {"prior": "alibi"}),
    ("frequencies", {"frequencies": "as_released"}),
    ("query_noise_in_bias", {"query_noise_in_bias": True, "prior": "riccati"}),
    ("query_noise_in_bias", {"query_noise_in_bias": True, "prior": "flat"}),
    ("gate", {"gate": False, "prior": "flat"}),
    ("learn_noise_floor", {"learn_noise_floor": True, "prior": "flat"}),
    ("process_noise_as", {"process_noise_as": "steady_state", "prior": "flat"}),
    ("learn_frequencies", {"learn_frequencies": True, "frequencies": "rope"}),  # no pairs to keep
    ("prior", {"score": "dot_product"}),
    ("prior", {"score": "dot_product", "prior": "riccati"}),
]
BASELINE_COMBINATIONS = [
    ("rotate_values", {"rotate_values": True, "frequencies": "none"}),
    ("rotate_values", {"rotate_values": True, "frequencies": "as_released"}),
    ("query_noise_in_bias", {"query_noise_in_bias": True}),
    ("learn_frequencies", {"learn_frequencies": True, "frequencies": "none"}),
    ("learn_decay", {"learn_decay": True}),
    ("gate", {"gate": False}),
    ("horizon", {"horizon": 0.7}),
    ("initial_slopes", {"initial_slopes": "alibi"}),
]


def refused(name, construct):
    with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
        construct()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "fault"), VALUES + COMBINATIONS, ids=str)
def test_filters(name, fault):
    refused(name, lambda: preset("m2-sc-rfa", **fault))
    refused(name, lambda: RFAConfig(**fault))


@pytest.mark.parametrize(("name", "fault"), BASELINE_COMBINATIONS, ids=str)
def test_baselines(name, fault):
    refused(name, lambda: preset("b1-rope", **fault))


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("b1-rope", {"damping": 3.0}),
        ("b1-rope", {"zero_heads": 0}),
        ("b2-alibi", {"frequency_base": 500.0}),
        ("b4-sc-rope", {"steady_state": 0.5}),
        ("m2.2-flat-prior", {"steady_state": 0.5}),
        ("x2-riccati-alibi", {"steady_state": 0.5}),
        ("m2-sc-rfa", {"decay": "none", "damping": 3.0}),
    ],
    ids=str,
)
def test_fields_without_effect(name, override):
    field = list(override)[-1]
    assert "no effect" in refused(field, lambda: preset(name, **override))


@pytest.mark.parametrize("name", NAMES)
def test_every_field_with_an_effect_has_one(name):
    """A number that is accepted changes the attention layer."""
    config = preset(name, **SIZES)
    changes = {"damping": 0.7, "zero_heads": 1, "frequency_base": 500.0, "steady_state": 0.3}
    served = flatten(config.attention).keys() - config.attention.without_effect()
    for field in changes.keys() & served:
        changed = preset(name, **SIZES, **{field: changes[field]}).build_attention().state_dict()
        fixed = {key: value for key, value in config.build_attention().state_dict().items() if "projection" not in key}
        assert any(not torch.equal(changed[key], value) for key, value in fixed.items()), field


def test_unknown_preset():
    message = refused("preset", lambda: preset("m2"))
    assert "'m2'" in message
    assert "m2-sc-rfa" in message


@pytest.mark.parametrize("field", ["hidden", "model_type", "refuses_idle_fields"])
def test_unknown_field(field):
    assert "hidden_size" in refused(field, lambda: preset("m2-sc-rfa", **{field: 1}))


@pytest.mark.parametrize("kind", [RFAConfig, RFATimeSeriesConfig])
def test_what_a_class_says_of_itself_is_no_field(kind):
    assert {"hidden_size", "causal"} < {*kind.field_names()}
    assert not {"refuses_idle_fields", "keys_to_ignore_at_inference"} & {*kind.field_names()}


def test_a_whole_number_is_a_number():
    attention = preset("m2-sc-rfa", damping=5, frequency_base=500, steady_state=1, horizon=2).attention
    assert (attention.decay.damping, attention.frequencies.base, attention.horizon) == (5.0, 500.0, 2.0)
    assert {type(value) for value in (attention.decay.damping, attention.steady_state)} == {float}


@pytest.mark.parametrize("name", ["b1-rope", "m2-sc-rfa"])
@pytest.mark.parametrize("shape", [(2, 8), (9,)], ids=str)
def test_attention_mask_of_another_shape(name, shape):
    message = refused("attention_mask", lambda: small(name)(tokens(), attention_mask=torch.ones(shape)))
    assert str(shape) in message
    assert "(2, 9)" in message


def test_attention_mask_without_the_cached_keys():
    model, ids = small("m2-sc-rfa"), tokens()
    cache = model(ids[:, :5], use_cache=True).past_key_values
    refused("attention_mask", lambda: model(ids[:, 5:], attention_mask=torch.ones(2, 4), past_key_values=cache))


@pytest.mark.parametrize("both", [False, True])
def test_tokens_or_embeddings(both):
    model, ids = small("m2-sc-rfa"), tokens()
    given = {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)} if both else {}
    refused("input_ids", lambda: model(**given))


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.bool, lambda ids: ids[0], lambda ids: ids[None]])
def test_tokens_that_are_none(change):
    model, ids = small("m2-sc-rfa"), tokens()
    assert "integers (batch, length)" in refused("input_ids", lambda: model(change(ids)))


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.long, lambda x: x[0], lambda x: x[..., :5]])
def test_embeddings_that_are_none(change):
    model, ids = small("m2-sc-rfa"), tokens()
    embedded = model.get_input_embeddings()(ids).detach()
    refused("inputs_embeds", lambda: model(inputs_embeds=change(embedded)))


@pytest.mark.parametrize("name", ["b1-rope", "m2-sc-rfa"])
@pytest.mark.parametrize("fault", ["short", "falling", "equal"])
def test_times_that_do_not_fit(name, fault):
    times = {"short": torch.arange(8.0), "falling": -torch.arange(9.0), "equal": torch.zeros(9)}[fault]
    model = small(name)
    refused("times", lambda: model(tokens(), times=times))


@pytest.mark.parametrize("number", [-1, 61])
def test_token_ids_outside_the_vocabulary(number):
    model, ids = small("m2-sc-rfa"), tokens()
    ids[0, 1] = number
    assert refused("input_ids", lambda: model(ids)) == f"input_ids: got {number}, expected ids from 0 to 60"


@pytest.mark.parametrize("number", [-1, -101, 61])
def test_labels_outside_the_vocabulary(number):
    model, ids = small("m2-sc-rfa"), tokens()
    labels = ids.clone()
    labels[0, 1:3] = torch.tensor([number, -100])
    message = refused("labels", lambda: model(ids, labels=labels))
    assert message == f"labels: got {number}, expected ids from 0 to 60, or -100"


def test_labels_that_are_not_scored():
    model, ids = small("m2-sc-rfa"), tokens()
    labels = ids.clone()
    labels[:, :6] = -100
    logits = model(ids).logits[:, 5:-1]  # which foretell the last three
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten())
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.int, lambda x: x[:, :3], lambda x: x.T])
def test_labels_of_another_kind(change):
    model, ids = small("m2-sc-rfa"), tokens()
    given = change(ids)
    message = refused("labels", lambda: model(ids, labels=given))
    expected = "torch.int64 (2, 9), as the logits"
    assert message == f"labels: got '{given.dtype} {tuple(given.shape)}', expected {expected}"
