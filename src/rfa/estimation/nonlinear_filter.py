"""The robust filter of a `NonlinearModel`: extended Kalman or sigma-point steps, with the weights of the linear filter.

Weights, noise scales and challengers are those of `recursive_filter.py`: with linear f and h both give the same, with
one exception. Here a filter that a challenger replaces becomes the challenger, so that three wrong readings that agree
are soon forgotten. The linear filter has no such rule: after a diffuse start it doubled the error of large outliers.

A weight may also count for one component of a reading. Then the components are weighted one after another. Weights come
from compiled code (`rfa_weigh` in kernels/linear.cpp), the rest is NumPy.

Source: Särkkä and Svensson, Bayesian Filtering and Smoothing (2023), chapters 7 to 10 and 12 to 14.
"""

import ctypes
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from rfa.checks import check_choice, require

from . import gaussian
from .compiled import _ROBUST_CONSTANTS, _integer, _pointer
from .gaussian import Gaussian, Information, NoiseScale
from .linear_model import Found, Rows, compiled_library, noise_name
from .nonlinear_model import REGULAR, Linearised, NonlinearModel, of_sensor
from .problem import LARGEST_VALUE

_DIVERGED = 20  # readings in a row, each beyond 99.9 % of what the filter expects
_NORMAL_QUANTILE = 3.09  # of 99.9 %
_MOST_LOG_ODDS = 20.0  # between the two kinds of weights, so that they can change
_SAME_POINT = 1e-12  # relative: a step of the iterated update that changes nothing
_SAME_COST = 1e-9  # relative: a rise by rounding


class Candidate(NamedTuple):
    """The filter or its challenger."""

    mean: ndarray  # `(n,)`
    covariance: ndarray  # `(n, n)`
    scales: dict[str, ndarray]  # by sensor, `(1 + m, 2, scales)`: of its reading and components, as `NoiseScale`
    log_odds: dict[str, float]  # by sensor: of weights for components over weights for readings


class FilterState(NamedTuple):
    """All that the filter carries from one reading to the next."""

    time: float | None
    filter: Candidate
    challenger: Candidate | None = None
    log_odds: float = -math.inf  # of the challenger
    trusted: int = 0  # readings that the challenger will still use with weight 1
    surprises: int = 0  # readings in a row that are beyond what the filter expects


class ReadingPosterior(NamedTuple):
    """What a reading says of its weights and of the state."""

    candidate: Candidate  # after the reading
    weights: ndarray  # `(m,)`, 1 of missing components
    log_evidence: float  # its log density, in units of the noise and without 2 pi
    distance: float  # squared, of the innovation, by what weight 1 expects
    linear: tuple[ndarray, ndarray, ndarray]  # the reading is `slope x + e`: its value, the slope, the variance of e
    innovation: ndarray  # `(m,)`
    variance: ndarray  # `(m,)`, of the innovation with weight 1


class SeenNoise(NamedTuple):
    """R of a reading, some of whose components may be missing: these have noise of their own, 1."""

    noise: ndarray  # `(m, m)`
    bound: ndarray  # `(m,)`, of an innovation: squares of larger ones overflow
    log_scale: float  # the log density of a reading is that in units of the noise minus this
    kind: int  # of its weights, as kernels/linear.cpp numbers them


class Reading(NamedTuple):
    """A reading."""

    time: float
    sensor: str
    value: ndarray  # `(m,)`, NaN where a component is missing
    control: tuple[ndarray, ...] = ()  # u from the reading before to this one, or nothing

    @property
    def seen(self) -> ndarray:
        """Which components are there, `(m,)`."""
        return ~np.isnan(self.value)


class ReadingStep(NamedTuple):
    """A reading, and the filter before and after it."""

    row: Reading
    before: Candidate
    posterior: ReadingPosterior | None  # None where nothing was read

    @property
    def after(self) -> Candidate:
        """After the reading."""
        return self.before if self.posterior is None else self.posterior.candidate


def _result_or_none(step: Callable[..., Any], *given: Any) -> Any:
    """The result of a step. None where f or h fails for a challenger: it ends then."""
    try:
        return step(*given)
    except (ValueError, np.linalg.LinAlgError):
        return None


