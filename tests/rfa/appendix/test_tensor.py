"""The anisotropic operator against explicit loops, differences and xPos."""

import math
import re

import numpy as np
import pytest
import torch
from cover import cover
from ops.oracle import as_array
from ops.problems import EXACT, PARAMETERS, SINGLE, STATES, WEIGHTS, irregular_times, with_gradients
from ops.test_filter_attention_values import STRUCTURE, TIMING, structure_options, timing_options
from shapes import only_our_own_checks

from appendix.anisotropic import PER_MODE, loops, tensor_problem
from rfa.appendix import TensorFilterAttention, tensor_filter_attention
from rfa.nn import FilterCache

# Two orders of the same few dozen float64 operations on numbers of order one.
ROUNDING = 1e-12


def attend(inputs, **options):
    return tensor_filter_attention(**inputs, **options, return_log_precision=True)


def assert_finite(inputs, **options):
    for name, x in with_gradients(inputs, attend, **options).items():
        assert bool(torch.isfinite(x).all()), name


@cover(structure=STRUCTURE, timing=TIMING, causal=[True, False], weight=WEIGHTS)
def test_explicit_loops(weight, causal, timing, structure):
    options = {"weight": weight, "causal": causal, **timing_options(timing), **structure_options(structure)}
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, SINGLE)):
        inputs = tensor_problem(1, queries=4, dtype=dtype)
        for rotate_values in (True, False):
            results = attend(inputs, rotate_values=rotate_values, **options)
            expected = loops(**inputs, rotate_values=rotate_values, **options)
            for x, y in zip(results, expected, strict=True):
                assert x.dtype == dtype
                np.testing.assert_allclose(as_array(x), y, rtol=tolerance, atol=tolerance)


@cover(1, rotate_values=[True, False], causal=[True, False], weight=WEIGHTS)
def test_gradients(weight, causal, rotate_values):
    """All eleven tensors, times and query times; one row sees no key."""
    inputs = tensor_problem(6, batch=2, heads=1, queries=3, keys=4, modes=2)
    inputs["decay"][0, 0] = 0.07  # finite differences stay legal
    tensors = {
        **inputs,
        "times": irregular_times(6, 2, 4),
        "query_times": torch.tensor([-9.0, 2.03, 7.7], dtype=torch.float64),
    }
    mask = torch.tensor([[True, False, True, True], [True, True, True, False]])
    options = {"key_mask": mask, "weight": weight, "causal": causal, "rotate_values": rotate_values}

    def call(*leaves):
        output, log_precision = attend(dict(zip(tensors, leaves, strict=True)), **options)
        return output, log_precision.masked_fill(log_precision.isinf(), 0.0)

    # As for the isotropic operator: h^2 f''' ~ 1e-11 at h = 1e-6, and rounding 1e-15 / h = 1e-9.
    assert torch.autograd.gradcheck(call, [x.clone().requires_grad_() for x in tensors.values()], atol=1e-7, rtol=1e-6)


def test_gradient_of_the_decay_at_zero():
    """mu = 0 is a legal value: central differences of the loops, which continue to negative decays."""
    inputs = tensor_problem(7, batch=1)
    leaf = inputs["decay"].clone().requires_grad_()
    attend({**inputs, "decay": leaf})[0].square().sum().backward()
    step = torch.zeros_like(leaf)
    step[0, 0] = 1e-5  # error h^2 f''' ~ 1e-9
    up, down = (np.sum(loops(**{**inputs, "decay": inputs["decay"] + s * step})[0] ** 2) for s in (1, -1))
    assert leaf.grad[0, 0].item() == pytest.approx((up - down) / 2e-5, rel=1e-6)


def test_without_gradients_rows_are_computed_in_blocks(monkeypatch):
    inputs, options = tensor_problem(8, keys=7), {"key_mask": torch.arange(14).view(2, 7) % 3 > 0}
    expected = attend(inputs, **options)
    for scores in (1, 2 * 2 * 3 * 7 * 2, 10**9):
        monkeypatch.setattr("rfa.ops.dense._SCORES", scores)
        with torch.no_grad():
            for x, y in zip(attend(inputs, **options), expected, strict=True):
                torch.testing.assert_close(x, y, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_accumulate_in_float32(dtype):
    inputs = tensor_problem(9, dtype=torch.float32)
    inputs.update({n: inputs[n].to(dtype) for n in STATES})
    output, log_precision = attend(inputs)
    expected, expected_log = attend({n: x.float() for n, x in inputs.items()})
    assert (output.dtype, log_precision.dtype) == (dtype, torch.float32)
    assert torch.equal(output, expected.to(dtype))
    assert torch.equal(log_precision, expected_log)
    alone = tensor_filter_attention(**inputs)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, output)


