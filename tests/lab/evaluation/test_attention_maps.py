"""Maps against dense weights from the formulas, in float64."""

import math

import numpy as np
import pytest
import torch
from cover import some
from nn import by_hand
from ops import oracle

from rfa.models import RFAForCausalLM, preset
from rfa_lab.evaluation import attention_maps
from rfa_lab.evaluation.attention_maps import middle_window

LENGTH, VOCABULARY = 23, 31
HALF = {"rtol": 1e-3, "atol": 1e-7}  # float16: eps 9.8e-4, smallest number 6e-8
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY}


def model_and_window(name, **changes):
    torch.manual_seed(0)
    model = RFAForCausalLM(preset(name, **{**SIZES, "train_length": 8, **changes})).double().eval()
    by_hand.perturb(model.model.layers[0].attention)
    return model, np.random.default_rng(1).integers(0, VOCABULARY, LENGTH)


def layer_and_states(model, ids):
    """The first layer, and its queries and keys in float64."""
    block = model.model.layers[0]
    with torch.no_grad():
        embedded = model.model.input_projection(model.model.embed_tokens(torch.from_numpy(ids)[None]))
        hidden = block.attention_norm(embedded)
    return block.attention, *by_hand.states(block.attention, hidden)[:2]


def filter_weights(model, ids):
    """`A exp(-mu tau)` from the operator's oracle: the values are the rows of the identity."""
    layer, query, key = layer_and_states(model, ids)
    eye = np.concatenate([np.eye(LENGTH), np.zeros((LENGTH, LENGTH))], -1)
    value = np.broadcast_to(eye, (*key.shape[:2], *eye.shape))
    options = {name: getattr(layer.options, name) for name in ("weight", "prior", "gate", "query_noise_in_bias")}
    dynamics = {name: given.detach() for name, given in layer.dynamics().items()}
    output, _ = oracle.filter_attention(query, key, value, rotate_values=False, **options, **dynamics)
    return output[0, ..., :LENGTH]


def dot_product_weights(model, ids):
    """`softmax(Re(q^H R k) / sqrt(2 d) - slope tau) exp(-mu tau)`; RoPE turns forwards unless values turn too."""
    layer, query, key = layer_and_states(model, ids)
    q, k = oracle.as_complex(query)[0], oracle.as_complex(key)[0]
    heads, _, modes = q.shape
    none, geometry = np.zeros(heads), layer.geometry
    omega = np.zeros((heads, modes)) if geometry.frequency is None else oracle.as_array(geometry.frequency)
    mu = none if geometry.decay is None else oracle.as_array(geometry.decay)
    slope = none if geometry.slopes is None else oracle.as_array(geometry.slopes)
    sign = 1 if layer.rotate_values else -1
    weights = np.zeros((heads, LENGTH, LENGTH))
    for h in range(heads):
        for i in range(LENGTH):
            lag = i - np.arange(i + 1.0)
            turned = np.exp(1j * sign * omega[h] * lag[:, None]) * k[h, : i + 1]
            score = (turned @ q[h, i].conj()).real / math.sqrt(2 * modes) - slope[h] * lag
            weight = np.exp(score - score.max())
            weights[h, i, : i + 1] = weight / weight.sum() * np.exp(-mu[h] * lag)
    return weights


def pooled(weights, block):
    """Means over blocks of queries of sums over blocks of keys."""
    starts = np.arange(0, LENGTH, block)
    summed = np.add.reduceat(weights, starts, axis=2)
    counts = np.diff([*starts, LENGTH])
    return np.add.reduceat(summed, starts, axis=1) / counts[:, None]


def assert_maps_without_decay(model, weights, maps, block):
    """A is W over the decay of the formula; maps of A are there where something decays."""
    layer = model.model.layers[-1].attention
    given = layer.dynamics() if hasattr(layer, "dynamics") else {"decay": layer.geometry.decay}
    if given["decay"] is None:
        assert maps.keys() == {"weights"}
        return
    mu, ahead = (oracle.as_array(given[n].detach())[:, None, None] if n in given else 0.0 for n in ("decay", "horizon"))
    lag = np.clip(np.arange(LENGTH)[:, None] - np.arange(LENGTH), 0, None)
    softmax = weights / np.exp(-mu * (lag + ahead))
    np.testing.assert_allclose(softmax.sum(-1), 1, rtol=1e-9)
    np.testing.assert_allclose(maps["undecayed"].astype(np.float64), pooled(softmax, block), **HALF)


