"""Tiles on folds (`rfa.ops.triton.folds`) against the float64 reference, and which heads fold."""

import pytest
import torch
from cover import cover

from ..problems import problem
from .fused_problems import HALF, errors, needs_triton, triton_attention

pytestmark = needs_triton
TYPES = list(HALF)


@pytest.fixture
def nearest(monkeypatch):
    """The shortest folding lag of each head, `(batch, heads)`, of every call so far."""
    from rfa.ops.triton import backward, folds, operator

    seen, made = [], folds.frame_and_folds

    def watched(*given, **options):
        frame, found = made(*given, **options)
        seen.extend([] if found is None else [found.nearest])
        return frame, found

    for module in (operator, backward):
        monkeypatch.setattr(module, "frame_and_folds", watched)
    return seen


def assert_as_accurate_as_pairs(monkeypatch, inputs, *, dtype, **arguments):
    """Errors within the tolerance of `dtype`, or, where rounding of states makes larger ones, near those of pairs."""
    from rfa.ops.triton import folds

    found = errors(inputs, dtype=dtype, **arguments)
    wrong = {name: error for name, error in found.items() if error > HALF[dtype]}
    if wrong:
        monkeypatch.setattr(folds, "may_fold", lambda _: False)
        pairs = errors(inputs, dtype=dtype, **arguments)
        wrong = {name: (error, pairs[name]) for name, error in wrong.items() if error > 2.0 * pairs[name]}
    assert not wrong, wrong


def slow(seed=0, *, heads=2, keys=150, noise=0.02, **sizes):
    """A problem whose decays fold: the last one's factor of a block is 1/2. With little noise near blocks fold, too."""
    inputs = problem(seed, batch=sizes.pop("batch", 1), heads=heads, keys=keys, modes=8, **sizes)
    inputs["decay"] = torch.linspace(0.0, 0.011, heads, dtype=torch.float64)
    inputs["process_noise"] *= noise
    return inputs


OPTIONS = [
    {},
    {"gate": False},
    {"prior": "riccati"},
    {"query_noise_in_bias": True},
    {"rotate_values": False},
]


@cover(1, dtype=TYPES, options=OPTIONS)
def test_folded_heads(nearest, monkeypatch, dtype, options):
    assert_as_accurate_as_pairs(monkeypatch, slow(1), dtype=dtype, **options)
    assert (nearest[0] <= 65).all(), nearest[0]


@cover(1, dtype=TYPES, sizes=[(200, 130), (192, 192), (257, 150), (150, 128), (128, 128)])
def test_ragged_blocks_and_queries_that_follow_a_cache(nearest, monkeypatch, dtype, sizes):
    keys, queries = sizes
    inputs = slow(2, heads=1, keys=keys, queries=queries, batch=2)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)
    assert len(nearest) >= 2


@cover(1, dtype=TYPES, horizon=[0.5, 3.0])
def test_horizon(nearest, monkeypatch, dtype, horizon):
    inputs = slow(3)
    inputs["horizon"] = torch.full((2,), horizon, dtype=torch.float64)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)
    assert (nearest[0] <= 65).all()


@cover(1, dtype=TYPES, channels=[(16, 32), (64, 16)])
def test_values_of_another_size(nearest, monkeypatch, dtype, channels):
    inputs = problem(4, batch=1, heads=1, keys=150, modes=channels[0] // 2, value_modes=channels[1] // 2)
    inputs["decay"] = torch.full((1,), 0.01, dtype=torch.float64)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, rotate_values=False)
    assert (nearest[0] <= 65).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_heads_of_both_kinds(nearest, monkeypatch, dtype):
    """A large c and large states go pair by pair; a fast decay folds where E is nothing."""
    from rfa.ops.triton.table_folds import NEVER

    inputs = slow(5, heads=4)
    inputs["decay"][1] = 2.0
    inputs["robustness"][2] = 60.0
    inputs["query"][:, 3] *= 1e4
    inputs["key"][:, 3] *= 1e4
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)
    assert nearest[0][0, 0] <= 65
    assert torch.exp(-2.0 * nearest[0][0, 1]) < 1e-15
    assert (nearest[0][0, 2:] == NEVER).all(), nearest[0]


