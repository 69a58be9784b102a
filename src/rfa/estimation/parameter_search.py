"""The parameters of a structural model by maximum likelihood.

The search is L-BFGS on the logarithms of diffusions, of frequencies, and of the decay rates `-log f` of factors f. So
units of values and times do not matter. Slopes are central differences: all shifted models are filtered together, as
one batch. All values here have decay rates in the place of factors.
"""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rfa.checks import require

from .components import (
    Autoregression,
    Component,
    Cycle,
    ParameterKind,
    SeriesScale,
    StructuralModel,
    as_factor,
    to_factors,
    to_rates,
    unit_share,
)
from .readings_problem import ReadingsTable, exact_log_likelihood, filter_readings, irregular_names
from .series import Readings
from .series_estimate import standardised_innovations

_SLOPE_STEP = 1e-3  # of a coordinate: so the slopes of two units of time differ less by rounding than a search tells
_HESSIAN_STEP = 2e-3  # of a coordinate, for second differences, whose errors are 1e-6 on both sides
_LARGEST_CHANGE = 60.0  # of a coordinate. Beyond it the likelihood has no maximum.
_LEAST_DECAY = 1e-10  # in a median gap: nothing tells a slower one, whose start would be too wide, from no decay
_VANISHING_FALL = 12.0  # fall of the logarithm of a variance after which 0 is tried
_FALL_TO_NOTHING = 30.0  # fall at which nothing of it is left
_EQUAL_LIKELIHOODS = 1e-6  # nats
_DECILE_DISTANCE = 2.5631  # standard deviations between the first and the last tenth of a normal distribution
_LARGEST_END_SLOPE = 1e-2  # nats by coordinate at the end of a search that has converged, of up to 1,000 readings
# Log-variances over those of the start, tried for all components together.
_RATIOS = math.log(10) * torch.arange(-3.0, 2.0, dtype=torch.float64)
# Log-variances tried one component at a time, to escape a flat region.
_LIFTS = math.log(10) * torch.arange(-5.0, 1.0, dtype=torch.float64)
_LEAST_GAIN = 1e-2  # nats that a lifted variance must gain for another search
_MOST_RESTARTS = 3
# A long series is searched by its last readings before: so many, or those of so many of the longest period.
_BLOCK_READINGS, _BLOCK_PERIODS, _LONG_IN_BLOCKS = 2000, 4, 2
_SMALLEST_STEP = 1e-7  # nats in one step, or change of all coordinates, by which a search has ended
_SMALLEST_STEP_OF_LONG = 1e-5  # the same of a long series: a three hundredth of a standard error

# of the robust fit, whose likelihood is that of the readings that the robust filter keeps
_MOST_ROUNDS = 4
_FAR_DEVIATIONS = 4.0  # standard deviations from its prediction at which a reading is left out: 1 of 16,000 good ones
_MEDIAN_DEVIATION = 0.6745  # standard deviations that half of all normal numbers exceed in size
# a smaller deviation of most innovations; three standard errors of it, times root of T
_MASKED_DEVIATION, _CHANCE_ERRORS = 0.8, 3.5
_LEAST_NOISE = 0.1  # of the variance of the change from reading to reading: less noise hides nothing
_MOST_LEFT_OUT, _NO_NOISE = 0.25, 1e-6  # share of the readings; of the variance of the change from reading to reading
_LEAST_MEDIAN = 1.5  # bounds at which half of the wrong readings are, at least
_SLOWER_STARTS = 20  # each ten times slower
_DIFFERENCE, _SMALLEST_GAIN = 1e-3, 1e-7  # of a logarithm, and in nats: of Newton's search
_WEAK, LONGEST_STEP, LEAST_LOG = 1e-3, 3.0, -46.0  # curvature in nats, a step of a logarithm, and the one taken as 0
_NO_GAIN = 1e-4  # in nats, between a small noise and none: its logarithm would fall for ever
_EXTRA_READINGS = 2  # Prefixes of up to 2 x unpredicted + 2 readings are tried.
_START_READINGS = 1000  # of the readings: a wrong start shows there
_REFUSAL_COST = 0.3  # of refusing one reading at the start, where a reading far from its prediction costs 1


