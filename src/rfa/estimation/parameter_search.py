"""The parameters of a structural model by maximum likelihood.

The search is L-BFGS on the logarithms of variances, of frequencies, and of the decay rates `-log f` of factors f. So
units of values and times hardly matter. Slopes are central differences: all shifted models are filtered together, as
one batch. All values here have decay rates in the place of factors.
"""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require

from .components import unit_share
from .readings_problem import (
    ReadingsProblem,
    ReadingsTable,
    exact_log_likelihood,
    filter_readings,
    irregular_names,
)
from .series import Readings
from .series_estimate import standardised_innovations
from .structural_model import Component, ParameterKind, SeriesScale, StructuralModel, to_rates

_STEP = 1e-4  # of a coordinate: differences lose half of the digits
_HESSIAN_STEP = 2e-3  # of a coordinate, for second differences, whose errors are 1e-6 on both sides
_LARGEST_CHANGE = 60.0  # of a coordinate. Beyond it the likelihood has no maximum.
_SLOWEST = 1e-10  # decay in a unit of time that its factor still tells from 1, to six digits
_ZERO = 12.0  # fall of the logarithm of a variance after which 0 is tried
_SAME = 1e-6  # nats
_TENTHS = 2.5631  # standard deviations between the first and the last tenth of a normal distribution
_SLOPE = 1e-2  # nats by coordinate at the end of a search that has converged, of up to 1,000 readings
_RATIOS = math.log(10) * torch.arange(-3.0, 2.0, dtype=torch.float64)  # logarithms: of all components' usual variances
_LIFTS = math.log(10) * torch.arange(-5.0, 1.0, dtype=torch.float64)  # and of one of them, to leave a flat with it
_GAIN = 1e-2  # nats that a lifted variance must gain for another search
_MOST_RESTARTS = 3
_FLAT = 1e-7  # nats in one step, or change of all coordinates, by which a search has ended


class FoundParameters(NamedTuple):
    """What a search finds.

    Args:
        values: of all parameters by name, fixed ones too, with decay rates in the place of factors.
        log_likelihood: in nats.
        converged: whether the slope along each free parameter is small at the end: 0.01 nats, and 0.01 for each 1,000
            readings. The curvature grows as their number, so what is left to gain does too, at 1e-10 nats each.
    """

    values: dict[str, float]
    log_likelihood: float
    converged: bool


class _SearchTooFar(Exception):
    """A coordinate has left the range of the search."""


def parameter_kinds(model: StructuralModel, sensors: tuple[str, ...]) -> dict[str, ParameterKind]:
    """All parameters by name: the components' and the readings' noise."""
    noises: dict[str, ParameterKind] = {name: "variance" for name in irregular_names(sensors)}
    return {**noises, **model.parameters}


def series_scale(readings: Readings, robust: bool = True) -> SeriesScale:
    """The scale of a series by medians, so that a minority of outliers does not change it by much."""
    values = readings.values - readings.offset
    seen = values[~np.isnan(values)]
    steps = [np.diff(own[~np.isnan(own)]) for own in (values[readings.sensor == k] for k in set(readings.sensor))]
    median = float(np.median(seen))
    variance = _robust_variance(seen - median) or median**2 or 1.0
    step = _robust_variance(np.concatenate(steps)) or 1e-4 * variance
    low, high = np.quantile(seen, (0.1, 0.9))
    widest = ((high - low) / _TENTHS) ** 2 if robust else np.mean(np.square(seen - median))
    return SeriesScale(median, variance, step, max(variance, float(widest)), readings.gap, readings.span or 1.0)


def read_fixed(model: StructuralModel, sensors: tuple[str, ...], fixed: Mapping[str, float | int]) -> dict[str, float]:
    """Values of fixed parameters, factors as decay rates. The name of a component stands for all its variances.

    Raises:
        ValueError: for a name that the model does not have, and a value out of range.
    """
    kinds, found = parameter_kinds(model, sensors), dict[str, float]()
    variances = {
        each.name: [name for name, kind in each.parameters.items() if kind == "variance"] for each in model.components
    }
    for name, value in fixed.items():
        names = [name] if name in kinds else variances.get(name, [])
        require(bool(names), "fixed", name, f"one of {', '.join([*kinds, *variances])}")
        found.update(dict.fromkeys(names, float(value)))
    for name, value in found.items():
        kind = kinds[name]
        lower, upper, expected = {
            "variance": (0.0, math.inf, "a variance >= 0"),
            "frequency": (0.0, math.inf, "a frequency > 0"),
            "factor": (0.0, 1.0, "a factor between 0 and 1"),
        }[kind]
        require(lower <= value < upper and (value > 0 or kind == "variance"), f"fixed[{name!r}]", value, expected)
    return {name: float(value) for name, value in to_rates(kinds, found).items()}


