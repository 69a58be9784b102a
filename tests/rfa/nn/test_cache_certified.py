"""A cache that drops old keys changes no estimate by more than it says, and refuses what it cannot serve then."""

import math

import pytest
import torch
from cover import cover

from rfa.nn import ContentFilterAttention, DotProductAttention, FilterCache, RobustFilterAttention
from rfa.ops import robust_filter_attention

from .layers import M2, ROWS, read

EPS, HEADS, SIZE, LENGTH = 1e-3, 2, 32, 240
SLOPES = torch.tensor([0.4, 1.5])  # nats a token: a horizon of 24 tokens
TOKEN_BY_TOKEN = (30, *(1,) * (LENGTH - 30))
PIECES = (90, 1, 100, 7, 42)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def build(slopes=SLOPES, **options):
    torch.manual_seed(2)
    start = {"prior": "riccati", "initial_slopes": slopes, "decay": torch.zeros(HEADS)}
    return RobustFilterAttention(SIZE, HEADS, **start, **options)


def tokens(batch=2, length=LENGTH, dtype=torch.float32):
    return torch.randn(batch, length, SIZE, generator=torch.Generator().manual_seed(5)).to(dtype)


def dropping(reserve=3.0, **options):
    return FilterCache(**{"certified": EPS, "reserve": reserve, **options})


def largest_error(layer, x):
    """What dropped keys and those left out may change in the outputs: each of both 2 eps of the largest value."""
    value = layer.values(x, layer.keys(x)).norm(dim=-1).amax((0, 2))
    return 4 * EPS * value.norm() * torch.linalg.matrix_norm(layer.output_projection.weight, 2)


def assert_near(found, layer, x, start=0, **given):
    whole = layer(x, **given)[:, start:]
    assert (found - whole).norm(dim=-1).max() <= largest_error(layer, x) + 1e-5


@cover(
    options=[{}, {"weight": "exponential"}, {"rotate_values": False}, {"horizon": 0.7}],
    chunks=[TOKEN_BY_TOKEN, PIECES],
)
def test_outputs_without_dropped_keys(chunks, options):
    layer, x = build(**options), tokens()
    found, cache = read(layer, x, chunks, dropping())
    held = cache.layers[0]
    assert 24 < held.keys.shape[2] < 24 + max(64, *chunks[1:])
    assert held.dropped + held.keys.shape[2] == cache.get_seq_length() == LENGTH
    assert cache.uncertified == 0
    assert_near(found, layer, x)
    assert not torch.equal(found, read(layer, x, chunks, FilterCache(certified=None))[0])


KEEPING = {
    "max_length": ({}, {"max_length": LENGTH}),
    "None": ({}, {"certified": None}),
    "eps of 0": ({}, {"certified": 0.0}),
    "layer's None": ({"certified": None}, {"certified": "auto"}),
    "clock": ({"clock": "content"}, {}),
    "reference": ({"backend": "reference"}, {}),
}


@pytest.mark.parametrize("case", KEEPING)
def test_what_keeps_everything(case):
    options, given = KEEPING[case]
    layer, x = build(**options), tokens()
    found, cache = read(layer, x, TOKEN_BY_TOKEN, dropping(**given))
    assert cache.layers[0].keys.shape[2] == LENGTH
    assert_near(found, layer, x)


def test_gradients_reach_every_key():
    layer, x = build(), tokens().requires_grad_()
    with torch.enable_grad():
        found, cache = read(layer, x, (100, 140), dropping())
        (slope,) = torch.autograd.grad(found[:, 100].sum(), x)
    assert cache.layers[0].dropped == 0
    assert slope[:, 95].any()


@cover(how=ROWS, chunks=[(1,) * 50, (7, 43)])
def test_rows_of_the_batch(how, chunks):
    (change, rows), layer, x = ROWS[how], build(), tokens()
    _, cache = read(layer, x, TOKEN_BY_TOKEN[: LENGTH - 79], dropping())
    change(cache)
    rest, _ = read(layer, x[rows], chunks, cache, start=190)
    assert cache.layers[0].decoding.uncertified.shape == (len(rows), HEADS)
    assert cache.uncertified == 0
    assert_near(rest, layer, x[rows], 190)