def test_folds_and_pairs_agree(monkeypatch):
    """In float16 both differ from each other by less than the rounding of states."""
    from rfa.ops.triton import folds

    inputs = {name: x.to(torch.float16 if x.dim() == 4 else torch.float32) for name, x in slow(6, heads=1).items()}
    folded = triton_attention(**inputs)
    monkeypatch.setattr(folds, "may_fold", lambda _: False)
    for one, other in zip(folded, triton_attention(**inputs), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-3, atol=1e-3)


@cover(1, name=["query", "key", "value"], place=[3, 70, 140])
def test_poisoned_states(name, place):
    """A row that sees NaN is NaN, as without folds; another is what it was."""
    inputs = {n: x.to(torch.bfloat16 if x.dim() == 4 else torch.float32) for n, x in slow(7, heads=1).items()}
    clean, clean_log = triton_attention(**inputs)
    inputs[name][0, 0, place, 0] = torch.nan
    found, found_log = triton_attention(**inputs)
    sees = torch.arange(150) == place if name == "query" else torch.arange(150) >= place
    assert found[0, 0, sees].isnan().all()
    assert torch.equal(found[0, 0, ~sees], clean[0, 0, ~sees])
    if name != "value":
        assert found_log[0, 0, sees].isnan().all()
    assert torch.equal(found_log[0, 0, ~sees], clean_log[0, 0, ~sees])


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


def test_gradients_are_repeatable_and_do_not_depend_on_the_memory(nearest, monkeypatch):
    from rfa.ops.triton import query_gradients

    inputs = slow(8, heads=1)
    first = gradients(inputs)
    assert (nearest[0] <= 65).all()
    for one, other in zip(first, gradients(inputs), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(query_gradients, "_PARTIAL_SUMS", 1)  # one block of queries a launch
    for one, other in zip(first, gradients(inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradient_through_the_log_precision_alone(nearest, monkeypatch):
    from rfa.ops.triton import folds

    from .fused_problems import reference_attention, rounded

    inputs = {n: x.double() for n, x in rounded(slow(9, heads=1), torch.bfloat16).items()}
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items() if n != "frequency"}
    total = reference_attention(**leaves, frequency=inputs["frequency"])[1].sum()
    wanted = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    folded = gradients(inputs, log_precision_only=True)
    assert (nearest[0] <= 65).all()
    monkeypatch.setattr(folds, "may_fold", lambda _: False)
    for name, one, pair, other in zip(leaves, folded, gradients(inputs, log_precision_only=True), wanted, strict=True):
        error, of_pairs = ((x.double() - other).abs().max() for x in (one, pair))
        assert error <= max(1.2 * of_pairs, 0.02 * other.abs().max().clamp(min=1e-2)), name


def test_expansion_of_a_smooth_function():
    """The functions of a block reproduce `log2(65 + n)` to 2^-12 of a bit, in float16."""
    from rfa.ops.triton.fold_constants import FOLD, _functions

    functions, fit, _ = _functions()
    change = torch.log2(65.0 + torch.arange(FOLD, dtype=torch.float64)) - torch.log2(torch.tensor(65.0).double())
    coefficients = torch.from_numpy(fit) @ change
    high = coefficients.half()
    low = (coefficients - high.double()).half()
    fitted = (high.double() + low.double()) @ torch.from_numpy(functions)
    assert (fitted - change).abs().max() < 2.0**-12


@cover(1, dtype=TYPES, present=[100, 128, 219])
def test_padding_at_the_end_folds(nearest, monkeypatch, dtype, present):
    """220 tokens: the last queries fold two blocks of keys, of which the second has absent ones."""
    mask = torch.ones(2, 220, dtype=torch.bool)
    mask[0, present:] = False
    assert_as_accurate_as_pairs(monkeypatch, slow(10, heads=1, batch=2, keys=220), dtype=dtype, key_mask=mask)
    assert (nearest[0] <= 65).all()


@cover(1, dtype=TYPES, packed=[False, True])
def test_other_groups_go_pair_by_pair(nearest, monkeypatch, dtype, packed):
    from rfa.ops.triton import folds

    inputs, segments = slow(11, heads=1), torch.arange(150)[None] // 70
    options = {"segment_ids": segments} if packed else {"key_mask": segments > 0}
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, **options)
    assert nearest  # the call has folds, of no block
    groups = segments.to(torch.int32) if packed else segments.to(torch.int32) - 1
    given = type("Inputs", (), {"key_groups": groups, "query_groups": groups, "query": inputs["query"]})
    assert folds.blocks_of_present_keys(given).tolist() == [0]


def test_a_poisoned_query_without_a_gradient_harms_nothing(nearest):
    inputs = slow(12, heads=1)
    cotangent = torch.randn(1, 1, 150, 16, generator=torch.Generator().manual_seed(0)).half()
    cotangent[:, :, 140] = 0.0

    def found():
        leaves = learned(inputs, torch.float16)
        out, _ = triton_attention(**leaves)
        wanted = [leaves[n] for n in ("key", "value", "decay", "robustness")]
        return torch.autograd.grad(out, wanted, cotangent.to(out.device))

    clean = found()
    inputs["query"][0, 0, 140, 0] = torch.nan
    for one, other in zip(found(), clean, strict=True):
        assert torch.equal(one, other)
    assert (nearest[0] <= 65).all()


@cover(1, dtype=TYPES, decay=[0.7, 1.0])
def test_decays_that_underflow(monkeypatch, dtype, decay):
    """E becomes subnormal within the sequence."""
    inputs = slow(13, heads=1)
    inputs["decay"][:] = decay
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_horizon_that_leaves_nothing(monkeypatch, dtype):
    inputs = slow(14, heads=1)
    inputs["decay"][:], inputs["horizon"] = 5.0, torch.full((1,), 40.0, dtype=torch.float64)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_small_states_keep_their_digits(monkeypatch, scale):
    inputs = slow(15, heads=1)
    inputs["decay"][:] = 0.08
    inputs = {name: x * scale if x.dim() == 4 else x for name, x in inputs.items()}
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
def test_far_lags_fold_where_near_ones_have_little_variance(nearest, monkeypatch, dtype):
    """The variance is 2^-20 at lag 0, and a third at lag 64: only the lags that fold count for the scale of float16."""
    inputs = slow(18, heads=1, keys=200)
    for name, x in {"process_noise": 0.006, "key_noise": 0.0, "query_noise": 0.0, "noise_floor": 2.0**-20}.items():
        inputs[name][:] = x
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype)
    assert (nearest[0] <= 65).all(), nearest[0]


