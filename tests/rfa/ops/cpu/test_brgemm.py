"""States in bfloat16 that are multiplied as such: PyTorch's brgemm, and a stand-in for processors without it."""

import ctypes

import numpy as np
import pytest
import torch
from cover import cover

from rfa.ops.cpu import operator
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.positions import checked_positions

from ..problems import PARAMETERS, PRIORS, WEIGHTS, attend, irregular_times, problem, with_gradients

LENGTH = 300  # three blocks of keys, four of queries, none of them whole at the end
# Relative to the largest entry, as the Triton kernels in half precision: see tests/ops/triton/fused_problems.py.
TOLERANCE = 5e-2
_NUMBERS = [ctypes.c_int64] * 6
_PRODUCT = ctypes.CFUNCTYPE(None, *_NUMBERS, ctypes.c_bool, *[ctypes.c_void_p] * 3, ctypes.c_bool)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_bool)


def at(address, dtype, rows, stride, columns):
    """The matrix at an address, of rows that are `stride` entries apart."""
    size = np.dtype(dtype).itemsize
    memory = (ctypes.c_char * ((rows - 1) * stride + columns) * size).from_address(address)
    return np.lib.stride_tricks.as_strided(np.frombuffer(memory, dtype), (rows, columns), (stride * size, size))


def as_float(words):
    return (words.astype(np.uint32) << 16).view(np.float32)


@_PRODUCT
def slow_product(m, n, k, lda, ldb, ldc, add, a, b, c, in_pairs):
    assert in_pairs
    assert k % 2 == 0
    left = as_float(at(a, np.uint16, m, lda, k))
    pairs = at(b, np.uint32, k // 2, ldb, n)
    right = np.stack([as_float(pairs & 0xFFFF), as_float(pairs >> 16)], 1).reshape(k, n)
    sums = at(c, np.float32, m, ldc, n)
    sums[:] = left @ right + (sums if add else 0.0)


@_RELEASE
def nothing(in_pairs):
    assert in_pairs


STAND_IN = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in (slow_product, nothing))


@pytest.fixture(params=["the stand-in", "the processor's"])
def products(request, monkeypatch):
    """The products that the kernels take for bfloat16."""
    monkeypatch.setattr(operator, "LEAST_QUERIES", LENGTH - 50)
    if request.param == "the stand-in":
        monkeypatch.setattr(operator, "bfloat16_products", lambda: STAND_IN)
    elif operator.bfloat16_products() is None:
        pytest.skip("this processor has no instructions for bfloat16")


def made(seed=0, *, keys=LENGTH, queries=None, modes=8, value_modes=None, dtype=torch.bfloat16, **scaled):
    """A problem of one head with states of bfloat16. A decay keeps gradients of parameters away from 0."""
    inputs = problem(seed, batch=1, heads=1, keys=keys, queries=queries, modes=modes, value_modes=value_modes)
    inputs["decay"] += 0.05
    states = {n: (x * scaled.get(n, 1.0)).to(dtype) for n, x in inputs.items() if n in ("query", "key", "value")}
    return {n: states.get(n, x.float()) for n, x in inputs.items()}


def results(inputs, backend, options):
    return with_gradients(inputs, backend, inputs.keys() - {"frequency"}, **options)


def assert_near(found, inputs, options):
    """To the reference in float64. A parameter's gradient is one by its logarithm, beside the largest of all of them:
    a small one may be a difference of sums that are larger by far.
    """
    exact = {n: x.double() for n, x in inputs.items()}
    expected = results(exact, "reference", options)
    effects = {n: x.detach() for n, x in exact.items() if n in PARAMETERS and n in expected}
    most = max((expected[n] * x).abs().max() for n, x in effects.items())
    for name, x in found.items():
        error = (x.double() - expected[name]).abs()
        relative = error * effects[name] / most if name in effects else error / expected[name].abs().max()
        assert relative.max() <= TOLERANCE, f"{name}: {relative.max():.1e}"


@cover(1, causal=[True, False], timed=[True, False], weight=WEIGHTS, prior=PRIORS, wide=[False, True])
def test_results_and_gradients_are_those_of_float64(causal, timed, weight, prior, wide, products):
    """`wide`: values of 36 channels, which are not whole vectors, and more keys than queries."""
    sizes = {"modes": 20, "value_modes": 18, "queries": 260} if wide else {}
    if prior == "riccati" or timed:
        sizes.pop("queries", None)
    inputs = made(0, **sizes)
    options = {"causal": causal, "weight": weight, "prior": prior, "rotate_values": not wide}
    options["times"] = irregular_times(1, LENGTH) if timed else None
    assert_near(results(inputs, "cpu", options), inputs, options)


