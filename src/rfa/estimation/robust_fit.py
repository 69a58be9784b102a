"""The parameters of a series with wrong readings: likelihood of the readings that the robust filter keeps.

A wrong reading among the first ones is the start of everything after it. Nothing before it tells that it is wrong. So
other starts are tried, and that under which the series makes most sense is taken.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .components import unit_share
from .parameter_search import FoundParameters, find_parameters, free_decays, start_parameters
from .readings_filter import filter_readings, smooth_readings
from .readings_problem import ReadingsProblem
from .series import Readings
from .series_estimate import standardised_innovations
from .structural_model import SeriesScale, StructuralModel

_MOST_ROUNDS = 4
_FAR = 4.0  # standard deviations from its prediction at which a reading is left out: 1 of 16,000 good ones
_SLOWER_STARTS = 20  # each ten times slower
_MORE = 3  # readings beyond twice the unpredicted ones that may be refused together, less one
_REFUSED = 0.3  # readings that are far from their predictions, for each that is refused at the start


class RobustFit(NamedTuple):
    """What a robust fit finds.

    Args:
        found: the parameters.
        readings: the series, with the wrong readings at its start refused.
        kept: the readings of the likelihood.
    """

    found: FoundParameters
    readings: Readings
    kept: Readings


def robust_fit(
    model: StructuralModel, readings: Readings, known: Mapping[str, float], scale: SeriesScale, max_steps: int
) -> RobustFit:
    """Fit to the readings that the robust filter predicts, and again, until these stay the same.

    Args:
        model: the components.
        readings: the series.
        known: fixed parameters.
        scale: of the series.
        max_steps: of each search.
    """
    start = start_parameters(model, readings.sensors, scale, known)
    values = _plausible_start(model, start, known, readings, scale)
    found, before, kept, as_kalman = None, None, readings, values == start
    for _ in range(_MOST_ROUNDS):
        readings = replace(readings, refused=_wrong_start(model, values, readings, scale))
        left_out = _far(model, values, readings, scale) | readings.wrong
        if found is not None and bool((left_out == before).all()):
            break
        if _are_most(left_out, readings):  # such values say nothing about the readings
            left_out = readings.wrong
        before, kept = left_out, replace(readings, values=np.where(left_out, np.nan, readings.values))
        again = {name: value if value > 0 else start[name] for name, value in values.items()}  # 0 has no logarithm
        found = find_parameters(model, kept, known, again, max_steps)
        values, as_kalman = found.values, as_kalman and not left_out.any()
    assert found is not None
    assert before is not None
    if not as_kalman and not before.any():  # another start, or fewer readings, may have led to another maximum
        direct = find_parameters(model, kept, known, start, max_steps)
        if direct.log_likelihood > found.log_likelihood and not _far(model, direct.values, readings, scale).any():
            found = direct
    return RobustFit(found, readings, kept)


def _plausible_start(
    model: StructuralModel,
    start: Mapping[str, float],
    known: Mapping[str, float],
    readings: Readings,
    scale: SeriesScale,
) -> Mapping[str, float]:
    """The start, with slower decays until at least half of the readings are near their predictions.

    A stationary component may begin far from a series whose mean is not 0. A slower decay with the same Q raises its
    stationary variance alone: the predictions from reading to reading stay as narrow as they are, so outliers stay
    visible.
    """
    decays = free_decays(model, known)
    for exponent in range(_SLOWER_STARTS if decays else 0):
        slower = dict(start)
        for decay, variances in decays.items():
            slower[decay] = start[decay] * 10.0**-exponent
            same_noise = unit_share(slower[decay]) / unit_share(start[decay])
            slower.update({name: start[name] * same_noise for name in variances})
        if not _are_most(_far(model, slower, readings, scale), readings):
            return slower
    return start


def _are_most(some: np.ndarray, readings: Readings) -> bool:
    """Whether more than half of the readings are among some."""
    seen = ~np.isnan(readings.values)
    return bool(2 * (some & seen).sum() > seen.sum())


def _far(model: StructuralModel, values: Mapping[str, float], readings: Readings, scale: SeriesScale) -> np.ndarray:
    """Which readings are far from their predictions, `(T,)`."""
    problem = ReadingsProblem.of(model, values, readings)
    run = filter_readings(problem, problem.first(scale), robust=True)
    return np.abs(standardised_innovations(problem, run, scale)) > _FAR


def _wrong_start(
    model: StructuralModel, values: Mapping[str, float], readings: Readings, scale: SeriesScale
) -> np.ndarray:
    """Which of the first readings, that nothing predicts, are wrong, `(T,)`.

    The series is filtered without each of them, and without the first two, three and so on. The start with the fewest
    far readings is taken. Then the smoother says which of those left out are far from where it expects them.
    """
    readings = replace(readings, refused=None)
    problem = ReadingsProblem.of(model, values, readings)
    first = problem.first(scale)
    innovations = standardised_innovations(problem, filter_readings(problem, first, robust=True), scale)
    seen = ~np.isnan(readings.values)
    unpredicted = seen & np.isnan(innovations)
    none = np.zeros_like(seen)
    places = np.flatnonzero(unpredicted)
    fewest = int((np.abs(innovations) > _FAR).sum())
    if not fewest or 2 * len(places) >= seen.sum():  # all is well, or there is no series to judge by
        return none
    best, least = none, float(fewest)
    alone = [np.arange(len(seen)) == place for place in places]
    prefixes = [seen & (seen.cumsum() <= count) for count in range(2, 2 * len(places) + _MORE)]
    for refused in [*alone, *prefixes]:
        far = _far(model, values, replace(readings, refused=refused), scale)
        cost = far.sum() + _REFUSED * refused.sum()
        if cost < least:
            best, least = refused, cost
    if not best.any():
        return none
    problem = ReadingsProblem.of(model, values, replace(readings, refused=best))
    first = problem.first(scale)
    run = smooth_readings(problem, first, filter_readings(problem, first, robust=True), robust=True)
    mean, variance = run.estimates.of_readings(problem.table.rows)
    deviation = np.sqrt(variance + problem.noise[0].numpy())
    return best & (np.abs(readings.values - readings.offset - mean) > _FAR * deviation)
