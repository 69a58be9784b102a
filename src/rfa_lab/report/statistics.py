"""Means over seeds with t intervals, the noise of seeds, and paired differences of log perplexity.

A difference has two intervals: a t interval over seeds, and a bootstrap interval over books. If one of them holds 0,
the difference is open. A difference of a single seed has no interval over seeds. It is compared with the noise of
seeds.
"""

from rfa.checks import needs

needs("scipy")

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from .runs import MissingData, Run, by_label, perplexity_by_length

LossByBook = Mapping[str, tuple[float, float]]  # at one context length: sum of losses in nats, number of scored tokens


class Mean(NamedTuple):
    """A mean and the half-width of its t interval, which is None for a single value."""

    value: float
    half: float | None


class Difference(NamedTuple):
    """A difference of log perplexity in nats.

    value: over all seeds and books.
    low, high: ends of the interval over books; None for a single book.
    books: number of books.
    half: half-width of the t interval over seeds; None for a single seed.
    """

    value: float
    low: float | None
    high: float | None
    books: int
    half: float | None


def mean_and_interval(values: Sequence[float], level: float = 0.95) -> Mean:
    """The mean, and the half-width `t s / sqrt(n)` of its t interval with n - 1 degrees of freedom.

    s is the sample's standard deviation. For three values and 95 %, t is 4.30.

    Raises:
        ValueError: for no values.
    """
    count = len(values)
    if not count:
        raise ValueError("values: got none, expected at least one")
    half = None
    if count > 1:
        half = float(t_quantile(count, level) * np.std(values, ddof=1)) / math.sqrt(count)
    return Mean(float(np.mean(values)), half)


def t_quantile(count: int, level: float = 0.95) -> float:
    """The number of standard errors in half of a t interval of the mean of `count` values, at least two."""
    return float(stdtrit(count - 1, (1 + level) / 2))