@pytest.mark.parametrize("robustness", [2.0, 50.0])
def test_equal_queries_and_keys_meet_exactly(monkeypatch, robustness):
    inputs = slow(16, heads=1)
    inputs |= {"key": inputs["query"].clone(), "frequency": torch.zeros(1, 8, dtype=torch.float64)}
    for name, x in {"decay": 0.05, "key_noise": 1e-4, "noise_floor": 1e-4, "query_noise": 0.02}.items():
        inputs[name][:] = x
    inputs["robustness"][:] = robustness
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.bfloat16)


@cover(1, times=[None, "irregular"], scale=[2.0**-14, 2.0**10])
def test_gradients_of_every_size_in_float16(monkeypatch, times, scale):
    """Each row's incoming gradient has a size of its own: half of them are smaller by 2^10."""
    from rfa.ops.triton import folds

    from ..problems import irregular_times
    from .fused_problems import reference_attention, rounded, with_gradients

    inputs = rounded(slow(17, heads=1), torch.float16)
    g = torch.Generator().manual_seed(1)
    small = torch.where(torch.arange(150) % 2 == 0, 1.0, 2.0**-10)[:, None]
    cotangents = [(scale * small * torch.randn(1, 1, 150, 16, generator=g)).half().double(), torch.zeros(1, 1, 150)]
    options = {} if times is None else {"times": irregular_times(17, 150)}
    given = {"cotangents": cotangents, "constant": ("frequency",), **options}
    exact = with_gradients(reference_attention, {n: x.double() for n, x in inputs.items()}, **given)

    def errors():
        found, wrong = with_gradients(triton_attention, inputs, **given), {}
        for name in ("value", "decay", "query_noise", "robustness"):
            wrong[name] = (found[name] - exact[name]).abs().max() / exact[name].abs().max()
        for rows in (0, 1):
            error = (found["query"] - exact["query"])[:, :, 64 + rows :: 2].abs().amax(-1)
            wrong[f"query, {rows}"] = (error / exact["query"][:, :, 64 + rows :: 2].abs().amax(-1)).max()
        return wrong

    folded = errors()
    monkeypatch.setattr(folds, "may_fold", lambda _: False)
    for name, error in errors().items():
        assert folded[name] < max(HALF[torch.float16], 1.5 * error), (name, folded[name], error)
