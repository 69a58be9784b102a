"""The cache: what enters is turned once, nothing of the past is touched again, and it changes no result."""

import copy
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import rfa.dynamics
import rfa.nn.dot_product_attention
from rfa.dynamics import rotary_frequencies
from rfa.nn import DotProductAttention, FilterCache, RobustFilterAttention, alibi_slopes
from rfa.nn.cache import Buffer
from rfa.nn.projections import split_heads
from rfa.ops.inputs import locate

from .by_hand import EXACT, SINGLE, hidden, only_our_own_checks, perturb

SIZE, HEADS = 16, 2
DECAY, ROPE = torch.tensor([0.0, 0.3]), rotary_frequencies(HEADS, SIZE // HEADS)
LAYERS = {
    "defaults": lambda: RobustFilterAttention(SIZE, HEADS),
    "horizon": lambda: RobustFilterAttention(SIZE, HEADS, horizon=0.7),
    "horizon, values do not turn": lambda: RobustFilterAttention(SIZE, HEADS, horizon=0.7, rotate_values=False),
    "learned": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, learn_frequency=True, learn_decay=True),
    "query noise in bias": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, query_noise_in_bias=True),
    "no gate": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, gate=False),
    "exponential": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, weight="exponential"),
    "flat": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, prior="flat"),
    "riccati": lambda: RobustFilterAttention(SIZE, HEADS, decay=DECAY, prior="riccati"),
    "plain": lambda: DotProductAttention(SIZE, HEADS),
    "b1": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE),
    "b2": lambda: DotProductAttention(SIZE, HEADS, slopes=alibi_slopes(HEADS)),
    "b3": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, decay=DECAY),
    "RoPER with decay": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, rotate_values=True, decay=DECAY),
    "as released": lambda: DotProductAttention(SIZE, HEADS, frequency=ROPE, rotary_map="as_released"),
}
IRREGULAR = torch.tensor([0.0, 0.5, 0.7, 2.0, 2.5, 4.0, 7.0, 7.5, 9.0], dtype=torch.float64)
CHUNKS = (4, 1, 1, 2, 1)


def build(name, dtype=torch.float64):
    return perturb(LAYERS[name]()).to(dtype)


def read(layer, x, chunks=CHUNKS, cache=None, start=0, **given):
    """The layer's output in chunks; what is given of all keys is given of those so far."""
    cache, outputs = FilterCache() if cache is None else cache, []
    for length in chunks:
        end = start + length
        so_far = {name: value[..., :end] for name, value in given.items()}
        outputs.append(layer(x[:, start:end], past_key_values=cache, **so_far))
        start = end
    return torch.cat(outputs, 1), cache


def mask_of_left_padding(*padding, length=9):
    return torch.arange(length) >= torch.tensor(padding)[:, None]


# what the layer is given beside the tokens; padding's outputs are not compared
SITUATIONS = {
    "default times": {},
    "irregular": {"times": IRREGULAR},
    "each row its own": {"times": torch.stack([IRREGULAR, 3 * IRREGULAR + 2])},
    "far-off seconds": {"times": 1e9 + IRREGULAR},
    "nanoseconds since 1970": {"times": 1_700_000_000_000_000_000 + (10 * IRREGULAR).long() * torch.tensor([[1], [2]])},
    "left padding": {"key_mask": mask_of_left_padding(0, 3)},
    "padding longer than a chunk": {"key_mask": mask_of_left_padding(5, 6)},
    "a gap": {"key_mask": torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1], [1] * 9]).bool()},
    "padding with times": {
        "key_mask": mask_of_left_padding(2, 0),
        "times": torch.stack([torch.cat([torch.full((2,), -1e6), IRREGULAR[:7]]), IRREGULAR]),
    },
    "segments": {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [4, 4, 4, 4, 4, 2, 2, 7, 7]])},
    "segments that each start at 0": {
        "segment_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]]).repeat(2, 1),
        "times": torch.cat([IRREGULAR[:5], IRREGULAR[:4]]),
    },
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_are_the_whole(name, situation):
    layer, x, given = build(name), hidden(length=9), SITUATIONS[situation]
    kept = given.get("key_mask", torch.ones(2, 9, dtype=torch.bool))
    with torch.no_grad():
        whole = layer(x, **given)
        pieces, cache = read(layer, x, **given)
    torch.testing.assert_close(pieces[kept], whole[kept], rtol=EXACT, atol=EXACT)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("name", LAYERS)
