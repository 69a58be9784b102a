"""Means over seeds and clustered bootstrap intervals, against closed forms and scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from rfa_lab.report.measurements import seed_noise
from rfa_lab.report.statistics import (
    Difference,
    mean_and_interval,
    paired_difference,
    pooled_difference,
    pooled_spreads,
    proportion_interval,
    verdict,
)

from .results import result


def books(losses, targets):
    return {f"book {k}": (float(loss), int(count)) for k, (loss, count) in enumerate(zip(losses, targets, strict=True))}


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 2.0, 4.0], list(np.random.default_rng(0).normal(size=64))])
def test_mean_and_interval_are_scipys(values):
    mean = mean_and_interval(values)
    found = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean.value - mean.half, mean.value + mean.half) == pytest.approx((found.low, found.high), rel=1e-12)
    assert mean_and_interval(values[:1]) == (values[0], None)


def test_a_pooled_difference_is_scipys_t_test():
    """Of two models. A third one of one seed has their spread, and widens nothing."""
    one, two = [1.0, 1.2, 1.1], [2.0, 2.3]
    found = scipy.stats.ttest_ind(one, two).confidence_interval(0.95)
    for models in ({"one": one, "two": two}, {"one": one, "two": two, "single": [5.0]}):
        (value, half), freedom = pooled_difference(models, "one", "two")
        assert freedom == 3
        assert (value - half, value + half) == pytest.approx((found.low, found.high), rel=1e-12)
    _, single = pooled_difference({"one": one, "two": two, "single": [5.0]}, "single", "two")[0]
    spread = math.sqrt((2 * np.var(one, ddof=1) + np.var(two, ddof=1)) / 3)
    assert single == pytest.approx(scipy.stats.t.ppf(0.975, 3) * spread * math.sqrt(1 + 1 / 2))


def test_a_model_whose_seeds_differ_more_is_apart():
    """With its own variance, as in Welch's test; the others are pooled without it."""
    models = {name: [0.0, 0.1, 0.2] for name in "abcdef"} | {"wild": [0.0, 3.0, 6.0]}
    spreads = pooled_spreads(models)
    assert spreads["wild"] == pytest.approx((9.0, 2))
    assert all(spreads[name] == pytest.approx((0.01, 12)) for name in "abcdef")
    (value, half), freedom = pooled_difference(models, "wild", "a")
    parts = (9.0 / 3, 0.01 / 3)
    assert freedom == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 12))
    assert (value, half) == pytest.approx((2.9, scipy.stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))))
    assert pooled_spreads({"a": [0.0, 0.1, 0.2], "b": [0.0, 0.2, 0.4]})["b"].freedom == 4  # an F of 4 is no proof
    with pytest.raises(ValueError, match="one seed of each"):
        pooled_spreads({"a": [1.0], "b": [2.0]})


@pytest.mark.parametrize("right", [0, 1, 7, 64])
def test_interval_of_a_share_is_scipys(right):
    found = scipy.stats.binomtest(right, 64).proportion_ci(0.95, method="wilson")
    assert proportion_interval(right / 64, 64) == pytest.approx((found.low, found.high), abs=1e-12)


def test_noise_of_seeds_is_the_median_over_pairs():
    """Losses of three models by seed; a pair's variance is that of its difference. A model of two seeds is left out."""
    losses = {"a": (4.0, 4.1, 4.2), "b": (4.0, 4.0, 4.0), "c": (5.0, 4.8, 5.3), "two": (3.0, 9.0)}
    runs = [result(label, seed, loss) for label, of in losses.items() for seed, loss in enumerate(of)]
    variances = [0.01, np.var((-1.0, -0.7, -1.1), ddof=1), np.var((5.0, 4.8, 5.3), ddof=1)]  # a-b, a-c, b-c
    expected = scipy.stats.norm.ppf(0.975) * math.sqrt(np.median(variances))
    assert seed_noise(runs, 16, "blocks") == pytest.approx(expected)
    assert seed_noise(runs, 32, "blocks") == pytest.approx(expected)  # all losses rise alike
    assert seed_noise(runs, 17, "blocks") is None
    assert seed_noise([run for run in runs if run["label"] != "a" and run["seed"] < 2], 16, "blocks") is None


@pytest.mark.parametrize(
    ("value", "half", "books", "noise", "expected"),
    [
        (-0.011, 0.0155, (-0.020, -0.002), None, "open"),  # of three seeds, all below 0 perhaps
        (-0.015, 0.008, (-0.024, -0.001), 0.1, ""),
        (-0.015, 0.008, (-0.024, 0.001), 0.1, "open"),
        (0.010, None, (0.004, 0.016), 0.014, "within a seed"),
        (0.020, None, (0.004, 0.036), 0.014, ""),
        (0.020, None, (-0.004, 0.036), 0.014, "open"),
        (0.020, None, None, None, "one seed"),
        (0.020, None, (0.010, 0.036), None, "one seed"),
        (0.020, None, None, 0.014, ""),
    ],
)
def test_verdict(value, half, books, noise, expected):
    assert verdict(Difference(value, books, half), noise) == expected


def test_interval_is_scipys():
    generator = np.random.default_rng(0)
    targets = generator.integers(50, 500, 30)
    baseline = targets * generator.normal(4.0, 0.5, 30)
    model = baseline + targets * generator.normal(-0.05, 0.1, 30)
    ours = paired_difference([books(model, targets)], [books(baseline, targets)])
    scipys = scipy.stats.bootstrap(
        (model, baseline, targets),
        lambda a, b, n, axis=-1: (a.sum(axis) - b.sum(axis)) / n.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    error = 6 * scipys.standard_error / math.sqrt(10_000) * 2.7  # six standard errors of a 2.5 % quantile of a normal
    assert ours.over_books == pytest.approx(scipys.confidence_interval, abs=error)
    assert ours.value == pytest.approx((model - baseline).sum() / targets.sum())


def test_seeds_are_averaged():
    targets = [10, 20, 30]
    seeds = [books(losses, targets) for losses in ([40, 80, 120], [42, 78, 126])]
    baseline = [books([45, 85, 130], targets), books([43, 87, 134], targets)]
    found = paired_difference(seeds, baseline)
    assert found[:2] == paired_difference([books([41, 79, 123], targets)], [books([44, 86, 132], targets)])[:2]
    assert found == paired_difference(seeds[::-1], baseline[::-1])  # and deterministic
    apart = np.array([(240 - 260) / 60, (246 - 264) / 60])  # by seed
    assert found.value == pytest.approx(apart.mean())
    assert found.half == pytest.approx(12.7062 * abs(apart[0] - apart[1]) / 2, rel=1e-5)  # t of one degree of freedom


@pytest.mark.parametrize(("counts", "message"), [((1, 2), "different numbers of targets"), ((0, 0), "none at all")])
def test_refuses(counts, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(*([books([1], [count])] for count in counts))