def test_crop():
    """Back to a token that is held; further back it is refused, and nothing is cropped in any layer."""
    layers, x = (build(), build(SLOPES / 2)), tokens()  # their horizons differ
    cache = dropping()
    for i, layer in enumerate(layers):
        for start in (0, *range(30, 170)):
            layer(x[:, start : max(30, start + 1)], past_key_values=cache, layer_index=i)
    held = [layer.keys.shape[2] for layer in cache.layers]
    assert held[0] < held[1] < 170
    for number in (held[0], held[1], 169):
        with pytest.raises(ValueError, match=rf"tokens_to_remove: got -{number}, expected fewer than the {held[0]} "):
            cache.crop(-number)
        assert [layer.keys.shape[2] for layer in cache.layers] == held
    cache.crop(-3)
    assert cache.get_seq_length() == 167
    rest, _ = read(layers[0], x, (1,) * 73, cache, start=167)
    assert_near(rest, layers[0], x, 167)
    cache.crop(-240)
    assert cache.get_seq_length() == cache.layers[0].dropped == 0
    assert_near(read(layers[0], x, PIECES, cache)[0], layers[0], x)


@pytest.mark.parametrize("chunks", [TOKEN_BY_TOKEN, PIECES])
def test_left_padding(chunks):
    """A row of padding that is longer than the horizon counts as no failure."""
    layer, x = build(), tokens()
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [150]])
    found, cache = read(layer, x, chunks, dropping(), key_mask=mask)
    assert cache.layers[0].dropped > 0
    assert cache.uncertified == 0
    whole = layer(x, key_mask=mask)
    assert (found - whole)[mask].norm(dim=-1).max() <= largest_error(layer, x) + 1e-5


