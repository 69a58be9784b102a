"""The parameters of a structural model by maximum likelihood.

The search is L-BFGS on `log v` of variances and frequencies, and on `log(-log f)` of factors f in (0, 1). So units of
values and times do not matter. Slopes are central differences: all shifted models are filtered together, as one batch.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require

from .readings_filter import exact_log_likelihood
from .readings_problem import ReadingsTable, irregular_names
from .series import Readings
from .structural_model import ParameterKind, SeriesScale, StructuralModel

_STEP = 1e-4  # of a coordinate: differences lose half of the digits
_LARGEST_CHANGE = 60.0  # of a coordinate. Beyond it the likelihood has no maximum.
_ZERO = 12.0  # fall of the logarithm of a variance after which 0 is tried
_SAME = 1e-6  # nats
_SLOPE = 1e-2  # nats by coordinate at the end of a search that has converged
_RATIOS = (1e-3, 1e-2, 0.1, 1.0, 10.0)  # of the components' variances over their usual start


class FoundParameters(NamedTuple):
    """What a search finds.

    Args:
        values: of all parameters by name, fixed ones too.
        log_likelihood: in nats.
        converged: whether the slope along each free parameter is small at the end.
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


def series_scale(readings: Readings) -> SeriesScale:
    """The scale of a series by medians, so that a minority of outliers does not change it by much."""
    values = readings.values - readings.offset
    seen = values[~np.isnan(values)]
    steps = [np.diff(own[~np.isnan(own)]) for own in (values[readings.sensor == k] for k in set(readings.sensor))]
    median = float(np.median(seen))
    variance = _robust_variance(seen - median) or median**2 or 1.0
    step = _robust_variance(np.concatenate(steps)) or 1e-4 * variance
    return SeriesScale(median, variance, step, readings.gap, readings.span or 1.0)


def read_fixed(model: StructuralModel, sensors: tuple[str, ...], fixed: Mapping[str, float | int]) -> dict[str, float]:
    """Values of fixed parameters. The name of a component stands for all its variances.

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
    return found


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

    def values(coordinates: Tensor) -> dict[str, float | Tensor]:
        chosen = {name: _from_coordinate(kinds[name], x) for name, x in zip(free, coordinates.unbind(-1), strict=True)}
        return {**fixed, **chosen}

    def likelihood(coordinates: Tensor) -> Tensor:
        return exact_log_likelihood(table.problem(values(coordinates)))

    origin = torch.tensor([_to_coordinate(kinds[name], start[name]) for name in free], dtype=torch.float64)
    if not free:
        return FoundParameters(dict(fixed), likelihood(origin).item(), True)
    origin = _best_start(origin, [name in model.parameters and kinds[name] == "variance" for name in free], likelihood)
    shifts = _STEP * torch.cat([torch.zeros(1, len(free)), torch.eye(len(free)), -torch.eye(len(free))])
    coordinates = origin.clone().requires_grad_()
    best: list[tuple[float, Tensor, Tensor]] = []
    search = torch.optim.LBFGS([coordinates], max_iter=max_steps, line_search_fn="strong_wolfe", tolerance_grad=1e-5)

    def evaluate() -> Tensor:
        at = coordinates.detach().clone()
        if not bool((at - origin).abs().max() < _LARGEST_CHANGE):
            raise _SearchTooFar
        found = likelihood(at + shifts)
        if not bool(found.isfinite().all()):
            raise _SearchTooFar
        slope = (found[1 : len(free) + 1] - found[len(free) + 1 :]) / (2 * _STEP)
        coordinates.grad = -slope
        best[:] = [max([*best, (found[0].item(), at, slope)], key=lambda one: one[0])]
        return -found[0]

    evaluate()
    with suppress(_SearchTooFar, ValueError, torch.linalg.LinAlgError):  # a search that goes too far ends at its best
        search.step(evaluate)  # type: ignore[no-untyped-call]
    total, at, slope = best[0]
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
    return FoundParameters(found, total, bool(slope.abs().max() < _SLOPE))


def start_parameters(
    model: StructuralModel, sensors: tuple[str, ...], scale: SeriesScale, fixed: Mapping[str, float | int]
) -> dict[str, float]:
    """Where a search starts, by the scale of the series. Half of the change from reading to reading is noise."""
    noises = dict.fromkeys(irregular_names(sensors), 0.25 * scale.step_variance)
    return {**noises, **model.start(scale), **fixed}


def _best_start(origin: Tensor, scaled: list[bool], likelihood: Callable[[Tensor], Tensor]) -> Tensor:
    """The best of a few ratios of the components' variances to the noise."""
    ratios = torch.tensor(_RATIOS, dtype=torch.float64).log()[:, None]
    starts = origin + ratios * torch.tensor(scaled, dtype=torch.float64)
    return starts[likelihood(starts).nan_to_num(nan=-torch.inf).argmax()]


def _robust_variance(deviations: np.ndarray) -> float:
    """Of Gaussian deviations with mean zero, by their median size; where that is 0, by their squares."""
    if not len(deviations):
        return 0.0
    return float((1.4826 * np.median(np.abs(deviations))) ** 2) or float(np.mean(np.square(deviations)))


def _to_coordinate(kind: ParameterKind, value: float) -> float:
    return math.log(-math.log(value)) if kind == "factor" else math.log(value)


def _from_coordinate(kind: ParameterKind, coordinate: Tensor) -> Tensor:
    return (-coordinate.exp()).exp() if kind == "factor" else coordinate.exp()