def find_parameters(
    model: StructuralModel,
    readings: Readings,
    fixed: Mapping[str, float | int],
    start: Mapping[str, float],
    max_steps: int = 200,
) -> FoundParameters:
    """Maximise the likelihood over the parameters that are not fixed, from `start`."""
    kinds = parameter_kinds(model, readings.sensors)
    free = [name for name in kinds if name not in fixed]
    table = ReadingsTable.of(model, readings)

    rounding = (np.finfo(float).eps * float(np.nanmedian(np.abs(readings.values)))) ** 2  # of most readings
    least = torch.tensor([rounding if name not in model.parameters else 0.0 for name in free], dtype=torch.float64)

    def values(coordinates: Tensor) -> dict[str, float | Tensor]:
        return {**fixed, **_exponentials(free, coordinates, least)}

    def likelihood(coordinates: Tensor) -> Tensor:
        return exact_log_likelihood(table.problem(values(coordinates)))

    origin = torch.tensor([start[name] for name in free], dtype=torch.float64).log()
    if not free:
        return FoundParameters(dict(fixed), likelihood(origin).item(), True)
    scaled = torch.tensor([name in model.parameters and kinds[name] == "variance" for name in free])
    origin = _best(origin + _RATIOS[:, None] * scaled, likelihood)[1]
    best = _climbed(origin, likelihood, max_steps)
    for _ in range(_MOST_RESTARTS):
        alone = torch.eye(len(free), dtype=torch.bool)[scaled]  # each variance by itself
        lifted = torch.where(alone[:, None], origin + _LIFTS[:, None], best.at).reshape(-1, len(free))
        total, begin = _best(torch.cat([best.at[None], lifted]), likelihood)
        if not total > best.total + _GAIN:
            break
        best = max(best, _climbed(begin, likelihood, max_steps), key=lambda one: one.total)
    total, at, slope = best
    found = {name: float(value) for name, value in values(at).items()}
    vanishing = [
        name
        for name, x, first in zip(free, at, origin, strict=True)
        if kinds[name] == "variance" and name in model.parameters and first - x > _ZERO
    ]
    without = {**found, **dict.fromkeys(vanishing, 0.0)}
    if vanishing:
        at_zero = exact_log_likelihood(table.problem(without)).item()
        if at_zero > total - _SAME:
            found, total = without, at_zero
    told = _told_from_one(model, fixed, found)
    if told != found and (at_told := exact_log_likelihood(table.problem(told)).item()) > total - _GAIN:
        found, total = told, at_told
    count = int((~np.isnan(readings.used)).sum())
    return FoundParameters(found, total, bool(slope.abs().max() < _SLOPE * max(1.0, count / 1000)))


def free_decays(model: StructuralModel, fixed: Collection[str]) -> dict[str, list[str]]:
    """The decays that are not fixed, each with the variances of its component that are not."""

    def free(component: Component, kind: ParameterKind) -> list[str]:
        return [name for name, own in component.parameters.items() if own == kind and name not in fixed]

    return {decay: free(each, "variance") for each in model.components for decay in free(each, "factor")}


def _told_from_one(model: StructuralModel, fixed: Collection[str], found: Mapping[str, float]) -> dict[str, float]:
    """With decays that are no slower than `_SLOWEST`, and the same stationary variances.

    Along such a wave that does not fade the likelihood is flat. So its factor can be given back by the caller.
    """
    told = dict(found)
    for decay, variances in free_decays(model, fixed).items():
        if found[decay] < _SLOWEST:
            told[decay] = _SLOWEST
            told.update({name: found[name] * _SLOWEST / found[decay] for name in variances})
    return told


