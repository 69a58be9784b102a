"""The cache changes no result, and refuses what does not fit it."""

import copy

import pytest
import torch
from cover import cover
from shapes import only_our_own_checks
from transformers import DynamicCache

import rfa.dynamics
import rfa.nn.cache_layer
from rfa.nn import FilterCache
from rfa.nn.projections import split_heads

from .by_hand import EXACT, hidden
from .layers import HEADS, IRREGULAR, LAYERS, SITUATIONS, build, mask_of_left_padding, read


@cover(1, situation=SITUATIONS, name=LAYERS)
def test_chunks_are_the_whole(name, situation):
    layer, x, given = build(name), hidden(length=9), SITUATIONS[situation]
    kept = given.get("key_mask", torch.ones(2, 9, dtype=torch.bool))
    with torch.no_grad():
        whole = layer(x, **given)
        pieces, cache = read(layer, x, **given)
    torch.testing.assert_close(pieces[kept], whole[kept], rtol=EXACT, atol=EXACT)
    assert cache.get_seq_length() == 9


def test_half_precision_is_rounded_once():
    """Cosines and products in bfloat16 would each add a rounding to what all later queries see."""
    layer, x = build("defaults", torch.bfloat16), hidden(length=9).bfloat16()
    with torch.no_grad():
        _, cache = read(layer, x, (9,))
        key = split_heads(layer.key_projection(x), HEADS).float()
        expected = rfa.dynamics.rotate(key, layer.dynamics()["frequency"], torch.arange(9), inverse=True)
    assert torch.equal(cache.layers[0].keys, expected.bfloat16())


def test_a_row_whose_first_chunk_is_padding_counts_from_its_first_key():
    """Nanoseconds since 1970 from a padding at 0 would be rounded to 256 of them."""
    layer, x, mask = build("defaults"), hidden(length=9), mask_of_left_padding(0, 6)
    times = SITUATIONS["nanoseconds since 1970"]["times"].masked_fill(~mask, 0)
    with torch.no_grad():
        whole = layer(x, times=times, key_mask=mask)
        pieces, cache = read(layer, x, times=times, key_mask=mask)
    torch.testing.assert_close(pieces[mask], whole[mask], rtol=EXACT, atol=EXACT)
    assert cache.origin.tolist() == [[times[0, 0]], [times[1, 6]]]


def test_times_of_one_row_may_become_those_of_each():
    layer, x = build("defaults"), hidden(length=9)
    each = IRREGULAR.expand(2, -1).clone()
    each[1, 5:] += 1
    with torch.no_grad():
        whole = layer(x, times=each)
        _, cache = read(layer, x, (5,), times=IRREGULAR)
        second, _ = read(layer, x, (2,), cache, start=5, times=each)
        third, _ = read(layer, x, (2,), cache, start=7, times=each)
    torch.testing.assert_close(torch.cat([second, third], 1), whole[:, 5:], rtol=EXACT, atol=EXACT)