class FoundParameters(NamedTuple):
    """What a search finds. It has converged where each slope at the end is below 0.01 nats for each 1,000 readings."""

    values: dict[str, float]  # of all parameters by name, fixed ones too, with decay rates in the place of factors
    log_likelihood: float  # in nats
    converged: bool


class Maximum(NamedTuple):
    """The best point that a search has seen, with the slope of the likelihood along each coordinate."""

    total: float  # the likelihood
    at: Tensor
    slope: Tensor


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
    widest = ((high - low) / _DECILE_DISTANCE) ** 2 if robust else np.mean(np.square(seen - median))
    return SeriesScale(median, variance, step, max(variance, float(widest)), readings.gap, readings.span or 1.0)


def read_fixed(model: StructuralModel, sensors: tuple[str, ...], fixed: Mapping[str, float | int]) -> dict[str, float]:
    """Values of fixed parameters, with decay rates in the place of factors.

    The name of a component stands for all its variances, `NAME.rate` for the decay rate of the factor NAME.
    """
    kinds, found = parameter_kinds(model, sensors), dict[str, float]()
    rates = {f"{name}.rate": name for name, kind in kinds.items() if kind == "factor"}
    variances = {
        each.name: [name for name, kind in each.parameters.items() if kind == "variance"] for each in model.components
    }
    for name, value in fixed.items():
        names = [name] if name in kinds or name in rates else variances.get(name, [])
        require(bool(names), "fixed", name, f"one of {', '.join([*kinds, *variances])}")
        require(rates.get(name) not in fixed, "fixed", f"{name} and {rates.get(name)}", "one of them")
        found.update(dict.fromkeys(names, float(value)))
    limits = {"variance": (math.inf, "a variance >= 0"), "frequency": (math.inf, "a frequency > 0")}
    limits |= {"factor": (1.0, "a factor between 0 and 1"), "rate": (math.inf, "a decay rate > 0")}
    for name, value in found.items():
        kind = kinds.get(name, "rate")
        upper, expected = limits[kind]
        inside = 0 < value < upper or (value == 0 and kind == "variance")
        require(inside, f"fixed[{name!r}]", value, expected)
    return {name: float(value) for name, value in to_rates(kinds, found).items()}