CASES = [
    ("b1-rope", {}),
    ("b2-alibi", {}),
    ("b3-decayed-rope", {}),
    ("m2.6-pure-rotation", {}),
    ("m1-rfa", {}),
    ("m2-sc-rfa", {}),
    ("m2-sc-rfa", {"horizon": 1.5}),
    ("m2-sc-rfa", {"tie_key_value": True}),
    ("m2.4-no-value-rotation", {}),
    ("x2-riccati-alibi", {}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
@pytest.mark.parametrize("block", some([4, 1], 2))
def test_equal_to_dense_weights(name, changes, block):
    model, ids = model_and_window(name, **changes)
    if changes.get("tie_key_value"):
        model.model.layers[-1].attention.value_projection = model.model.layers[-1].attention.key_projection
    expected = (dot_product_weights if name[0] == "b" or "pure" in name else filter_weights)(model, ids)
    if changes.get("tie_key_value"):
        model.model.layers[-1].attention.value_projection = None
    maps, summary = attention_maps(model, ids, 8, size=-(-LENGTH // block))
    assert {of.dtype for of in maps.values()} == {np.dtype(np.float16)}
    assert (summary["length"], summary["block"], summary["layer"]) == (LENGTH, block, 0)
    np.testing.assert_allclose(maps["weights"].astype(np.float64), pooled(expected, block), **HALF)
    assert_maps_without_decay(model, expected, maps, block)
    kept = [head["kept"] for head in summary["heads"]]
    np.testing.assert_allclose(kept, expected.sum(-1).mean(-1), rtol=1e-6)
    if block == 1:
        lag = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        mean_lag = (expected * lag).sum((1, 2)) / expected.sum((1, 2))
        np.testing.assert_allclose([head["mean_lag"] for head in summary["heads"]], mean_lag, rtol=1e-6)
        beyond = (expected * (lag > 8)).sum((1, 2)) / expected.sum((1, 2))
        np.testing.assert_allclose([head["beyond_training"] for head in summary["heads"]], beyond, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "c4-fox",
        "c7-rope-alibi-innovation",
        "x3-rotation-riccati",
        "x4-content-riccati",
        "x5-content-clock",
        "x7-gated-roper",
    ],
)
def test_weights_without_decay_are_a_distribution(name):
    model, ids = model_and_window(name, **({"damping": 0.0} if name == "x5-content-clock" else {}))
    maps, summary = attention_maps(model, ids, 8, size=LENGTH)
    assert maps.keys() == {"weights"}
    assert (maps["weights"] >= -1e-6).all()  # turned there and back in float32
    np.testing.assert_allclose([head["kept"] for head in summary["heads"]], 1, atol=1e-6)
    assert (np.triu(maps["weights"], 1) == 0).all()


def test_weights_before_the_decay_of_each_token_are_a_distribution():
    model, ids = model_and_window("x6-content-dynamics")
    maps, _ = attention_maps(model, ids, 8, size=LENGTH)
    np.testing.assert_allclose(maps["undecayed"].sum(-1, dtype=np.float64), 1, rtol=1e-2)  # float16
    assert (maps["weights"] < 0.9 * maps["undecayed"]).any()
    assert (maps["weights"] <= maps["undecayed"] + 1e-3).all()


def test_a_layer_that_is_named():
    """The first of two, by dense weights; the last of them by default."""
    model, ids = model_and_window("m2-sc-rfa", num_hidden_layers=2)
    expected = filter_weights(model, ids)
    for layer in (0, -2):
        maps, summary = attention_maps(model, ids, 8, size=LENGTH, layer=layer)
        assert summary["layer"] == 0
        np.testing.assert_allclose(maps["weights"].astype(np.float64), expected, **HALF)
    assert attention_maps(model, ids, 8)[1]["layer"] == 1
    for layer in (2, -3):
        with pytest.raises(ValueError, match=f"layer: got {layer}, expected -2 to 1"):
            attention_maps(model, ids, 8, layer=layer)


def test_the_window():
    assert middle_window(100, 40) == slice(30, 70)
    with pytest.raises(ValueError, match="attention: got a text of 10 tokens, expected at least 40"):
        middle_window(10, 40)
