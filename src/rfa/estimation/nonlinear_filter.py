"""The robust filter of a `NonlinearModel`: extended Kalman or sigma-point steps, with the weights of the linear filter.

Weights, noise scales and challengers are those of `recursive_filter.py`: with linear f and h both give the same, with
one exception. Here a filter that a challenger replaces becomes the challenger, so that three wrong readings that agree
are soon forgotten. The linear filter has no such rule: after a diffuse start it doubled the error of large outliers.

A weight may also count for one component of a reading. Then the components are weighted one after another.

Source: Särkkä and Svensson, Bayesian Filtering and Smoothing (2023), chapters 7 to 10 and 12 to 14.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from rfa.checks import as_array, require

from .gaussian import (
    ABANDONED_LOG_ODDS,
    MOST_LOG_ODDS_GAIN,
    NO_DIGITS,
    PRIOR_LOG_ODDS,
    REJECTED,
    SAME_LOG_ODDS,
    Gaussian,
    Information,
    NoiseScale,
    ScalePosterior,
    infer_scale,
)
from .nonlinear_model import NonlinearModel, of_sensor
from .problem import LARGEST_VALUE

_DIVERGED = 20  # readings in a row, each beyond 99.9 % of what the filter expects
_NORMAL_QUANTILE = 3.09  # of 99.9 %
_MOST_LOG_ODDS = 20.0  # between the two kinds of weights, so that they can change
_SAME_POINT = 1e-12  # relative: a step of the iterated update that changes nothing
_SAME_COST = 1e-9  # relative: a rise by rounding
_REGULAR = 1e-14  # relative: a direction without variance


class Candidate(NamedTuple):
    """The filter or its challenger."""

    mean: ndarray  # `(n,)`
    covariance: ndarray  # `(n, n)`
    scales: dict[Any, NoiseScale]  # by sensor, and by sensor and component
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
    weights: ndarray  # `(m,)`, of its present components
    log_evidence: float  # its log density, in units of the noise and without 2 pi
    distance: float  # squared, of the innovation, by what weight 1 expects
    linear: tuple[
        ndarray, ndarray, ndarray
    ]  # what was read is `slope x + e`: the reading, the slope, the variance of e


class Weighted(NamedTuple):
    """The weights of a reading, and what it says of the scales of the noise."""

    weights: ndarray  # `(m,)`
    scatter: ndarray  # `(n, n)`: the covariance between scales of the state after the reading
    scales: dict[Any, NoiseScale]
    log_odds: dict[str, float]
    log_evidence: float


class Reading(NamedTuple):
    """A reading."""

    time: float
    sensor: str
    value: ndarray  # `(m,)`, NaN where a component is missing

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


def _tried(step: Callable[..., Any], *given: Any) -> Any:
    """The result of a step. None where f or h fails for a challenger: it ends then."""
    try:
        return step(*given)
    except (ValueError, np.linalg.LinAlgError):
        return None


@dataclass(frozen=True)
class NonlinearRecursion:
    """The steps of the filter of a model."""

    model: NonlinearModel
    robust: bool

    def start(self) -> FilterState:
        """Before any reading."""
        return FilterState(self.model.start_time, Candidate(*self.model.start, {}, {}))

    def predicted(self, candidate: Candidate, before: float | None, time: float) -> Candidate:
        """A step later. Two readings of one time have no step between them, and the first of all has none before it."""
        if before is None or time == before:
            return candidate
        linear, noise = self.model.step(candidate.mean, candidate.covariance, time - before, time)
        covariance = linear.slope @ candidate.covariance @ linear.slope.T + noise
        if not np.isfinite(covariance).all():
            raise ValueError(f"times: got {time:g}, by which the state overflows, expected a shorter step")
        return candidate._replace(mean=linear.value, covariance=(covariance + covariance.T) / 2)

    def filtered(self, rows: Sequence[Reading]) -> tuple[FilterState, list[ReadingStep]]:
        """After all readings, and the steps."""
        state, steps = self.start(), list[ReadingStep]()
        for row in rows:
            state, step = self.used(state, row)
            steps.append(step)
        return state, steps

    def used(self, state: FilterState, row: Reading) -> tuple[FilterState, ReadingStep]:
        """After one more reading."""
        before, m = self.predicted(state.filter, state.time, row.time), int(row.seen.sum())
        rival: Any = state.challenger and _tried(self.predicted, state.challenger, state.time, row.time)
        if not m:
            return state._replace(time=row.time, filter=before, challenger=rival), ReadingStep(row, before, None)
        own, other = self.posterior(before, row), rival and _tried(self.posterior, rival, row)
        log_odds, trusted, ended, same = state.log_odds, max(state.trusted - 1, 0), True, False
        if other is not None:
            if state.trusted and other.weights.min() < REJECTED:  # it keeps what it says of the scale
                full = self.posterior(rival, row, np.ones(m))
                learned = full.candidate._replace(scales=other.candidate.scales, log_odds=other.candidate.log_odds)
                other = full._replace(candidate=learned, log_evidence=other.log_evidence)
            change = other.log_evidence - own.log_evidence
            log_odds, same = log_odds + min(change, MOST_LOG_ODDS_GAIN), abs(change) < SAME_LOG_ODDS
            if log_odds > 0:  # they change places: where the challenger was wrong, the next reading says so
                own, other, before, log_odds, trusted = other, own, rival, -log_odds, 0
            ended = not ABANDONED_LOG_ODDS < log_odds <= 0
        if (ended or same) and own.weights.min() < REJECTED and own.distance < NO_DIGITS:
            wide = before._replace(covariance=before.covariance * max(own.distance / m, 1.0))
            other = _tried(self.posterior, wide, row, np.ones(m))
            log_odds, trusted = PRIOR_LOG_ODDS, 2 * (-(-len(before.mean) // m) - 1)
        elif ended:
            other = None
        beyond = own.distance > m * (1 - 2 / (9 * m) + _NORMAL_QUANTILE * math.sqrt(2 / (9 * m))) ** 3
        surprises = state.surprises + 1 if beyond else 0
        if surprises == _DIVERGED:
            fault = f"{_DIVERGED} readings in a row, up to time {row.time:g}, are beyond 99.9 % of what it expects"
            warnings.warn(f"the filter may have diverged: {fault}", stacklevel=4)
        following = other and other.candidate
        log_odds = -math.inf if following is None else log_odds
        after = FilterState(row.time, own.candidate, following, log_odds, trusted, surprises)
        return after, ReadingStep(row, before, own)

    def posterior(self, prior: Candidate, row: Reading, weights: ndarray | None = None) -> ReadingPosterior:
        """After a reading, by its robust weights or by given ones. Iterations are Gauss-Newton steps that may halve."""
        sensor, seen = self.model.by_name[row.sensor], row.seen
        reading, noise = np.where(seen, row.value, 0.0), sensor.noise[np.ix_(seen, seen)]
        mean, covariance, *_ = prior
        spread, dual = covariance, np.zeros_like(mean)  # the state is `mean + covariance dual`
        accepted, least, found = dual, math.inf, None
        for _ in range(self.model.iterations):
            point = mean + covariance @ dual
            linear = self.model.reading(row.sensor, point, spread, row.time)
            slope, extra = linear.slope[seen], linear.extra[np.ix_(seen, seen)]
            bound = LARGEST_VALUE * np.sqrt(noise.diagonal())  # squares of larger ones overflow
            left = sensor.difference(reading, linear.value)[seen].clip(-bound, bound)
            innovation = left - slope @ (mean - point)
            weighted = self._weighted(prior, row.sensor, np.flatnonzero(seen), innovation, slope, extra, noise, weights)
            rooted = weighted.weights**-0.5
            error = extra + rooted[:, None] * noise * rooted
            cost = dual @ covariance @ dual + left @ np.linalg.solve(error, left)
            if cost > least * (1 + _SAME_COST):
                dual = (dual + accepted) / 2
                continue
            across = slope @ covariance
            solved = np.linalg.solve(across @ slope.T + error, np.column_stack([innovation, across]))
            accepted, least, dual = dual, cost, slope.T @ solved[:, 0]
            updated, gain = mean + covariance @ dual, solved[:, 1:].T
            kept = np.eye(len(mean)) - gain @ slope
            spread = kept @ covariance @ kept.T + gain @ error @ gain.T + weighted.scatter  # Joseph's form
            spread = (spread + spread.T) / 2
            if not (np.isfinite(updated).all() and np.isfinite(spread).all()):
                fault = f"got {row.value} at time {row.time:g}, by which the state overflows, expected other units"
                raise ValueError(f"readings{of_sensor(row.sensor)}: {fault}")
            distance = innovation @ np.linalg.solve(across @ slope.T + extra + noise, innovation)
            after = Candidate(updated, spread, weighted.scales, weighted.log_odds)
            linear_reading = innovation + slope @ mean, slope, error
            found = ReadingPosterior(after, weighted.weights, weighted.log_evidence, float(distance), linear_reading)
            if np.abs(updated - point).max() <= _SAME_POINT * np.abs(updated).max():
                break
        assert found is not None
        return found

    def _weighted(
        self, prior: Candidate, name: str, seen: ndarray, innovation: ndarray, slope: ndarray, extra: ndarray,
        noise: ndarray, weights: ndarray | None,
    ) -> Weighted:  # fmt: skip
        """The weights of a reading's m components that are seen, by its innovation."""
        m, n = slope.shape
        root = np.linalg.cholesky(noise)
        whitened = np.linalg.solve(root, np.column_stack([innovation, slope, extra]))
        error, rows = whitened[:, 0], whitened[:, 1 : n + 1]
        across = prior.covariance @ rows.T
        variance = rows @ across + np.linalg.solve(root, whitened[:, n + 1 :].T)
        scales = dict(prior.scales)
        if weights is not None or not self.robust:
            factor = np.linalg.cholesky(variance + np.eye(m))
            evidence = -(np.linalg.solve(factor, error) ** 2).sum() / 2 - np.log(np.diag(factor)).sum()
            weights = np.ones(m) if weights is None else weights
            return Weighted(weights, np.zeros((n, n)), scales, prior.log_odds, float(evidence))
        found = self._scale(scales, name, error, variance)
        scatter = across @ found.scatter[0].numpy() @ across.T
        whole = Weighted(np.full(m, found.weight.item()), scatter, scales, prior.log_odds, found.log_evidence.item())
        kind = self.model.weighting
        if kind == "reading" or (m == 1 and kind == "auto") or np.count_nonzero(noise) > m:
            return whole
        weights, covariance, scatter, evidence = np.ones(m), prior.covariance, np.zeros((n, n)), 0.0
        for j, (row, variance_of_error) in enumerate(zip(slope, noise.diagonal(), strict=True)):
            across = covariance @ row
            variance = row @ across + extra[j, j]
            size = variance_of_error**0.5
            found = self._scale(scales, (name, seen[j]), innovation[[j]] / size, variance[None, None] / size**2)
            weights[j], evidence = found.weight.item(), evidence + found.log_evidence.item()
            gain = across / (variance + variance_of_error / weights[j])
            innovation = innovation - slope @ gain * innovation[j]
            between = np.outer(across, across) * (found.scatter.item() / variance_of_error)
            covariance, scatter = covariance - np.outer(gain, across) + between, scatter + between
        odds = prior.log_odds.get(name, 0.0) + evidence - whole.log_evidence
        log_odds = prior.log_odds | {name: min(max(odds, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)}
        if kind == "component" or odds > 0:
            return Weighted(weights, scatter, scales, log_odds, evidence)
        return whole._replace(log_odds=log_odds)

    @staticmethod
    def _scale(scales: dict[Any, NoiseScale], key: Any, innovation: ndarray, variance: ndarray) -> ScalePosterior:
        """The scale of an error by its whitened innovation. What is known of the scales of this key is updated."""
        error = torch.tensor(innovation)[None]
        scale = scales.get(key) or NoiseScale.prior(error)
        present = torch.ones_like(error, dtype=torch.bool)
        found = infer_scale(scale.expected(), error, torch.tensor(variance)[None], present)
        scales[key] = scale.updated(found)
        return found

    def smoothed(self, rows: Sequence[Reading]) -> list[ReadingStep]:
        """Each row with the state by all rows, and its weights, as `recursive_filter.robust_smoother` finds them.

        Backward, a row has the filter's prediction and the same with the future: the one under which it is more
        probable gives its weights. Then the filter goes forward with them, and a pass backward smooths it.
        """
        weights = [np.ones(row.seen.sum()) for row in rows]
        if self.robust:
            state, steps = self.filtered(rows)
            weights = self._weights_by_all(steps, state.filter)
        now, time, forward, found = self.start().filter, self.model.start_time, list[ReadingStep](), list[ReadingStep]()
        for row, given in zip(rows, weights, strict=True):
            before = self.predicted(now, time, row.time)
            forward.append(ReadingStep(row, before, self.posterior(before, row, given) if row.seen.any() else None))
            now, time = forward[-1].after, row.time
        for step, later in zip(forward[::-1], [None, *forward[:0:-1]], strict=True):
            smooth = step.after
            if later is not None and later.row.time == step.row.time:
                smooth = found[-1].after
            elif later is not None:
                lag = later.row.time - step.row.time
                linear, _ = self.model.step(smooth.mean, smooth.covariance, lag, later.row.time)
                across, predicted, after = linear.slope @ smooth.covariance, later.before, found[-1].after
                gain = np.linalg.lstsq(predicted.covariance, across, rcond=_REGULAR)[0].T
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
            weights.append(np.ones(row.seen.sum()))
            if posterior is not None:
                past = before._replace(scales=scales, log_odds=last.log_odds)
                mean, covariance = torch.tensor(past.mean)[None], torch.tensor(past.covariance)[None]
                both = Gaussian(mean, covariance, None, 0 * mean[:, 0]).informed(later)[0]
                future = past._replace(mean=both.mean[0].numpy(), covariance=both.covariance[0].numpy())
                found = max(self.posterior(future, row), self.posterior(past, row), key=lambda x: x.log_evidence)
                scales = scales | {
                    key: NoiseScale(scales[key].counts, scale.last)
                    for key, scale in found.candidate.scales.items()
                    if key in scales
                }
                weights[-1] = found.weights
                value, slope, error = found.linear
                whitened = np.linalg.solve(np.linalg.cholesky(error), np.column_stack([value, slope]))[None]
                later = later + Information.of(torch.tensor(whitened[..., 1:]), torch.tensor(whitened[..., 0]))
            if k and steps[k - 1].row.time < row.time:
                earlier = steps[k - 1].after
                lag = row.time - steps[k - 1].row.time
                linear, noise = self.model.step(earlier.mean, earlier.covariance, lag, row.time)
                later = later.inflated(torch.tensor(noise)[None])
                offset = torch.tensor(linear.value - linear.slope @ earlier.mean)
                later = later._replace(vector=later.vector - later.matrix[0] @ offset)
                later = later.substituted(torch.tensor(linear.slope)[None])
        return weights[::-1]


class NonlinearEstimate(NamedTuple):
    """The state at each of T readings, or query times.

    Args:
        times: `(T,)`.
        mean, covariance: of the state, `(T, n)` and `(T, n, n)`.
        weights: of each reading's components, in (0, 1], `(T, m)`. A component counts as if its variance were
            R / weight. NaN where nothing was read, and beyond the components of a sensor with fewer than others.
        log_likelihood: the log density of all readings, each predicted from those before. NaN of smooth and forecast.
    """

    times: ndarray
    mean: ndarray
    covariance: ndarray
    weights: ndarray
    log_likelihood: float


class NonlinearFilter:
    """Filter, smoother and forecast of a `NonlinearModel`, robustly or, with `robust=False`, with all weights 1.

    Readings are `(T, m)`, or of several sensors T vectors beside `sensor`, the name of each. NaN is a missing
    component. Several may have one time. A `UserWarning` names the time at which 20 readings in a row were beyond
    99.9 % of what the filter expects. A call that raises leaves the filter as it was.

    Raises:
        ValueError: naming the argument, what was given and expected: for times that go back, a reading of the wrong
            length, an unknown sensor, and, with the time, for f, h or Q that give NaN or another shape.
    """

    def __init__(self, model: NonlinearModel, robust: bool = True):
        self.model = model
        self.recursion = NonlinearRecursion(model, robust)
        self.state = self.recursion.start()

    def filter(self, times: Any, readings: Any, sensor: Any = None) -> NonlinearEstimate:
        """The state at each time by the readings up to it, from the model's start. `update` goes on from the last."""
        state, steps = self.recursion.filtered(self._readings(times, readings, sensor, self.model.start_time))
        self.state = state
        return self._estimate(steps)

    def update(self, time: Any, reading: Any, sensor: Any = None) -> NonlinearEstimate:
        """One more reading, in constant time and memory: the row that `filter` of all readings would have."""
        (new,) = self._readings([time], [reading], sensor, self.state.time)
        self.state, step = self.recursion.used(self.state, new)
        return self._estimate([step])

    def smooth(self, times: Any, readings: Any, sensor: Any = None) -> NonlinearEstimate:
        """The state at each time by all readings. What `update` goes on from stays."""
        return self._estimate(self.recursion.smoothed(self._readings(times, readings, sensor, self.model.start_time)))

    def forecast(self, query_times: Any, sensor: str | None = None) -> NonlinearEstimate:
        """The state after the last reading; with a sensor, its readings with their noise."""
        times, now, found = _times("query_times", query_times, self.state.time), self.state, list[Any]()
        for time in times:
            ahead = self.recursion.predicted(now.filter, now.time, time)
            now = now._replace(filter=ahead, time=time)
            if sensor is None:
                found.append((ahead.mean, ahead.covariance))
            else:
                linear = self.model.reading(self._known(sensor), ahead.mean, ahead.covariance, time)
                variance = linear.slope @ ahead.covariance @ linear.slope.T + linear.extra
                found.append((linear.value, variance + self.model.by_name[sensor].noise))
        mean, covariance = (np.stack(x) for x in zip(*found, strict=True))
        return NonlinearEstimate(times, mean, covariance, np.full((len(times), 0), np.nan), math.nan)

    def _known(self, sensor: Any) -> str:
        """The name of a sensor; None where there is only one."""
        names = list(self.model.by_name)
        name = names[0] if sensor is None and len(names) == 1 else sensor
        require(name in names, "sensor", sensor, f"one of {', '.join(map(repr, names))}")
        return name

    def _readings(self, times: Any, readings: Any, sensor: Any, last: float | None) -> list[Reading]:
        times, found = _times("times", times, last), list[Reading]()
        require(len(readings) == len(times), "readings", len(readings), f"{len(times)}, one for each time")
        names = [sensor] * len(times) if sensor is None or isinstance(sensor, str) else list(sensor)
        require(len(names) == len(times), "sensor", len(names), f"{len(times)} names, one for each reading")
        for time, name, given in zip(times.tolist(), map(self._known, names), readings, strict=True):
            reading, argument = as_array(given, "readings").astype(float), f"readings{of_sensor(name)}"
            size = len(self.model.by_name[name].noise)
            require(reading.shape == (size,), argument, reading.shape, f"{(size,)} at time {time:g}")
            require(not np.isinf(reading).any(), argument, reading, f"finite numbers or NaN at time {time:g}")
            found.append(Reading(time, name, reading))
        return found

    def _estimate(self, steps: list[ReadingStep]) -> NonlinearEstimate:
        n, likelihood = len(self.model.start[0]), 0.0
        weights = np.full((len(steps), max(len(sensor.noise) for sensor in self.model.by_name.values())), np.nan)
        for k, (row, _, posterior) in enumerate(steps):
            if posterior is not None:
                seen = np.flatnonzero(row.seen)
                weights[k, seen] = posterior.weights
                noise = self.model.by_name[row.sensor].noise[np.ix_(seen, seen)]
                units = len(seen) * math.log(2 * math.pi) + np.linalg.slogdet(noise)[1]
                likelihood += posterior.log_evidence - units / 2
        states = [step.after for step in steps]
        mean = np.reshape([state.mean for state in states], (len(steps), n))
        covariance = np.reshape([state.covariance for state in states], (len(steps), n, n))
        return NonlinearEstimate(np.array([step.row.time for step in steps]), mean, covariance, weights, likelihood)


def _times(name: str, given: Any, last: float | None) -> ndarray:
    times = np.atleast_1d(as_array(given, name)).astype(float)
    before = times[:1] if last is None else last
    good = times.ndim == 1 and bool(np.isfinite(times).all() and (np.diff(times, prepend=before) >= 0).all())
    since = "" if last is None else f", from {last:g} on"
    require(good, name, times.tolist(), f"finite numbers that do not go back{since}")
    return times
