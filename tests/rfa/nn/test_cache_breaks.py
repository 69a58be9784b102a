"""A call that was broken off changes no layer of a cache, and layers that hold different tokens are refused."""

import copy

import pytest
import torch
from cover import cover

from rfa.nn import FilterCache
from rfa.nn.cache import locate_tokens
from rfa.nn.cache_layer import Buffer
from rfa.ops.cpu import decoding as compiled

from .by_hand import EXACT, SINGLE, hidden
from .layers import build, read

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def run(layers, x, cache, stopped_before=None):
    """The layers of a model side by side, for positions that were located once."""
    positions = cache.locate(*x.shape[:2], CPU, None, None, None)
    outputs = []
    for i, layer in enumerate(layers):
        if i == stopped_before:
            raise KeyboardInterrupt
        outputs.append(layer(x, past_key_values=cache, layer_index=i, positions=positions))
    return outputs


@pytest.mark.parametrize("name", ["defaults", "clock", "content", "b1", "b3", "forget gate"])
def test_a_call_broken_off_between_layers(name):
    """Which the layers after the break find out, whether the same token or another one is given next."""
    layers, x, cache = [build(name), build(name)], hidden(length=9), FilterCache()
    run(layers, x[:, :4], cache)
    run(layers, x[:, 4:5], cache)
    with pytest.raises(KeyboardInterrupt):
        run(layers, x[:, 5:6], cache, stopped_before=1)
    for following in (x[:, 5:6], x[:, 6:7]):
        message = "past_key_values: got a layer with 5 tokens, expected 6: .* use `reset`"
        with pytest.raises(ValueError, match=message):
            run(layers, following, copy.deepcopy(cache))
    cache.reset()
    for output, layer in zip(run(layers, x, cache), layers, strict=True):
        torch.testing.assert_close(output, layer(x), rtol=EXACT, atol=EXACT)


@cover(1, entry=["enter", "token"], error=[KeyboardInterrupt, MemoryError])
def test_compiled_code_that_is_broken_off(entry, error, monkeypatch):
    layer, x, kernel = build("defaults", torch.float32), hidden(length=9, dtype=torch.float32), compiled.run_kernel
    whole, (_, cache) = layer(x), read(layer, x, (4,))

    def stopped(name, problem):
        kernel(name, problem)
        if name == entry:
            raise error

    monkeypatch.setattr(compiled, "run_kernel", stopped)
    with pytest.raises(error):
        layer(x[:, 4:6] if entry == "enter" else x[:, 4:5], past_key_values=cache)
    monkeypatch.undo()
    past = cache.layers[0]
    assert past.keys.shape[2] == past.values.shape[2] == past.key_norms.shape[2] == cache.get_seq_length() == 4
    rest, _ = read(layer, x, (1, 2, 2), cache, start=4)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=SINGLE, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["defaults", "clock"])
def test_a_write_that_is_broken_off(name, grad, monkeypatch):
    """At each buffer in turn: marks, norms, keys and values."""
    layer, x, write, left = build(name), hidden(length=9), Buffer.write, []
    whole, (_, cache) = layer(x), read(layer, x, (4,))

    def stopped(buffer, length, new):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return write(buffer, length, new)

    with monkeypatch.context() as patch, torch.set_grad_enabled(grad):
        patch.setattr(Buffer, "write", stopped)
        for written in range(3 if name == "defaults" else 4):
            left[:] = [None] * written
            with pytest.raises(KeyboardInterrupt):
                layer(x[:, 4:6], past_key_values=cache)
            past = cache.layers[0]
            assert past.keys.shape[2] == past.values.shape[2] == past.key_norms.shape[2] == cache.get_seq_length() == 4
    rest, _ = read(layer, x, (1, 2, 2), cache, start=4)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=EXACT, atol=EXACT)


@cover(1, name=["m2", "riccati", "b1", "content"], given=["one token", "a mask", "all tokens"])
def test_positions_that_were_located_without_the_cache(name, given):
    """They would be read beyond their end."""
    layer, x = build(name, torch.float32), hidden(length=9, dtype=torch.float32)
    cache = read(layer, x, (8,))[1]
    positions = {
        "one token": locate_tokens(2, 1, CPU, None, None, None),
        "a mask": locate_tokens(2, 1, CPU, None, torch.ones(2, 1, dtype=torch.bool), None),
        "all tokens": locate_tokens(2, 9, CPU, None, None, None),
    }[given]
    message = "past_key_values: got a layer with 8 tokens, expected 0: .* locate them with the cache"
    with pytest.raises(ValueError, match=message):
        layer(x[:, 8:], past_key_values=cache, positions=positions)
    located = locate_tokens(2, 1, CPU, None, None, None, cache)
    last = layer(x[:, 8:], past_key_values=cache, positions=located)
    torch.testing.assert_close(last, layer(x)[:, 8:], rtol=SINGLE, atol=1e-5)
