"""Means over seeds, and paired differences of log perplexity with a bootstrap interval clustered by book."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Books = Mapping[str, tuple[float, float]]  # of one context length: summed loss in nats, and scored tokens


class Mean(NamedTuple):
    """A mean over seeds; its standard error is None where there is one seed only."""

    value: float
    error: float | None
    seeds: int


class Difference(NamedTuple):
    """A difference of log perplexity in nats, the ends of its interval, None where one book says nothing of others."""

    value: float
    low: float | None
    high: float | None
    books: int


def mean_and_error(values: Sequence[float]) -> Mean:
    """The mean and `s / sqrt(n)`, with s the sample's standard deviation.

    Raises:
        ValueError: for no values.
    """
    if not len(values):
        raise ValueError("values: got none, expected at least one")
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), spread, len(values))


def paired_difference(
    model: Sequence[Books],
    baseline: Sequence[Books],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """`log perplexity(model) - log perplexity(baseline)` on the same books, negative where the model is better.

    Seeds are averaged, then books are drawn with replacement, the same ones for both; the interval is that of the
    percentiles. It says how far the difference would move with other books of this kind, not with other seeds.

    Args:
        model, baseline: for each seed the loss sums and targets by book.
        level: of the interval, between 0 and 1.
        resamples: bootstrap samples.
        seed: of the random numbers; the same input has the same interval.

    Raises:
        ValueError: for no seeds or books, books that are not the same or not of the same targets for every seed and
            both sides, or a level that is none.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1")
    if not model or not baseline or not baseline[0]:
        raise ValueError("books: got none, expected at least one seed and one book of each side")
    books = sorted(baseline[0])
    targets = _column(baseline[0], books, 1)
    for each in (*model, *baseline):
        if sorted(each) != books:
            odd = ", ".join(sorted(set(each) ^ set(books)))
            raise ValueError(f"books: got {odd} on one side or seed only, expected the same books everywhere")
        if not np.array_equal(_column(each, books, 1), targets):
            raise ValueError("books: got different numbers of targets, expected the same scored tokens everywhere")
    if not (targets >= 0).all() or not targets.sum() > 0:
        raise ValueError("targets: got negative numbers or none at all, expected scored tokens")
    losses = [np.mean([_column(each, books, 0) for each in side], axis=0) for side in (model, baseline)]
    difference = losses[0] - losses[1]
    value = float(difference.sum() / targets.sum())
    if len(books) == 1:
        return Difference(value, None, None, 1)
    drawn = _draws(len(books), resamples, seed)
    scored = drawn @ targets
    samples = (drawn @ difference)[scored > 0] / scored[scored > 0]
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Difference(value, float(low), float(high), len(books))


@functools.lru_cache(maxsize=4)
def _draws(books: int, resamples: int, seed: int) -> np.ndarray:
    """How often each book is in each sample."""
    return np.random.default_rng(seed).multinomial(books, np.full(books, 1 / books), size=resamples)


def _column(books: Books, order: Sequence[str], column: int) -> np.ndarray:
    return np.array([books[book][column] for book in order], dtype=np.float64)
