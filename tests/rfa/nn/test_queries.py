"""Queries of their own, dropout and shared keys; the robust weights by hand; fused gradients with own queries."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cover import cover
from shapes import only_our_own_checks

from rfa.models import PRESETS, RoutingAttentionConfig
from rfa.ops.positions import checked_positions

HIDDEN, HEADS, KEYS, QUERIES = 16, 2, 9, 5
FILTERS = ["m2-sc-rfa", "x2-riccati-alibi", "m2.1-exponential"]
PRODUCTS = ["b1-rope", "b2-alibi", "b3-decayed-rope", "m2.6-pure-rotation", "c2-window", "c7-rope-alibi-innovation"]


def layer(preset, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return PRESETS[preset].build(HIDDEN, HEADS, 4, **options).to(dtype)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    times = torch.rand(2, KEYS, generator=generator, dtype=torch.float64).add(0.2).cumsum(1)
    queries = torch.rand(2, QUERIES, generator=generator, dtype=torch.float64) * 6 - 0.2
    states = torch.randn(2, KEYS + QUERIES, HIDDEN, generator=generator).to(dtype)
    mask = torch.ones(2, KEYS, dtype=torch.bool)
    mask[1, 2] = False
    return states[:, :KEYS], states[:, KEYS:], times, queries, mask


def turned(x, angle):
    """States times `exp(i angle)`: real parts first, then imaginary parts."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def heads(x):
    return x.detach().unflatten(-1, (HEADS, -1)).transpose(1, 2).numpy()


@cover(1, preset=["m2-sc-rfa", "m2.1-exponential"])
def test_robust_weights_by_hand(preset):
    attention = layer(preset)
    keys, _, times, _, mask = data()
    positions = checked_positions(2, KEYS, KEYS, keys.device, times, None, mask)
    actual = attention.robust_weights(keys, positions).detach().numpy()
    q, k = heads(attention.query_projection(keys)), heads(attention.key_projection(keys))
    held = {name: x.detach().numpy() for name, x in attention.dynamics().items()}
    for b, h, i, j in np.ndindex(*actual.shape):
        lag = float(times[b, i] - times[b, j])
        if lag < 0 or not mask[b, j]:
            assert actual[b, h, i, j] == 0
            continue
        mu = held["decay"][h]
        decay = math.exp(-mu * lag)
        grown = held["process_noise"][h] * (lag if mu == 0 else (1 - math.exp(-2 * mu * lag)) / (2 * mu))
        variance = grown + held["key_noise"][h] * decay**2 + held["noise_floor"][h] + held["query_noise"][h]
        residual = ((q[b, h, i] - decay * turned(k[b, h, j], lag * held["frequency"][h])) ** 2).sum()
        quotient = residual / (held["robustness"][h] * attention.modes * variance)
        expected = math.exp(-quotient) if preset == "m2.1-exponential" else 1 / (1 + quotient)
        assert actual[b, h, i, j] == pytest.approx(expected, rel=1e-5)  # banks and noises are of float32


@cover(1, preset=[*FILTERS, *PRODUCTS, "c3-yarn", "b1-rope-as-released"], causal=[True, False])
def test_a_query_of_its_own_is_a_token_that_is_no_key(preset, causal):
    attention = layer(preset, causal=causal)
    keys, queries, times, query_times, mask = data()
    asked = attention(keys, times=times, key_mask=mask, query_states=queries, query_times=query_times)
    every = torch.cat([times, query_times], 1)
    order = every.argsort(1)
    tokens = torch.cat([keys, queries], 1).gather(1, order[..., None].expand(-1, -1, HIDDEN))
    present = torch.cat([mask, torch.zeros(2, QUERIES, dtype=torch.bool)], 1).gather(1, order)
    merged = attention(tokens, times=every.gather(1, order), key_mask=present)
    place = order.argsort(1)[:, KEYS:, None].expand(-1, -1, HIDDEN)
    torch.testing.assert_close(merged.gather(1, place), asked, rtol=0, atol=1e-6)  # YaRN's banks are of float32


@cover(1, preset=["m2-sc-rfa", "x2-riccati-alibi", "b2-alibi", "m2.6-pure-rotation"], causal=[True, False])
def test_gradients_of_queries_keys_and_times(preset, causal):
    attention = layer(preset, causal=causal)
    attention.backend = "reference"
    keys, queries, times, query_times, mask = data()
    inputs = [x.requires_grad_() for x in (keys, queries, times, query_times)]

    def run(keys, queries, times, query_times):
        return attention(keys, times=times, key_mask=mask, query_states=queries, query_times=query_times)

    torch.autograd.gradcheck(run, inputs, atol=1e-6, fast_mode=True)  # finite differences


@pytest.mark.parametrize("preset", ["m2-sc-rfa", "b1-rope", "b2-alibi", "b3-decayed-rope", "c2-window"])
def test_dropout_is_right_on_average_and_off_outside_training(preset):
    attention, plain = layer(preset, dropout=0.4), layer(preset)
    keys, _, times, _, mask = data()
    expected = plain(keys, times=times, key_mask=mask)
    torch.testing.assert_close(attention.eval()(keys, times=times, key_mask=mask), expected)
    attention.train()
    with torch.no_grad():
        many = attention(keys.repeat(1000, 1, 1), times=times.repeat(1000, 1), key_mask=mask.repeat(1000, 1))
    draws = many.unflatten(0, (1000, 2))
    error = draws.std(0) / math.sqrt(1000)
    assert ((draws.mean(0) - expected).abs() <= 5 * error + 1e-9).all()  # five standard errors
    assert draws.std(0).max() > 0.01
    one = attention(keys, times=times, key_mask=mask)
    one.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


