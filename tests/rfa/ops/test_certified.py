"""Certified windows: the bound against float64, the rule against sums of its own, gradients over what was visited."""

import math

import pytest
import torch

from rfa.ops import reference, robust_filter_attention
from rfa.ops.cpu.operator import GROUP, KEY_BLOCK, forward
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.kernel import kernel_inputs, rotation_tables
from rfa.ops.positions import checked_positions
from rfa.ops.prior import certified_tail, kernel_prior, riccati_weights, tail_of_keys
from rfa.ops.problem import Options, Parameters, Problem

from .problems import PARAMETERS, STATES, irregular_times, problem

KEYS = 5 * KEY_BLOCK - 7
EXAMPLES = {
    "uniform": {},
    "irregular": {"times": irregular_times(0, 2, KEYS)},
    "segments": {"segment_ids": (torch.arange(KEYS) // 300).expand(2, -1)},
    "interleaved segments": {"segment_ids": (torch.arange(KEYS) % 2).expand(2, -1)},
    "padding": {"key_mask": torch.arange(KEYS) >= torch.tensor([[0], [150]])},
    "gaps": {"key_mask": torch.arange(KEYS) % 5 != torch.tensor([[1], [3]])},
    "far queries": {"query_times": KEYS + 40.0 * torch.arange(KEYS)},
    "exponential": {"weight": "exponential"},
}


def fading(slopes=(0.08, 0.6), **options):
    """A problem whose weights fall by these slopes each step, in nats: the second head needs few keys."""
    inputs = problem(3, keys=KEYS, modes=4, **options)
    slopes, decay = torch.tensor(slopes, dtype=torch.float64), inputs["decay"]
    noise = inputs["key_noise"] + inputs["noise_floor"]
    gain = -torch.expm1(-slopes)
    ahead = gain * noise / (1 - gain)
    remaining = torch.exp(-2 * decay)
    grown = torch.where(decay > 0, (1 - remaining) / (2 * decay), 1.0)
    inputs["process_noise"] = (ahead**2 + ahead * noise * (1 - remaining)) / (ahead + noise) / grown
    inputs["inverse_temperature"] = torch.ones(2, dtype=torch.float64)
    return inputs


def attend(inputs, backend, certified, **options):
    """The estimate and the log precision under the Riccati prior; fused backends take float32."""
    options |= {"prior": "riccati", "certified": certified, "return_log_precision": True, "backend": backend}
    dtype = torch.float64 if backend == "reference" else torch.float32
    given = {name: x.to(dtype) for name, x in inputs.items()}
    return tuple(x.double() for x in robust_filter_attention(**given, **options))


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_is_left_out_changes_no_more_than_is_said(example):
    inputs, options = fading(), EXAMPLES[example]
    exact, log_exact = attend(inputs, "reference", None, **options)
    largest = inputs["value"].norm(dim=-1).amax()
    for backend, eps, rounding in (("reference", 1e-2, 0), ("cpu", 1e-2, 2e-6), ("cpu", 1e-4, 2e-6)):
        found, log_found = attend(inputs, backend, eps, **options)
        assert (found - exact).norm(dim=-1).max() <= (2 * eps + rounding) * largest
        less = (log_exact - log_found)[log_exact.isfinite()]
        assert less.max() <= eps + 4 * rounding
        if backend == "reference":  # something was left out, and only ever that
            assert less.min() >= -1e-12
            assert less.max() > 0


def visits(inputs, eps, **options):
    """The first key that each query visits on the CPU, `(batch, heads, queries)`; its log2 sum; the positions."""
    given = {name: x.float() for name, x in inputs.items()}
    states = [given[name] for name in STATES]
    places = (options.get(name) for name in ("times", "query_times", "key_mask", "segment_ids"))
    positions = checked_positions(2, states[0].shape[2], KEYS, torch.device("cpu"), *places)
    chosen = Options(prior="riccati", weight=options.get("weight", "student_t"), log_precision=True)
    parameters = Parameters(*(given[name] for name in PARAMETERS), None)
    prior = kernel_prior(Problem(parameters, positions, chosen))
    kinds = {"causal": True, "score_kind": chosen.weight, "rotate_values": True}
    tail = certified_tail(prior, positions, eps)
    rotation = rotation_tables(parameters.frequency, positions)
    _, log_sum, block = forward(*kernel_inputs(*states, rotation, prior, positions, tail=tail, **kinds))
    first = KEY_BLOCK * block.repeat_interleave(GROUP, dim=-1)[..., : states[0].shape[2]]
    return first, log_sum, positions


def log_masses(inputs, positions):
    """`beta log c_ij` in nats, -inf where a key is not seen. The values' oracle has the weights of the prior."""
    parameters = Parameters(*(inputs[name].double() for name in PARAMETERS))
    weights = riccati_weights(parameters, positions, torch.float64)
    between = (weights.at_queries[..., None] - weights.cumulative[:, :, None]).abs()
    mass = parameters.inverse_temperature[:, None, None] * (weights.log_gain[:, :, None] - between)
    return mass.expand(2, -1, -1, -1).masked_fill(~positions.visible(True)[:, None], -math.inf)


@pytest.mark.parametrize("example", ["uniform", "irregular", "interleaved segments", "gaps"])
def test_a_window_holds_every_key_that_the_rule_needs(example):
    """The masses of the keys left out, summed one by one, against eps times the sum of the row."""
    inputs, eps = fading(), 1e-3
    first, log_sum, positions = visits(inputs, eps, **EXAMPLES[example])
    mass = log_masses(inputs, positions).exp()
    outside = torch.arange(KEYS) < first[..., None]
    left_out = (mass * outside).sum(-1)
    assert (left_out <= eps * 1.001 * torch.exp2(log_sum)).all()
    assert outside.any(dim=(0, 2, 3)).all()  # both heads leave some keys out


def test_gradients_are_those_of_the_visited_keys(monkeypatch):
    """Against ordinary autograd with everything else masked out."""
    inputs, eps = fading(), 5e-2
    first, _, _ = visits(inputs, eps)
    monkeypatch.setattr(reference, "left_out", lambda *_: torch.arange(KEYS) < first[..., None])
    towards = torch.randn(inputs["query"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names, results = [name for name in inputs if name != "decay"], []  # head 0's gradient by the decay is one-sided
    for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        out = robust_filter_attention(**leaves, prior="riccati", certified=eps, backend=backend)
        results.append(torch.autograd.grad((out * towards.to(dtype)).sum(), [leaves[name] for name in names]))
    for name, expected, found in zip(names, *results, strict=True):
        limit = 2e-4 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=limit, msg=name)


def test_nothing_is_left_out_without_an_eps():
    inputs = fading()
    for backend in ("reference", "cpu"):
        assert all(map(torch.equal, attend(inputs, backend, None), attend(inputs, backend, 0.0)))


@pytest.mark.parametrize("times", [None, irregular_times(0, KEYS)])
def test_normalised_dot_products(times):
    """Their scores are bounded by the lengths of queries and keys."""
    inputs, slopes = fading(), torch.tensor([0.1, 0.9])
    states = [torch.nn.functional.normalize(inputs[name].float(), dim=-1) * 8**0.5 for name in STATES]
    positions = checked_positions(2, KEYS, KEYS, torch.device("cpu"), times)
    given = {"positions": positions, "slopes": slopes, "largest": torch.full((2,), 8**0.5), "backend": "cpu"}
    exact = decayed_dot_product_attention(*states, certified=None, **given)
    for eps in (1e-1, 1e-3):
        found = decayed_dot_product_attention(*states, certified=eps, **given)
        error = (found - exact).norm(dim=-1).max()
        assert 0 < error <= (2 * eps + 1e-6) * 8**0.5


def test_masses_of_keys_beyond_the_smallest_number():
    """Sums in logarithms are the oracle. What counts for less than 2^-1022 of the largest counts for that much."""
    bias = torch.tensor([-2000.0, -1500.0, -1500.5, 3.0, -900.0, 2.0])[None, None]
    rising = torch.tensor([0.0, 1.5, 2.5, 4.5, 40.0, 2000.0], dtype=torch.float64)[None, None]
    positions = checked_positions(1, 6, 6, torch.device("cpu"), None)
    expected = ((bias + rising) * math.log(2)).logcumsumexp(-1) / math.log(2) - rising
    found = tail_of_keys(rising, bias, positions)
    torch.testing.assert_close(found[..., 3:], expected[..., 3:].float())
    assert (found >= expected).all()
    assert found.isfinite().all()


def test_segments_of_samples_that_share_their_times():
    """Equal states reach the bound. Each key of the first sample is alone, those of the second are together."""
    segments = torch.stack([torch.arange(KEYS), torch.zeros(KEYS, dtype=torch.int64)])
    times = torch.arange(KEYS) + 0.25 * torch.rand(KEYS)
    positions = checked_positions(2, KEYS, KEYS, torch.device("cpu"), times, None, None, segments)
    state = torch.ones(2, 2, KEYS, 8)
    value = torch.where(torch.arange(KEYS) > KEYS - KEY_BLOCK, 1.0, -1.0)[:, None] * state
    slopes, largest = torch.tensor([0.02, 0.04]), torch.full((2,), 8**0.5)
    given = {"positions": positions, "slopes": slopes, "largest": largest, "backend": "cpu"}
    exact = decayed_dot_product_attention(state, state, value, certified=None, **given)
    found = decayed_dot_product_attention(state, state, value, certified=1e-2, **given)
    assert 1e-4 < (found - exact).abs().max() <= 2e-2


def test_bad_input():
    for certified in (-0.1, 1.0, math.nan, True, "auto"):
        with pytest.raises(ValueError, match=rf"^certified: got {certified!r}, expected None or a number eps"):
            robust_filter_attention(**problem(), prior="riccati", certified=certified)
    for options, message in (
        ({"prior": "lyapunov"}, "prior='riccati': it alone bounds"),
        ({"prior": "riccati", "causal": False}, "causal=True: later keys have no bound"),
    ):
        with pytest.raises(ValueError, match=rf"^certified: .*{message}"):
            robust_filter_attention(**problem(), certified=1e-3, **options)