def test_single_precision(name):
    layer, x = build(name, torch.float32), hidden(length=9, dtype=torch.float32)
    for given in ({}, {"times": 1e9 + IRREGULAR}):
        with torch.no_grad():
            torch.testing.assert_close(read(layer, x, **given)[0], layer(x, **given), rtol=SINGLE, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_keeps_its_dtype(name):
    """What is stored is rounded to bfloat16 once more than without a cache."""
    layer, x = build(name, torch.float32), hidden(length=9, dtype=torch.float32)
    with torch.no_grad():
        exact = layer(x)
        rough, cache = read(layer.bfloat16(), x.bfloat16())
    assert rough.dtype == cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.layers[0].key_norms.dtype == torch.float32
    assert (rough.float() - exact).norm() / exact.norm() < 0.04  # as in test_half_precision: ten times eps = 2^-8


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
    assert cache.layers[0].origin.tolist() == [[times[0, 0]], [times[1, 6]]]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_places_are_those_of_whole_sequences(situation):
    """The operator's own `locate` sees the same keys and queries."""
    given = {"times": None, "key_mask": None, "segment_ids": None, **SITUATIONS[situation]}
    past, end = FilterCache().layer(0), 0
    for length in CHUNKS:
        end += length
        so_far = {name: value if value is None else value[..., :end] for name, value in given.items()}
        placed = past.place(2, length, torch.device("cpu"), **so_far)
        past.update(torch.zeros(2, HEADS, length, 4), torch.zeros(2, HEADS, length, 4))
        expected = locate(length, end, torch.device("cpu"), query_times=None, **so_far)
        for mine, other in zip(placed, expected, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine is other


def test_norms_are_those_of_the_stored_keys():
    layer, x = build("b3"), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x)
        for change in (lambda: None, lambda: cache.crop(-2), lambda: cache.reorder_cache(torch.tensor([1, 1, 0]))):
            change()
            past = cache.layers[0]
            torch.testing.assert_close(past.key_norms, past.keys.square().sum(-1))


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


def test_times_may_be_given_for_each_row_and_then_for_all():
    layer, x = build("defaults"), hidden(length=9)
    _, cache = read(layer, x, (3,), times=IRREGULAR)
    _, cache = read(layer, x, (3,), cache, start=3, times=IRREGULAR.expand(2, -1))
    rest, _ = read(layer, x, (3,), cache, start=6, times=IRREGULAR)
    torch.testing.assert_close(rest, layer(x, times=IRREGULAR)[:, 6:], rtol=EXACT, atol=EXACT)


@pytest.fixture
def turned(monkeypatch):
    """The lengths of everything that is turned: all phases come from `rotation`."""
    lengths, original = [], rfa.dynamics.rotation

    def recorded(frequency, times):
        lengths.append(times.shape[-1])
        return original(frequency, times)

    for module in [module for path, module in sys.modules.items() if path.startswith("rfa.")]:
        if getattr(module, "rotation", None) is original:
            monkeypatch.setattr(module, "rotation", recorded)
    return lengths


@pytest.mark.parametrize(
    "given",
    [{}, {"times": IRREGULAR}, {"key_mask": mask_of_left_padding(2, 0)}],
    ids=["plain", "times", "left padding"],
)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("plain", "b2")])
def test_the_past_is_never_turned_again(name, given, turned):
    layer, x = build(name), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x, (4,), **{k: v[..., :4] for k, v in given.items()})
        assert 4 in turned
        turned.clear()
        before = cache.layers[0].keys.clone(), cache.layers[0].values.clone()
        read(layer, x, (1,) * 5, cache, start=4, **given)
    assert set(turned) <= {1}
    assert turned
    assert torch.equal(cache.layers[0].keys[:, :, :4], before[0])
    assert torch.equal(cache.layers[0].values[:, :, :4], before[1])


