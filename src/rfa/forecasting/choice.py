"""The model of a default forecast: the components and the scale that would have forecast best so far."""

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .components import FREE, free_season, most_harmonics, period_text
from .rolling import Channel, FittedChannel, Origins
from .scale import SCALES

SEASONS = ("1D", "7D", "365.2425D")  # that a dated series is searched for
_HARMONICS = 2, 6  # of a season that are tried
_OF_TWO = 4, 3  # harmonics of two seasons that are tried together
_KINDS = ["level", "ar"], ["level"], ["damped-trend"], ["trend"]  # what follows the readings beside a season
_SEASON_PENALTY = 1 / 0.9  # the penalty of a season, by which it must reduce the error
_MIN_PERIODS = 5  # of a cycle that is tried: fewer are seen in any walk
_SEARCH_STEPS = 15  # of a fit that is only compared
_PARAMETER_COST = 0.02  # of a parameter: the share by which it must reduce the error
_MAX_REFUSED = 0.2  # share of the readings that a filter may refuse; where it is more they are no outliers


class Choice(NamedTuple):
    """What is chosen.

    Fields:
        words: of the components.
        scale: a name of `SCALES`.
        tried: what decides, of each model by its words and its scale: the mean absolute error of its rolling forecasts
            times its penalty. The least is chosen.
    """

    words: list[str]
    scale: str
    tried: dict[str, float]


def choose(
    channels: dict[str, Channel],
    query_times: Float[np.ndarray, " steps"],
    robust: bool,
    report: Callable[[int, int], None],
) -> Choice:
    """The model whose forecasts of the last readings, at the horizon that is asked for, had the smallest error.

    Each model is fitted to all readings. Its filter then forecasts from up to 40 earlier readings, from each without a
    look at later ones. The error is the mean absolute one, 2 % more for each parameter and 11 % more with a season.
    Compared are components without a season, seasons of a day, a week and a year, what stands beside them, and scales.

    Args:
        channels: of each scale that is allowed, by its name. The first one is the usual one.
        query_times: that are to be forecast.
        robust: whether readings that a robust level refuses are left out of these fits.
        report: called with the number of models done and the most there can be.
    """
    usual, *others = channels
    table, truth = channels[usual].table, SCALES[usual].back(channels[usual].values)
    origins = Origins.of(channels[usual], float(query_times[-1] - channels[usual].times[-1]))
    if np.ptp(truth[~np.isnan(truth)]) == 0 or not len(origins.targets):
        return Choice(["level"], usual, {})
    costs, seasons = dict[str, float](), _seasons(channels[usual], query_times)
    cleaned = {name: _without_refused(channel, seasons) if robust else channel for name, channel in channels.items()}
    period = _cycle_period(cleaned[usual], seasons)
    kinds = [*_KINDS, *([["level", "ar", f"cycle:{period}{table.unit}"]] if period else [])]
    most = len(kinds) + len(seasons) + 2 * (len(_KINDS) - 1) * bool(seasons) + len(others)

    def cost(words: list[str], scale: str = usual) -> float:
        label = " + ".join(words) + (f" ({scale})" if scale != usual else "")
        if label not in costs:
            report(len(costs), most)
            costs[label] = np.inf
            try:
                fitted = FittedChannel.of(cleaned[scale], words, False, max_steps=_SEARCH_STEPS)
                mean = SCALES[scale].back(fitted.rolling(origins)[0])
            except ValueError:  # it cannot be fitted to these readings
                return np.inf
            error = float(np.mean(np.abs(mean - truth[origins.targets])))
            penalty = 1 + _PARAMETER_COST * len(fitted.filter.parameters)
            penalty *= _SEASON_PENALTY if any(word.startswith("season") for word in words) else 1.0
            costs[label] = error * penalty if np.isfinite(error) else np.inf
        return costs[label]

    without = min(kinds, key=cost)
    forms = [[season for season in seasons if season[0].endswith(FREE) == free] for free in (False, True)]
    best = [min(form, key=lambda season: cost([*_KINDS[0], *season])) for form in forms if form]
    chosen = min([without, *([*kind, *season] for season in best for kind in _KINDS)], key=cost)
    scale = min(channels, key=lambda name: cost(chosen, name))
    report(most, most)
    tried = {label: each for label, each in costs.items() if np.isfinite(each)}
    return Choice(chosen if tried else ["level"], scale, tried)