@pytest.mark.parametrize("hidden", ["padding", "segments"])
def test_keys_that_are_not_seen(hidden, products):
    inputs, places = made(1), torch.arange(LENGTH)[None]
    options = {"key_mask": places < 210} if hidden == "padding" else {"segment_ids": places // 70}
    assert_near(results(inputs, "cpu", options), inputs, options)


def test_equal_states_meet_exactly(products):
    """The norms are those of the rounded states: a key that equals the query has r = 0, whatever its size."""
    inputs = made(3, query=100.0)
    inputs["key"] = inputs["query"].clone()
    inputs["decay"] = torch.zeros(1)
    inputs |= {name: torch.full((1,), 1e-4) for name in ("key_noise", "query_noise", "noise_floor", "process_noise")}
    inputs["value"] = torch.ones_like(inputs["value"])
    inputs["value"][..., 1:] = torch.arange(LENGTH)[:, None] % 16
    inputs["frequency"] = torch.full_like(inputs["frequency"], 0.37)
    out = attend(inputs, "cpu", rotate_values=False)[0]
    torch.testing.assert_close(out.float(), inputs["value"].float(), rtol=1e-2, atol=1e-2)


def test_rounded_weights_add_up_to_one(products):
    """Rounding to the nearest errs to both sides. Cutting off would take a quarter of a percent from every estimate."""
    inputs = made(6)
    inputs["decay"] = torch.zeros(1)
    inputs["value"] = torch.ones_like(inputs["value"])
    out = attend(inputs, "cpu", rotate_values=False)[0]
    assert (out[0, 0, 1:].float().mean() - 1.0).abs() < 1e-3


def test_what_is_no_number_stays_with_those_who_see_it(products):
    inputs = made(4)
    clean = attend(inputs, "cpu")
    inputs["key"][0, 0, 200, 3] = float("nan")
    inputs["value"][0, 0, 250, 0] = float("inf")
    found = attend(inputs, "cpu")
    assert torch.equal(found[0][..., :200, :], clean[0][..., :200, :])
    assert found[0][..., 200:, :].isnan().all()
    assert not found[1][..., :200].isnan().any()


def test_few_queries_and_other_numbers_are_multiplied_in_float32(monkeypatch):
    monkeypatch.setattr(operator, "bfloat16_products", lambda: pytest.fail("asked for"))
    attend(made(6, keys=300), "cpu")
    attend(made(6, keys=operator.LEAST_QUERIES, dtype=torch.float16), "cpu")
    attend(made(6, keys=operator.LEAST_QUERIES, dtype=torch.float32), "cpu")
    inputs = made(6, keys=operator.LEAST_QUERIES)
    attend({**inputs, "value": inputs["value"][..., :0]}, "cpu", rotate_values=False)


@cover(1, causal=[True, False], timed=[True, False], kind=["slopes", "gate"])
def test_scores_of_dot_products(causal, timed, kind, products):
    g = torch.Generator().manual_seed(7)
    states = [torch.randn(1, 1, LENGTH, 16, generator=g).to(torch.bfloat16) for _ in range(3)]
    times = irregular_times(2, LENGTH) if timed else None
    given = {"slopes": torch.tensor([0.05])} if kind == "slopes" else {"decay": torch.tensor([0.02])}
    given["frequency"] = torch.rand(1, 8, generator=g)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.detach().to(dtype).requires_grad_() for x in states]
        positions = checked_positions(1, LENGTH, LENGTH, states[0].device, times)
        out = decayed_dot_product_attention(
            *leaves, positions=positions, rotate_values=True, causal=causal, backend="cpu", **given
        )
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for x, expected in zip(*found, strict=True):
        assert (x.float() - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_switching_onednn_off_between_the_passes_changes_nothing():
    """Keys and queries have a large part in common, so scores of other states would be wrong by many bits."""
    if operator.bfloat16_products() is None:
        pytest.skip("this processor has no instructions for bfloat16")
    gradients = []
    for enabled in (True, False):
        leaves = [x.requires_grad_() for x in made(8, keys=operator.LEAST_QUERIES).values() if x.dim() == 4]
        inputs = {**made(8, keys=operator.LEAST_QUERIES), **dict(zip(("query", "key", "value"), leaves, strict=True))}
        out = attend({**inputs, "query": inputs["query"] + 30.0, "key": inputs["key"] + 30.0}, "cpu")[0]
        with torch.backends.mkldnn.flags(enabled=enabled):
            gradients.append(torch.autograd.grad(out.float().sum(), leaves))
            assert torch.backends.mkldnn.enabled == enabled
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def works(product):
    return operator.library().rfa_brgemm_works(*(ctypes.cast(each, ctypes.c_void_p) for each in (product, nothing)))


def test_a_function_that_does_something_else_is_not_taken():
    assert works(slow_product)
    assert not works(_PRODUCT(lambda *_: None))


def test_without_onednn_or_the_instructions_there_are_none(monkeypatch):
    with torch.backends.mkldnn.flags(enabled=False):
        assert operator.find_brgemm() is None
    monkeypatch.setattr(operator, "instruction_sets", lambda: "flags : fpu avx2 avx512f")
    assert operator.find_brgemm() is None