class Touched(TorchDispatchMode):
    """Counts the numbers that all operations give out."""

    def __enter__(self):
        self.elements = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += sum(
            t.numel() for t in (result if isinstance(result, tuple) else [result]) if torch.is_tensor(t)
        )
        return result


@pytest.mark.parametrize("name", ["defaults", "riccati", "b1", "b2", "b3"])
def test_the_cost_of_a_token_is_linear_in_the_past(name):
    layer, cost = build(name), {}
    for length in (64, 256):
        x = hidden(length=length + 2)
        with torch.no_grad():
            _, cache = read(layer, x, (length, 1))  # the room for the next one is made
            with Touched() as touched:
                read(layer, x, (1,), cache, start=length + 1)
        cost[length] = touched.elements
    assert cost[256] < 4.05 * cost[64]


def test_one_query_without_bias_runs_on_the_cache_itself(monkeypatch):
    layer, x, calls = build("b1"), hidden(length=9), []
    original = rfa.nn.dot_product_attention.F.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        calls.append((key.data_ptr(), value.data_ptr(), options))
        return original(query, key, value, **options)

    monkeypatch.setattr(rfa.nn.dot_product_attention.F, "scaled_dot_product_attention", recorded)
    with torch.no_grad():
        _, cache = read(layer, x, (8, 1))
    past = cache.layers[0]
    assert calls[1] == (past.keys.data_ptr(), past.values.data_ptr(), {"is_causal": False})


def test_appending_copies_only_to_make_room():
    buffer, made = Buffer(1), []
    with torch.no_grad():
        for i in range(1000):
            filled = buffer.append(torch.full((2, 1), float(i)))
            if not made or made[-1] != filled.data_ptr():
                made.append(filled.data_ptr())
    assert torch.equal(filled, torch.arange(1000.0).expand(2, -1))
    assert len(made) <= 2 + 7  # the first one, then room for 65, 130 and so on, half again each time: 1.5^7 > 1000 / 65


def test_decoding_writes_into_the_same_memory():
    layer, x = build("defaults"), hidden(length=40)
    with torch.no_grad():
        _, cache = read(layer, x, (8, 1))
        past = cache.layers[0]

        def places():
            return [t.data_ptr() for t in (past.keys, past.values, past.key_norms, past.times)]

        before = places()
        read(layer, x, (1,) * 31, cache, start=9)
        assert places() == before
    assert past.keys.shape[2] == 40


@pytest.mark.parametrize("removed", [1, 3, 8])
@pytest.mark.parametrize("given", [{}, {"times": IRREGULAR}], ids=["uniform", "irregular"])
@pytest.mark.parametrize("name", ["defaults", "riccati", "RoPER with decay"])
def test_crop_and_go_on(name, given, removed):
    """The tokens that were removed leave no trace; others take their places."""
    layer, x, other = build(name), hidden(length=9), hidden(length=9, seed=3)
    with torch.no_grad():
        _, cache = read(layer, torch.cat([x[:, : 8 - removed], other[:, 8 - removed :]], 1), (4, 1, 3), **given)
        cache.crop(-removed)
        assert cache.get_seq_length() == 8 - removed
        rest, _ = read(layer, x, (1,) * (1 + removed), cache, start=8 - removed, **given)
        torch.testing.assert_close(rest, layer(x, **given)[:, 8 - removed :], rtol=EXACT, atol=EXACT)


