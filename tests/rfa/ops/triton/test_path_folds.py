"""Folded tiles at times that are not uniform (`rfa.ops.triton.path_folds`) against the float64 reference."""

import pytest
import torch
from cover import cover

from ..problems import irregular_times
from .fused_problems import HALF, errors, needs_triton, triton_attention
from .test_folds import TYPES, assert_as_accurate_as_pairs, gradients, slow

pytestmark = needs_triton
EVERY = [0, 1, 2]  # the blocks of keys that fold for the blocks of queries of 150 tokens


@pytest.fixture
def counts(monkeypatch):
    """How many blocks of keys fold for each block of queries, `(batch, heads, blocks)`, of every call so far."""
    from rfa.ops.triton import folds

    seen, made = [], folds.path_folds

    def watched(*given, **options):
        frame, found = made(*given, **options)
        seen.append(found.nearest)
        return frame, found

    monkeypatch.setattr(folds, "path_folds", watched)
    return seen


def spaced(seed=0, *, steps=1.0, **sizes):
    """A problem whose decays fold, and its times."""
    inputs = slow(seed, noise=1.0, **sizes)
    return inputs, steps * irregular_times(seed, inputs["key"].shape[2])


@cover(1, dtype=TYPES, options=[{}, {"prior": "riccati"}, {"query_noise_in_bias": True}, {"rotate_values": False}])
def test_folded_heads(counts, monkeypatch, dtype, options):
    inputs, times = spaced(21)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times, **options)
    assert (counts[0].cpu() == torch.tensor(EVERY)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_folds_and_pairs_agree(counts, monkeypatch, dtype):
    """They differ by less than the states round: so errors of the formulas are not hidden by those of the states."""
    from rfa.ops.triton import folds

    inputs, times = spaced(22)
    folded = errors(inputs, dtype=dtype, times=times)
    assert len(counts) == 2
    monkeypatch.setattr(folds, "may_fold", lambda _: False)
    for name, error in errors(inputs, dtype=dtype, times=times).items():
        assert abs(folded[name] - error) < HALF[dtype] / 20, name


@cover(1, dtype=TYPES, sizes=[(200, 130), (192, 192), (257, 150), (150, 128), (128, 128)])
def test_ragged_blocks_and_queries_that_follow_a_cache(counts, monkeypatch, dtype, sizes):
    keys, queries = sizes
    inputs, times = spaced(23, heads=1, keys=keys, queries=queries, batch=2)
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times, query_times=times[keys - queries :])
    assert counts[0].max() == (keys - queries + (queries - 1) // 64 * 64 + 1) // 64


@pytest.mark.parametrize("dtype", TYPES)
def test_queries_between_the_keys(counts, monkeypatch, dtype):
    """Estimates at times of their own, some equal to those of keys."""
    inputs, times = spaced(24, heads=1)
    query_times = times + 0.05
    query_times[::3] = times[::3]
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times, query_times=query_times)
    assert counts[0].flatten().tolist() == EVERY


@pytest.mark.parametrize("dtype", TYPES)
def test_times_of_each_sequence(counts, monkeypatch, dtype):
    """The second one has gaps in which everything decays."""
    inputs, times = spaced(25, batch=2)
    times = times.expand(2, -1).clone()
    times[1, 40:] += 500.0
    times[1, 100:] += 1e4
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times)
    assert (counts[0].cpu() == torch.tensor(EVERY)).all()


@pytest.mark.parametrize(("decay", "prior"), [(2.0**-20, "lyapunov"), (8.0, "lyapunov"), (8.0, "riccati")])
def test_gaps_of_a_million(counts, monkeypatch, decay, prior):
    """The sums of M and u are multiplied by times and must cancel to the lag; what has decayed must not see its lag."""
    inputs, times = spaced(27, heads=1)
    inputs["decay"][:] = decay
    for place in (63, 64, 128):
        times[place:] += 1e6
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.float16, times=times, prior=prior)
    assert counts[0].flatten().tolist() == EVERY


