"""Attention as an object of its own in a configuration: its dictionary, plain names, files and result records."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rfa.models import (
    PRESETS,
    DecayRates,
    FrequencyBank,
    RFAConfig,
    RFATimeSeriesConfig,
    RoutingAttentionConfig,
    preset,
)
from rfa.models.configuration import read_attention
from rfa.models.saved_files import read_config
from rfa.nn.dynamics import bank
from rfa_lab.record import read_rows

from .small import PATHS, SIZES

ROUTING = RoutingAttentionConfig(decay=DecayRates(damping=0.2))


@pytest.mark.parametrize("attention", [*(PRESETS[name] for name in PATHS), ROUTING], ids=[*PATHS, "routing"])
def test_forms_of_an_attention(attention, tmp_path):
    assert read_attention(json.loads(json.dumps(attention.to_dict()))) == attention
    assert attention.changed({}) == attention
    config = RFAConfig(attention=attention, **SIZES)
    assert config == copy.deepcopy(config) == RFAConfig(attention=attention.to_dict(), **SIZES)
    config.save_pretrained(tmp_path)
    assert read_config(tmp_path).attention == AutoConfig.from_pretrained(tmp_path).attention == attention
    assert config.to_diff_dict()["attention"] == config.attention.to_dict()
    assert hash(attention) == hash(copy.deepcopy(attention))


@pytest.mark.parametrize("heads", [2, 3, 8])
def test_heads_without_decay_fit_the_number_of_heads(heads, tmp_path):
    """Two by default, as in a layer that is built without a configuration; one where there is no other."""
    sizes = SIZES | {"hidden_size": 48, "num_attention_heads": heads}
    layer = bank(heads, 48 // heads, None, None)[1]
    for config in (preset("m2-sc-rfa", **sizes), RFAConfig(**sizes), preset("x6-content-dynamics", **sizes)):
        decay = config.attention.arguments(48, heads, 16)["decay"]
        assert torch.equal(decay, layer)
        assert int((decay == 0).sum()) == config.attention.decay.zero_heads == min(2, heads)
        config.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).attention == config.attention
    series = RFATimeSeriesConfig(hidden_size=48, num_attention_heads=heads, num_hidden_layers=1)
    assert series.attention.decay.zero_heads == min(2, heads)
    for fits in range(heads + 1):
        assert preset("m2-sc-rfa", **sizes, zero_heads=fits).attention.decay.zero_heads == fits
    with pytest.raises(ValueError, match=rf"^zero_heads: got {heads + 1}, expected .*from 0 to {heads}"):
        preset("m2-sc-rfa", **sizes, zero_heads=heads + 1)


def test_overrides_while_loading(tmp_path):
    preset("m2-sc-rfa", **SIZES).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, backend="reference", damping=0.2, vocab_size=7)
    assert (config.attention.backend, config.attention.decay.damping, config.vocab_size) == ("reference", 0.2, 7)


def test_plain_names_reach_fields_of_parts():
    assert preset("b4-sc-rope", damping=0.2, prior="alibi").attention == dataclasses.replace(
        PRESETS["b4-sc-rope"], decay=DecayRates(damping=0.2, zero_heads=0), prior="alibi"
    )
    parts = preset("m2-sc-rfa", frequencies={"base": 500.0}, decay=DecayRates(kind="length_scaled")).attention
    assert (parts.frequencies, parts.decay.kind) == (FrequencyBank(base=500.0), "length_scaled")
    both = preset("m3-sc-rfa", frequencies="rope", base=500.0).attention  # the kind, and a field beside it
    assert both.frequencies == FrequencyBank(kind="rope", base=500.0)
    assert RFAConfig(prior="lyapunov", innovation=True).attention == PRESETS["m2-sc-rfa"]
    assert RFAConfig(initial_slopes=None, innovation=True).attention == PRESETS["x1-riccati"]
    assert preset("rfa", prior="lyapunov").attention == PRESETS["m2-no-innovation"]
    assert preset("m2-sc-rfa", prior="riccati").attention == PRESETS["x1-riccati"]  # m2 has no start at slopes
    with pytest.raises(ValueError, match=r"^frequencies: got the field 'rate', expected some of kind, base"):
        preset("m2-sc-rfa", frequencies={"rate": 1})


@pytest.mark.parametrize("field", ["gate", "horizon", "initial_slopes"])
def test_a_name_that_the_kind_lacks(field):
    for construct in (preset, lambda name, **fields: RFAConfig(attention=PRESETS[name], **fields)):
        with pytest.raises(ValueError, match=rf"^{field}: got None, .*dot_product attention, which takes .*damping"):
            construct("x3-rotation-riccati", **{field: None})


def test_a_plain_name_cannot_be_assigned():
    config = preset("m2-sc-rfa")
    with pytest.raises(ValueError, match=r"^damping: got 0.2, expected .*attention"):
        config.damping = 0.2
    config.attention = dataclasses.replace(config.attention, horizon=1.0)
    assert config.to_dict()["attention"]["horizon"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (5, "attention: got 5, expected an object with kind"),
        ({"kind": None}, "attention.kind: got None, expected one of 'filter', 'routing', 'dot_product'"),
        ({"kind": "linear"}, "attention.kind: got 'linear'"),
        ({"kind": "filter", "colour": 1}, "attention: got the field 'colour', expected some of frequencies, decay"),
        ({"kind": "dot_product", "gate": True}, "attention: got the field 'gate'"),
        ({"kind": "filter", "decay": {"damping": "low"}}, "damping: got 'low', expected float"),
        ({"kind": "filter", "decay": {"rate": 1}}, "attention.decay: got the field 'rate'"),
        ({"kind": "filter", "decay": 5}, "attention.decay: got 5, expected an object with kind, damping, zero_heads"),
        ({"kind": "filter", "horizon": 10**400}, "horizon: got 1000000"),
        ({"kind": "filter", "gate": None}, "gate: got None, expected bool"),
        ({"kind": "filter", "horizon": True}, "horizon: got True, expected float | None"),
    ],
    ids=str,
)
def test_a_damaged_file(change, message, tmp_path):
    preset("m2-sc-rfa", **SIZES).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention": change}))
    for read in (AutoConfig.from_pretrained, read_config):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (compared as a whole below)
            read(tmp_path)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


RESULTS = Path(__file__).parents[3] / "results"


LEFT = {"c2-window", "c3-yarn", "c5-rope-innovation", "c6-alibi-innovation", "c12-kerple"}  # presets of commit c7550f4b


def common(stored, now):
    """The stored values of the fields that there are now; fields that came later have their defaults."""
    return {name: common(stored[name], x) if isinstance(x, dict) else stored.get(name, x) for name, x in now.items()}


@pytest.mark.parametrize("name", ["novels-small", "context"])
def test_every_stored_run_is_of_its_preset(name):
    """A run's configuration as it was is what its preset gives now, but for options that were left."""
    settings = read_rows(RESULTS / f"{name}.parquet").settings
    runs = [run for run in settings.values() if run["spec"]["preset"] not in LEFT]
    assert len(runs) > 40
    for run in runs:
        changes = {name: x for name, x in run["spec"]["model"].items() if name != "taps"}
        stored, now = run["config"]["attention"], preset(run["spec"]["preset"], **changes).attention.to_dict()
        stored = {"weight": stored.get("score"), **stored}  # its name at that time
        assert common(stored, now) == now