def test_nothing_that_positions_have_may_stand_beside_them():
    attention = layer("m2-sc-rfa")
    keys, queries, times, query_times, mask = data()
    positions = checked_positions(2, QUERIES, KEYS, keys.device, times, query_times, mask)
    attention(keys, positions=positions, query_states=queries)
    for name, value in (("query_times", query_times), ("times", times), ("key_mask", mask)):
        with pytest.raises(ValueError, match=rf"^{name}: got 'given beside positions'"):
            attention(keys, positions=positions, query_states=queries, **{name: value})


def test_a_dropped_weight_leaves_the_others_larger():
    """One key: it is dropped, and the estimate is 0, or it is kept, and the estimate is the value over 0.6."""
    attention = layer("m2-sc-rfa", dropout=0.4)
    keys = torch.randn(200, 1, HIDDEN, dtype=torch.float64)
    k = attention.keys(keys)
    value = attention.values(keys, k)
    estimates = []
    estimate = attention.estimate
    attention.estimate = lambda *given, **rest: estimates.append(estimate(*given, **rest)) or estimates[0]
    attention(keys)
    kept = torch.isclose(estimates[0], value / 0.6).all(-1)
    none = (estimates[0] == 0).all(-1)
    assert (kept ^ none).all()
    assert abs(float(none.double().mean()) - 0.4) < 5 * math.sqrt(0.24 / 400)  # of 400 draws


@cover(preset=["m2-sc-rfa", "b1-rope", "c4-fox"], groups=[1, 2])
def test_shared_keys_are_equal_keys(preset, groups):
    """A layer whose heads have copies of one group's keys and values is the layer with groups."""
    torch.manual_seed(0)
    shared = PRESETS[preset].build(HIDDEN, 4, 4, num_key_value_heads=groups).double()
    full = PRESETS[preset].build(HIDDEN, 4, 4).double()
    state = shared.state_dict()
    for name in ("key_projection", "value_projection"):
        for part in ("weight", "bias"):
            of_groups = state[f"{name}.{part}"].unflatten(0, (groups, -1))
            state[f"{name}.{part}"] = of_groups.repeat_interleave(4 // groups, 0).flatten(0, 1)
    full.load_state_dict(state)
    keys, _, times, _, mask = data()
    torch.testing.assert_close(shared(keys, times=times, key_mask=mask), full(keys, times=times, key_mask=mask))
    assert shared.key_projection.out_features == 2 * HIDDEN * groups // 4
    shared(keys, times=times).square().sum().backward()
    assert shared.key_projection.weight.grad.abs().max() > 0


def refused(name, call):
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{name}: .*expected"):
        call()


def test_what_a_layer_lacks_is_refused_by_name():
    keys, queries, times, query_times, _ = data()
    asked = {"query_states": queries, "query_times": query_times}
    refused("backend", lambda: replace(PRESETS["m2-sc-rfa"], backend="cpu").build(HIDDEN, HEADS, 4, dropout=0.1))
    refused("dropout", lambda: layer("b1-rope", dropout=1.0))
    refused("dropout", lambda: RoutingAttentionConfig().build(HIDDEN, HEADS, 4, dropout=0.1))
    refused("num_key_value_heads", lambda: layer("b1-rope", num_key_value_heads=3))
    refused("gates", lambda: layer("c4-fox", causal=False))
    refused("query_states", lambda: layer("c4-fox")(keys, times=times, **asked))
    refused(
        "query_states", lambda: layer("b1-rope")(keys, times=times, segment_ids=torch.zeros(2, KEYS).long(), **asked)
    )
    refused(
        "query_states", lambda: layer("b1-rope")(keys, times=times, query_states=queries[..., 1:], query_times=times)
    )
    refused("query_times", lambda: layer("b1-rope")(keys, times=times, query_times=query_times))
    refused("query_times", lambda: layer("b1-rope")(keys, times=times, query_states=queries))


@cover(1, preset=["b2-alibi", "b3-decayed-rope", "x3-rotation-riccati", "x2-riccati-alibi"], causal=[True, False])
def test_fused_gradients_are_those_of_the_reference(preset, causal):
    keys, queries, times, query_times, mask = data(torch.float32)
    gradients = {}
    for backend in ("auto", "reference"):
        attention = layer(preset, torch.float32, causal=causal)
        attention.backend = backend
        attention(
            keys, times=times, key_mask=mask, query_states=queries, query_times=query_times
        ).square().sum().backward()
        gradients[backend] = {name: p.grad for name, p in attention.named_parameters()}
    for name, expected in gradients["reference"].items():
        scale = max(1.0, float(expected.abs().max()))  # float32, sums of ten rows of numbers of order one
        torch.testing.assert_close(gradients["auto"][name], expected, rtol=0, atol=2e-5 * scale, msg=name)
