"""Maps against the weights that the model records, whose own oracle is in tests/rfa/models/test_attentions.py."""

import numpy as np
import pytest
import torch
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


def dense_weights(model, ids, layer=-1):
    """`A` of a layer, as the model records it, and `W = A exp(-mu (tau + horizon))`."""
    with torch.no_grad():
        softmax = oracle.as_array(model(torch.from_numpy(ids)[None], output_attentions=True).attentions[layer][0])
    attention = model.model.layers[layer].attention
    given = attention.dynamics() if hasattr(attention, "dynamics") else {"decay": attention.geometry.decay}
    numbers = [given[name] if given.get(name) is not None else torch.zeros(1) for name in ("decay", "horizon")]
    mu, ahead = (oracle.as_array(number.detach())[:, None, None] for number in numbers)
    lag = np.clip(np.arange(LENGTH)[:, None] - np.arange(LENGTH), 0, None)
    return softmax, softmax * np.exp(-mu * (lag + ahead))


def pooled(weights, block):
    """Means over blocks of queries of sums over blocks of keys."""
    starts = np.arange(0, LENGTH, block)
    summed = np.add.reduceat(weights, starts, axis=2)
    counts = np.diff([*starts, LENGTH])
    return np.add.reduceat(summed, starts, axis=1) / counts[:, None]


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
    ("c4-fox", {}),
    ("c7-rope-alibi-innovation", {}),
    ("x4-content-riccati", {}),
    ("x5-content-clock", {"damping": 0.0}),
]


@pytest.mark.parametrize(("name", "changes", "block"), [(*case, (4, 1)[k % 2]) for k, case in enumerate(CASES)])
def test_equal_to_dense_weights(name, changes, block):
    model, ids = model_and_window(name, **changes)
    softmax, expected = dense_weights(model, ids)
    maps, summary = attention_maps(model, ids, 8, size=-(-LENGTH // block))
    assert {of.dtype for of in maps.values()} == {np.dtype(np.float16)}
    assert (summary["length"], summary["block"], summary["layer"]) == (LENGTH, block, 0)
    np.testing.assert_allclose(maps["weights"].astype(np.float64), pooled(expected, block), **HALF)
    if "undecayed" in maps:
        np.testing.assert_allclose(maps["undecayed"].astype(np.float64), pooled(softmax, block), **HALF)
    else:  # nothing decays
        np.testing.assert_array_equal(expected, softmax)
    kept = [head["kept"] for head in summary["heads"]]
    np.testing.assert_allclose(kept, expected.sum(-1).mean(-1), rtol=1e-6)
    if block == 1:
        lag = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        mean_lag = (expected * lag).sum((1, 2)) / expected.sum((1, 2))
        np.testing.assert_allclose([head["mean_lag"] for head in summary["heads"]], mean_lag, rtol=1e-6)
        beyond = (expected * (lag > 8)).sum((1, 2)) / expected.sum((1, 2))
        np.testing.assert_allclose([head["beyond_training"] for head in summary["heads"]], beyond, atol=1e-9)


def test_weights_before_the_decay_of_each_token_are_a_distribution():
    model, ids = model_and_window("x6-content-dynamics")
    maps, _ = attention_maps(model, ids, 8, size=LENGTH)
    np.testing.assert_allclose(maps["undecayed"].sum(-1, dtype=np.float64), 1, rtol=1e-2)  # float16
    assert (maps["weights"] < 0.9 * maps["undecayed"]).any()
    assert (maps["weights"] <= maps["undecayed"] + 1e-3).all()


def test_a_layer_that_is_named():
    """The first of two, by dense weights; the last of them by default."""
    model, ids = model_and_window("m2-sc-rfa", num_hidden_layers=2)
    _, expected = dense_weights(model, ids, 0)
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