def test_segments():
    layer, x = build(), tokens()
    segments = (torch.arange(LENGTH) // 37).expand(2, -1)
    found, cache = read(layer, x, PIECES, dropping(), segment_ids=segments)
    assert cache.layers[0].dropped > 0
    assert cache.uncertified == 0
    assert_near(found, layer, x, segment_ids=segments)


GAPS = torch.arange(LENGTH) % 5 != torch.tensor([[1], [3]])
LATE = {
    "times": ({"times": 2.0 * torch.arange(LENGTH)}, "times: got 'times of their own', expected none after tokens"),
    "gaps": ({"key_mask": GAPS}, "key_mask, segment_ids: got 'absent keys in between"),
    "interleaved": ({"segment_ids": torch.arange(LENGTH).expand(2, -1) % 2}, "key_mask, segment_ids: got 'absent keys"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_comes_too_late_is_refused(case):
    """After dropped tokens, for which steps of one were assumed. The cache goes on as if nothing had been asked."""
    (given, message), layer, x = LATE[case], build(), tokens()
    _, cache = read(layer, x, TOKEN_BY_TOKEN[:161], dropping())
    with pytest.raises(ValueError, match=message):
        read(layer, x, (1,), cache, start=190, **given)
    assert_near(read(layer, x, (1,) * 50, cache, start=190)[0], layer, x, 190)


@cover(backend=["auto", "reference"], chunks=[(1,) * 140, (8,) * 17], padding=[None, 0, 100])
def test_rows_that_need_dropped_keys_are_counted(backend, chunks, padding):
    """Against sums of every row's weights and of the masses of its dropped keys."""
    layer, x, cache = build(), tokens(), dropping(reserve=0.0)
    layer.query_projection.weight *= 3  # far from all keys: their weights are small
    first = torch.tensor([0, padding or 0])
    mask = {} if padding is None else {"key_mask": torch.arange(LENGTH) >= first[:, None]}
    query, key, parameters = layer.queries(x).double(), layer.keys(x).double(), layer.dynamics()
    given = {name: part.double() for name, part in parameters.items()} | {"prior": "riccati", "rotate_values": False}
    slope, beta = SLOPES.double()[:, None, None], given["inverse_temperature"][:, None, None]
    _, cache = read(layer, x, (100,), cache, **mask)
    layer.backend, start, expected = backend, 100, 0
    for length in chunks:
        end, gone = start + length, cache.layers[0].dropped
        read(layer, x, (length,), cache, start, **mask)
        held = key[:, :, gone:end]
        seen = {name: marks[:, gone:end] for name, marks in mask.items()} | {"return_log_precision": True}
        _, log_sum = robust_filter_attention(query[:, :, start:end], held, held, **given, **seen)
        lag = torch.arange(start, end)[:, None] - torch.arange(gone)
        mass = (beta * (torch.log(-torch.expm1(-slope)) - slope * lag)).logsumexp(-1)
        expected += int(((mass > log_sum + math.log(EPS)) & (first < gone)[:, None, None]).sum())
        start = end
    assert 0 < expected < 2 * HEADS * 140
    assert cache.uncertified == expected


def test_bad_input():
    for eps in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=rf"^certified: got {eps}, expected None or a number"):
            FilterCache(certified=eps)
    for reserve in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"^reserve: got {reserve}, expected a finite number"):
            FilterCache(reserve=reserve)


def test_the_cache_says_what_products_read():
    """They keep all keys: None and eps are of the tokens that are read."""
    layer, x = DotProductAttention(SIZE, HEADS, gates="forget", normalise_states=True), tokens()
    all_keys = DotProductAttention(SIZE, HEADS, gates="forget", normalise_states=True, certified=None)
    all_keys.load_state_dict(layer.state_dict())
    expected, cache = read(all_keys, x, PIECES)
    assert cache.layers[0].keys.shape[2] == LENGTH
    assert torch.equal(read(layer, x, PIECES, FilterCache(certified=None))[0], expected)
    for model in (layer, all_keys):
        found, _ = read(model, x, PIECES, FilterCache(certified=0.3))
        assert (found - expected).abs().max() > 1e-5
        assert (found - expected).norm(dim=-1).max() <= 0.3 / EPS * largest_error(layer, x)


def test_later_keys_have_no_bound():
    with pytest.raises(ValueError, match=r"^certified: got 0.001 with causal=False, expected None, or causal=True"):
        build(causal=False, certified=1e-3)
    layer, x = build(causal=False), tokens()
    assert torch.equal(layer(x), build(causal=False, certified=None)(x))


UNBOUNDED = {
    "lyapunov": (RobustFilterAttention, M2, "prior='riccati'"),
    "routing": (RobustFilterAttention, {**M2, "aggregation": "routing"}, "prior='riccati'"),
    "content": (ContentFilterAttention, {}, "prior='riccati'"),
    "gates": (DotProductAttention, {"gates": "forget"}, "normalise_states=True"),
}


@pytest.mark.parametrize("case", UNBOUNDED)
def test_layers_without_a_bound_refuse_an_eps(case):
    """Their own and the cache's."""
    kind, options, named = UNBOUNDED[case]
    with pytest.raises(ValueError, match=f"^certified: got 0.001 with .*{named}"):
        kind(SIZE, HEADS, certified=1e-3, **options)
    layer, x = kind(SIZE, HEADS, **options), tokens(length=9)
    with pytest.raises(ValueError, match=f"^certified: got 0.001 with .*{named}"):
        layer(x, past_key_values=FilterCache(certified=1e-3))
    for free in ("auto", None):
        torch.testing.assert_close(
            read(layer, x, (4, 5), FilterCache(certified=free))[0], layer(x), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("given", ["times", "key_mask", "segment_ids"])
def test_nothing_is_dropped_once_steps_are_not_one(given):
    """After tokens at 0, 1, 2, ..., whose tables say how far the horizon is. What comes later is served as ever."""
    layer, x = build(), tokens()
    mask, counted = torch.ones(2, LENGTH, dtype=torch.bool), torch.arange(LENGTH)
    mask[1, 60 : LENGTH - 30] = False
    steps = {"key_mask": mask, "segment_ids": (counted * (counted > 20) % 2).expand(2, -1)}
    steps["times"] = torch.where(counted < 20, counted, 20 + (counted - 20) / 100)
    results = []
    for cache in (dropping(), FilterCache(certified=None)):
        parts, start = [layer(x[:, :20], past_key_values=cache)], 20
        for stop in (LENGTH - 20, LENGTH - 1, LENGTH):
            now = {given: steps[given][..., :stop]}
            parts.append(layer(x[:, start:stop], past_key_values=cache, **now))
            start = stop
        assert not cache.layers[0].dropped
        results.append(torch.cat(parts, dim=1))
    seen = mask[..., None] if given == "key_mask" else 1.0
    assert ((results[0] - results[1]) * seen).norm(dim=-1).max() <= largest_error(layer, x)
