"""Every preset against the table of docs/presets.md, by formula, and its number of parameters."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from nn.by_hand import assert_near, dot_product, hidden, merged, perturb, states
from ops import oracle
from torch._subclasses.fake_tensor import FakeTensorMode

from rfa.models import (
    PRESETS,
    FilterAttentionConfig,
    RFAConfig,
    RFAForCausalLM,
    RFATimeSeriesConfig,
    describe,
    preset,
)
from rfa.models.presets import PLAIN_NAMES
from rfa.nn import ContentFilterAttention, DotProductAttention, RobustFilterAttention
from rfa.nn.projections import LEAST_RATE

from .small import FILTERS, NAMES, PATHS, SIZES, small, tokens

HEADS, MODES = 4, 8
BASE = 10000.0


def partitioned():
    bank = sorted(BASE ** (-m / (HEADS * MODES / 2)) for m in range(HEADS * MODES // 2))
    return np.array(bank).reshape(HEADS, MODES // 2)


def paired(bank):
    return np.stack([bank, -bank], -1).reshape(HEADS, MODES)


def paired_rope():
    return paired(np.array([[BASE ** (-m / (MODES / 2)) for m in range(MODES // 2)]] * HEADS))


def rope():
    """As transformers' models: every pair of the 2 d channels of a head has a frequency of its own."""
    return np.array([[BASE ** (-m / MODES) for m in range(MODES)]] * HEADS)


def decays(damping, zero_heads):
    return np.where(np.arange(HEADS) < zero_heads, 0, damping * partitioned().max(-1))


SC = paired(partitioned())
ALIBI = [2 ** (-8 * h / HEADS) for h in range(1, HEADS + 1)]
TABLE = {
    # frequencies, decays, ALiBi slopes
    "b1-rope": (rope(), None, None),
    "b2-alibi": (None, None, ALIBI),
    "b3-decayed-rope": (rope(), decays(0.05, 0), None),
    "b4-sc-rope": (SC, decays(0.05, 0), None),
    "b1-rope-as-released": (rope(), None, None),
    "m2.6-pure-rotation": (SC, None, None),
    "x3-rotation-riccati": (SC, None, ALIBI[::-1]),  # head 0 is the slowest
    "c1-nope": (None, None, None),
    "forget-gate": (rope(), None, None),
    "c4-fox": (None, None, None),
    "x4-content-riccati": (rope(), None, None),
    "c7-rope-alibi-innovation": (rope(), None, ALIBI),
    "x7-gated-roper": (rope(), None, None),
    "c8-fox-clock": (rope(), None, ALIBI[::-1]),
    "x6-content-dynamics": (SC, decays(0.05, 2).clip(1e-6), None),
    "m1-rfa": (paired_rope(), decays(5 / 15 * 0.05, 2), None),  # T_train = 16
    "m3-sc-rfa": (SC, decays(5.0, 0), None),
    "m2.5-no-rotation": (0 * SC, decays(0.05, 2), None),
}
OTHERS = {"m2-sc-rfa", "m2.1-exponential", "m2.2-flat-prior", "m2.3-no-gate", "m2.4-no-value-rotation", "x1-riccati"}
OTHERS |= {"rfa", "x2-riccati-alibi", "x5-content-clock", "m2-no-innovation", "m2-released-bias"}
TABLE |= {name: (SC, decays(0.05, 2), None) for name in OTHERS}
KERNELS = {
    "rfa": {"prior": "riccati"},
    "m2.1-exponential": {"weight": "exponential"},
    "m2.3-no-gate": {"gate": False},
    "m2.4-no-value-rotation": {"rotate_values": False},
    "x1-riccati": {"prior": "riccati"},
    "x2-riccati-alibi": {"prior": "riccati"},
    "x5-content-clock": {"prior": "riccati"},
    "m2-released-bias": {"query_noise_in_bias": True},
}
BASELINES = {
    **{name: {} for name in NAMES if name[0] == "b"},
    "m2.6-pure-rotation": {"rotate_values": True, "innovation": True},
    "x3-rotation-riccati": {"rotate_values": True, "innovation": True, "learn_slopes": True},
    "c1-nope": {},
    "forget-gate": {"gates": "forget"},
    "c4-fox": {"gates": "forget"},
    "x4-content-riccati": {"gates": "gain", "innovation": True},
    "x7-gated-roper": {"gates": "forget", "rotate_values": True},
    "c8-fox-clock": {"learn_slopes": True},
    "c7-rope-alibi-innovation": {"innovation": True},
}
PAPER_COUNT = 19_364_177