@cover(1, name=["m2", "riccati", "b1"], masked=[False, True])
def test_phases_made_ahead_are_those_of_each_token(name, masked, monkeypatch):
    """Beyond the tokens for which they are made at once, and back after a crop."""
    monkeypatch.setattr(rfa.nn.cache_layer, "AHEAD", 9)
    layer, x = build(name), hidden(length=27)
    mask = torch.ones(2, x.shape[1], dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        given = {"key_mask": mask} if masked else {}
        whole = layer(x, **given)[:, 5:]
        _, cache = read(layer, x, (5,), **{k: v[:, :5] for k, v in given.items()})
        chunks = (1,) * 6 + (4, 2) + (1,) * 9
        pieces, _ = read(layer, x, chunks, cache, start=5, **given)
        torch.testing.assert_close(pieces, whole[:, : sum(chunks)], rtol=EXACT, atol=EXACT)
        cache.crop(-14)
        start = cache.get_seq_length()
        again, _ = read(layer, x, (1,) * 9, cache, start=start, **given)
        torch.testing.assert_close(again, whole[:, start - 5 : start + 4], rtol=EXACT, atol=EXACT)


def test_another_cache_is_refused():
    states = torch.zeros(2, 4, 3, 16)
    filled = DynamicCache()
    filled.update(states, states, 0)
    with pytest.raises(ValueError, match=r"past_key_values: got DynamicCache \(3 tokens\), expected a FilterCache"):
        build("defaults")(hidden(), past_key_values=filled)


@cover(1, name=["defaults", "b2"], later=["moved", "default"])
def test_times_of_the_past_do_not_change(name, later):
    layer, x = build(name), hidden(length=9)
    moved = torch.cat([IRREGULAR[:2], IRREGULAR[2:] - 0.1])
    with torch.no_grad():
        _, cache = read(layer, x, (4,), times=1 + IRREGULAR)
        with pytest.raises(ValueError, match=r"times: got key (0|2) at .* \(batch row 0\), expected (0.0|0.7)"):
            read(layer, x, (1,), cache, start=4, **({"times": 1 + moved} if later == "moved" else {}))
        pieces, _ = read(layer, x, (5,), cache, start=4, times=1 + IRREGULAR)  # no harm was done
        torch.testing.assert_close(pieces, layer(x, times=1 + IRREGULAR)[:, 4:], rtol=EXACT, atol=EXACT)


MISFITS = {
    "one row": (lambda x: x[:1], "past_key_values: got .*batch 2, .*expected batch 1"),
    "three rows": (lambda x: x[[0, 1, 1]], "past_key_values: got .*batch 2, .*expected batch 3"),
    "dtype": (lambda x: x.float(), "past_key_values: got keys of .*float64 .* expected .*float32"),
}


@cover(
    grad=[False, True],
    change=MISFITS,
    name=["defaults", "clock", "forget gate", "content"],
)
def test_input_that_does_not_fit_the_cache(name, change, grad):
    """Nothing of it enters, so that the right tokens may follow."""
    layer, x = build(name), hidden(length=9)
    change, message = MISFITS[change]
    with torch.set_grad_enabled(grad):
        whole, (_, cache) = layer(x), read(layer, x, (4,))
        wrong = change(x)[:, 4:5]
        with pytest.raises(ValueError, match=message):
            copy.deepcopy(layer).to(wrong.dtype)(wrong, past_key_values=cache)
        assert cache.get_seq_length() == 4
        rest, _ = read(layer, x, (1, 4), cache, start=4)
        torch.testing.assert_close(rest, whole[:, 4:], rtol=EXACT, atol=EXACT)


def test_states_that_do_not_fit_the_cache():
    past = FilterCache().layer(0)
    past.update(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 6))
    for key, value, message in (
        ((2, 1, 1, 4), (2, 1, 1, 6), "got keys of batch 2, 3 heads, 4 channels, .* expected batch 2, 1 heads"),
        ((2, 3, 1, 4), (2, 3, 1, 1), "got values of .* 6 channels, .* expected .* 1 channels"),
    ):
        with pytest.raises(ValueError, match=f"past_key_values: {message}"):
            past.update(torch.zeros(key), torch.zeros(value))
    assert past.keys.shape == (2, 3, 5, 4)
    assert past.values.shape == (2, 3, 5, 6)


def test_arguments_that_leave_out_the_past():
    layer, x = build("defaults"), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x, (4,))
        for given, message in (
            ({"times": torch.arange(4)}, "times: got shape"),
            ({"times": torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0])}, "times: got 3.0 followed by 3.0"),
            ({"key_mask": torch.ones(3, 5, dtype=torch.bool)}, "key_mask: got shape"),
            ({"segment_ids": torch.ones(2, 4, dtype=torch.long)}, "segment_ids: got shape"),
        ):
            with only_our_own_checks(), pytest.raises(ValueError, match=message):
                layer(x[:, 4:5], past_key_values=cache, **given)


@pytest.mark.parametrize("turn_values", [True, False])
def test_states_enter_by_compiled_code_as_by_pytorch(turn_values):
    """A prompt, then a few tokens; states as a projection gives them, of 19 modes, more than whole registers."""
    frequency = torch.linspace(-1.0, 2.0, 3 * 19).view(3, 19)
    compiled, plain = FilterCache(), FilterCache()
    with torch.no_grad():
        for length in (5, 1, 2):
            states = [torch.randn(2, length, 3, 38).transpose(1, 2) for _ in range(3)]
            found = []
            for cache, backend in ((compiled, "cpu"), (plain, "reference")):
                layer = cache.layer(0)
                positions = cache.locate(2, length, torch.device("cpu"), None, None, None)
                turns = layer.turns.at(frequency, positions, torch.float32)
                found.append([*layer.enter(*states, turns, turn_values, backend), layer.key_norms])
            assert found[0][1].shape == (2, 3, cache.get_seq_length(), 38)
            for actual, expected in zip(*found, strict=True):  # a few roundings; norms are sums of 38
                torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-6)
    expected = r"^past_key_values: got keys of batch 2, .* expected batch 1"
    with torch.no_grad(), pytest.raises(ValueError, match=expected):
        compiled.layer(0).enter(*(state[:1] for state in states), turns, turn_values, "auto")