def test_crop_and_reset_at_their_limits():
    layer, x = build("defaults"), hidden(length=9)
    cache = FilterCache()
    cache.crop(-1)
    with torch.no_grad():
        forgetting = (lambda: cache.crop(-100), lambda: cache.reset(), lambda: cache.crop(0))
        for shift, forget in zip((7.0, 1e9, -3.0), forgetting, strict=True):
            pieces, _ = read(layer, x, (4, 5), cache, times=shift + IRREGULAR)
            torch.testing.assert_close(pieces, layer(x, times=shift + IRREGULAR), rtol=EXACT, atol=EXACT)
            assert cache.layers[0].origin.tolist() == [[shift]]
            forget()
        assert cache.get_seq_length() == 9
        cache.reset()
        assert cache.get_seq_length() == 0
        pieces, _ = read(layer, x, (4, 5), cache)  # other times than before
        torch.testing.assert_close(pieces, layer(x), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("empty", [lambda cache: cache.crop(-9), lambda cache: cache.reset()], ids=["crop", "reset"])
@pytest.mark.parametrize("name", ["defaults", "riccati"])
def test_an_emptied_cache_may_meet_other_parameters(name, empty):
    """Tables of the prior, which the kernels keep in the cache, are those of the parameters before."""
    layer, x = build(name, torch.float32), hidden(length=9, dtype=torch.float32)
    with torch.no_grad():
        _, cache = read(layer, x)
        empty(cache)
        perturb(layer, seed=2)
        (again, _), (fresh, _) = read(layer, x, cache=cache), read(layer, x)
    torch.testing.assert_close(again, fresh, rtol=SINGLE, atol=1e-6)
    assert cache.get_seq_length() == 9


ROWS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "grow": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 0])), [1, 0, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1]),
    "indices": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
}


@pytest.mark.parametrize("given", ["default times", "irregular", "each row its own", "padding with times"])
@pytest.mark.parametrize("how", ROWS)
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_the_batch(how, given, batch):
    change, rows = ROWS[how]
    rows = [row for row in rows if row < batch] if how != "repeat" else sorted(row % batch for row in rows)
    if batch == 1:
        change = {
            "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
            "grow": lambda cache: cache.reorder_cache(torch.tensor([0, 0])),
            "repeat": lambda cache: cache.batch_repeat_interleave(3),
            "indices": lambda cache: cache.batch_select_indices(torch.tensor([0])),
            "mask": lambda cache: cache.batch_select_indices(torch.tensor([True])),
        }[how]
        rows = {"grow": [0, 0], "repeat": [0, 0, 0]}.get(how, [0])
    layer, x = build("defaults"), hidden(length=9, batch=batch)
    given = {k: v if v.dim() == 1 else v[:batch] for k, v in SITUATIONS[given].items()}
    with torch.no_grad():
        _, cache = read(layer, x, (4, 1), **given)
        change(cache)
        x, given = x[rows], {k: v if v.dim() == 1 else v[rows] for k, v in given.items()}
        rest, _ = read(layer, x, (1, 2, 1), cache, start=5, **given)
        torch.testing.assert_close(rest, layer(x, **given)[:, 5:], rtol=EXACT, atol=EXACT)


def test_changes_of_an_empty_cache():
    cache = FilterCache()
    cache.layer(1)
    cache.offload(1)
    cache.layer(1).prefetch()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    assert len(cache) == 2
    assert cache.get_seq_length() == 0


def test_what_transformers_asks_of_a_cache():
    cache = FilterCache()
    assert not cache.is_compileable
    with torch.no_grad():
        read(build("defaults"), hidden(length=9), cache=cache)
    assert cache.get_mask_sizes(2, 0) == (11, 0)
    assert cache.get_max_length() == -1
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.is_initialized
    assert cache.is_sliding == [False]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_offload_and_prefetch(device):
    layer, x = build("defaults").to(device), hidden(length=9).to(device)
    with torch.no_grad():
        _, cache = read(layer, x, (4, 1))
        past = cache.layers[0]
        cache.offload(0)
        assert past.keys.device.type == past.values.device.type == "cpu"
        if device != "cpu":
            with pytest.raises(ValueError, match=r"past_key_values: got keys of .* on cpu, expected .* on cuda"):
                read(layer, x, (1,), cache, start=5)
        past.prefetch()
        assert past.keys.device.type == past.values.device.type == device
        rest, _ = read(layer, x, (1, 3), cache, start=5)
        torch.testing.assert_close(rest, layer(x)[:, 5:], rtol=EXACT, atol=EXACT)


