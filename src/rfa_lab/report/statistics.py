"""Means over seeds with t intervals, and paired and pooled differences.

A difference has two intervals: a t interval over seeds, and a bootstrap interval over books. If one of them holds 0,
the difference is open. A difference of a single seed has no interval over seeds. It is compared with the noise of
seeds.
"""

from rfa.checks import needs

needs("scipy")

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import fdtri, ndtri, stdtrit

from .layout import NumberCell

LossByBook = Mapping[str, tuple[float, float]]  # at one context length: sum of losses in nats, number of scored tokens
LEVEL = 0.95  # of every interval
_RESAMPLES = 10_000  # of a bootstrap
NORMAL_QUANTILE = float(ndtri((1 + LEVEL) / 2))  # standard deviations in half of an interval of a normal variable


class Mean(NamedTuple):
    """A mean and the half-width of its t interval, which is None for a single value."""

    value: float
    half: float | None


class Difference(NamedTuple):
    """A difference of log perplexity in nats, over all seeds and books."""

    value: float
    over_books: tuple[float, float] | None  # ends of the interval over books; None for a single book
    half: float | None  # of the t interval over seeds; None for a single seed


def mean_and_interval(values: Sequence[float]) -> Mean:
    """The mean, and the half-width `t s / sqrt(n)` of its 95 % t interval with n - 1 degrees of freedom.

    s is the sample's standard deviation. For three values t is 4.30.
    """
    count = len(values)
    half = None
    if count > 1:
        quantile = stdtrit(count - 1, (1 + LEVEL) / 2)
        half = float(quantile * np.std(values, ddof=1)) / math.sqrt(count)
    return Mean(float(np.mean(values)), half)


class Spread(NamedTuple):
    """The variance of a model's seeds, and its degrees of freedom."""

    variance: float
    freedom: float


_APART = 0.001  # the chance that the F test sets a model apart whose variance is that of the others


def pooled_spreads(models: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """The spread of each model's values over seeds: one for all models, but for those that are apart.

    The pooled variance is `sum_m (n_m - 1) s_m^2 / sum_m (n_m - 1)`. A model is apart, with a variance of its own, if
    its variance is so much larger than the pooled one of the others that an F test refuses it at 0.1 %. The largest is
    tried first. Models of a single seed have the pooled spread.

    Raises:
        ValueError: if no model has two values.
    """
    own = {name: Spread(float(np.var(of, ddof=1)), len(of) - 1.0) for name, of in models.items() if len(of) > 1}
    if not own:
        raise ValueError("models: got one seed of each, expected two or more of one of them")
    kept = dict(own)
    while len(kept) > 1:
        name = max(kept, key=lambda each: kept[each].variance)
        largest, others = kept[name], _pool([of for each, of in kept.items() if each != name])
        if largest.variance <= others.variance * fdtri(largest.freedom, others.freedom, 1 - _APART):
            break
        del kept[name]
    pool = _pool([*kept.values()])
    return {name: own[name] if name in own.keys() - kept.keys() else pool for name in models}


def _pool(spreads: Sequence[Spread]) -> Spread:
    freedom = sum(each.freedom for each in spreads)
    return Spread(sum(each.freedom * each.variance for each in spreads) / freedom, freedom)


def pooled_mean(models: Mapping[str, Sequence[float]], model: str) -> Mean:
    """A model's mean over seeds with half of its 95 % t interval by `pooled_spreads`."""
    spread, values = pooled_spreads(models)[model], models[model]
    half = float(stdtrit(spread.freedom, (1 + LEVEL) / 2)) * math.sqrt(spread.variance / len(values))
    return Mean(float(np.mean(values)), half)


def pooled_difference(models: Mapping[str, Sequence[float]], model: str, baseline: str) -> tuple[Mean, float]:
    """The difference of two models' means with half of its 95 % t interval, and the degrees of freedom.

    Both have the spreads of `pooled_spreads`. The degrees of freedom are those of the pooled spread where both have it;
    else they are those of Welch and Satterthwaite.
    """
    spreads = pooled_spreads(models)
    sides = [(spreads[name], len(models[name])) for name in (model, baseline)]
    parts = [spread.variance / count for spread, count in sides]
    if sides[0][0] == sides[1][0]:
        freedom = sides[0][0].freedom
    else:
        each = (part**2 / spread.freedom for part, (spread, _) in zip(parts, sides, strict=True))
        freedom = sum(parts) ** 2 / sum(each)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(sum(parts))
    return Mean(float(np.mean(models[model]) - np.mean(models[baseline])), half), freedom


def interval_cell(values: Sequence[float], digits: int = 2, **form: Any) -> NumberCell | None:
    """The mean of values and half of its 95 % interval, which a single value does not have; None for no values."""
    if not values:
        return None
    mean = mean_and_interval(values)
    return NumberCell(mean.value, mean.half, digits=digits, **form)


def proportion_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share of `count` trials (Wilson, 1927). Unlike a t interval it never leaves 0 to 1."""
    z = NORMAL_QUANTILE
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def paired_difference(model: Sequence[LossByBook], baseline: Sequence[LossByBook]) -> Difference:
    """`log perplexity(model) - log perplexity(baseline)` on the same books. It is negative if the model is better.

    The interval is a percentile bootstrap. Seeds are averaged first. Then books are drawn with replacement, the same
    ones for both sides, by the same random numbers at every call. The interval describes other books of this kind. For
    other seeds see the t interval.

    With few books the interval is too narrow. With 8 independent books and normal differences, a nominal 95 % interval
    covers 87 %. It covers less if books of one author are alike.

    Both sides have as many seeds, in the same order, and the same books. Raises `ValueError` if the targets differ
    between seeds or sides, or there are none.
    """
    books = sorted(baseline[0])
    sums = np.array([[[each[book] for book in books] for each in side] for side in (model, baseline)], dtype=np.float64)
    losses, targets = sums[..., 0], sums[0, 0, :, 1]
    if not (sums[..., 1] == targets).all():
        raise ValueError("books: got different numbers of targets, expected the same scored tokens everywhere")
    if not (targets >= 0).all() or not targets.sum() > 0:
        raise ValueError("targets: got negative numbers or none at all, expected scored tokens")
    by_seed = losses[0] - losses[1]
    value, half = mean_and_interval(by_seed.sum(1) / targets.sum())
    if len(books) == 1:
        return Difference(value, None, half)
    drawn = _draws(len(books))
    scored = drawn @ targets
    samples = (drawn @ by_seed.mean(0))[scored > 0] / scored[scored > 0]
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(value, (float(low), float(high)), half)


@functools.lru_cache(maxsize=4)
def _draws(books: int) -> np.ndarray:
    """The number of times that each book is in each bootstrap sample, `(samples, books)`."""
    return np.random.default_rng(0).multinomial(books, np.full(books, 1 / books), size=_RESAMPLES)


OPEN, WITHIN_A_SEED, ONE_SEED = "open", "within a seed", "one seed"


def verdict(found: Difference, noise: float | None) -> str:
    """What a difference leaves undecided: "open" if an interval holds 0, "within a seed", "one seed", or nothing.

    The noise of `seed_noise` counts for a difference of a single seed only. Where it is not known, a single seed
    decides nothing.
    """
    if found.half is None:
        if noise is None:
            return ONE_SEED
        if abs(found.value) <= noise:
            return WITHIN_A_SEED
    over_seeds = found.half is not None and abs(found.value) <= found.half
    over_books = found.over_books is not None and found.over_books[0] <= 0 <= found.over_books[1]
    return OPEN if over_seeds or over_books else ""
