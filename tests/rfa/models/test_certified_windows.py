"""Certified windows of models: which attention has them, that keys are left out, and generation without old keys."""

import dataclasses
import math
import warnings

import pytest
import torch
from cover import some

import rfa.ops.cpu.operator
from rfa.models import PRESETS
from rfa.nn import FilterCache, RobustFilterAttention

from .small import NAMES, assert_same, small, tokens

EPS = 1e-3
BOUNDED = ["rfa", "x1-riccati", "x2-riccati-alibi", "x5-content-clock"]
NORMALISED = ["b2-alibi", "c4-fox", "c7-rope-alibi-innovation", "c8-fox-clock", "x3-rotation-riccati"]
NORMALISED += ["x4-content-riccati", "x7-gated-roper", "forget-gate"]


@pytest.mark.parametrize("normalised", [False, True])
def test_which_attention_takes_an_eps(normalised):
    """Configuration and layer say the same; without a bound they refuse an eps by name. Switches fit all."""
    for name in NAMES:
        attention = dataclasses.replace(PRESETS[name], normalise_states=normalised)
        bounded = name in BOUNDED or (normalised and name in NORMALISED)
        for given in ("auto", None):
            layer = dataclasses.replace(attention, certified=given).build(32, 4, 16)
            assert (layer.unbounded is None) == bounded, name
            assert layer.certified == (given if bounded else None)
        for wrong in (-0.1, 1.0, math.nan):
            with pytest.raises(ValueError, match=rf"^certified: got {wrong}, expected None or a number eps"):
                dataclasses.replace(attention, certified=wrong)
        if bounded:
            assert dataclasses.replace(attention, certified=EPS).build(32, 4, 16).certified == EPS
        else:
            with pytest.raises(ValueError, match=r"^certified: got 0.001 with .*, expected None"):
                dataclasses.replace(attention, certified=EPS)


@pytest.fixture
def visits(monkeypatch):
    """The first block of keys that each group of queries has visited, `(batch, heads, groups)` of each call."""
    found, outputs = [], rfa.ops.cpu.operator._outputs

    def noted(inputs):
        made = outputs(inputs)
        found.append(made[2])
        return made

    monkeypatch.setattr(rfa.ops.cpu.operator, "_outputs", noted)
    return found


@pytest.mark.parametrize("name", [*BOUNDED, *some(NORMALISED, 6)])
def test_old_keys_are_left_out(name, visits):
    """By "auto", in a forward pass for training; logits and gradients are as without."""
    options = {"normalise_states": True} if name in NORMALISED else {}
    ids, results = tokens(1, 1400), []
    for certified in ("auto", None):
        model = small(name, num_hidden_layers=1, certified=certified, **options)
        visits.clear()
        logits = model(ids, use_cache=False).logits
        logits.square().mean().backward()
        results.append((logits.detach(), {n: x.grad for n, x in model.named_parameters() if x.grad is not None}))
        assert [bool(first.any()) for first in visits] == [certified == "auto"]
    (found, grads), (expected, exact) = results
    assert_same(found, expected)
    for parameter, grad in exact.items():
        assert_same(grads[parameter], grad)


def steep(name="x2-riccati-alibi", **overrides):
    """A model whose weights fall by 0.4 to 1 nats a token: 24 tokens count to an eps of 1e-3, 100 to 2^-24."""
    model = small(name, **overrides)
    for block in model.model.layers:
        held = block.attention.dynamics
        slopes = {
            "initial_slopes": torch.tensor([0.4, 0.6, 0.8, 1.0]),
            "decay": held.decay,
            "frequency": held.frequency,
        }
        start = RobustFilterAttention(32, 4, prior="riccati", **slopes)
        held.load_state_dict(start.dynamics.state_dict())
    return model


def test_generation_warns_once():
    model, ids = steep(), tokens(1, 130)
    for block in model.model.layers:
        with torch.no_grad():
            block.attention.query_projection.weight *= 20  # far from all keys: no row is as large as was assumed
    options = {"max_new_tokens": 20, "do_sample": False}
    cache = FilterCache(certified=EPS, reserve=0.0)
    with pytest.warns(
        UserWarning, match=r"^past_key_values: \d+ rows .* may have needed keys that were dropped"
    ) as met:
        model.generate(ids, past_key_values=cache, **options)
    assert len([one for one in met if "may have needed" in str(one.message)]) == 1
    assert cache.uncertified > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(ids[:, :1], past_key_values=cache)
        model.generate(ids, past_key_values=FilterCache(certified=None), **options)
