"""Tiles on folds (`rfa.ops.old_triton.folds`), at uniform times and others, against the float64 reference."""

import pytest
import torch
from cover import cover, slow

from ..problems import irregular_times, problem
from .fused_problems import (
    HALF,
    errors,
    needs_triton,
    reference_attention,
    rounded,
    triton_attention,
    with_gradients,
)

pytestmark = needs_triton
TYPES = list(HALF)
TIMES = [False, True]  # uniform, irregular
EVERY = [0, 1, 2]  # the blocks of keys that fold for the blocks of queries of 150 tokens


@pytest.fixture
def folded(monkeypatch):
    """What folds in every call so far.

    At uniform times the shortest folding lag of each head, `(batch, heads)`; at others how many blocks of keys fold for
    each block of queries, `(batch, heads, blocks)`.
    """
    from rfa.ops.old_triton import backward, folds, operator

    seen, made = [], folds.frame_and_folds

    def watched(*given, **options):
        frame, found = made(*given, **options)
        seen.extend([] if found is None else [found.nearest.cpu()])
        return frame, found

    for module in (operator, backward):
        monkeypatch.setattr(module, "frame_and_folds", watched)
    return seen


def all_fold(folded, irregular):
    return bool((folded[0] == torch.tensor(EVERY)).all() if irregular else (folded[0] <= 65).all())


def pair_by_pair(monkeypatch):
    from rfa.ops.old_triton import folds

    monkeypatch.setattr(folds, "may_fold", lambda _: False)


def assert_as_accurate_as_pairs(monkeypatch, inputs, *, dtype, **arguments):
    """Errors within the tolerance of `dtype`, or, where rounding of states makes larger ones, near those of pairs."""
    found = errors(inputs, dtype=dtype, **arguments)
    wrong = {name: error for name, error in found.items() if error > HALF[dtype]}
    if wrong:
        pair_by_pair(monkeypatch)
        pairs = errors(inputs, dtype=dtype, **arguments)
        wrong = {name: (error, pairs[name]) for name, error in wrong.items() if error > 2.0 * pairs[name]}
    assert not wrong, wrong


def folding(seed, irregular=False, *, heads=1, keys=150, batch=1, **sizes):
    """A problem whose decays fold: the last one's factor of a block is 1/2. With little noise near blocks fold, too.

    With it the options that give its times.
    """
    inputs = problem(seed, batch=batch, heads=heads, keys=keys, modes=8, **sizes)
    inputs["decay"] = torch.linspace(0.0, 0.011, heads, dtype=torch.float64)
    inputs["process_noise"] *= 1.0 if irregular else 0.02
    return inputs, {"times": irregular_times(seed, keys)} if irregular else {}


@cover(1, irregular=TIMES, dtype=TYPES[:2], prior=["lyapunov", "riccati"])
def test_folded_heads(folded, monkeypatch, irregular, dtype, prior):
    inputs, given = folding(21, irregular, heads=2)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, prior=prior, **given)
    assert all_fold(folded, irregular)


@slow
@cover(
    1,
    irregular=TIMES,
    dtype=TYPES,
    options=[{"horizon": 0.5}, {"gate": False}, {"query_noise_in_bias": True}, {"rotate_values": False}],
)
def test_options(folded, monkeypatch, irregular, dtype, options):
    inputs, given = folding(3, irregular, heads=2)
    if "horizon" in options:
        inputs["horizon"] = torch.full((2,), options["horizon"], dtype=torch.float64)
    else:
        given |= options
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, **given)
    if irregular and "gate" in options:
        assert not folded  # a constant weight of the residual is left to pairs
    elif not (irregular and "horizon" in options):  # there states are multiplied in float32
        assert all_fold(folded, irregular)