def test_the_table_is_complete():
    assert {*TABLE} == {*NAMES} == {*FILTERS, *BASELINES, "x6-content-dynamics"}
    assert all(describe(name) for name in PRESETS)
    # errors list the names of users first
    assert list(PRESETS)[:5] == ["rfa", "sc-rfa", "rope", "alibi", "forget-gate"]
    assert all(PRESETS[plain] == PRESETS[name] for plain, name in PLAIN_NAMES.items())
    assert preset("sc-rfa", damping=0.1) == preset("m2-sc-rfa", damping=0.1)


def held(attention):
    """Frequencies, decays and fixed or learned slopes of a layer."""
    if isinstance(attention, RobustFilterAttention):
        return {**attention.dynamics(), "slopes": None}
    if isinstance(attention, ContentFilterAttention):  # of any token: at first they are all alike
        token, _ = attention.dynamics(attention.dynamics.rates(torch.zeros(1, 1, HEADS * MODES)))
        return {"frequency": token.frequency[0, ..., 0], "decay": token.decay[0, :, 0], "slopes": None}
    return {**{key: getattr(attention.geometry, key) for key in ("frequency", "decay")}, "slopes": attention.slopes()}


@pytest.mark.parametrize("name", NAMES)
def test_dynamics_are_the_table(name):
    for layer in small(name).model.layers:
        for key, expected in zip(("frequency", "decay", "slopes"), TABLE[name], strict=True):
            found = held(layer.attention)[key]
            assert (found is None) == (expected is None), key
            if expected is not None:
                learned = name[:3] in ("x3-", "x6-", "c8-")
                tolerance = 1e-4 if learned else 1e-6  # from float32 noises, whose sums cancel
                np.testing.assert_allclose(oracle.as_array(found.detach()), expected, rtol=tolerance, err_msg=key)


def by_the_given_times(attention):
    """A layer whose content clock, if it has one, starts again; clocks are the subject of tests/nn/test_clock.py."""
    if attention.clock is not None:
        torch.nn.init.zeros_(attention.clock.weight)
        torch.nn.init.constant_(attention.clock.bias, math.log(math.expm1(1 - LEAST_RATE)))
    return attention


@pytest.mark.parametrize("name", FILTERS)
def test_kernels_of_the_filters_are_the_table(name):
    """The layer by hand with the kernel of the table, and the innovation."""
    attention = by_the_given_times(perturb(small(name, dtype=torch.float64).model.layers[0].attention))
    assert isinstance(attention, RobustFilterAttention)
    x = hidden(size=32)
    q, k, v = states(attention, x)
    parameters = {key: value.detach() for key, value in attention.dynamics().items()}
    estimate, _ = oracle.filter_attention(q, k, v, **parameters, **KERNELS.get(name, {}))
    assert_near(attention(x), merged(attention, estimate - (name not in ("rfa", "m2-no-innovation")) * v))


@pytest.mark.parametrize("name", BASELINES)
def test_kernels_of_the_baselines_are_the_table(name):
    attention = by_the_given_times(perturb(small(name, dtype=torch.float64).model.layers[0].attention))
    assert isinstance(attention, DotProductAttention)
    x = hidden(size=32, length=20)  # beyond the training length
    bank, decay, slopes = TABLE[name]
    kernel = {"frequency": bank, "decay": decay, "slopes": slopes, **BASELINES[name]}
    near = np.abs(oracle.as_array(attention(x)) - dot_product(attention, x, **kernel)).max() < 1e-5  # float32 banks
    assert near == (name != "b1-rope-as-released")  # the released map: tests/nn/test_dot_product_attention.py


@pytest.mark.parametrize("name", FILTERS)
def test_noises_are_the_table(name):
    attention = small(name).model.layers[0].attention
    found = {key: oracle.as_array(value) for key, value in attention.dynamics().items()}
    expected = {"robustness": 4, "inverse_temperature": 1, "key_noise": 1, "query_noise": 1, "noise_floor": 0.01}
    if name == "m2.2-flat-prior":
        expected |= {"key_noise": 0, "query_noise": 0, "noise_floor": 1, "process_noise": 0}
    elif name not in ("rfa", "x2-riccati-alibi", "x5-content-clock"):  # theirs: tests/rfa/nn/test_head_dynamics.py
        steady = 0.5 if name == "m3-sc-rfa" else 0.1
        expected["process_noise"] = np.where(found["decay"] > 0, 2 * found["decay"] * steady, 1e-6)
    if name == "m2.3-no-gate":
        del expected["query_noise"]  # enters nothing
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], np.broadcast_to(value, HEADS), rtol=1e-5, atol=1e-9, err_msg=key)