@dataclass(frozen=True)
class ParameterSearch:
    """The search for the parameters of a model of a series that are not fixed."""

    model: StructuralModel
    readings: Readings
    scale: SeriesScale
    fixed: Mapping[str, float]
    max_steps: int
    # whether the bound of wrong readings may be less than four standard deviations
    narrow: bool = field(default=True, kw_only=True)

    @functools.cached_property
    def kinds(self) -> dict[str, ParameterKind]:
        """Of all parameters by name."""
        return parameter_kinds(self.model, self.readings.sensors)

    @functools.cached_property
    def start(self) -> dict[str, float]:
        """Where the search starts, by the scale of the series. Half of the change from reading to reading is noise."""
        noises = dict.fromkeys(irregular_names(self.readings.sensors), 0.25 * self.scale.step_variance)
        return {**noises, **self.model.start(self.scale), **self.fixed}

    @functools.cached_property
    def decays(self) -> dict[str, list[str]]:
        """The decays that are not fixed, each with the variances of what fades that are not."""

        def free(component: Component, kind: ParameterKind) -> list[str]:
            return [name for name, own in component.parameters.items() if own == kind and name not in self.fixed]

        return {
            decay: [name for name in free(each, "variance") if name != "sigma2.level"]
            for each in self.model.components
            for decay in free(each, "factor")
        }

    @functools.cached_property
    def faded(self) -> dict[str, str]:
        """The variances that are gained over a unit of time, fading included, each with its decay."""
        fading = (each for each in self.model.components if isinstance(each, Autoregression | Cycle))
        decays = {each.name: name for each in fading for name, kind in each.parameters.items() if kind == "factor"}
        return {f"sigma2.{name}": decay for name, decay in decays.items()}

    def shares(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Each of these variances over its diffusion, which units of time only scale."""
        return {name: unit_share(values[decay]) for name, decay in self.faded.items()}

    def maximum(
        self, readings: Readings, start: Mapping[str, float], near: Mapping[str, float] | None = None
    ) -> FoundParameters:
        """The maximum of the likelihood of some readings, from `start`.

        A long series is searched by its last readings before, unless values near the maximum are known. The curvature
        by these readings scales the coordinates, so that the search over all readings needs few steps.
        """
        fixed, model = self.fixed, self.model
        free = [name for name in self.kinds if name not in fixed]
        of_components = [name for name in free if name in model.parameters and self.kinds[name] == "variance"]
        table = ReadingsTable.of(model, readings)
        rounding = (np.finfo(float).eps * float(np.nanmedian(np.abs(readings.values)))) ** 2  # of most readings
        least = torch.tensor([rounding if name not in model.parameters else 0.0 for name in free], dtype=torch.float64)

        def values(coordinates: Tensor) -> dict[str, Any]:
            found = {**fixed, **_exponentials(free, coordinates, least)}
            shares = self.shares(found)
            return found | {name: found[name] * share for name, share in shares.items() if name in free}

        def coordinates_of(values: Mapping[str, float]) -> Tensor:
            shares = self.shares(values)
            return torch.tensor([values[name] / shares.get(name, 1.0) for name in free], dtype=torch.float64).log()

        def likelihood(coordinates: Tensor) -> Tensor:
            return exact_log_likelihood(table.problem(values(coordinates)))

        origin = coordinates_of(start)
        if not free:
            return FoundParameters(dict(fixed), likelihood(origin).item(), True)
        lifted = scaled = torch.tensor([name in of_components for name in free])
        block, root, tolerance = self._block(readings), torch.eye(len(free), dtype=torch.float64), _SMALLEST_STEP
        before, begin = _best(origin + _RATIOS[:, None] * scaled, likelihood)
        if block is None:
            origin = begin
        else:
            near = self.maximum(block, start).values if near is None else near
            at_near = coordinates_of({name: near[name] or start[name] * math.exp(-_FALL_TO_NOTHING) for name in near})
            lifted = torch.tensor([self.kinds[name] == "variance" for name in free])  # a noise may be gone there
            if likelihood(at_near[None]).item() > before:
                begin, few = at_near, ReadingsTable.of(model, block)
                curvature = _hessian(begin, lambda at: exact_log_likelihood(few.problem(values(at))))
                sizes, basis = torch.linalg.eigh(-curvature * len(readings) / len(block))
                root = basis * sizes.clamp(min=1.0).rsqrt()  # of the inverse. What hardly curves counts as if by one
                tolerance = _SMALLEST_STEP_OF_LONG
        best = _maximum_from(begin, likelihood, self.max_steps, root, tolerance)
        for _ in range(_MOST_RESTARTS):
            alone = torch.eye(len(free), dtype=torch.bool)[lifted]  # each variance by itself
            candidates = torch.where(alone[:, None], origin + _LIFTS[:, None], best.at).reshape(-1, len(free))
            total, begin = _best(torch.cat([best.at[None], candidates]), likelihood)
            if not total > best.total + _LEAST_GAIN:
                break
            again = _maximum_from(begin, likelihood, self.max_steps, root, tolerance)
            best = again if again.total > best.total else best
        total, at, slope = best
        found = {name: float(value) for name, value in values(at).items()}
        fallen = dict(zip(free, (origin - at).tolist(), strict=True))
        vanished = {**found, **{name: 0.0 for name in of_components if fallen[name] > _VANISHING_FALL}}
        at_zero = exact_log_likelihood(table.problem(vanished)).item() if vanished != found else -math.inf
        if at_zero > total - _EQUAL_LIKELIHOODS:
            found, total = vanished, at_zero
        slowest = _LEAST_DECAY / self.scale.gap
        slow = {decay: names for decay, names in self.decays.items() if found[decay] < slowest}
        raised = self._with_decays(found, dict.fromkeys(slow, slowest))  # stationary variances stay
        raised |= {name: raised[name] * slowest / found[decay] for decay, names in slow.items() for name in names}
        if raised != found and (at_raised := exact_log_likelihood(table.problem(raised)).item()) > total - _LEAST_GAIN:
            found, total = raised, at_raised
        count = int((~np.isnan(readings.used)).sum())
        return FoundParameters(found, total, bool(slope.abs().max() < _LARGEST_END_SLOPE * max(1.0, count / 1000)))

    def _block(self, readings: Readings) -> Readings | None:
        """The last readings of a long series, by which a search gets near the maximum. None: it is short."""
        longest = max((component.shortest_span() for component in self.model.components), default=0.0)
        seen = np.flatnonzero(~np.isnan(readings.used))
        least = int(np.searchsorted(readings.times, readings.times[-1] - _BLOCK_PERIODS * longest))
        first = min(least, int(seen[-min(_BLOCK_READINGS, len(seen))]))
        short = _LONG_IN_BLOCKS * (len(readings) - first) > len(readings)
        return None if short else readings.selected(slice(first, None))

    def _with_decays(self, values: Mapping[str, float], decays: Mapping[str, float]) -> dict[str, float]:
        """Values with other decays and the same diffusions: variances that are gained over a unit of time follow."""
        changed = {**values, **decays}
        before, after = self.shares(values), self.shares(changed)
        free = before.keys() - self.fixed.keys()
        return changed | {name: values[name] * after[name] / before[name] for name in free}

    def standard_errors(self, readings: Readings, found: Mapping[str, float]) -> dict[str, float]:
        """Of the free parameters at the maximum, as `to_factors` has them: `se(v) = |dv / dx| sqrt((-H^-1)_xx)`.

        H is the Hessian along the coordinates of the search, by differences. Infinite at zero, and without a maximum.
        """
        kinds, fixed = self.kinds, self.fixed
        free = [name for name in kinds if name not in fixed and found[name] > 0]
        errors = dict.fromkeys(to_factors(kinds, {name: x for name, x in found.items() if name not in fixed}), math.inf)
        if not free:
            return errors
        table, kept = ReadingsTable.of(self.model, readings), {**fixed, **found}
        at = torch.tensor([found[name] for name in free], dtype=torch.float64).log()
        hessian = _hessian(
            at, lambda points: exact_log_likelihood(table.problem({**kept, **_exponentials(free, points)}))
        )
        factor, failed = torch.linalg.cholesky_ex(-hessian)
        if failed == 0:
            for name, variance in zip(free, torch.cholesky_inverse(factor).diagonal(), strict=True):
                shown, value = as_factor(name, found[name]) if kinds[name] == "factor" else (name, found[name])
                slope = found[name] * (value if kinds[name] == "factor" and shown == name else 1.0)
                errors[shown] = float(slope * variance.sqrt())
        return errors

    def robust_fit(self) -> tuple[FoundParameters, Readings, Readings]:
        """Fit again to what the robust filter predicts; also the series, and the readings of the likelihood.

        A bound below four standard deviations is taken back where what it leaves out is a quarter of the readings, or
        all noise, or not far beyond it: then it is no error, but a noise of several sizes.
        """
        found, readings, kept, narrow = self._robust_fit()
        if narrow is not None:
            seen, left = (~np.isnan(self.readings.values)).sum(), (~np.isnan(kept.used)).sum()
            noise = max(found.values[name] for name in irregular_names(self.readings.sensors))
            vanished = noise < _NO_NOISE * self.scale.step_variance
            if narrow < _LEAST_MEDIAN or vanished or left < (1 - _MOST_LEFT_OUT) * seen:
                found, readings, kept, _ = replace(self, narrow=False)._robust_fit()
        return found, readings, kept

    def _robust_fit(self) -> tuple[FoundParameters, Readings, Readings, float | None]:
        """The same, and the median of what is left out, in bounds. None: no bound was below four deviations."""
        start, readings, block = self.start, self.readings, self._block(self.readings)
        values = self._plausible_start() if block is None else replace(self, readings=block)._robust_fit()[0].values
        found, before, kept, narrow = None, None, readings, None
        is_kalman_fit = values == start  # the same start and all readings, as without a robust filter
        for _ in range(_MOST_ROUNDS):
            readings = replace(readings, refused=self._wrong_start(values))
            sizes = np.abs(self._innovations(values, readings))
            bound = self._bound(sizes, values)
            left_out = (sizes > bound) | readings.wrong
            if narrow is not None or bound < _FAR_DEVIATIONS:
                narrow = float(np.median(sizes[sizes > bound])) / bound if (sizes > bound).any() else math.inf
            if found is not None and bool((left_out == before).all()):
                break
            if _are_most(left_out, readings):  # such values say nothing about the readings
                left_out = readings.wrong
            before, kept = left_out, replace(readings, values=np.where(left_out, np.nan, readings.values))
            again = {name: value if value > 0 else start[name] for name, value in values.items()}  # 0 has no logarithm
            again = start if found is None and block is not None else again  # a noise may be gone in the block alone
            found = self.maximum(kept, again, values)
            values, is_kalman_fit = found.values, is_kalman_fit and not left_out.any()
        assert found is not None
        assert before is not None
        if not is_kalman_fit and not before.any():  # another start, or fewer readings, may have led to another maximum
            direct = self.maximum(kept, start)
            if direct.log_likelihood > found.log_likelihood and not self._far(direct.values, readings).any():
                found = direct
        return found, readings, kept, narrow

    def _plausible_start(self) -> Mapping[str, float]:
        """The start, with slower decays until at least half of the readings are near their predictions.

        A stationary component may begin far from a series whose mean is not 0. A slower decay with the same Q widens
        its start, while predictions from reading to reading stay narrow.
        """
        start = self.start
        for exponent in range(_SLOWER_STARTS if self.decays else 0):
            slower = self._with_decays(start, {decay: start[decay] * 10.0**-exponent for decay in self.decays})
            if not _are_most(self._far(slower, self.readings), self.readings):
                return slower
        return start

    def _far(self, values: Mapping[str, float], readings: Readings) -> np.ndarray:
        """Which readings are far from their predictions, `(T,)`."""
        sizes = np.abs(self._innovations(values, readings))
        return sizes > self._bound(sizes, values)

    def _bound(self, sizes: np.ndarray, values: Mapping[str, float]) -> float:
        """The standardised innovation beyond which a reading is far: four standard deviations.

        As long as many wrong readings are among the fitted ones, the noise is too large. This shows where most
        innovations are far smaller than predicted. Then their own deviation counts.
        """
        known = sizes[~np.isnan(sizes)]
        deviation = float(np.median(known)) / _MEDIAN_DEVIATION if len(known) else 1.0
        noise = max(values[name] for name in irregular_names(self.readings.sensors))
        smaller = 0 < deviation < min(_MASKED_DEVIATION, 1 - _CHANCE_ERRORS / math.sqrt(max(len(known), 1)))
        masked = self.narrow and smaller and noise > _LEAST_NOISE * self.scale.step_variance
        return _FAR_DEVIATIONS * (deviation if masked else 1.0)

    def _innovations(self, values: Mapping[str, float], readings: Readings) -> np.ndarray:
        """Of the robust filter, NaN where nothing predicts a reading."""
        problem = ReadingsTable.of(self.model, readings).problem(values)
        run = filter_readings(problem, self.scale, robust=True)
        return standardised_innovations(problem, run, self.scale)

    def _wrong_start(self, values: Mapping[str, float]) -> np.ndarray:
        """Which of the first readings, that nothing predicts, are wrong, `(T,)`.

        The series is filtered without each of them, and without the first two, three and so on. Of the start with the
        fewest far readings the smoother says which are far from its estimates.
        """
        readings = self.readings.selected(slice(_START_READINGS))
        innovations = self._innovations(values, readings)
        seen = ~np.isnan(readings.values)
        unpredicted = seen & np.isnan(innovations)
        none = np.zeros(len(self.readings), dtype=bool)
        places = np.flatnonzero(unpredicted)
        fewest = int(self._far(values, readings).sum())
        if not fewest or 2 * len(places) >= seen.sum():  # all is well, or there is no series to judge by
            return none
        best, least = none[: len(seen)], float(fewest)
        alone = [np.arange(len(seen)) == place for place in places]
        prefixes = [seen & (seen.cumsum() <= count) for count in range(2, 2 * len(places) + _EXTRA_READINGS + 1)]
        for refused in [*alone, *prefixes]:
            far = self._far(values, replace(readings, refused=refused))
            cost = far.sum() + _REFUSAL_COST * refused.sum()
            if cost < least:
                best, least = refused, cost
        if not best.any():
            return none
        problem = ReadingsTable.of(self.model, replace(readings, refused=best)).problem(values)
        mean, variance = problem.of_readings(filter_readings(problem, self.scale, robust=True, smooth=True))
        wrong = best & (np.abs(readings.values - readings.offset - mean) > _FAR_DEVIATIONS * np.sqrt(variance))
        return np.pad(wrong, (0, len(self.readings) - len(wrong)))


def _maximum_from(
    origin: Tensor, likelihood: Callable[[Tensor], Tensor], max_steps: int, root: Tensor, tolerance: float
) -> Maximum:
    """The best point of L-BFGS from `origin`, with slopes by central differences.

    The search is along the columns of `root`, by which the likelihood curves alike. No coordinate changes by more than
    60, where the likelihood has no maximum: a step too far must not end the search.
    """
    free = len(origin)
    shifts = _SLOPE_STEP * torch.cat([torch.zeros(1, free), torch.eye(free), -torch.eye(free)])
    along = torch.zeros_like(origin).requires_grad_()
    seen: list[Maximum] = []
    tolerances: dict[str, Any] = {"tolerance_grad": 1e-5, "tolerance_change": tolerance}
    search = torch.optim.LBFGS([along], max_iter=max_steps, line_search_fn="strong_wolfe", **tolerances)

    def evaluate() -> Tensor:
        bounded = (root @ along.detach() / _LARGEST_CHANGE).tanh()
        at = origin + _LARGEST_CHANGE * bounded
        found = likelihood(at + shifts)
        if not bool(found.isfinite().all()):
            raise ValueError("values: got a likelihood that is not finite, expected smaller numbers or noises")
        slope = (found[1 : free + 1] - found[free + 1 :]) / (2 * _SLOPE_STEP)
        along.grad = -(root.mT @ (slope * (1 - bounded.square())))
        seen[:] = [max([*seen, Maximum(found[0].item(), at, slope)], key=lambda one: one.total)]
        return -found[0]

    evaluate()  # an error here is the caller's; a later one is the search's, which has gone too far
    with suppress(ValueError, torch.linalg.LinAlgError):
        search.step(evaluate)  # type: ignore[no-untyped-call]
    return seen[0]


def _hessian(at: Tensor, likelihood: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the likelihood along all coordinates, by second differences."""
    step = _HESSIAN_STEP * torch.eye(len(at), dtype=torch.float64)
    pairs = torch.stack([step[:, None] + step, step[:, None] - step, step - step[:, None], -step[:, None] - step])
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    found = likelihood((at + pairs).reshape(-1, len(at))).reshape(pairs.shape[:3])
    return torch.einsum("s,sij->ij", signs, found) / (4 * _HESSIAN_STEP**2)


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


def _are_most(some: np.ndarray, readings: Readings) -> bool:
    """Whether more than half of the readings are among some."""
    seen = ~np.isnan(readings.values)
    return bool(2 * (some & seen).sum() > seen.sum())


def newton_maximum(total: Callable[[np.ndarray], float], at: np.ndarray, max_steps: int) -> tuple[np.ndarray, bool]:
    """Where a function has its maximum, by Newton's method with differences, and whether the search has ended there."""
    best, moves = total(at), _DIFFERENCE * np.eye(len(at))
    for _ in range(max_steps):
        ahead, behind = (np.array([total(at + sign * move) for move in moves]) for sign in (1, -1))
        slope = (ahead - behind) / (2 * _DIFFERENCE)
        curvature = np.diag(ahead + behind - 2 * best)
        for i, j in zip(*np.tril_indices(len(at), -1), strict=True):
            curvature[i, j] = curvature[j, i] = total(at + moves[i] + moves[j]) - ahead[i] - ahead[j] + best
        values, basis = np.linalg.eigh(curvature / _DIFFERENCE**2)
        step = basis @ ((basis.T @ slope) / np.maximum(np.abs(values), _WEAK))
        step *= min(1.0, LONGEST_STEP / max(float(np.abs(step).max()), 1e-300))
        while not (found := total(at + step)) > best and np.abs(step).max() > _DIFFERENCE**2:
            step = step / 2
        if not found > best + _SMALLEST_GAIN:
            return at, True
        flat = (slope < 0) & (np.abs(curvature.diagonal()) < _WEAK * _DIFFERENCE**2)
        at, gained, best = at + step, found - best, found
        if flat.any() and gained < _NO_GAIN and 0 <= total(np.where(flat, LEAST_LOG, at)) - best < _NO_GAIN:
            return at, True
    return at, False
