"""Means over seeds with t intervals, and paired differences with two intervals: over seeds and over books."""

from rfa.checks import needs

needs("scipy")

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import ndtri, stdtrit

from rfa_lab.record import Record

LEVEL = 0.95  # of every interval
_RESAMPLES = 10_000  # of a bootstrap
_MIN_SEEDS = 3  # seeds of a model whose noise is measured
NORMAL_QUANTILE = float(ndtri((1 + LEVEL) / 2))  # standard deviations in half of an interval of a normal variable


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % t interval of a mean, `t s / sqrt(n)` with n - 1 degrees of freedom; NaN for one value."""
    count = len(values)
    if count < 2:
        return math.nan
    return float(stdtrit(count - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1)) / math.sqrt(count)


def over_seeds(values: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means over the seeds of each label, and halves of their 95 % t intervals; `values` as of `Record.values`."""
    groups = values.groupby(level="label", sort=False)
    return groups.mean(), groups.agg(lambda column: half_interval(column.dropna().to_numpy()))


class Difference(NamedTuple):
    """A difference of mean losses in nats: its value, half of the interval over seeds, the interval over books.

    `half` is NaN for one seed, `low` and `high` are NaN for one book. `verdict` says what is undecided: "open" where an
    interval holds 0, "within a seed" where one seed differs by no more than the noise of seeds, or nothing.
    """

    value: float
    half: float
    low: float
    high: float
    seeds: int
    verdict: str


def seed_noise(losses: pd.Series) -> float:
    """How far two models of one seed each may differ by the seed alone, in nats; NaN where too few have three seeds.

    It is the normal quantile of 95 % times the root of the median, over all pairs of models with three seeds or more,
    of the variance over seeds of their difference. `losses` has them by (label, seed).
    """
    by_label = losses.dropna().unstack("seed")
    variances = []
    for one, other in itertools.combinations(by_label.index, 2):
        paired = (by_label.loc[one] - by_label.loc[other]).dropna()
        if len(paired) >= _MIN_SEEDS:
            variances.append(paired.var(ddof=1))
    return NORMAL_QUANTILE * math.sqrt(np.median(variances)) if variances else math.nan


def differences(record: Record, baseline: str, protocol: str) -> dict[str, dict[float, Difference]]:
    """Mean losses less those of the baseline, on the same seeds and books, by label and context length.

    Seeds are averaged first. Then books are drawn with replacement, the same ones for both sides (a percentile
    bootstrap). With few books that interval is too narrow: with 8 a nominal 95 % interval covers 87 %. A label without
    a seed of the baseline is left out.
    """
    losses, found = record.values(f"loss {protocol}"), dict[str, dict[float, Difference]]()
    if baseline not in losses.index.unique("label"):
        return found
    books, targets = record.books(protocol), record.books(protocol, "targets")
    noise = {length: seed_noise(losses[length]) for length in losses}
    for label in losses.index.unique("label").drop(baseline):
        by_seed = losses.loc[label] - losses.loc[baseline]  # aligned by seed, NaN where one has none
        for length in losses:
            paired = by_seed[length].dropna()
            if not len(paired):
                continue
            value, half = float(paired.mean()), half_interval(paired.to_numpy())
            low, high = math.nan, math.nan
            if length in books:
                less = books[length].loc[label].loc[paired.index] - books[length].loc[baseline].loc[paired.index]
                scored = targets[length].loc[baseline].loc[paired.index[0]]
                low, high = _over_books(less.mean().to_numpy(), scored.to_numpy())
            verdict = ""
            if math.isnan(half):
                single = math.isnan(noise[length])
                verdict = "one seed" if single else "within a seed" if abs(value) <= noise[length] else ""
            if abs(value) <= half or low <= 0 <= high:  # comparisons with NaN are false
                verdict = "open"
            found.setdefault(label, {})[length] = Difference(value, half, low, high, len(paired), verdict)
    return found


def _over_books(less: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """The interval over books that all runs have; NaN where these are fewer than two."""
    common = np.isfinite(less) & np.isfinite(targets)
    if common.sum() < 2:
        return math.nan, math.nan
    drawn = _draws(int(common.sum()))
    scored = drawn @ targets[common]
    samples = (drawn @ less[common])[scored > 0] / scored[scored > 0]
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@functools.lru_cache(maxsize=4)
def _draws(books: int) -> np.ndarray:
    """The number of times that each book is in each bootstrap sample, `(samples, books)`, the same at every call."""
    return np.random.default_rng(0).multinomial(books, np.full(books, 1 / books), size=_RESAMPLES)