@pytest.mark.parametrize("dtype", TYPES)
def test_heads_of_both_kinds(counts, monkeypatch, dtype):
    """A large c, large states and no noise go pair by pair."""
    inputs, times = spaced(28, heads=4)
    inputs["robustness"][1] = 60.0
    inputs["query"][:, 2] *= 1e4
    inputs["key"][:, 2] *= 1e4
    inputs["noise_floor"][3] = 0.0
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times)
    assert counts[0][0].tolist() == [EVERY, [0] * 3, [0] * 3, [0] * 3]


@cover(1, name=["query", "key", "value"], place=[3, 70, 140])
def test_poisoned_states(name, place):
    inputs, times = spaced(29, heads=1)
    inputs = {n: x.to(torch.bfloat16 if x.dim() == 4 else torch.float32) for n, x in inputs.items()}
    clean, clean_log = triton_attention(**inputs, times=times)
    inputs[name][0, 0, place, 0] = torch.nan
    found, found_log = triton_attention(**inputs, times=times)
    sees = torch.arange(150) == place if name == "query" else torch.arange(150) >= place
    assert found[0, 0, sees].isnan().all()
    assert torch.equal(found[0, 0, ~sees], clean[0, 0, ~sees])
    assert torch.equal(found_log[0, 0, ~sees], clean_log[0, 0, ~sees])


@pytest.mark.parametrize("prior", ["lyapunov", "riccati"])
def test_gradients_are_repeatable_and_do_not_depend_on_the_memory(counts, monkeypatch, prior):
    from rfa.ops.triton import query_gradients

    inputs, times = spaced(30)
    first = gradients(inputs, times=times, prior=prior)
    assert (counts[0].cpu() == torch.tensor(EVERY)).all()
    for one, other in zip(first, gradients(inputs, times=times, prior=prior), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(query_gradients, "_PARTIAL_SUMS", 1)
    for one, other in zip(first, gradients(inputs, times=times, prior=prior), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@cover(1, dtype=TYPES, present=[100, 128, 149], prior=["lyapunov", "riccati"])
def test_padding_at_the_end_folds(counts, monkeypatch, dtype, present, prior):
    inputs, times = spaced(31, batch=2)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, present:] = False
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times, key_mask=mask, prior=prior)
    assert counts[0][0, 0].tolist() == [0, 1, present // 64]
    assert counts[0][1, 0].tolist() == EVERY


@cover(1, dtype=TYPES, case=["queries", "packed", "mask"])
def test_what_goes_pair_by_pair(counts, monkeypatch, dtype, case):
    """Queries whose times fall, packed sequences, and padding that does not stand at the end."""
    inputs, times = spaced(32, heads=1)
    segments = torch.arange(150)[None] // 70
    options = {"queries": {}, "packed": {"segment_ids": segments}, "mask": {"key_mask": segments > 0}}[case]
    query_times = times.clone()
    if case == "queries":
        query_times[[5, 6]] = times[[6, 5]]
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=dtype, times=times, query_times=query_times, **options)
    assert (counts[0] == 0).all()


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_small_states_keep_their_digits(monkeypatch, scale):
    inputs, times = spaced(33, heads=1, steps=0.1)
    inputs = {name: x * scale if x.dim() == 4 else x for name, x in inputs.items()}
    for name in ("process_noise", "key_noise", "query_noise", "noise_floor"):
        inputs[name] *= scale**2
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.float16, times=times)


@pytest.mark.parametrize("robustness", [2.0, 20.0])
def test_equal_queries_and_keys_meet_exactly(monkeypatch, robustness):
    inputs, times = spaced(34, heads=1)
    inputs |= {"key": inputs["query"].clone(), "frequency": torch.zeros(1, 8, dtype=torch.float64)}
    for name, x in {"decay": 0.05, "key_noise": 1e-4, "noise_floor": 1e-4, "query_noise": 0.02}.items():
        inputs[name][:] = x
    inputs["robustness"][:] = robustness
    assert_as_accurate_as_pairs(monkeypatch, inputs, dtype=torch.bfloat16, times=times)