@slow
@cover(1, irregular=TIMES, dtype=TYPES, sizes=[(200, 130), (192, 192), (257, 150), (150, 128), (128, 128)])
def test_ragged_blocks_and_queries_that_follow_a_cache(folded, monkeypatch, irregular, dtype, sizes):
    keys, queries = sizes
    inputs, given = folding(2, irregular, keys=keys, queries=queries, batch=2)
    given |= {"query_times": given["times"][keys - queries :]} if irregular else {}
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, **given)
    if irregular:
        assert folded[0].max() == (keys - queries + (queries - 1) // 64 * 64 + 1) // 64


@slow
@pytest.mark.parametrize("channels", [(16, 32), (64, 16)])
def test_values_of_another_size(folded, monkeypatch, channels):
    inputs = problem(4, batch=1, heads=1, keys=150, modes=channels[0] // 2, value_modes=channels[1] // 2)
    inputs["decay"] = torch.full((1,), 0.01, dtype=torch.float64)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.bfloat16, rotate_values=False)
    assert all_fold(folded, False)


@cover(1, irregular=TIMES, dtype=TYPES)
def test_heads_of_both_kinds(folded, monkeypatch, irregular, dtype):
    """A large c, large states and, at given times, no noise go pair by pair; a fast decay folds where E is nothing."""
    from rfa.ops.old_triton.table_folds import NEVER

    inputs, given = folding(28, irregular, heads=4)
    inputs["robustness"][1] = 60.0
    inputs["query"][:, 2] *= 1e4
    inputs["key"][:, 2] *= 1e4
    inputs["noise_floor" if irregular else "decay"][3] = 0.0 if irregular else 2.0
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, **given)
    if irregular:
        assert folded[0][0].tolist() == [EVERY, [0] * 3, [0] * 3, [0] * 3]
    else:
        assert folded[0][0, 0] <= 65
        assert (folded[0][0, 1:3] == NEVER).all()
        assert torch.exp(-2.0 * folded[0][0, 3]) < 1e-15


@pytest.mark.parametrize("irregular", TIMES)
def test_folds_and_pairs_agree(folded, monkeypatch, irregular):
    """They differ by less than the states round: so errors of the formulas are not hidden by those of the states."""
    inputs, given = folding(22, irregular, heads=2)
    on_folds = errors(inputs, dtype=torch.float16, **given)
    assert len(folded) == 2
    pair_by_pair(monkeypatch)
    for name, error in errors(inputs, dtype=torch.float16, **given).items():
        assert abs(on_folds[name] - error) < HALF[torch.float16] / 20, name


@cover(1, irregular=TIMES, name=["query", "key", "value"], place=[3, 70, 140])
def test_non_finite_statesed_states(irregular, name, place):
    """A row that sees NaN is NaN, as without folds; another is what it was."""
    inputs, given = folding(7, irregular)
    inputs = {n: x.to(torch.bfloat16 if x.dim() == 4 else torch.float32) for n, x in inputs.items()}
    clean, clean_log = triton_attention(**inputs, **given)
    inputs[name][0, 0, place, 0] = torch.nan
    found, found_log = triton_attention(**inputs, **given)
    sees = torch.arange(150) == place if name == "query" else torch.arange(150) >= place
    assert found[0, 0, sees].isnan().all()
    assert torch.equal(found[0, 0, ~sees], clean[0, 0, ~sees])
    assert torch.equal(found_log[0, 0, ~sees], clean_log[0, 0, ~sees])
    if name != "value":
        assert found_log[0, 0, sees].isnan().all()


def test_a_poisoned_query_without_a_gradient_harms_nothing(folded):
    inputs, _ = folding(12)
    cotangent = torch.randn(1, 1, 150, 16, generator=torch.Generator().manual_seed(0)).half()
    cotangent[:, :, 140] = 0.0

    def found():
        leaves = learned(inputs, torch.float16)
        out, _ = triton_attention(**leaves)
        wanted = [leaves[n] for n in ("key", "value", "decay", "robustness")]
        return torch.autograd.grad(out, wanted, cotangent.to(out.device))

    clean = found()
    inputs["query"][0, 0, 140, 0] = torch.nan
    assert all(torch.equal(one, other) for one, other in zip(found(), clean, strict=True))
    assert all_fold(folded, False)


def learned(inputs, dtype):
    """Leaves with gradients, but for the frequency: with a gradient of its own it turns states in float32."""
    leaves = {n: x.detach().clone().to(dtype if x.dim() == 4 else torch.float32) for n, x in inputs.items()}
    return {n: x.requires_grad_(n != "frequency") for n, x in leaves.items()}


def gradients(inputs, log_precision_only=False, **options):
    leaves = learned(inputs, torch.bfloat16)
    out, log_precision = triton_attention(**leaves, **options)
    total = log_precision.double().sum() if log_precision_only else (out.double() ** 2).sum()
    wanted = [x for x in leaves.values() if x.requires_grad]
    return torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)