def test_prefetch_goes_where_the_norms_are():
    """As from another device, where there is none: meta stands for it."""
    past = FilterCache().layer(0)
    with torch.no_grad():
        past.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        past._key_norms.change(lambda x: x.to("meta"))
        past.offload()
        assert past.keys.device.type == past.values.device.type == "cpu"
        past.prefetch()
    assert past.keys.device.type == past.values.device.type == "meta"


def test_a_copy_is_a_prompt_to_begin_from_twice():
    layer, x, other = build("defaults"), hidden(length=9), hidden(length=9, seed=3)
    with torch.no_grad():
        _, prompt = read(layer, x, (4, 1))
        for rest in (x[:, 5:], other[:, 5:]):
            text = torch.cat([x[:, :5], rest], 1)
            pieces, _ = read(layer, text, (1, 3), copy.deepcopy(prompt), start=5)
            torch.testing.assert_close(pieces, layer(text)[:, 5:], rtol=EXACT, atol=EXACT)
    assert prompt.get_seq_length() == 5


@pytest.mark.parametrize("name", ["defaults", "riccati", "RoPER with decay"])
def test_gradients_through_a_cache(name):
    """Nothing is written into what a graph holds: gradients are those of the whole."""
    layer, x = build(name), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x[:, :2], (1, 1))  # room is left, into which nothing may be written now
    layer(x).square().sum().backward()
    whole = {path: parameter.grad for path, parameter in layer.named_parameters()}
    layer.zero_grad()
    read(layer, x)[0].square().sum().backward()
    for path, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[path], rtol=1e-9, atol=1e-9)
    layer.zero_grad()
    outputs, _ = read(layer, x, (1, 1, 1), cache, start=2)
    outputs.square().sum().backward()  # raises where a saved tensor was overwritten
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_frozen_keys_under_gradients():
    """The queries' gradients need the keys as they were at each step."""
    layer, x = build("defaults"), hidden(length=9)
    for part in (layer.key_projection, layer.value_projection):
        part.requires_grad_(False)
    layer(x).square().sum().backward()
    whole = layer.query_projection.weight.grad.clone()
    layer.zero_grad()
    read(layer, x)[0].square().sum().backward()
    torch.testing.assert_close(layer.query_projection.weight.grad, whole, rtol=1e-9, atol=1e-9)


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


def test_the_first_states_are_copied_once():
    key, past = torch.zeros(1, 2, 50, 64), FilterCache().layer(0)
    with torch.no_grad():
        assert past.update(key, key)[0] is key
        place = past.keys.data_ptr()
        past.update(key[:, :, :1], key[:, :, :1])
    assert past.keys.data_ptr() == place != key.data_ptr()


@pytest.mark.parametrize("chunks", [(6,), (4, 2)])
@pytest.mark.parametrize("name", ["defaults", "RoPER with decay", "b2"])
def test_backward_through_a_prefill_that_went_on_without_gradients(name, chunks):
    layer, x = build(name), hidden(length=9)
    layer(x[:, :6]).square().sum().backward()
    whole = {path: parameter.grad for path, parameter in layer.named_parameters()}
    layer.zero_grad()
    outputs, cache = read(layer, x, chunks)
    with torch.no_grad():
        cache.crop(-1)
        rest, _ = read(layer, x, (1, 3), cache, start=5)
        torch.testing.assert_close(rest, layer(x)[:, 5:], rtol=EXACT, atol=EXACT)
    outputs.square().sum().backward()  # raises where a saved tensor was overwritten
    for path, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[path], rtol=1e-9, atol=1e-9)


def test_inference_mode_and_back():
    layer, x = build("defaults"), hidden(length=9)
    cache, outputs = FilterCache(), []
    for start, mode in enumerate([torch.inference_mode, torch.inference_mode, torch.no_grad, torch.no_grad] * 2):
        with mode():
            outputs.append(read(layer, x, (1,), cache, start=start)[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x[:, :8]), rtol=EXACT, atol=EXACT)


