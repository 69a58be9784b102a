"""Means over seeds and clustered bootstrap intervals, against closed forms and scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from rfa.report.statistics import mean_and_error, paired_difference


def books(losses, targets):
    return {f"book {k}": (float(loss), int(count)) for k, (loss, count) in enumerate(zip(losses, targets, strict=True))}


def test_mean_and_error():
    mean = mean_and_error([1.0, 2.0, 4.0])
    assert (mean.value, mean.seeds) == (pytest.approx(7 / 3), 3)
    assert mean.error == pytest.approx(scipy.stats.sem([1.0, 2.0, 4.0]))
    assert mean_and_error([3.0]) == (3.0, None, 1)
    with pytest.raises(ValueError, match="got none"):
        mean_and_error([])


def test_two_books_have_three_samples():
    """Twice the one, one of each, twice the other, with probabilities 1/4, 1/2, 1/4."""
    model, baseline = books([30.0, 20.0], [10, 40]), books([40.0, 24.0], [10, 40])
    first, both, second = -10 / 10, -14 / 50, -4 / 40
    wide = paired_difference([model], [baseline], level=0.95)
    assert wide == (pytest.approx(both), pytest.approx(first), pytest.approx(second), 2, None)
    narrow = paired_difference([model], [baseline], level=0.4)  # from the 30th percentile to the 70th
    assert narrow == (pytest.approx(both), pytest.approx(both), pytest.approx(both), 2, None)


def test_interval_is_scipys():
    generator = np.random.default_rng(0)
    targets = generator.integers(50, 500, 30)
    baseline = targets * generator.normal(4.0, 0.5, 30)
    model = baseline + targets * generator.normal(-0.05, 0.1, 30)
    ours = paired_difference([books(model, targets)], [books(baseline, targets)], resamples=40_000)
    scipys = scipy.stats.bootstrap(
        (model, baseline, targets),
        lambda a, b, n, axis=-1: (a.sum(axis) - b.sum(axis)) / n.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    error = 6 * scipys.standard_error / math.sqrt(20_000) * 2.7  # six standard errors of a 2.5 % quantile of a normal
    assert ours.low == pytest.approx(scipys.confidence_interval.low, abs=error)
    assert ours.high == pytest.approx(scipys.confidence_interval.high, abs=error)
    assert ours.value == pytest.approx((model - baseline).sum() / targets.sum())


def test_seeds_are_averaged():
    targets = [10, 20, 30]
    seeds = [books(losses, targets) for losses in ([40, 80, 120], [42, 78, 126])]
    baseline = [books([45, 85, 130], targets), books([43, 87, 134], targets)]
    found = paired_difference(seeds, baseline)
    assert found[:4] == paired_difference([books([41, 79, 123], targets)], [books([44, 86, 132], targets)])[:4]
    assert found == paired_difference(seeds[::-1], baseline[::-1])  # and deterministic
    apart = np.array([(240 - 260) / 60, (246 - 264) / 60])  # by seed
    assert found.value == pytest.approx(apart.mean())
    assert found.error == pytest.approx(abs(apart[0] - apart[1]) / 2)  # s / sqrt(2) of two


@pytest.mark.parametrize(
    ("model", "baseline", "level", "message"),
    [
        ([], [books([1], [1])], 0.95, "got none"),
        ([{}], [{}], 0.95, "got none"),
        ([books([1], [1])] * 2, [books([1], [1])], 0.95, "seeds: got 2 and 1, expected as many"),
        ([books([1], [1])], [books([1, 2], [1, 2])], 0.95, "got book 1 on one side"),
        ([books([1], [1])], [books([1], [2])], 0.95, "different numbers of targets"),
        ([books([1], [0])], [books([1], [0])], 0.95, "none at all"),
        ([books([1], [1])], [books([1], [1])], 1.0, "level: got 1.0"),
    ],
)
def test_refuses(model, baseline, level, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(model, baseline, level=level)
