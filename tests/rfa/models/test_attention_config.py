"""Attention as an object of its own in a configuration: nested and flat names, files, result records, kinds."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rfa.models import (
    PRESETS,
    ContentAttentionConfig,
    DecayRates,
    DotProductAttentionConfig,
    FilterAttentionConfig,
    FrequencyBank,
    RFAConfig,
    RFATimeSeriesConfig,
    RoutingAttentionConfig,
    preset,
)
from rfa.models.flat import DEFAULTS, change, flatten, from_flat, read_attention
from rfa.models.saved_files import read_config
from rfa.nn.dynamics import bank
from rfa_lab.record import read_rows

from .small import NAMES, SIZES

KIND = {
    "filter": FilterAttentionConfig(),
    "routing": RoutingAttentionConfig(),
    "dot": DotProductAttentionConfig(),
    "content": ContentAttentionConfig(),
}


@pytest.mark.parametrize("name", NAMES)
def test_forms_of_a_preset(name):
    attention = PRESETS[name]
    assert read_attention(json.loads(json.dumps(attention.to_dict()))) == attention
    assert from_flat(flatten(attention)) == attention
    assert change(attention, {}) == attention
    config = preset(name, **SIZES)
    assert config == copy.deepcopy(config) == RFAConfig(attention=attention, **SIZES)
    assert config == RFAConfig(attention=attention.to_dict(), **SIZES)
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


@pytest.mark.parametrize("attention", KIND.values(), ids=KIND)
def test_saved_and_read(attention, tmp_path):
    config = RFAConfig(attention=dataclasses.replace(attention, decay=DecayRates(damping=0.2)), **SIZES)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["attention"]["kind"] == attention.kind
    assert written["attention"]["decay"]["damping"] == 0.2
    assert "damping" not in written
    for read in (AutoConfig.from_pretrained, RFAConfig.from_pretrained, read_config):
        assert read(tmp_path).attention == config.attention


READERS = {
    "transformers": AutoConfig.from_pretrained,
    "ours": read_config,
    "one file": lambda folder: RFAConfig.from_json_file(folder / "config.json"),
}


def write_flat(folder, attention, **fault):
    """A file of an older version: a value for every flat name, and the precision by its older name."""
    record = {**SIZES, "model_type": "rfa", "torch_dtype": "bfloat16", **DEFAULTS, **flatten(attention), **fault}
    (folder / "config.json").write_text(json.dumps(record), "utf-8")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("attention", [*KIND.values(), PRESETS["x2-riccati-alibi"], PRESETS["x3-rotation-riccati"]])
def test_a_file_of_flat_names(attention, read, tmp_path):
    attention = dataclasses.replace(attention, decay=DecayRates(kind=attention.decay.kind, damping=0.2))
    write_flat(tmp_path, attention)
    config = read(tmp_path)
    assert config.attention == attention
    assert config.dtype == torch.bfloat16
    assert {size: getattr(config, size) for size in SIZES} == SIZES


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("b1-rope", {"gate": False}),
        ("b1-rope", {"initial_slopes": "alibi"}),
        ("x3-rotation-riccati", {"decay": "spectral"}),
        ("m2-sc-rfa", {"aggregation": "routing", "gate": False}),
        ("m2-sc-rfa", {"aggregation": ["routing"]}),
    ],
    ids=str,
)
def test_a_damaged_file_of_flat_names(name, fault, tmp_path):
    write_flat(tmp_path, PRESETS[name], **fault)
    for read in READERS.values():
        with pytest.raises(ValueError, match=rf"^{list(fault)[-1]}: got "):
            read(tmp_path)


def test_overrides_while_loading(tmp_path):
    preset("m2-sc-rfa", **SIZES).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, backend="reference", damping=0.2, vocab_size=7)
    assert (config.attention.backend, config.attention.decay.damping, config.vocab_size) == ("reference", 0.2, 7)


def test_flat_names_choose_the_kind():
    assert isinstance(preset("m2-sc-rfa", aggregation="routing").attention, RoutingAttentionConfig)
    assert preset("m3-sc-rfa", score="dot_product", prior="flat").attention == DotProductAttentionConfig(
        frequencies=FrequencyBank(), decay=DecayRates(damping=5.0, zero_heads=0), rotate_values=True, innovation=True
    )
    back = preset("b1-rope", score="student_t", prior="lyapunov", frequencies="paired_rope").attention
    assert back == FilterAttentionConfig(
        prior="lyapunov",
        frequencies=FrequencyBank(kind="paired_rope"),
        decay=DecayRates(kind="none", zero_heads=0),
        rotate_values=False,
    )
    assert preset("b4-sc-rope", damping=0.2, prior="alibi").attention == dataclasses.replace(
        PRESETS["b4-sc-rope"], decay=DecayRates(damping=0.2, zero_heads=0), prior="alibi"
    )
    start = preset("x3-rotation-riccati", score="exponential").attention
    assert (start.prior, start.initial_slopes) == ("riccati", "alibi")  # where these dot products start too
    with pytest.raises(ValueError, match=r"^gate: got False, expected True for dot_product attention"):
        preset("m2.3-no-gate", score="dot_product", prior="flat")
    with pytest.raises(ValueError, match=r"^initial_slopes: got 'alibi', expected None for dot_product attention"):
        preset("x2-riccati-alibi", score="dot_product", prior="alibi")


def test_flat_names_alone_change_the_defaults_of_their_kind():
    kinds = {"aggregation": "routing"}, {"score": "dot_product"}, {"dynamics": "content"}
    for flat, kind in zip(kinds, list(KIND.values())[1:], strict=True):
        assert RFAConfig(**flat).attention == kind
    assert RFAConfig(prior="lyapunov", innovation=True).attention == PRESETS["m2-sc-rfa"]
    assert RFAConfig(initial_slopes=None, innovation=True).attention == PRESETS["x1-riccati"]
    assert preset("rfa", prior="lyapunov").attention == PRESETS["m2-no-innovation"]
    assert preset("m2-sc-rfa", prior="riccati").attention == PRESETS["x1-riccati"]  # m2 has no start at slopes


def test_what_a_flat_file_misses_is_of_the_default_of_its_time():
    assert from_flat({"damping": 0.05}) == PRESETS["m2-sc-rfa"]
    assert from_flat({"damping": 0.05, "prior": "riccati"}) == PRESETS["x1-riccati"]
    config = RFAConfig.from_dict({"model_type": "rfa", "prior": "riccati", "initial_slopes": "alibi", **SIZES})
    assert config.attention == PRESETS["x2-riccati-alibi"]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("b1-rope", "gate", True),
        ("b1-rope", "horizon", None),
        ("b1-rope", "aggregation", "consensus"),
        ("x3-rotation-riccati", "initial_slopes", "alibi"),
    ],
)
def test_a_name_that_the_kind_lacks(name, field, value):
    for construct in (preset, lambda name, **flat: RFAConfig(attention=PRESETS[name], **flat)):
        with pytest.raises(ValueError, match=rf"^{field}: got .* dot_product attention, which takes .*damping"):
            construct(name, **{field: value})


def test_a_flat_name_cannot_be_assigned():
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


@pytest.mark.parametrize("name", ["novels-small", "context"])
def test_every_stored_run_is_of_its_preset(name):
    """A run's configuration as it was is what its preset gives now."""
    record = read_rows(RESULTS / f"{name}.parquet")
    assert len(record.settings) > 40
    for run in record.settings.values():
        expected = preset(run["spec"]["preset"], **run["spec"]["model"]).attention
        assert RFAConfig.from_dict(run["config"]).attention == expected
