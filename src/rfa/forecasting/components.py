"""The components of a forecast: from words such as `season:24h:3`, or chosen by the data."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from rfa.checks import require
from rfa.estimation import Autoregression, Component, Cycle, Level, RobustFilter, Season, StructuralModel, Trend

from .table import SeriesTable

SEASONS = ("1D", "7D", "365.2425D")  # that a dated series is searched for
_HARMONICS = 2  # of a season without a number
_KINDS: dict[str, Callable[[], Component]] = {
    "level": Level,
    "trend": Trend,
    "damped-trend": partial(Trend, damped=True),
    "cycle": Cycle,
    "ar": Autoregression,
}
_EXPECTED = "level, trend, damped-trend, season:PERIOD, season:PERIOD:HARMONICS, cycle, cycle:PERIOD or ar"
_SEARCH_STEPS = 15  # of a fit that is only compared


def components_of(words: Sequence[str], table: SeriesTable) -> StructuralModel:
    """The sum of components of words: `level`, `trend`, `damped-trend`, `season:24h:3`, `cycle`, `cycle:11`, `ar`.

    A period is a length of time as `SeriesTable.duration` reads it; after it a season may have its number of harmonics,
    2 by default.

    Raises:
        ValueError: for an unknown word, a period or harmonics that the series cannot show, or a model that is none.
    """
    require(len(words) > 0, "components", "none", _EXPECTED)
    seasons = sum(word.startswith("season") for word in words)
    found: list[Component] = []
    for word in words:
        kind, *rest = word.split(":")
        if kind == "season" and 1 <= len(rest) <= 2:
            name = {} if seasons == 1 else {"name": f"season {rest[0]}"}
            period, span = table.duration("components", rest[0]), float(table.times[-1] - table.times[0])
            expected = f"a season of at most the span of the series, {span:g} {table.unit}".rstrip()
            require(period <= span, "components", word, expected)
            found.append(Season(period, _harmonics(word, rest, table), **name))
        elif kind == "cycle" and len(rest) == 1:
            found.append(Cycle(table.duration("components", rest[0])))
        else:
            require(kind in _KINDS and not rest, "components", word, _EXPECTED)
            found.append(_KINDS[kind]())
    return StructuralModel(*found)


def _harmonics(word: str, rest: list[str], table: SeriesTable) -> int:
    whole = len(rest) == 1 or (rest[1].isascii() and rest[1].isdigit() and 1 <= int(rest[1]) <= 100)
    require(whole, "components", word, "a number of harmonics from 1 to 100, as in season:24h:3")
    wanted = int(rest[1]) if len(rest) == 2 else _HARMONICS
    most = math.floor(table.duration("components", rest[0]) / table.gap / 2 + 1e-9)
    if len(rest) == 1:
        wanted = max(1, min(wanted, most))
    expected = f"at most {most} harmonics: a wave needs two readings, and the typical gap is {table.gap:g} {table.unit}"
    require(wanted <= most, "components", word, expected.rstrip())
    return wanted


def chosen_components(
    table: SeriesTable, values: Float[np.ndarray, " T"], report: Any = None
) -> tuple[list[str], dict[str, float]]:
    """The words of a default model, and the criterion of each model that was tried, by its words joined with " + ".

    The criterion is the Bayesian one of Kalman filters: `log p(values) - parameters log(readings) / 2`. Values are in
    median deviations and times in median gaps, so that the units do not matter. Where most values are equal, the
    standard deviation stands for the median deviation. What a robust level takes for outliers counts as missing.

    First `level` or `trend`; then, for a dated series, the best season among a day, a week and a year, while the
    criterion improves; at last `level` or `trend` again, beside the seasons. A season needs two periods in the series.
    A series of one value is a level. `report` is called with the number of models done and the most there can be.
    """
    span = float(table.times[-1] - table.times[0])
    seasons = [
        f"season:{period}"
        for period in (SEASONS if table.unit else ())
        if 2 * table.duration("season", period) <= span and table.duration("season", period) >= 4 * table.gap
    ]
    most, tried = 4 + len(seasons) * (len(seasons) + 1) // 2, dict[str, float]()
    seen = values[~np.isnan(values)]
    deviation = float(np.median(np.abs(seen - np.median(seen)))) or float(np.std(seen))  # 0: most values are equal
    if np.ptp(seen) == 0:
        return ["level"], {}
    scaled = (values - np.median(seen)) / deviation
    times = table.times.numpy() / table.gap
    unit = table._replace(times=table.times / table.gap, unit="")
    sensor = list(table.sensor) or None

    def done() -> None:
        if report is not None:
            report(min(len(tried) + 1, most), most)

    level = RobustFilter(Level()).fit(times, scaled, sensor=sensor, max_steps=_SEARCH_STEPS)
    kept = np.where(level.filter().outliers, np.nan, scaled)
    done()

    def criterion(words: list[str]) -> float:
        in_gaps = [word if ":" not in word else _in_gaps(word, table) for word in words]
        model = components_of(in_gaps, unit)
        fitted = RobustFilter(model, robust=False).fit(times, kept, sensor=sensor, max_steps=_SEARCH_STEPS)
        tried[" + ".join(words)] = found = fitted.log_likelihood - math.log(len(seen)) * len(fitted.parameters) / 2
        done()
        return found

    chosen = max((["level"], ["trend"]), key=criterion)
    best = tried[chosen[0]]
    while seasons:
        season = max(seasons, key=lambda one: criterion([*chosen, one]))
        if tried[" + ".join([*chosen, season])] <= best:
            break
        best = tried[" + ".join([*chosen, season])]
        chosen = [*chosen, season]
        seasons.remove(season)
    if len(chosen) > 1:  # without its season a smooth wave looks like a trend
        other = ["trend" if chosen[0] == "level" else "level", *chosen[1:]]
        chosen = other if criterion(other) > best else chosen
    if report is not None:
        report(most, most)
    return chosen, tried


def _in_gaps(word: str, table: SeriesTable) -> str:
    kind, period, *rest = word.split(":")
    return ":".join([kind, repr(table.duration("season", period) / table.gap), *rest])
