"""One call of compiled code decodes a token as PyTorch's operators do, and says where it does not serve."""

import copy
import pickle

import pytest
import torch
from cover import cover

from rfa.nn import FilterCache, RobustFilterAttention
from rfa.ops.backends import compiled_decoding
from rfa.ops.cpu import decoding as compiled

from .by_hand import perturb
from .layers import IRREGULAR, M2

HEADS, MODES = 3, 18  # channels that are not whole registers
WIDE = 114  # 228 channels: with AVX-512 128 + 64 + 32 + 4 of them, by one loop of the kernel each
LAYERS = {
    "defaults": {},
    "m2": M2,
    "values stay": {"rotate_values": False},
    "exponential": {"weight": "exponential"},
    "no slopes of ALiBi": {"initial_slopes": None},
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def decoded(monkeypatch):
    """The tokens that compiled code has decoded."""
    calls, run = [], compiled.run_kernel

    def counted(entry, problem):
        if entry == "token":
            calls.append(problem)
        run(entry, problem)

    monkeypatch.setattr(compiled, "run_kernel", counted)
    return calls


def build(modes=MODES, **options):
    torch.manual_seed(3)
    layer = RobustFilterAttention(HEADS * modes, HEADS, **options)
    perturb(layer)
    return layer.eval()


@cover(1, modes=[MODES, WIDE], name=LAYERS)
def test_tokens_are_those_of_pytorch(name, modes, decoded):
    """140 tokens: over the first room of the cache, a first block of keys, and the lags of two tables."""
    layer, plain = build(modes, **LAYERS[name]), build(modes, **LAYERS[name], backend="reference")
    x = torch.randn(2, 140, HEADS * modes)
    cache = FilterCache()
    pieces = [layer(x[:, :30], past_key_values=cache)]
    pieces += [layer(x[:, i : i + 1], past_key_values=cache) for i in range(30, 140)]
    found, expected = torch.cat(pieces, dim=1), plain(x)
    near = 1e-6 * float(expected.abs().max())  # eight roundings of the largest, in sums of up to 342 in float32
    torch.testing.assert_close(found, expected, rtol=0.0, atol=near)
    assert len(decoded) == 110 - 2  # all but the first tokens that need longer tables


HALF = [torch.bfloat16, torch.float16]


@cover(dtype=HALF, modes=[MODES, WIDE], name=["defaults", "m2"])
def test_tokens_in_half_precision(name, modes, dtype, decoded):
    layer, plain = (build(modes, **LAYERS[name], backend=backend).to(dtype) for backend in ("auto", "reference"))
    x = torch.randn(2, 80, HEADS * modes).to(dtype)
    caches = FilterCache(), FilterCache()
    found, expected = (
        torch.cat([model(part, past_key_values=cache) for part in (x[:, :60], *x[:, 60:].split(1, 1))], 1)
        for model, cache in zip((layer, plain), caches, strict=True)
    )
    assert found.dtype is caches[0].layers[0].keys.dtype is caches[0].layers[0].values.dtype is dtype
    assert len(decoded) == 20
    # the query is not rounded in the frame, and all else is: a few units in the last place
    assert (found - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()
    # float32 may differ in the last place before it is rounded
    step = torch.finfo(dtype).eps * caches[1].layers[0].keys.abs().max()
    assert (caches[0].layers[0].keys - caches[1].layers[0].keys).abs().max() <= step
    norms = caches[0].layers[0].keys.float().square().sum(-1)
    torch.testing.assert_close(caches[0].layers[0].key_norms, norms)


@pytest.mark.parametrize("dtype", HALF)
def test_each_number_in_half_precision(dtype):
    """All numbers are read as they are, and products with factors of any size are rounded as PyTorch rounds them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(1, 1, 2048, 32)
    key = every.nan_to_num(1.0, 1.0, 1.0)
    factor = torch.randn(1, 1, 2048, 1) * 2.0 ** torch.randint(-30, 20, (1, 1, 2048, 1))
    cos, sin = factor.expand(-1, -1, -1, 32).contiguous(), torch.zeros(1, 1, 2048, 32)
    keys, values = torch.empty_like(key), torch.empty_like(key)
    compiled.enter((key, key, every), (cos, sin), (keys, values, torch.empty(1, 1, 2048)), False)
    assert torch.equal(values.isnan(), every.isnan())
    assert torch.equal(values.nan_to_num(7.0), every.nan_to_num(7.0))
    known = ~every.isnan()
    assert torch.equal(values.view(torch.int16)[known], every.view(torch.int16)[known])  # infinity and -0.0 too
    assert torch.equal(keys, (key.float() * factor).to(dtype))


def test_a_cache_whose_memory_moves(decoded):
    """The addresses of the last token are not taken again; a moved, a copied and a stored cache go on by themselves."""
    layer, plain, x = build(), build(backend="reference"), torch.randn(2, 30, HEADS * MODES)
    cache, reference = FilterCache(), FilterCache()
    for model, each in ((layer, cache), (plain, reference)):
        for part in (x[:, :20], *x[:, 20:23].split(1, 1)):
            model(part, past_key_values=each)
    held, before = cache.layers[0], len(decoded)
    assert held.decoding.last_call is not None
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    for storage in (held.keys, held.values, held.key_norms):
        storage.share_memory_()
    expected = torch.cat([plain(part, past_key_values=reference) for part in x[:, 23:].split(1, 1)], 1)
    for each in (cache, *copies):
        assert each is cache or each.layers[0].decoding.last_call is None
        found = torch.cat([layer(part, past_key_values=each) for part in x[:, 23:].split(1, 1)], 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(decoded) == before + 3 * 7


@pytest.mark.parametrize("longer", ["query", "key", "value"])
def test_a_token_that_lies_in_a_longer_projection(longer, decoded):
    """Its strides are others than those of the token before, which lay alone."""
    layer, plain = build(), build(backend="reference")
    states = {name: torch.randn(2, HEADS, 30, 2 * MODES) for name in ("query", "key", "value")}
    outputs = []
    for each in (layer, plain):
        cache = FilterCache()
        past, parts = cache.layer(0), []
        for start, end in ((0, 20), *((i, i + 1) for i in range(20, 30))):
            given = {name: x[:, :, start:end] for name, x in states.items()}
            given |= {name: x.clone() for name, x in given.items() if name != longer or end % 2}
            positions = cache.locate(2, end - start, torch.device("cpu"), None, None, None)
            parts.append(each.estimate_with_cache(**given, cached=past, positions=positions))
        outputs.append(torch.cat(parts, 2))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert len(decoded) == 10


OTHERS = {
    "horizon": ({"horizon": 0.7}, {}),
    "log precision": ({**M2, "step": "precision"}, {}),
    "clock": ({"clock": "content"}, {}),
    "routing": ({**M2, "aggregation": "routing"}, {}),
    "reference": ({"backend": "reference"}, {}),
    "times": ({}, {"times": IRREGULAR[:9]}),
    "mask": ({}, {"key_mask": torch.arange(9)[None] != 4}),
    "segments": ({}, {"segment_ids": torch.ones(1, 9, dtype=torch.long)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_elsewhere_the_operator_decodes(name, decoded):
    options, given = OTHERS[name]
    layer, x = build(**options), torch.randn(1, 9, HEADS * MODES)

    def until(end):
        return {key: value[..., :end] for key, value in given.items()}

    cache = FilterCache()
    pieces = [layer(x[:, :7], past_key_values=cache, **until(7))]
    pieces += [layer(x[:, i : i + 1], past_key_values=cache, **until(i + 1)) for i in (7, 8)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x, **given), rtol=1e-4, atol=1e-5)
    assert not decoded


def test_a_recorded_program_does_not_decode_in_compiled_code():
    """Which writes behind the recorder's back: the program would return memory that nobody wrote."""
    found = []

    def ask(query):
        found.append(compiled_decoding("cpu", query))
        return query + 1

    query = torch.randn(1, HEADS, 1, 2 * MODES)
    ask(query)
    torch.jit.trace(ask, query, check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(ask)(query)
    assert found[0] is not None
    assert found[1:] == [None, None]
