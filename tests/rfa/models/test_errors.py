"""Bad input: `ValueError`, one line, which names the argument."""

import re

import pytest
import torch

from rfa.models import RFAConfig, preset

from .small import small, tokens

NO_PAIRS = {"hidden_size": 36, "num_attention_heads": 4}  # nine modes
# the field that is named, and what is wrong with it; all refused from a filter's defaults
VALUES = [
    ("weight", {"weight": "cosine"}),
    ("prior", {"prior": "ricatti"}),
    ("frequencies", {"frequencies": "random"}),
    ("initial_slopes", {"initial_slopes": "steep", "prior": "riccati"}),
    ("hidden_size", {"hidden_size": "32"}),
    ("hidden_size", {"hidden_size": 33}),
    ("hidden_size", NO_PAIRS),
    ("hidden_size", {**NO_PAIRS, "frequencies": "none", "decay": "none", "learn_frequencies": True}),
    ("vocab_size", {"vocab_size": 0}),
    ("num_attention_heads", {"num_attention_heads": 0}),
    ("train_length", {"train_length": 1}),
    ("base", {"base": 1.0}),
    ("slow_modes", {"slow_modes": "slow"}),
    ("slow_modes", {"slow_modes": "real", "learn_frequencies": True}),
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
COMBINATIONS = [  # rules of the configuration, and one of the layer's: those are in tests/rfa/nn/test_checks.py
    ("query_noise_in_bias", {"query_noise_in_bias": True, "prior": "riccati"}),
    ("prior", {"prior": "alibi"}),
    ("frequencies", {"frequencies": "as_released"}),
    ("learn_frequencies", {"learn_frequencies": True, "frequencies": "rope"}),  # no pairs to keep
    ("dropout", {"attention_dropout": 1.0}),
    ("backend", {"backend": "gpu"}),
]
BASELINE_COMBINATIONS = [
    ("rotate_values", {"rotate_values": True, "frequencies": "as_released"}),
    ("learn_frequencies", {"learn_frequencies": True}),
    *((name, {name: value}) for name, value in (("learn_decay", True), ("gate", False), ("horizon", 0.7))),
    ("decay", {"prior": "riccati", "decay": "spectral"}),
    ("clock", {"frequencies": "none", "clock": "content"}),
    ("clock", {"frequencies": "none", "prior": "forget_gate", "clock": "content"}),
]


def refused(name, construct):
    with pytest.raises(ValueError, match=rf"\b{name}") as caught:
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
        ("b2-alibi", {"base": 500.0}),
        ("b2-alibi", {"slow_modes": "real"}),
        ("b4-sc-rope", {"steady_state": 0.5}),
        ("m2.2-flat-prior", {"steady_state": 0.5}),
        ("x2-riccati-alibi", {"steady_state": 0.5}),
        ("rfa", {"steady_state": 0.5}),
        ("rfa", {"prior": "lyapunov", "initial_slopes": "alibi"}),
        ("m2-sc-rfa", {"initial_slopes": "alibi"}),
        ("m2-sc-rfa", {"decay": "none", "damping": 3.0}),
    ],
    ids=str,
)
def test_fields_without_effect(name, override):
    field = list(override)[-1]
    assert "no effect" in refused(field, lambda: preset(name, **override))


def test_unknown_names():
    assert "'m2', expected one of rfa, sc-rfa, rope" in refused("preset", lambda: preset("m2"))
    for field in ("hidden", "model_type", "refuses_idle_fields"):
        assert "hidden_size" in refused(field, lambda field=field: preset("m2-sc-rfa", **{field: 1}))


def test_a_whole_number_is_a_number():
    attention = preset("m2-sc-rfa", damping=5, base=500, steady_state=1, horizon=2).attention
    assert (attention.decay.damping, attention.frequencies.base, attention.horizon) == (5.0, 500.0, 2.0)
    assert {type(value) for value in (attention.decay.damping, attention.steady_state)} == {float}


IDS, LABELS = tokens(), tokens()
STATES = small("m2-sc-rfa").get_input_embeddings()(IDS).detach()


def with_number(number):
    """Ids of which one is another number."""
    return IDS.masked_scatter(torch.arange(9) == 1, torch.full((2,), number))


CALLS = [
    ("attention_mask", {"attention_mask": torch.ones(2, 8)}, r"\(2, 8\).*\(2, 9\)"),
    ("attention_mask", {"attention_mask": torch.ones(9)}, r"\(9,\).*\(2, 9\)"),
    ("input_ids", {"inputs_embeds": STATES}, "not both"),
    ("input_ids", {"input_ids": None}, "expected either"),
    *(("input_ids", {"input_ids": ids}, r"integers \(batch, length\)") for ids in (IDS.float(), IDS.bool(), IDS[0])),
    *(
        ("inputs_embeds", {"input_ids": None, "inputs_embeds": states}, "floating-point")
        for states in (STATES.double(), STATES.long(), STATES[0], STATES[..., :5])
    ),
    *(("times", {"times": times}, "got") for times in (torch.arange(8.0), -torch.arange(9.0), torch.zeros(9))),
    *(("input_ids", {"input_ids": with_number(n)}, rf"got {n}, expected ids from 0 to 60$") for n in (-1, 61)),
    *(("labels", {"labels": with_number(n)}, rf"got {n}, expected ids from 0 to 60, or -100$") for n in (-1, -101, 61)),
    *(
        ("labels", {"labels": labels}, r"expected torch.int64 \(2, 9\), as the logits$")
        for labels in (LABELS.float(), LABELS.int(), LABELS[:, :3], LABELS.T)
    ),
]


@pytest.mark.parametrize(("name", "given", "says"), CALLS)
def test_calls(name, given, says):
    message = refused(f"{name}: ", lambda: small("m2-sc-rfa")(**{"input_ids": IDS, **given}))
    assert re.search(says, message)


def test_attention_mask_without_the_cached_keys():
    model, ids = small("m2-sc-rfa"), tokens()
    cache = model(ids[:, :5], use_cache=True).past_key_values
    refused("attention_mask", lambda: model(ids[:, 5:], attention_mask=torch.ones(2, 4), past_key_values=cache))