def standard_errors(
    model: StructuralModel, readings: Readings, fixed: Mapping[str, float | int], found: Mapping[str, float]
) -> dict[str, float]:
    """Of the free parameters at the maximum, factors as such, from the Hessian of the log-likelihood by differences.

    The Hessian is taken along the coordinates of the search: `se(v) = |dv / dx| sqrt((-H^-1)_xx)`. It is infinite at
    zero, and where the likelihood has no maximum.
    """
    kinds = parameter_kinds(model, readings.sensors)
    free = [name for name in kinds if name not in fixed and found[name] > 0]
    errors = {name: math.inf for name in kinds if name not in fixed}
    if not free:
        return errors
    table, kept = ReadingsTable.of(model, readings), {**fixed, **found}
    at = torch.tensor([found[name] for name in free], dtype=torch.float64).log()
    step = _HESSIAN_STEP * torch.eye(len(free), dtype=torch.float64)
    pairs = torch.stack([step[:, None] + step, step[:, None] - step, step - step[:, None], -step[:, None] - step])
    points = (at + pairs).reshape(-1, len(free))
    likelihood = exact_log_likelihood(table.problem({**kept, **_exponentials(free, points)}))
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    hessian = torch.einsum("s,sij->ij", signs, likelihood.reshape(pairs.shape[:3])) / (4 * _HESSIAN_STEP**2)
    factor, failed = torch.linalg.cholesky_ex(-hessian)
    if failed == 0:
        for name, variance in zip(free, torch.cholesky_inverse(factor).diagonal(), strict=True):
            slope = found[name] * (math.exp(-found[name]) if kinds[name] == "factor" else 1.0)
            errors[name] = float(slope * variance.sqrt())
    return errors


def start_parameters(
    model: StructuralModel, sensors: tuple[str, ...], scale: SeriesScale, fixed: Mapping[str, float | int]
) -> dict[str, float]:
    """Where a search starts, by the scale of the series. Half of the change from reading to reading is noise."""
    noises = dict.fromkeys(irregular_names(sensors), 0.25 * scale.step_variance)
    return {**noises, **model.start(scale), **fixed}


class _Maximum(NamedTuple):
    """The likelihood at coordinates, and its slope along each."""

    total: float
    at: Tensor
    slope: Tensor


def _climbed(origin: Tensor, likelihood: Callable[[Tensor], Tensor], max_steps: int) -> _Maximum:
    """The maximum that a search from `origin` ends at."""
    free = len(origin)
    shifts = _STEP * torch.cat([torch.zeros(1, free), torch.eye(free), -torch.eye(free)])
    coordinates = origin.clone().requires_grad_()
    best: list[_Maximum] = []
    search = torch.optim.LBFGS(
        [coordinates], max_iter=max_steps, line_search_fn="strong_wolfe", tolerance_grad=1e-5, tolerance_change=_FLAT
    )

    def evaluate() -> Tensor:
        at = coordinates.detach().clone()
        if not bool((at - origin).abs().max() < _LARGEST_CHANGE):
            raise _SearchTooFar
        found = likelihood(at + shifts)
        if not bool(found.isfinite().all()):
            raise _SearchTooFar
        slope = (found[1 : free + 1] - found[free + 1 :]) / (2 * _STEP)
        coordinates.grad = -slope
        best[:] = [max([*best, _Maximum(found[0].item(), at, slope)], key=lambda one: one.total)]
        return -found[0]

    try:
        evaluate()
    except _SearchTooFar:
        raise ValueError("values: got a likelihood that is not finite, expected smaller numbers or noises") from None
    with suppress(_SearchTooFar, ValueError, torch.linalg.LinAlgError):  # a search that goes too far ends at its best
        search.step(evaluate)  # type: ignore[no-untyped-call]
    return best[0]


def _best(candidates: Tensor, likelihood: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    """The likelihood of the best row, and the row."""
    found = likelihood(candidates).nan_to_num(nan=-torch.inf)
    return found.max().item(), candidates[found.argmax()]


def _robust_variance(deviations: np.ndarray) -> float:
    """Of Gaussian deviations with mean zero, by their median size; where that is 0, by their squares."""
    if not len(deviations):
        return 0.0
    return float((1.4826 * np.median(np.abs(deviations))) ** 2) or float(np.mean(np.square(deviations)))


def _exponentials(names: list[str], coordinates: Tensor, least: Tensor | float = 0.0) -> dict[str, Tensor]:
    """The values of free parameters, by name; none is less than `least`."""
    return dict(zip(names, coordinates.exp().clamp(min=least).unbind(-1), strict=True))


# The parameters of a series with wrong readings: likelihood of the readings that the robust filter keeps

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
    smoothed = filter_readings(problem, problem.first(scale), robust=True, smooth=True)
    mean, variance = problem.of_readings(smoothed.estimates)
    deviation = np.sqrt(variance + problem.noise[0].numpy())
    return best & (np.abs(readings.values - readings.offset - mean) > _FAR * deviation)
