"""What enters the cache is turned once; nothing of the past, nor what a graph holds, is touched again."""

import torch
from cover import cover

from rfa.nn import FilterCache
from rfa.nn.cache_layer import Buffer

from .by_hand import EXACT, hidden
from .layers import build, read


def test_writing_copies_only_to_make_room():
    buffer, made = Buffer(), []
    with torch.no_grad():
        for i in range(1000):
            filled = buffer.write(i, torch.full((2, 1, 1), float(i)))
            if not made or made[-1] != filled.data_ptr():
                made.append(filled.data_ptr())
    assert torch.equal(filled, torch.arange(1000.0).expand(2, 1, -1))
    assert len(made) <= 2 + 7  # the first one, then room for 65, 130 and so on, half again each time: 1.5^7 > 1000 / 65


@cover(1, chunks=[(6,), (4, 2)], name=["m2", "riccati", "RoPER with decay", "b2"])
def test_gradients_through_a_cache_that_goes_on_without_them(name, chunks):
    """Nothing is written into what a graph holds: gradients are those of the whole."""
    layer, x = build(name), hidden(length=9)
    layer(x[:, :6]).square().sum().backward()
    whole = {path: parameter.grad for path, parameter in layer.named_parameters()}
    layer.zero_grad()
    outputs, cache = read(layer, x, chunks)
    with torch.no_grad():
        cache.crop(-1)
        rest, _ = read(layer, x, (1, 2), cache, start=5)  # room is left, into which nothing may be written now
        torch.testing.assert_close(rest, layer(x)[:, 5:8], rtol=EXACT, atol=EXACT)
    outputs.square().sum().backward()  # raises where a saved tensor was overwritten
    for path, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[path], rtol=1e-9, atol=1e-9)
    layer.zero_grad()
    read(layer, x, (1,), cache, start=8)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_what_was_given_is_neither_kept_nor_written_to():
    """Not even where it has room: removed tokens give place to others, in storage of the cache's own."""
    states = torch.stack([hidden(seed)[:, None] for seed in range(3)])
    before, past = states.clone(), FilterCache().layer(0)
    for grad in (False, True):
        past.reset()
        with torch.set_grad_enabled(grad):
            past.update(states[1], states[2])
        with torch.no_grad():
            past.crop(-1)
            keys, values = past.update(-states[1, :, :, -1:], -states[2, :, :, -1:])
        assert torch.equal(states, before)
        for kept, whole in ((keys, states[1]), (values, states[2])):
            assert torch.equal(kept, torch.cat([whole[:, :, :-1], -whole[:, :, -1:]], dim=2))
            assert kept.untyped_storage().data_ptr() != states.untyped_storage().data_ptr()


def test_inference_mode_and_back():
    layer, x = build("defaults"), hidden(length=9)
    cache, outputs = FilterCache(), []
    for start, mode in enumerate([torch.inference_mode, torch.inference_mode, torch.no_grad, torch.no_grad] * 2):
        with mode():
            outputs.append(read(layer, x, (1,), cache, start=start)[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x[:, :8]), rtol=EXACT, atol=EXACT)