@cover(1, irregular=TIMES, prior=["lyapunov", "riccati"])
def test_gradients_are_repeatable_and_do_not_depend_on_the_memory(folded, monkeypatch, irregular, prior):
    from rfa.ops.old_triton import query_gradients

    inputs, given = folding(8, irregular)
    given["prior"] = prior
    first = gradients(inputs, **given)
    assert all_fold(folded, irregular)
    assert all(torch.equal(one, other) for one, other in zip(first, gradients(inputs, **given), strict=True))
    monkeypatch.setattr(query_gradients, "_PARTIAL_SUMS", 1)  # one block of queries a launch
    for one, other in zip(first, gradients(inputs, **given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradient_through_the_log_precision_alone(folded, monkeypatch):
    inputs, _ = folding(9)
    exact = {n: x.double() for n, x in rounded(inputs, torch.bfloat16).items()}
    leaves = {n: x.clone().requires_grad_() for n, x in exact.items() if n != "frequency"}
    total = reference_attention(**leaves, frequency=exact["frequency"])[1].sum()
    wanted = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    on_folds = gradients(inputs, log_precision_only=True)
    assert all_fold(folded, False)
    pair_by_pair(monkeypatch)
    pairs = gradients(inputs, log_precision_only=True)
    for name, one, pair, other in zip(leaves, on_folds, pairs, wanted, strict=True):
        error, of_pairs = ((x.double() - other).abs().max() for x in (one, pair))
        assert error <= max(1.2 * of_pairs, 0.02 * other.abs().max().clamp(min=1e-2)), name


@cover(1, irregular=TIMES, scale=[2.0**-14, 2.0**10])
def test_gradients_of_every_size_in_float16(monkeypatch, irregular, scale):
    """Each row's incoming gradient has a size of its own: half of them are smaller by 2^10."""
    inputs, given = folding(17, irregular)
    inputs = rounded(inputs, torch.float16)
    g = torch.Generator().manual_seed(1)
    small = torch.where(torch.arange(150) % 2 == 0, 1.0, 2.0**-10)[:, None]
    cotangents = [(scale * small * torch.randn(1, 1, 150, 16, generator=g)).half().double(), torch.zeros(1, 1, 150)]
    given |= {"cotangents": cotangents, "constant": ("frequency",)}
    exact = with_gradients(reference_attention, {n: x.double() for n, x in inputs.items()}, **given)

    def relative_errors():
        found, wrong = with_gradients(triton_attention, inputs, **given), {}
        for name in ("value", "decay", "query_noise", "robustness"):
            wrong[name] = (found[name] - exact[name]).abs().max() / exact[name].abs().max()
        for rows in (0, 1):
            error = (found["query"] - exact["query"])[:, :, 64 + rows :: 2].abs().amax(-1)
            wrong[f"query, {rows}"] = (error / exact["query"][:, :, 64 + rows :: 2].abs().amax(-1)).max()
        return wrong

    on_folds = relative_errors()
    pair_by_pair(monkeypatch)
    for name, error in relative_errors().items():
        assert on_folds[name] < max(HALF[torch.float16], 1.5 * error), (name, on_folds[name], error)


def test_expansion_of_a_smooth_function():
    """The functions of a block reproduce `log2(65 + n)` to 2^-12 of a bit, in float16."""
    from rfa.ops.old_triton.fold_constants import FOLD, _functions

    functions, fit, _ = _functions()
    change = torch.log2(65.0 + torch.arange(FOLD, dtype=torch.float64)) - torch.log2(torch.tensor(65.0).double())
    coefficients = torch.from_numpy(fit) @ change
    high = coefficients.half()
    low = (coefficients - high.double()).half()
    fitted = (high.double() + low.double()) @ torch.from_numpy(functions)
    assert (fitted - change).abs().max() < 2.0**-12


@cover(1, irregular=TIMES, dtype=TYPES[:2], present=[100, 149])
def test_padding_at_the_end_folds(folded, monkeypatch, irregular, dtype, present):
    """The last queries fold whole blocks of keys, of which the last has absent ones."""
    inputs, given = folding(10, irregular, batch=2, keys=150 if irregular else 220)
    mask = torch.ones(2, inputs["key"].shape[2], dtype=torch.bool)
    mask[0, present:] = False
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, key_mask=mask, **given)
    if irregular:
        assert folded[0][:, 0].tolist() == [[0, 1, present // 64], EVERY]
    else:
        assert all_fold(folded, irregular)


@cover(1, irregular=TIMES, dtype=TYPES, case=["queries", "packed", "mask"])
def test_what_goes_pair_by_pair(folded, monkeypatch, irregular, dtype, case):
    """Queries whose times fall, packed sequences, and padding that does not stand at the end."""
    inputs, given = folding(32, irregular or case == "queries")
    segments = torch.arange(150)[None] // 70
    given |= {"queries": {}, "packed": {"segment_ids": segments}, "mask": {"key_mask": segments > 0}}[case]
    if case == "queries":
        given["query_times"] = given["times"].clone()
        given["query_times"][[5, 6]] = given["times"][[6, 5]]
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, **given)
    if "times" in given:
        assert (folded[0] == 0).all()


@pytest.mark.parametrize(("decay", "prior"), [(2.0**-20, "lyapunov"), (8.0, "riccati")])
def test_gaps_of_a_million(folded, monkeypatch, decay, prior):
    """The sums of M and u are multiplied by times and must cancel to the lag; what has decayed must not see its lag."""
    inputs, given = folding(27, irregular=True)
    inputs["decay"][:] = decay
    for place in (63, 64, 128):
        given["times"][place:] += 1e6
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.float16, prior=prior, **given)
    assert all_fold(folded, True)


@slow
@cover(1, case=["between", "of each sequence"], dtype=TYPES)
def test_other_times(folded, monkeypatch, case, dtype):
    """Queries between the keys, some at the time of one; sequences of which one has gaps in which everything decays."""
    inputs, given = folding(24, irregular=True, batch=1 if case == "between" else 2)
    times = given["times"]
    if case == "between":
        given["query_times"] = times + 0.05
        given["query_times"][::3] = times[::3]
    else:
        given["times"] = times.expand(2, -1).clone()
        given["times"][1, 40:] += 500.0
        given["times"][1, 100:] += 1e4
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, **given)
    assert all_fold(folded, True)


