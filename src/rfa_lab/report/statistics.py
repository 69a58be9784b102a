"""Means over seeds with t intervals, and paired differences of log perplexity.

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
from scipy.special import ndtri, stdtrit

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