def count(name):
    with torch.device("meta"):
        return RFAForCausalLM(preset(name)).num_parameters()


def test_the_baseline_at_the_papers_size_by_formula():
    vocabulary, d, inner, blocks = 50257, 256, 4 * 256, 6
    embedding, head_bias = vocabulary * d, vocabulary  # the head's weight is the embedding's
    norm, square = 2 * d, d * d + d
    attention = 3 * (d * 2 * d + 2 * d) + (2 * d * d + d)
    feed_forward = (d * inner + inner) + (inner * d + d)
    block = 2 * norm + attention + feed_forward
    assert embedding + head_bias + 2 * square + norm + blocks * block == PAPER_COUNT
    assert count("b1-rope") == PAPER_COUNT


def test_no_preset_has_more_than_the_baseline():
    """At most 0.05 % more; gates, clocks and dynamics that depend on the content have a projection."""
    for name in NAMES:
        gated = "gate" in name or "fox" in name or "content" in name
        share = 0.012 if name == "x6-content-dynamics" else 0.001 if gated else 0.0005
        assert PAPER_COUNT <= count(name) <= PAPER_COUNT * (1 + share), name


def test_there_is_one_default():
    """x2 without the innovation step, in every configuration and in the layer."""
    default = PRESETS["rfa"]
    assert default == dataclasses.replace(PRESETS["x2-riccati-alibi"], innovation=False)
    assert default == RFAConfig().attention == FilterAttentionConfig()
    assert RFATimeSeriesConfig() == RFATimeSeriesConfig(preset="rfa")
    layers = []
    for make in (default.build, lambda size, heads, _: RobustFilterAttention(size, heads)):
        torch.manual_seed(0)
        layers.append(make(32, HEADS, 16))
    one, other = layers
    assert (one.options, one.innovation, one.certified) == (other.options, other.innovation, other.certified)
    x = hidden(size=32, dtype=torch.float32)
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("m2-sc-rfa", {"horizon": 0.69}),
        ("m2-sc-rfa", {"horizon": 0.69, "learn_horizon": True}),
        ("m2-sc-rfa", {"innovation": False}),
        ("m2-sc-rfa", {"query_noise_in_bias": True}),
        ("m2-sc-rfa", {"learn_frequencies": True, "learn_decay": True}),
        ("m2-sc-rfa", {"learn_noise_floor": True, "process_noise_as": "steady_state", "learn_decay": True}),
        ("m2-sc-rfa", {"steady_state": 0.3}),
        ("m2-sc-rfa", {"zero_heads": 0}),
        ("m2-sc-rfa", {"damping": 1}),
        ("m2-sc-rfa", {"base": 100}),
        ("m2-sc-rfa", {"slow_modes": "real"}),
        ("m1-rfa", {"train_length": 64}),
        ("b1-rope", {"innovation": True}),
        ("m2-sc-rfa", {"normalise_states": True}),
        ("c4-fox", {"normalise_states": True}),
        ("x6-content-dynamics", {"normalise_states": True}),
        ("m2-sc-rfa", {"attention_dropout": 0.5}),
        ("b1-rope", {"attention_dropout": 0.5}),
    ],
    ids=str,
)
def test_overrides_reach_the_layer(name, override):
    model, plain = small(name, **override).train(), small(name)
    ids = tokens()
    output = model(ids, labels=ids)
    if "learn_decay" not in override:  # what is only learned starts where it was
        assert (output.logits - plain(ids).logits).abs().max() > 1e-6
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["m2-sc-rfa", "b1-rope"])
def test_real_slow_modes_turn_at_least_once_in_training_or_not_at_all(name):
    """`omega T_train < 2 pi` becomes 0, with T_train = 16, and all faster modes stay."""
    for plain, real in zip(small(name).model.layers, small(name, slow_modes="real").model.layers, strict=True):
        before, after = (oracle.as_array(held(layer.attention)["frequency"].detach()) for layer in (plain, real))
        slow = np.abs(before) * 16 < 2 * np.pi
        assert slow.any()
        assert not slow.all()
        np.testing.assert_array_equal(after, np.where(slow, 0, before))


@pytest.mark.parametrize("name", PATHS)
def test_shapes_come_out_without_data(name):
    """On the device "meta", and under `FakeTensorMode`, in which tools plan memory and placement."""
    for place in (torch.device("meta"), FakeTensorMode()):
        with place:
            model = RFAForCausalLM(preset(name, **SIZES))
            ids = torch.zeros(2, 9, dtype=torch.int64)
            output = model(ids, labels=ids)
        assert output.logits.shape == (2, 9, SIZES["vocab_size"])
        assert output.loss.shape == ()