@slow
@cover(1, dtype=TYPES, case=["decay 0.7", "decay 1", "horizon", "far lags"])
def test_extremes_at_uniform_times(monkeypatch, dtype, case):
    """E becomes subnormal; a horizon leaves nothing; the variance is 2^-20 at lag 0 and a third at lag 64."""
    inputs, _ = folding(13, keys=200)
    if case.startswith("decay"):
        inputs["decay"][:] = float(case.split()[1])
    elif case == "horizon":
        inputs["decay"][:], inputs["horizon"] = 5.0, torch.full((1,), 40.0, dtype=torch.float64)
    else:  # only the lags that fold count for the scale of float16
        small = {"process_noise": 0.006, "key_noise": 0.0, "query_noise": 0.0, "noise_floor": 2.0**-20}
        inputs |= {name: torch.full_like(inputs[name], x) for name, x in small.items()}
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)


@slow
@cover(irregular=TIMES, case=["states 1e-2", "states 1e-3", "equal, nu 2", "equal, nu 50"])
def test_digits(monkeypatch, irregular, case):
    """Small states keep their digits; equal queries and keys meet exactly."""
    inputs, given = folding(15, irregular)
    if case.startswith("states"):
        scale = float(case.split()[1])
        inputs = {name: x * scale if x.dim() == 4 else x for name, x in inputs.items()}
        if irregular:
            given["times"] = 0.1 * given["times"]
            noises = ("process_noise", "key_noise", "query_noise", "noise_floor")
            inputs |= {name: inputs[name] * scale**2 for name in noises}
        else:
            inputs["decay"][:] = 0.08
        assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.float16, **given)
        return
    inputs |= {"key": inputs["query"].clone(), "frequency": torch.zeros(1, 8, dtype=torch.float64)}
    for name, x in {"decay": 0.05, "key_noise": 1e-4, "noise_floor": 1e-4, "query_noise": 0.02}.items():
        inputs[name][:] = x
    inputs["robustness"][:] = float(case.split()[-1])
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.bfloat16, **given)