def test_no_keys_at_all():
    inputs = tensor_problem(11, queries=2, keys=0)
    output, log_precision = attend(inputs, query_times=torch.tensor([0.0, 1.0]))
    assert torch.equal(output, torch.zeros_like(inputs["query"]))
    assert bool((log_precision == -torch.inf).all())


def test_masked_keys_may_hold_nan_and_rows_may_be_empty():
    inputs = tensor_problem(12, dtype=torch.float32)
    mask = torch.tensor([[False, False, True, True, False], [False] * 5])
    expected = attend(inputs, key_mask=mask)
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(~mask[:, None, :, None], torch.nan)
    found = with_gradients(inputs, attend, key_mask=mask)
    assert torch.equal(found["output"], expected[0])
    assert torch.equal(found.pop("log_precision"), expected[1])
    empty = torch.tensor([[True, True, False, False, False], [True] * 5])[:, None, :, None]
    assert bool((found["output"].masked_select(empty) == 0).all())
    assert torch.equal(expected[1] == -torch.inf, empty.expand(2, 2, 5, 3))
    assert all(bool(torch.isfinite(x).all()) for x in found.values())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_far_lags_large_inputs_and_extreme_parameters_stay_finite(weight, causal):
    options = {"weight": weight, "causal": causal}
    inputs = tensor_problem(13, dtype=torch.float32)
    near = irregular_times(13, 5)
    assert_finite({n: 1e3 * x if n in STATES else x for n, x in inputs.items()}, **options)
    assert_finite(inputs, times=near * 1e6, **options)
    assert_finite(inputs, times=near, query_times=near + 1e6, **options)
    for name in ("decay", "process_noise", "key_noise", "query_noise", "noise_floor"):
        for value in (0.0, 1e-12, 1e4, 1e12 if name != "decay" else 1e3):
            assert_finite({**inputs, name: torch.full_like(inputs[name], value)}, **options)
    noiseless = {n: torch.zeros_like(x) if "noise" in n else x for n, x in inputs.items()}
    assert_finite(noiseless, **options)


def test_without_noises_both_are_zero():
    """And nothing overflows, where the stationary frame would: it ends at `mu t` = 354 (appendix B.2.3)."""
    inputs = tensor_problem(15, keys=50, modes=8)
    inputs["decay"] = inputs["decay"] * 200
    bare = {name: x for name, x in inputs.items() if name not in ("process_noise", "key_noise")}
    zeros = {name: torch.zeros_like(inputs[name]) for name in ("process_noise", "key_noise")}
    expected, found = (with_gradients(given, attend) for given in (inputs | zeros, bare))
    assert all(torch.equal(found[name], expected[name]) and found[name].isfinite().all() for name in found)


