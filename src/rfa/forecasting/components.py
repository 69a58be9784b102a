"""The components of a forecast, from words such as `season:24h:3`, and the season that earlier periods show."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation import Autoregression, Component, Cycle, Level, Season, StructuralModel, Trend

from .table import SeriesTable

_HARMONICS = 2  # of a season without a number
FREE = "free"  # in the place of a number: a season of any form
_LONG_MONTHS = 0.12  # 12 months of 31 days and 4 quarters of 92 days are a year: 5.89 and 1.98 waves
_PERIODS = 5  # whose readings at the same phase are a free season
_KINDS: dict[str, Callable[[], Component]] = {
    "level": Level,
    "trend": Trend,
    "damped-trend": partial(Trend, damped=True),
    "cycle": Cycle,
    "ar": Autoregression,
}
_EXPECTED = "level, trend, damped-trend, season:PERIOD[:HARMONICS], season:PERIOD:free, cycle[:PERIOD] or ar"


class ForecastModel(NamedTuple):
    """Components, and a free season beside them.

    A free season of period P at time t is the median of the readings at t - P, t - 2 P ... t - 5 P. It may have any
    form. The components follow what is left of the readings without it.
    """

    components: StructuralModel
    period: float | None = None  # of the free season


def components_of(words: Sequence[str], table: SeriesTable, past: float | None = None) -> ForecastModel:
    """The model of words: `level`, `trend`, `damped-trend`, `season:24h:3`, `season:7D:free`, `cycle:11`, `ar`.

    A period is a length of time as `SeriesTable.duration` reads it; after it a season may have its number of harmonics,
    2 by default, or `free`. `past` is the span in which a free season is found; by default that of the table.

    Raises:
        ValueError: for an unknown word, a period or harmonics that the series cannot show, or a model that is none.
    """
    require(len(words) > 0, "components", "none", _EXPECTED)
    require(len({*words}) == len(words), "components", " ".join(words), "each component once")
    seasons = sum(word.startswith("season") for word in words)
    found, free = list[Component](), list[float]()
    for word in words:
        kind, *rest = word.split(":")
        if kind == "season" and 1 <= len(rest) <= 2:
            name = {} if seasons == 1 else {"name": f"season {rest[0]}"}
            period, span = table.duration("components", rest[0]), float(table.times[-1] - table.times[0])
            expected = f"a season of at most the span of the series, {span:g} {table.unit}".rstrip()
            free_one = rest[1:] == [FREE]
            require(period <= (past if free_one and past is not None else span), "components", word, expected)
            if free_one:
                free.append(period)
            else:
                found.append(Season(period, _harmonics(word, rest, table), **name))
        elif kind == "cycle" and len(rest) == 1:
            found.append(Cycle(table.duration("components", rest[0])))
        else:
            require(kind in _KINDS and not rest, "components", word, _EXPECTED)
            found.append(_KINDS[kind]())
    require(len(free) <= 1, "components", " ".join(words), "one free season at most")
    require(len(found) > 0, "components", " ".join(words), "level, trend or ar beside a free season")
    require(not (free and table.sensor), "components", " ".join(words), "no free season where there are sensors")
    return ForecastModel(StructuralModel(*found), *free)


def _harmonics(word: str, rest: list[str], table: SeriesTable) -> int:
    whole = len(rest) == 1 or (rest[1].isascii() and rest[1].isdigit() and 1 <= int(rest[1]) <= 100)
    require(whole, "components", word, "a number of harmonics from 1 to 100, as in season:24h:3, or free")
    wanted, most = int(rest[1]) if len(rest) == 2 else _HARMONICS, most_harmonics(rest[0], table)
    if len(rest) == 1:
        wanted = max(1, min(wanted, most))
    expected = f"at most {most} harmonics: a wave needs two readings, and the typical gap is {table.gap:g} {table.unit}"
    require(wanted <= most, "components", word, expected.rstrip())
    return wanted


def most_harmonics(period: str, table: SeriesTable) -> int:
    """That a season of this period can have: a wave needs two readings. Most months are longer than a twelfth."""
    return math.floor(table.duration("components", period) / table.gap / 2 + _LONG_MONTHS)


def period_text(period: float) -> str:
    """A period in words: four digits, without an exponent."""
    return np.format_float_positional(period, precision=4, fractional=False, trim="-")


def free_season(
    times: Float[np.ndarray, " T"],
    values: Float[np.ndarray, " T"],
    period: float,
    at: Float[np.ndarray, " n"],
    until: float | Float[np.ndarray, " n"] | None = None,
) -> Float[np.ndarray, " n"]:
    """The median of the readings at the same phase in the five periods before each time `at`.

    Between two readings a value lies on the line that joins them, unless they are a quarter of a period apart.

    Args:
        times, values: increasing times, NaN where nothing was read.
        period: of the season.
        at: the times that are asked for.
        until: the time after which no reading is known, for each. By default one period before `at`.

    Returns:
        `(n,)`, NaN where no period shows a reading.
    """
    seen = ~np.isnan(values)
    times, values = times[seen], values[seen]
    before = at - period if until is None else np.broadcast_to(until, at.shape)
    last = np.searchsorted(times, before, side="right") - 1  # the last reading that is known
    first = np.maximum(np.ceil((at - before) / period - 1e-9), 1.0)  # periods back to one that is known
    phases = at - (first + np.arange(_PERIODS)[:, None]) * period
    left = np.searchsorted(times, phases, side="right") - 1
    right = np.minimum(left + 1, last)
    inside = left >= 0
    left, right = np.maximum(left, 0), np.maximum(right, 0)
    gap = times[right] - times[left]
    share = np.where(gap > 0, (phases - times[left]) / np.where(gap > 0, gap, 1.0), 0.0)
    usual = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    near = (gap <= max(period / 4, 2 * usual)) & (phases - times[left] <= max(period / 4, 2 * usual))
    found = np.where(inside & near, values[left] + share * (values[right] - values[left]), np.nan)
    known = ~np.isnan(found).all(axis=0)
    median = np.full(at.shape, np.nan)
    median[known] = np.nanmedian(found[:, known], axis=0)
    return median