class NonlinearKernel:
    """The filter of a `NonlinearModel`, as `LinearKernel` is that of matrices. A series' state is a `FilterState`.

    Args:
        model: its functions.
        names: of the states.
        robust: whether readings are weighted.
        weights: "reading", "component" or "auto".
        scales: factors of Q ("process_noise") and of a sensor's R, 1 where there is none.
    """

    inputs, step, bound_step = None, 0.0, None  # any number of inputs, any gaps, and no compiled step

    def __init__(
        self, model: NonlinearModel, names: tuple[str, ...], robust: bool, weights: str,
        scales: Mapping[str, float] = MappingProxyType({}),
    ):  # fmt: skip
        check_choice("weights", weights, ("auto", "reading", "component"))
        self.robust, self.weights, self.names, self.states = robust, weights, names, len(names)
        self.needs_control = model.needs_control
        self.iterations, self.model = model.iterations, Linearised(model, self.states, scales.get("process_noise", 1.0))
        self.by_name = {
            name: replace(sensor, observation_noise=sensor.observation_noise * scales.get(noise_name(name), 1.0))
            for name, sensor in model.sensors.items()  # type: ignore[union-attr]
        }
        noises = {name: sensor.observation_noise for name, sensor in self.by_name.items()}
        for name, noise in noises.items():
            fits = weights != "component" or np.count_nonzero(noise) == len(noise)
            require(fits, "weights", weights, f"'reading' or 'auto': observation_noise{of_sensor(name)} not diagonal")
        self.sensors, self.sizes = tuple(noises), np.array([len(x) for x in noises.values()])
        self.noise = np.concatenate([noise.diagonal() for noise in noises.values()])
        self._noises, self._identity = dict[tuple[str, bytes], SeenNoise](), np.eye(self.states)
        weigh = compiled_library().rfa_weigh
        weigh.argtypes = [_pointer, *[_integer] * 3, *[_pointer] * 3]
        self._weigh = functools.partial(weigh, ctypes.addressof(_ROBUST_CONSTANTS))
        self.by_component, total = weights != "reading", int(self.sizes.sum())
        self.all_parts, self.one_parts = (total, int(self.sizes.max())) if self.by_component else (len(noises), 1)

    def start(self, means: ndarray, covariances: ndarray, times: ndarray) -> ndarray:
        """The states `(series,)` of series that start at times, NaN where at their first reading."""
        states = np.empty(len(means), dtype=object)
        for k, (mean, covariance, time) in enumerate(zip(means, covariances, times.tolist(), strict=True)):
            states[k] = FilterState(None if math.isnan(time) else time, Candidate(mean, covariance, {}, {}))
        return states

    def readings_of(self, number: int, mean: ndarray, covariance: ndarray) -> tuple[ndarray, ndarray]:
        """Means and variances `(..., m)` of readings by moments of states: of all sensors (-1), or of one."""
        found = np.empty((2, *mean.shape[:-1], len(self.noise) if number < 0 else int(self.sizes[number])))
        for place in np.ndindex(mean.shape[:-1]):
            for name, columns, _ in self._parts(number):
                sensor, at = self.by_name[name], covariance[place]
                linear = self.model.reading(name, sensor, mean[place], at)
                variance = ((linear.slope @ at) * linear.slope).sum(-1) + linear.extra.diagonal()
                found[(slice(None), *place, columns)] = linear.value, variance + sensor.observation_noise.diagonal()
        return found[0], found[1]

    def _parts(self, number: int) -> Iterator[tuple[str, slice, slice]]:
        """The sensors of a row, of all (-1) or of one, their columns of readings, and those of weights."""
        end = 0
        for k, name in enumerate(self.sensors):
            if number in (-1, k):
                columns = slice(end, end + int(self.sizes[k]))
                yield name, columns, columns if self.by_component else slice(k * (number < 0), k * (number < 0) + 1)
                end += int(self.sizes[k]) * (number < 0)

    def run(self, rows: Rows, state: ndarray, smooth: bool = False) -> tuple[Found, tuple[str, int, int] | None]:
        """Filter rows from the states before them, which become those after. Or smooth from a start.

        Returns:
            What is found, and a fault with its series and row, or None.
        """
        (series, length, width), n = rows.readings.shape, self.states
        parts = self.all_parts if rows.sensor is None else self.one_parts
        shapes = [(n,), (n, n), (parts,), (parts,), (width,), (width,), ()]
        found = Found(*(np.full((series, length, *shape), np.nan) for shape in shapes))
        found.log_density[...] = 0.0
        numbers = [-1] * length if rows.sensor is None else rows.sensor[0].tolist()
        for k in range(series):
            now, steps, given = state[k], list[ReadingStep](), list[tuple[int, Reading, slice, slice]]()
            times, controls, at = rows.times[k % len(rows.times)].tolist(), rows.control, 0
            if length and now.time is not None and times[0] < now.time:
                return found, ("late", k, 0)
            for row, (time, number) in enumerate(zip(times, numbers, strict=True)):
                if np.isinf(rows.readings[k, row]).any():
                    return found, ("infinite", k, row)
                control = () if controls is None else (controls[k % len(controls), row],)
                for name, columns, places in self._parts(number):
                    reading = Reading(time, name, rows.readings[k, row, columns], control)
                    given.append((row, reading, columns, places))
            try:
                if smooth:
                    at, steps = length - 1, self.smoothed([reading for _, reading, *_ in given], now)
                else:
                    for row, reading, *_ in given:
                        at = row
                        before, (now, step) = now, self.used(now, reading)
                        steps.append(step)
                        if before.surprises < now.surprises == _DIVERGED:
                            fault = f"{_DIVERGED} readings in a row, up to time {reading.time:g}, are beyond 99.9 % of"
                            warnings.warn(f"the filter may have diverged: {fault} what it expects", stacklevel=5)
                    state[k] = now
            except (ValueError, np.linalg.LinAlgError) as error:
                return found, (str(error), k, at)
            for (row, _, columns, places), step in zip(given, steps, strict=True):
                self._write(Found(*(x[k, row : row + 1] for x in found)), step, columns, places)
        return found, None

    def _write(self, found: Found, step: ReadingStep, columns: slice, places: slice) -> None:
        """Write a step of one sensor into its row of what is found."""
        found.mean[0], found.covariance[0] = step.after.mean, step.after.covariance
        if (posterior := step.posterior) is None:
            return
        seen, of = step.row.seen, self._noise_of(step.row.sensor, step.row.seen)
        spread = np.where(seen, posterior.variance / of.noise.diagonal() - 1, np.nan)
        found.log_density[0] += posterior.log_evidence - of.log_scale
        found.predicted[0, columns] = step.row.value - posterior.innovation
        found.variance[0, columns] = np.where(seen, posterior.variance, np.nan)
        if self.by_component:
            found.weight[0, places], found.spread[0, places] = np.where(seen, posterior.weights, np.nan), spread
        else:
            found.weight[0, places], found.spread[0, places] = posterior.weights[seen][0], np.nanmean(spread)

    def predicted(self, candidate: Candidate, before: float | None, row: Reading) -> Candidate:
        """A step later. Two readings of one time have no step between them, and the first of all has none before it."""
        if before is None or row.time == before:
            return candidate
        linear, noise = self.model.step(candidate.mean, candidate.covariance, row.time - before, *row.control)
        covariance = linear.slope @ candidate.covariance @ linear.slope.T + noise
        finite = bool(np.isfinite(covariance).all())
        require(finite, "times", row.time - before, "a shorter step: the state overflows")
        return candidate._replace(mean=linear.value, covariance=(covariance + covariance.T) / 2)

    def used(self, state: FilterState, row: Reading) -> tuple[FilterState, ReadingStep]:
        """After one more reading."""
        before, m = self.predicted(state.filter, state.time, row), int(row.seen.sum())
        rival: Any = state.challenger and _result_or_none(self.predicted, state.challenger, state.time, row)
        if not m:
            return state._replace(time=row.time, filter=before, challenger=rival), ReadingStep(row, before, None)
        own, other = self.posterior(before, row), rival and _result_or_none(self.posterior, rival, row)
        log_odds, trusted, ended, same = state.log_odds, max(state.trusted - 1, 0), True, False
        if other is not None:
            if state.trusted and other.weights.min() < gaussian.REJECTED:  # it keeps what it says of the scale
                full = self.posterior(rival, row, np.ones(len(row.value)))
                learned = full.candidate._replace(scales=other.candidate.scales, log_odds=other.candidate.log_odds)
                other = full._replace(candidate=learned, log_evidence=other.log_evidence)
            change = other.log_evidence - own.log_evidence
            log_odds, same = log_odds + min(change, gaussian.MOST_LOG_ODDS_GAIN), abs(change) < gaussian.SAME_LOG_ODDS
            if log_odds > 0:  # they change places: where the challenger was wrong, the next reading says so
                own, other, before, log_odds, trusted = other, own, rival, -log_odds, 0
            ended = not gaussian.ABANDONED_LOG_ODDS < log_odds <= 0
        if (ended or same) and own.weights.min() < gaussian.REJECTED and own.distance < gaussian.NO_DIGITS:
            wide = before._replace(covariance=before.covariance * max(own.distance / m, 1.0))
            other = _result_or_none(self.posterior, wide, row, np.ones(len(row.value)))
            log_odds, trusted = gaussian.PRIOR_LOG_ODDS, 2 * (-(-len(before.mean) // m) - 1)
        elif ended:
            other = None
        beyond = own.distance > m * (1 - 2 / (9 * m) + _NORMAL_QUANTILE * math.sqrt(2 / (9 * m))) ** 3
        surprises = state.surprises + 1 if beyond else 0
        following = other and other.candidate
        log_odds = -math.inf if following is None else log_odds
        after = FilterState(row.time, own.candidate, following, log_odds, trusted, surprises)
        return after, ReadingStep(row, before, own)

    def posterior(self, prior: Candidate, row: Reading, weights: ndarray | None = None) -> ReadingPosterior:
        """After a reading, by its robust weights or by given ones. Iterations are Gauss-Newton steps that may halve."""
        sensor, seen = self.by_name[row.sensor], row.seen
        reading, (noise, bound, _, kind) = np.where(seen, row.value, 0.0), self._noise_of(row.sensor, seen)
        (mean, covariance, *_), n, m = prior, self.states, len(seen)
        spread, dual = covariance, np.zeros(n)  # the state is `mean + covariance dual`
        accepted, least, found, expected = dual, math.inf, None, tuple[ndarray, ...]()
        for _ in range(self.iterations):
            point = mean + covariance @ dual
            linear = self.model.reading(row.sensor, sensor, point, spread)
            slope, extra = linear.slope * seen[:, None], linear.extra * (seen[:, None] & seen)
            left = np.minimum(np.maximum(sensor.difference(reading, linear.value) * seen, -bound), bound)
            innovation = left - slope @ (mean - point)
            scales = prior.scales[row.sensor].copy() if row.sensor in prior.scales else self._first_scales(m)
            given = np.concatenate([x.ravel() for x in (innovation, slope, extra, noise, covariance, seen)])
            out = np.append(np.empty(m + n * n + 2), prior.log_odds.get(row.sensor, 0.0))
            sizes = (kind if weights is None else 0), n, m
            if self._weigh(*sizes, *(x.ctypes.data for x in (scales, given, out))):
                raise MemoryError("rfa: no memory for a reading")
            own = out[:m] if weights is None else weights
            evidence, distance, odds = out[-3:].tolist()
            error, across = extra + noise / own, slope @ covariance  # R is diagonal where weights differ
            cost = dual @ covariance @ dual + left @ np.linalg.solve(error, left) if self.iterations > 1 else 0.0
            if cost > least * (1 + _SAME_COST):
                dual = (dual + accepted) / 2
                continue
            variance = across @ slope.T
            expected = expected or (left, (variance + extra + noise).diagonal())
            solved = np.linalg.solve(variance + error, np.concatenate([innovation[:, None], across], axis=1))
            accepted, least, dual = dual, cost, slope.T @ solved[:, 0]
            updated, gain = mean + covariance @ dual, solved[:, 1:].T
            kept, scatter = self._identity - gain @ slope, out[m : m + n * n].reshape(n, n)
            spread = kept @ covariance @ kept.T + gain @ error @ gain.T + scatter  # Joseph's form
            spread = (spread + spread.T) / 2
            finite = bool(np.isfinite(updated).all() and np.isfinite(spread).all())
            require(finite, f"readings{of_sensor(row.sensor)}", row.value.tolist(), "other units: the state overflows")
            odds = min(max(odds, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
            after = Candidate(
                updated, spread, {**prior.scales, row.sensor: scales}, {**prior.log_odds, row.sensor: odds}
            )
            linear_reading = innovation + slope @ mean, slope, error
            found = ReadingPosterior(after, own, evidence, distance, linear_reading, *expected)  # type: ignore[arg-type]
            if np.abs(updated - point).max() <= _SAME_POINT * np.abs(updated).max():
                break
        assert found is not None
        return found

    def _noise_of(self, name: str, seen: ndarray) -> SeenNoise:
        """Of a sensor's components that are seen, computed once."""
        key = name, seen.tobytes()
        if key not in self._noises:
            noise = np.where(seen[:, None] & seen, self.by_name[name].observation_noise, np.eye(len(seen)))
            alone = self.weights == "reading" or (self.weights == "auto" and seen.sum() == 1)
            alone |= np.count_nonzero(noise) > len(seen)
            kind = 0 if not self.robust else 1 if alone else 2 if self.weights == "component" else 3
            log_scale = (np.linalg.slogdet(noise)[1] + seen.sum() * math.log(2 * math.pi)) / 2
            self._noises[key] = SeenNoise(noise, LARGEST_VALUE * np.sqrt(noise.diagonal()), log_scale, kind)
        return self._noises[key]

    def _first_scales(self, m: int) -> ndarray:
        return np.tile(np.stack(NoiseScale.prior(torch.zeros(1, dtype=torch.float64)))[:, 0], (1 + m, 1, 1))

    def smoothed(self, rows: Sequence[Reading], start: FilterState) -> list[ReadingStep]:
        """Each row with the state by all rows, and its weights, as `recursive_filter.robust_smoother` finds them.

        Backward, a row has the filter's prediction and the same with the future: the one under which it is more
        probable gives its weights. Then the filter goes forward with them, and a pass backward smooths it.
        """
        weights = [np.ones(len(row.value)) for row in rows]
        if self.robust:
            state, steps = start, list[ReadingStep]()
            for row in rows:
                state, step = self.used(state, row)
                steps.append(step)
            weights = self._weights_by_all(steps, state.filter)
        now, time, forward, found = start.filter, start.time, list[ReadingStep](), list[ReadingStep]()
        for row, given in zip(rows, weights, strict=True):
            before = self.predicted(now, time, row)
            forward.append(ReadingStep(row, before, self.posterior(before, row, given) if row.seen.any() else None))
            now, time = forward[-1].after, row.time
        for step, later in zip(forward[::-1], [None, *forward[:0:-1]], strict=True):
            smooth = step.after
            if later is not None and later.row.time == step.row.time:
                smooth = found[-1].after
            elif later is not None:
                lag = later.row.time - step.row.time
                linear, _ = self.model.step(smooth.mean, smooth.covariance, lag, *later.row.control)
                across, predicted, after = linear.slope @ smooth.covariance, later.before, found[-1].after
                gain = np.linalg.lstsq(predicted.covariance, across, rcond=REGULAR)[0].T
                covariance = smooth.covariance + gain @ (after.covariance - predicted.covariance) @ gain.T
                mean = smooth.mean + gain @ (after.mean - predicted.mean)
                smooth = smooth._replace(mean=mean, covariance=(covariance + covariance.T) / 2)
            posterior = step.posterior and step.posterior._replace(candidate=smooth, log_evidence=math.nan)
            found.append(ReadingStep(step.row, smooth, posterior))
        return found[::-1]

    def _weights_by_all(self, steps: list[ReadingStep], last: Candidate) -> list[ndarray]:
        """The weights of each row by earlier and later ones."""
        scales, n, weights = last.scales, len(last.mean), list[ndarray]()
        later = Information(*(torch.zeros(1, *shape, dtype=torch.float64) for shape in ((n, n), (n,), ())))
        for k in reversed(range(len(steps))):
            row, before, posterior = steps[k]
            weights.append(np.ones(len(row.value)))
            if posterior is not None:
                past = before._replace(scales=scales, log_odds=last.log_odds)
                mean, covariance = torch.tensor(past.mean)[None], torch.tensor(past.covariance)[None]
                both = Gaussian(mean, covariance, None, 0 * mean[:, 0]).informed(later)[0]
                future = past._replace(mean=both.mean[0].numpy(), covariance=both.covariance[0].numpy())
                found = max(self.posterior(future, row), self.posterior(past, row), key=lambda x: x.log_evidence)
                last_one = found.candidate.scales[row.sensor][:, 1]
                scales = scales | {row.sensor: np.stack([scales[row.sensor][:, 0], last_one], axis=1)}
                weights[-1] = found.weights
                value, slope, error = found.linear
                whitened = np.linalg.solve(np.linalg.cholesky(error), np.column_stack([value, slope]))[None]
                later = later + Information.of(torch.tensor(whitened[..., 1:]), torch.tensor(whitened[..., 0]))
            if k and steps[k - 1].row.time < row.time:
                earlier = steps[k - 1].after
                lag = row.time - steps[k - 1].row.time
                linear, noise = self.model.step(earlier.mean, earlier.covariance, lag, *row.control)
                later = later.inflated(torch.tensor(noise)[None])
                offset = torch.tensor(linear.value - linear.slope @ earlier.mean)
                later = later._replace(vector=later.vector - later.matrix[0] @ offset)
                later = later.substituted(torch.tensor(linear.slope)[None])
        return weights[::-1]
