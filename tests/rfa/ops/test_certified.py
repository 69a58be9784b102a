"""Certified windows: the bound against float64, the rule against sums of its own, gradients over what was visited."""

import math
from itertools import pairwise

import pytest
import torch
from cover import cover

from rfa.ops import robust_filter_attention
from rfa.ops.cpu.operator import GROUP, KEY_BLOCK, forward
from rfa.ops.dot_product import decayed_dot_product_attention
from rfa.ops.kernel import kernel_inputs, rotation_tables
from rfa.ops.positions import checked_positions
from rfa.ops.prior import certified_tail, kernel_prior, tail_of_keys
from rfa.ops.problem import Options, Parameters, Problem
from rfa.ops.reference import filter_attention

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


@cover(1, example=EXAMPLES, backend=("reference", "cpu"), eps=(1e-2, 1e-4))
def test_what_is_left_out_changes_no_more_than_is_said(example, backend, eps):
    inputs, options = fading(), EXAMPLES[example]
    exact, log_exact = attend(inputs, "reference", None, **options)
    found, log_found = attend(inputs, backend, eps, **options)
    rounding = 0 if backend == "reference" else 2e-6
    largest = inputs["value"].norm(dim=-1).amax()
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
    """`beta log c_ij` in nats from Kalman gains of each interval, -inf where a key is not seen."""
    p = {name: x.double() for name, x in inputs.items()}
    seen = positions.visible(True)[:, None].expand(2, 2, -1, -1)
    found = torch.full(seen.shape, -math.inf, dtype=torch.float64)
    for sample in range(2):
        times = positions.key_times[sample % positions.key_times.shape[0]]
        groups = torch.zeros(KEYS, dtype=torch.int32) if positions.key_groups is None else positions.key_groups[sample]
        for head in range(2):
            mu, noise = p["decay"][head], p["key_noise"][head] + p["noise_floor"][head]
            for group in groups.unique().tolist():
                members = (groups == group).nonzero()[:, 0]
                if group < 0 or len(members) < 2:
                    continue
                step = times[members].diff()
                step = torch.cat([step[:1], step])
                left = torch.exp(-2 * mu * step)
                added = p["process_noise"][head] * (step if mu == 0 else (1 - left) / (2 * mu))
                half = (noise * (1 - left) - added) / 2
                ahead = -half + torch.sqrt(half**2 + added * noise)  # x^2 + x (r (1 - F^2) - q) - q r = 0
                gain = ahead / (ahead + noise)
                rest = torch.log1p(-gain)
                sums = rest.cumsum(0) - rest[0]
                last = torch.searchsorted(times[members], positions.query_times[sample % len(positions.query_times)])
                exact = (
                    times[members][last.clamp(max=len(members) - 1)]
                    == positions.query_times[sample % len(positions.query_times)]
                )
                last = torch.where(exact, last, last - 1).clamp(0, len(members) - 1)
                beta = p["inverse_temperature"][head]
                found[sample, head][:, members] = beta * (gain.log() + sums[last][:, None] - sums[None])
    return found.masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("example", ["irregular", "interleaved segments", "gaps"])
def test_a_window_holds_every_key_that_the_rule_needs(example):
    """The masses of the keys left out, summed one by one, against eps times the sum of the row."""
    inputs, eps = fading(), 1e-3
    first, log_sum, positions = visits(inputs, eps, **EXAMPLES[example])
    mass = log_masses(inputs, positions).exp()
    outside = torch.arange(KEYS) < first[..., None]
    left_out = (mass * outside).sum(-1)
    assert (left_out <= eps * 1.001 * torch.exp2(log_sum)).all()
    assert outside.any(dim=(0, 2, 3)).all()  # both heads leave some keys out


def test_gradients_are_those_of_the_visited_keys():
    """Against ordinary autograd with everything else masked out."""
    inputs, eps = fading(), 5e-2
    first, _, positions = visits(inputs, eps)
    outside = torch.arange(KEYS) < first[..., None]
    generator = torch.Generator().manual_seed(1)
    towards = torch.randn(inputs["query"].shape, generator=generator, dtype=torch.float64)
    results = []
    for backend in ("reference", "cpu"):
        dtype = torch.float64 if backend == "reference" else torch.float32
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        if backend == "cpu":
            out = robust_filter_attention(**leaves, prior="riccati", certified=eps, backend="cpu")
        else:
            out = masked(leaves, positions, outside)
        names = [name for name in leaves if name != "decay"]  # head 0 has none, where the gradient is one-sided
        grads = torch.autograd.grad((out * towards.to(dtype)).sum(), [leaves[name] for name in names])
        results.append({name: grad.double() for name, grad in zip(names, grads, strict=True)})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=2e-3, atol=2e-4 * float(expected.abs().max()))


def masked(leaves, positions, outside):
    """The operator over the keys that are not outside, head by head and block by block of rows."""
    parameters, rows = Parameters(*(leaves[name] for name in PARAMETERS), None), []
    starts = outside.long().sum(-1)  # the first key of each row
    edges = [0, *((starts[:, :, 1:] != starts[:, :, :-1]).any(dim=(0, 1)).nonzero()[:, 0] + 1).tolist(), KEYS]
    for low, high in pairwise(edges):
        heads = []
        for sample in range(2):
            for head in range(2):
                start = int(starts[sample, head, low])
                one = Parameters(*(x if x is None else x[head : head + 1] for x in parameters[:8]), None)
                part = checked_positions(1, high - low, high - start, torch.device("cpu"), torch.arange(start, high))
                query = leaves["query"][sample : sample + 1, head : head + 1, low:high]
                key, value = (leaves[n][sample : sample + 1, head : head + 1, start:high] for n in ("key", "value"))
                heads.append(filter_attention(query, key, value, Problem(one, part, Options(prior="riccati")))[0])
        rows.append(torch.cat(heads).view(2, 2, high - low, -1))
    return torch.cat(rows, dim=2)


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_recorded_program_serves_other_lengths():
    inputs = {name: x.float() for name, x in fading().items()}

    def run(query, key, value, times):
        given = inputs | {"query": query, "key": key, "value": value}
        return robust_filter_attention(**given, times=times, prior="riccati", certified=1e-3, backend="cpu")

    example = *(inputs[name][:, :, :200] for name in STATES), torch.arange(200.0)
    recorded = torch.jit.trace(run, example, check_trace=False)
    states = [inputs[name][:, :, :301] for name in STATES]
    exact = robust_filter_attention(**inputs | dict(zip(STATES, states, strict=True)), prior="riccati", backend="cpu")
    torch.testing.assert_close(recorded(*states, torch.arange(301.0)), exact, rtol=1e-4, atol=1e-4)