def _seasons(channel: Channel, query_times: Float[np.ndarray, " steps"]) -> list[list[str]]:
    """The seasons that are tried: waves of two periods in these readings, free ones of two in all, and two together.

    A free one needs readings at the phases that are to be forecast: of the night too, where only days have some.
    """
    table, span = channel.table, float(channel.times[-1] - channel.times[0])
    all_times = channel.past[0]
    lengths = {period: table.duration("season", period) for period in (SEASONS if table.unit else ())}
    lengths = {period: length for period, length in lengths.items() if most_harmonics(period, table) >= 2}
    waves = [period for period, length in lengths.items() if 2 * length <= span]
    found: list[list[str]] = []
    for period, length in lengths.items():
        harmonics = sorted({min(each, most_harmonics(period, table)) for each in _HARMONICS})
        found += [[f"season:{period}:{each}"] for each in harmonics if period in waves]
        if 2 * length <= all_times[-1] - all_times[0] and not table.sensor:
            ahead = free_season(*channel.past, length, query_times, all_times[-1])
            found += [] if np.isnan(ahead).any() else [[f"season:{period}:free"]]
    for pair in combinations(waves, 2):
        two = zip(pair, _OF_TWO, strict=True)
        found.append([f"season:{period}:{min(each, most_harmonics(period, table))}" for period, each in two])
    return found


def _without_refused(channel: Channel, seasons: list[list[str]]) -> Channel:
    """Without the readings that a robust level refuses, unless they are many.

    A level with a free season must refuse them too, where earlier periods have shown one: peaks that return are right.
    """
    outliers = np.ones(len(channel.values), dtype=bool)
    for season in [[], *(season for season in seasons if season[0].endswith(FREE))]:
        fitted = FittedChannel.of(channel, ["level", *season], True, max_steps=_SEARCH_STEPS)
        unknown = False if fitted.season is None else np.isnan(fitted.season)
        outliers &= np.asarray(fitted.filter.filter().outliers) | unknown
    if outliers.sum() > _MAX_REFUSED * (~np.isnan(channel.values)).sum():
        return channel
    return channel._replace(values=np.where(outliers, np.nan, channel.values))


def _cycle_period(channel: Channel, seasons: list[list[str]]) -> str:
    """The period of the largest wave in the series, by the periodogram of its readings on a regular grid.

    A wave has five periods, of four readings at least: there is none, "", in fewer than 20 readings. Nor is there one
    that the series cannot tell from a season: by less than one wave over its span, as 23 h and a day in a week.
    """
    seen = ~np.isnan(channel.values)
    times, values = channel.times[seen], channel.values[seen]
    if len(times) < 4 * _MIN_PERIODS:
        return ""
    grid = np.linspace(times[0], times[-1], len(times))
    level = np.interp(grid, times, values)
    level -= np.polyval(np.polyfit(grid - grid[0], level, 1), grid - grid[0])
    power = np.abs(np.fft.rfft(level * np.hanning(len(grid)))) ** 2
    power[:_MIN_PERIODS], power[len(grid) // 4 + 1 :] = 0.0, 0.0
    span, waves = float(grid[-1] - grid[0]), max(int(power.argmax()), _MIN_PERIODS)
    known = {channel.table.duration("season", word.split(":")[1]) for season in seasons for word in season}
    return "" if any(abs(span / length - waves) < 1 for length in known) else period_text(span / waves)