@pytest.mark.parametrize("noise", [True, False])
def test_the_layer(noise):
    """Projections around the operator and its innovation; every parameter learns, and there is no cache."""
    torch.manual_seed(0)
    layer, times = TensorFilterAttention(12, 2, noise=noise).double(), irregular_times(7, 7)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    named = {name: p.reshape(2, -1) for name, p in layer.mode_dynamics().items()} | layer.weighing.positive(x.dtype)
    named["noise_floor"] = named["noise_floor"][:, 0]
    query, key = layer.queries(x), layer.keys(x)
    value = layer.values(x, key)
    estimate = tensor_filter_attention(query, key, value, times=times, **named)
    expected = layer.output_projection((estimate - value).transpose(1, 2).flatten(2))
    found = layer(x, times=times)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    with pytest.raises(ValueError, match=r"past_key_values: .* has none"):
        layer(x, past_key_values=FilterCache())
    with pytest.raises(ValueError, match="clock: got 'content', expected options among causal"):
        TensorFilterAttention(12, 2, clock="content")


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_without_noise_it_is_xpos(size):
    """Appendix B.2.3: xPos of Sun et al. (arXiv:2212.10554) by its own formula, in one product of scaled states.

    The filter also has the transported key's norm. It falls by the square of `size` where queries are as much longer
    and keys as much shorter: then xPos alone is left. Both exponents stay within range at 6 tokens.
    """
    length, modes, scale_base = 6, 4, 2.0  # xPos divides by 512; a small base lets the scales differ within 6 tokens
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, length, 2 * modes, dtype=torch.float64).unbind()
    n = torch.arange(length, dtype=torch.float64)[:, None]
    zeta = ((torch.arange(0, 2 * modes, 2) + 0.4 * 2 * modes) / (1.4 * 2 * modes)).double() ** (1 / scale_base)
    omega = 10000.0 ** (-torch.arange(modes, dtype=torch.float64) / modes)

    def turned(x, exponent):
        """`x_n exp(-i omega n) zeta^(exponent n)`."""
        z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(zeta ** (exponent * n), -omega * n)
        return torch.cat([z.real, z.imag], dim=-1)

    seen = n >= n.mT
    score = turned(q, 1) @ turned(k, -1).mT / math.sqrt(2 * modes)
    squares = k.unflatten(-1, (2, modes)).square().sum(-2)[0, 0]
    norm = torch.einsum("ijm,jm->ij", zeta ** (2 * (n[:, None] - n)), squares) / (2 * math.sqrt(2 * modes))
    exact = (score - norm / size**2).masked_fill(~seen, -torch.inf).softmax(-1)
    xpos = score.masked_fill(~seen, -torch.inf).softmax(-1)

    one = torch.ones(1, modes, dtype=torch.float64)
    found = tensor_filter_attention(
        size * q,
        k / size,
        v,
        decay=-zeta.log()[None],
        frequency=omega[None],
        query_noise=0.5 * one,
        noise_floor=0.5 * one[:, 0],
        robustness=one[:, 0],
        inverse_temperature=modes / (2 * math.sqrt(2 * modes)) * one[:, 0],  # 2 beta / (nu_s d) = 1 / sqrt(2 d)
        weight="exponential",
    )

    def estimate(weights):
        """Values of the common frame, brought to each query's time."""
        z = weights.to(torch.complex128) @ torch.complex(*turned(v, -1).chunk(2, dim=-1))
        z = z * torch.polar(zeta**n, omega * n)
        return torch.cat([z.real, z.imag], dim=-1)

    rounding = ROUNDING * size**2  # residuals hold the square of the queries' size
    torch.testing.assert_close(found, estimate(exact), rtol=rounding, atol=rounding)
    assert (estimate(exact) - estimate(xpos)).abs().max() > 1e-3 / size**2  # the norm counts
    if size > 1:
        torch.testing.assert_close(found, estimate(xpos), rtol=10 / size**2, atol=10 / size**2)


def refuse(name, change, **options):
    inputs = tensor_problem(0, dtype=torch.float32)
    if name in inputs:
        inputs[name] = change(inputs[name])
    with only_our_own_checks(), pytest.raises(ValueError, match=rf"^{re.escape(name)}: got .* expected "):
        attend(inputs, **options)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_do_not_fit(name):
    per_mode = name in (*PER_MODE, "frequency")
    refuse(name, (lambda x: x[:, 0]) if per_mode else (lambda x: x[:, None].expand(2, 3)))
    refuse(name, lambda x: x[..., :1])
    refuse(name, lambda x: x.long())
    refuse(name, lambda x: x.to("meta"))
    refuse(name, lambda x: x.tolist())
    bad = [math.nan, math.inf] if name == "frequency" else [math.nan, math.inf, -0.25]
    for value in bad + [0.0] * (name in ("robustness", "inverse_temperature")):
        refuse(name, lambda x, value=value: x.flatten().index_fill(0, torch.tensor([1]), value).view(x.shape))


def test_states_and_positions_that_do_not_fit():
    refuse("query", lambda x: x[..., :5])
    refuse("key", lambda x: x[..., :4])
    refuse("key", lambda x: x.double())
    for rotate_values in (True, False):
        refuse("value", lambda x: x[..., :4], rotate_values=rotate_values)
    refuse("times", None, times=torch.tensor([0.0, 1.0, 1.0, 2.0, 3.0]))
    refuse("query_times", None, query_times=torch.tensor([0.0, 1.0]))
    refuse("key_mask", None, key_mask=torch.ones(2, 5))
    refuse("segment_ids", None, segment_ids=torch.zeros(5, dtype=torch.long))
    refuse("weight", None, weight="gaussian")