def test_another_cache_is_refused():
    with pytest.raises(ValueError, match="past_key_values: got DynamicCache, expected a FilterCache"):
        build("defaults")(hidden(), past_key_values=DynamicCache())


@pytest.mark.parametrize("name", ["defaults", "b2"])
@pytest.mark.parametrize("later", ["moved", "default"])
def test_times_of_the_past_do_not_change(name, later):
    layer, x = build(name), hidden(length=9)
    moved = torch.cat([IRREGULAR[:2], IRREGULAR[2:] - 0.1])
    with torch.no_grad():
        _, cache = read(layer, x, (4,), times=1 + IRREGULAR)
        with pytest.raises(ValueError, match=r"times: got key (0|2) at .* \(batch row 0\), expected (0.0|0.7)"):
            read(layer, x, (1,), cache, start=4, **({"times": 1 + moved} if later == "moved" else {}))
        pieces, _ = read(layer, x, (5,), cache, start=4, times=1 + IRREGULAR)  # no harm was done
        torch.testing.assert_close(pieces, layer(x, times=1 + IRREGULAR)[:, 4:], rtol=EXACT, atol=EXACT)


def test_default_times_may_be_given_later():
    layer, x = build("defaults"), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x, (4,))
        pieces, _ = read(layer, x, (2, 3), cache, start=4, times=torch.arange(9))
        torch.testing.assert_close(pieces, layer(x)[:, 4:], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:1], "past_key_values: got keys of batch 2, .* expected batch 1"),
        (lambda x: x.float(), "past_key_values: got keys of .*float64 .* expected .*float32"),
    ],
    ids=["batch", "dtype"],
)
def test_input_that_does_not_fit_the_cache(change, message):
    layer, x = build("defaults"), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x, (4,))
        layer = layer.to(change(x).dtype)
        with pytest.raises(ValueError, match=message):
            layer(change(x)[:, 4:5], past_key_values=cache)
        assert cache.get_seq_length() == 4


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ((2, 1, 1, 4), (2, 1, 1, 6), "got keys of batch 2, 3 heads, 4 channels, .* expected batch 2, 1 heads"),
        ((2, 2, 1, 4), (2, 2, 1, 6), "got keys of batch 2, 3 heads, .* expected batch 2, 2 heads"),
        ((2, 3, 1, 1), (2, 3, 1, 6), "got keys of .* 4 channels, .* expected .* 1 channels"),
        ((2, 3, 1, 4), (2, 3, 1, 1), "got values of .* 6 channels, .* expected .* 1 channels"),
    ],
    ids=["one head", "other heads", "channels", "channels of values"],
)
def test_states_that_do_not_fit_the_cache(key, value, message, grad):
    past = FilterCache().layer(0)
    with torch.set_grad_enabled(grad):
        past.update(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 6))
        with pytest.raises(ValueError, match=f"past_key_values: {message}"):
            past.update(torch.zeros(key), torch.zeros(value))
    assert past.keys.shape == (2, 3, 5, 4)
    assert past.values.shape == (2, 3, 5, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"times": torch.arange(4)}, "times: got shape"),
        ({"times": torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0])}, "times: got 3.0 followed by 3.0"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, "key_mask: got shape"),
        ({"segment_ids": torch.ones(2, 4, dtype=torch.long)}, "segment_ids: got shape"),
    ],
    ids=["short times", "equal times", "mask", "segments"],
)
@pytest.mark.parametrize("name", ["defaults", "b1"])
def test_arguments_that_leave_out_the_past(name, given, message):
    layer, x = build(name), hidden(length=9)
    with torch.no_grad():
        _, cache = read(layer, x, (4,))
        with only_our_own_checks(), pytest.raises(ValueError, match=message):
            layer(x[:, 4:5], past_key_values=cache, **given)


def test_crop_counts_from_the_end():
    with pytest.raises(ValueError, match="tokens_to_remove: got 3"):
        FilterCache().layer(0).crop(3)