def proportion_interval(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share of `count` trials (Wilson, 1927). Unlike a t interval it never leaves 0 to 1."""
    z = float(ndtri((1 + level) / 2))
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def paired_difference(
    model: Sequence[LossByBook],
    baseline: Sequence[LossByBook],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """`log perplexity(model) - log perplexity(baseline)` on the same books. It is negative if the model is better.

    The interval is a percentile bootstrap. Seeds are averaged first. Then books are drawn with replacement, the same
    ones for both sides. The interval describes other books of this kind. For other seeds see the t interval.

    With few books the interval is too narrow. With 8 independent books and normal differences, a nominal 95 % interval
    covers 87 %. It covers less if books of one author are alike.

    Args:
        model, baseline: for each seed the sums of losses and the targets by book; seeds in the same order in both.
        level: of the interval, between 0 and 1.
        resamples: number of bootstrap samples.
        seed: of the random numbers. The same input gives the same interval.

    Raises:
        MissingData: if the books or their targets differ between seeds or sides.
        ValueError: for no seeds, no books, different numbers of seeds, or a level outside 0 to 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1")
    if not model or not baseline or not baseline[0]:
        raise ValueError("books: got none, expected at least one seed and one book of each side")
    if len(model) != len(baseline):
        raise ValueError(f"seeds: got {len(model)} and {len(baseline)}, expected as many of both sides")
    books = sorted(baseline[0])
    targets = _column(baseline[0], books, 1)
    for each in (*model, *baseline):
        if sorted(each) != books:
            odd = ", ".join(sorted(set(each) ^ set(books)))
            raise MissingData(f"books: got {odd} on one side or seed only, expected the same books everywhere")
        if not np.array_equal(_column(each, books, 1), targets):
            raise MissingData("books: got different numbers of targets, expected the same scored tokens everywhere")
    if not (targets >= 0).all() or not targets.sum() > 0:
        raise MissingData("targets: got negative numbers or none at all, expected scored tokens")
    by_seed = np.array([_column(a, books, 0) - _column(b, books, 0) for a, b in zip(model, baseline, strict=True)])
    difference = by_seed.mean(0)
    value, half = mean_and_interval(by_seed.sum(1) / targets.sum(), level)
    if len(books) == 1:
        return Difference(value, None, None, 1, half)
    drawn = _draws(len(books), resamples, seed)
    scored = drawn @ targets
    samples = (drawn @ difference)[scored > 0] / scored[scored > 0]
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Difference(value, float(low), float(high), len(books), half)


@functools.lru_cache(maxsize=4)
def _draws(books: int, resamples: int, seed: int) -> np.ndarray:
    """The number of times that each book is in each bootstrap sample, `(resamples, books)`."""
    return np.random.default_rng(seed).multinomial(books, np.full(books, 1 / books), size=resamples)


def _column(books: LossByBook, order: Sequence[str], column: int) -> np.ndarray:
    return np.array([books[book][column] for book in order], dtype=np.float64)


OPEN, WITHIN_A_SEED, ONE_SEED = "open", "within a seed", "one seed"


def verdict(found: Difference, noise: float | None) -> str:
    """What a difference leaves undecided: "open" if an interval holds 0, "within a seed", "one seed", or nothing.

    Args:
        found: the difference.
        noise: as from `seed_noise`; it counts for a difference of a single seed only. Where it is not known, a single
            seed decides nothing.
    """
    if found.half is None and noise is None:
        return ONE_SEED
    if found.half is None and noise is not None and abs(found.value) <= noise:
        return WITHIN_A_SEED
    over_seeds = found.half is not None and abs(found.value) <= found.half
    over_books = found.low is not None and found.high is not None and found.low <= 0 <= found.high
    return OPEN if over_seeds or over_books else ""


_MEASURED = 3  # seeds of a model whose noise is measured


def seed_noise(runs: Sequence[Run], length: int, protocol: str, level: float = 0.95) -> float | None:
    """How far a difference of two models of one seed each may lie from 0 by the seed alone, in nats.

    It is the normal quantile of the level times the root of the median, over all pairs of models with at least three
    seeds, of the variance over seeds of their difference. The median leaves out a model that fails. It is also a little
    low: the median of the variance of three values is 0.69 of its mean. Half of the pairs are noisier.

    Args:
        runs: result files.
        length, protocol: of the evaluation.
        level: of the normal quantile.

    Returns:
        None with fewer than two models of three seeds.
    """
    losses = {
        label: {
            run["seed"]: math.log(found[length])
            for run in of
            if length in (found := perplexity_by_length(run, protocol))
        }
        for label, of in by_label(runs).items()
    }
    variances = []
    for one, other in itertools.combinations(losses.values(), 2):
        shared = sorted(one.keys() & other.keys())
        if len(shared) >= _MEASURED:
            variances.append(np.var([one[seed] - other[seed] for seed in shared], ddof=1))
    if not variances:
        return None
    return float(ndtri((1 + level) / 2) * math.sqrt(np.median(variances)))


RunPairs = Sequence[tuple[Run, Run]]


class Comparison(NamedTuple):
    """A difference or None, and a remark about it, which may be empty."""

    difference: Difference | None
    problem: str


def pairs_of(runs: Sequence[Run], baseline: Sequence[Run]) -> RunPairs:
    """Pairs of a run of one label and the baseline's run of the same seed."""
    against = {run["seed"]: run for run in baseline}
    return [(run, against[run["seed"]]) for run in runs if run["seed"] in against]


def compare(pairs: RunPairs, length: int, protocol: str, level: float = 0.95, resamples: int = 10_000) -> Comparison:
    """`paired_difference` of pairs of runs at one context length, on the books that all runs have."""
    sides = [[_books(pair[side], protocol, length) for pair in pairs] for side in (0, 1)]
    every = [each for side in sides for each in side]
    common, known = set.intersection(*map(set, every)), set.union(*map(set, every))
    if not common:
        return Comparison(None, "no losses by book" if not known else "no book in common")
    compared = [[{book: each[book] for book in common} for each in side] for side in sides]
    try:
        found = paired_difference(*compared, level=level, resamples=resamples)
    except MissingData as error:
        return Comparison(None, str(error))
    if known - common:
        return Comparison(found, f"without {', '.join(sorted(known - common))}, not in every run")
    return Comparison(found, "one book, no interval" if found.low is None else "")


def _books(run: Run, protocol: str, length: int) -> LossByBook:
    books = ((run.get("evaluations") or {}).get(protocol) or {}).get("books") or {}
    return {book: tuple(of[str(length)]) for book, of in books.items() if str(length) in of}
