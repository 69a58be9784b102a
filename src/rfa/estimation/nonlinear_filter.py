"""The robust filter of a nonlinear model, by linearisation where the filter stands.

    x_k = f(x_{k-1}, dt) + q,  q ~ N(0, Q(dt)),      z_k = h(x_k) + e,  e ~ N(0, s R)

f and h are replaced by `value + slope (x - m)` with an error N(0, extra): by their Jacobians at the mean m (extended
Kalman filter; extra is 0), or by sigma points of N(m, P) (statistical regression). Weights, noise scales and
challengers are those of the linear filter (`recursive_filter.py`): with linear f and h both give the same.

Source: Särkkä and Svensson, Bayesian Filtering and Smoothing (2023), chapters 7 to 10 and 12 to 14.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from rfa.checks import as_array, check_choice, require

from .gaussian import Gaussian, Information
from .robust_weight import (
    ABANDONED_LOG_ODDS,
    NO_DIGITS,
    PRIOR_LOG_ODDS,
    REJECTED,
    SAME_LOG_ODDS,
    NoiseScale,
    ScalePosterior,
    infer_scale,
)

Method = Literal["jacobian", "sigma_points"]
Weighting = Literal["auto", "reading", "component"]

_DIVERGED = 20  # readings in a row, each beyond 99.9 % of what the filter expects
_NORMAL_QUANTILE = 3.09  # of 99.9 %
_MOST_LOG_ODDS = 20.0  # between the two kinds of weights, so that they can change
_SAME_POINT = 1e-12  # relative: a step of the iterated update that changes nothing
_SAME_COST = 1e-9  # relative: a rise by rounding


class Linear(NamedTuple):
    """`value + slope (x - mean)`, with an error of covariance `extra`."""

    value: ndarray  # `(m,)`
    slope: ndarray  # `(m, n)`
    extra: ndarray  # `(m, m)`


@dataclass(frozen=True)
class Sensor:
    """How a sensor reads the state.

    Args:
        observation: `h(x)`, from `(n,)` to `(m,)`. Of PyTorch; of NumPy with a `jacobian`, or with sigma points.
        noise: R, `(m, m)` or its diagonal `(m,)`: variances. Positive definite.
        jacobian: of h, `(m, n)`. None: `torch.func.jacfwd`.
        angle: which components are angles in radians, one flag or m: differences are wrapped to [-pi, pi).
        residual: `residual(z, predicted)`, `(m,)`, instead of a difference.
    """

    observation: Callable[..., Any]
    noise: Any
    jacobian: Callable[..., Any] | None = None
    angle: Any = False
    residual: Callable[[Any, Any], Any] | None = None

    def difference(self, reading: ndarray, predicted: ndarray) -> ndarray:
        """Reading minus prediction."""
        if self.residual is not None:
            return np.asarray(self.residual(reading, predicted), dtype=float)
        difference = reading - predicted
        wrapped = (difference + math.pi) % (2 * math.pi) - math.pi
        return np.where(self.angle, wrapped, difference)


@dataclass(frozen=True)
class NonlinearModel:
    """A state that moves by f and is read through h of one or several sensors.

    Args:
        transition: `f(x, dt)`, from `(n,)` to `(n,)`. Of PyTorch; of NumPy with a Jacobian, or with sigma points.
        process_noise: `Q(dt)`, `(n, n)`, or the Q of each step. Positive semi-definite.
        sensors: one, or several by name. Their errors are independent.
        start: mean `(n,)` and covariance `(n, n)` of the state at `start_time`.
        start_time: None: that of the first reading, which is then used without a step before it.
        transition_jacobian: of f, as `jacobian(x, dt)`, `(n, n)`. None: `torch.func.jacfwd`.
        method: "jacobian" or "sigma_points".
        iterations: updates by each reading, each linearised where the last one ended, from the same prior.
        alpha, beta, kappa: of the 2 n + 1 sigma points: `mean -+ sqrt(alpha^2 (n + kappa))` Cholesky columns. The
            defaults 1, 0, 0 are the cubature rule, in which the mean itself has weight 0.
        weighting: whether a weight counts for a whole reading or for each component of one, which needs a diagonal
            R. "auto": the one under which the readings so far are more probable.

    Raises:
        ValueError: for a shape that does not fit, an R that is not positive definite, and unknown choices.
    """

    transition: Callable[..., Any]
    process_noise: Any
    sensors: Sensor | Mapping[str, Sensor]
    start: tuple[Any, Any]
    start_time: float | None = None
    transition_jacobian: Callable[..., Any] | None = None
    method: Method = "jacobian"
    iterations: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    kappa: float = 0.0
    weighting: Weighting = "auto"
    takes_tensors: dict[str, bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("method", self.method, Method)
        check_choice("weighting", self.weighting, Weighting)
        require(isinstance(self.iterations, int) and self.iterations >= 1, "iterations", self.iterations, "at least 1")
        mean, covariance = (np.array(x, dtype=float) for x in self.start)
        n = len(mean) if mean.ndim == 1 else 0
        require(n > 0 and bool(np.isfinite(mean).all()), "start", mean, "a mean of finite numbers, (n,)")
        require(alpha_spread(self, n) > 0, "kappa", self.kappa, f"alpha^2 (n + kappa) > 0 with n = {n}")
        _check_covariance("start", covariance, n)
        given = {"": self.sensors} if isinstance(self.sensors, Sensor) else dict(self.sensors)
        sensors = {}
        for name, sensor in given.items():
            noise = np.array(sensor.noise, dtype=float)
            noise = np.diag(noise) if noise.ndim == 1 else noise
            _check_covariance(f"noise{_of(name)}", noise, len(noise), definite=True)
            angle = np.broadcast_to(np.asarray(sensor.angle, dtype=bool), len(noise))
            sensors[name] = replace(sensor, noise=noise, angle=angle)
        require(bool(sensors), "sensors", self.sensors, "at least one Sensor")
        object.__setattr__(self, "start", (mean, covariance))
        object.__setattr__(self, "sensors", sensors)

    def step(self, mean: ndarray, covariance: ndarray, dt: float, time: float) -> tuple[Linear, ndarray]:
        """f over a step that ends at a time, linearised, and the covariance that the step adds."""
        functions = self.transition, self.transition_jacobian
        linear = self._linearise("transition", functions, mean, covariance, np.subtract, time, dt)
        noise = self.process_noise(dt) if callable(self.process_noise) else self.process_noise
        noise = np.array(noise, dtype=float)
        _check_covariance("process_noise", noise, len(mean))
        return linear, linear.extra + noise

    def reading(self, name: str, mean: ndarray, covariance: ndarray, time: float) -> Linear:
        """h of a sensor, linearised."""
        sensor = self.sensors[name]  # type: ignore[index]
        functions = sensor.observation, sensor.jacobian
        found = self._linearise(f"observation{_of(name)}", functions, mean, covariance, sensor.difference, time)
        require(
            len(found.value) == len(sensor.noise), f"observation{_of(name)}", len(found.value),
            f"{len(sensor.noise)} components, as noise has",
        )  # fmt: skip
        return found

    def _linearise(
        self, name: str, functions: tuple[Any, Any], mean: ndarray, covariance: ndarray, difference: Any, time: float,
        *args: float,
    ) -> Linear:  # fmt: skip
        function, jacobian = functions
        if self.method == "sigma_points":
            n, spread = len(mean), alpha_spread(self, len(mean))
            root = _square_root(covariance)
            offsets = math.sqrt(spread) * np.concatenate([np.zeros((1, n)), root.T, -root.T])
            weights = np.full(2 * n + 1, 0.5 / spread)
            weights[0] = 1 - n / spread
            values = [self._call(name, function, mean + offset, args, time) for offset in offsets]
            moved = np.stack([difference(value, values[0]) for value in values])
            average = weights @ moved
            weights[0] += 1 - self.alpha**2 + self.beta
            moved -= average
            across = (weights[:, None] * offsets).T @ moved
            slope = np.linalg.lstsq(covariance, across, rcond=1e-14)[0].T
            extra = (weights[:, None] * moved).T @ moved - slope @ across
            return Linear(values[0] + average, slope, (extra + extra.T) / 2)
        if jacobian is not None:
            value = self._call(name, function, mean, args, time)
            slope = self._call(f"{name}, jacobian", jacobian, mean, args, time)
        else:
            both = torch.func.jacfwd(lambda x: (y := function(x, *args), y), has_aux=True)
            try:
                slope, value = both(torch.tensor(mean))
            except (TypeError, RuntimeError) as error:
                expected = f"a function of PyTorch, or its Jacobian beside it ({error})"
                raise ValueError(
                    f"{name}: got a function that PyTorch cannot differentiate, expected {expected}"
                ) from error
            value, slope = (_finite(name, x, time) for x in (value, slope))
        if slope.shape != (*value.shape, len(mean)):
            raise ValueError(f"{name}, jacobian: got shape {slope.shape}, expected {(*value.shape, len(mean))}")
        return Linear(value, slope, np.zeros((len(value), len(value))))

    def _call(
        self, name: str, function: Callable[..., Any], x: ndarray, args: tuple[float, ...], time: float
    ) -> ndarray:
        """The value of a function of NumPy or of PyTorch: one that refuses an array gets a tensor from then on."""
        if not self.takes_tensors.get(name):
            try:
                return _finite(name, function(x, *args), time)
            except (TypeError, AttributeError):
                found = _finite(name, function(torch.tensor(x), *args), time)
                self.takes_tensors[name] = True
                return found
        return _finite(name, function(torch.tensor(x), *args), time)


def alpha_spread(model: NonlinearModel, n: int) -> float:
    """`alpha^2 (n + kappa)`: the squared distance of sigma points from the mean, in standard deviations."""
    return model.alpha**2 * (n + model.kappa)


def _of(name: str) -> str:
    return f" of {name!r}" if name else ""


def _finite(name: str, given: Any, time: float) -> ndarray:
    found = np.asarray(given.detach() if isinstance(given, torch.Tensor) else given, dtype=float)
    if not np.isfinite(found).all():
        raise ValueError(f"{name}: got NaN or infinite values at time {time:g}, expected finite numbers")
    return found


def _check_covariance(name: str, given: ndarray, n: int, definite: bool = False) -> None:
    kind = "definite" if definite else "semi-definite"
    expected = f"a symmetric positive {kind} matrix {(n, n)}"
    if (
        given.shape != (n, n)
        or not np.isfinite(given).all()
        or np.abs(given - given.T).max() > 1e-9 * np.abs(given).max()
    ):
        raise ValueError(f"{name}: got {given.tolist()!s:.80}, expected {expected}")
    least, most = np.linalg.eigvalsh(given)[[0, -1]]
    if least < -1e-9 * max(most, 0.0) or (definite and least <= 1e-14 * most) or (most < 0):
        raise ValueError(f"{name}: got an eigenvalue of {least:.6g}, expected {expected}")


def _square_root(covariance: ndarray) -> ndarray:
    """The Cholesky factor, or of a singular matrix the root by its eigenvectors."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        values, basis = np.linalg.eigh(covariance)
        return basis * np.sqrt(values.clip(0))


# One step: filter, challenger, reading


class Candidate(NamedTuple):
    """The filter or its challenger."""

    mean: ndarray  # `(n,)`
    covariance: ndarray  # `(n, n)`
    scales: dict[Any, NoiseScale]  # by sensor, and by sensor and component
    log_odds: dict[str, float]  # by sensor: of weights for components over weights for readings


class State(NamedTuple):
    """All that the filter carries from one reading to the next."""

    time: float | None
    filter: Candidate
    challenger: Candidate | None = None
    log_odds: float = -math.inf  # of the challenger
    trusted: int = 0  # readings that the challenger will still use with weight 1
    surprises: int = 0  # readings in a row that are beyond what the filter expects


class Posterior(NamedTuple):
    """What a reading says of its weights and of the state."""

    candidate: Candidate  # after the reading
    weights: ndarray  # `(m,)`, of its present components
    log_evidence: float  # its log density, in units of the noise and without 2 pi
    distance: float  # squared, of the innovation, by what weight 1 expects


class Weighted(NamedTuple):
    """The weights of a reading, and what it says of the scales of the noise."""

    weights: ndarray  # `(m,)`
    scatter: ndarray  # `(n, n)`: the covariance between scales of the state after the reading
    scales: dict[Any, NoiseScale]
    log_odds: dict[str, float]
    log_evidence: float


class Row(NamedTuple):
    """A reading."""

    time: float
    sensor: str
    reading: ndarray  # `(m,)`, NaN where a component is missing


class Step(NamedTuple):
    """A reading, and the filter before and after it."""

    row: Row
    before: Candidate
    posterior: Posterior | None  # None where nothing was read


@dataclass(frozen=True)
class Recursion:
    """The steps of the filter of a model."""

    model: NonlinearModel
    robust: bool

    def start(self) -> State:
        """Before any reading."""
        return State(self.model.start_time, Candidate(*self.model.start, {}, {}))

    def predicted(self, candidate: Candidate, dt: float, time: float) -> Candidate:
        """A step later. Two readings of one time have no step between them."""
        if dt == 0:
            return candidate
        linear, noise = self.model.step(candidate.mean, candidate.covariance, dt, time)
        covariance = linear.slope @ candidate.covariance @ linear.slope.T + noise
        return candidate._replace(mean=linear.value, covariance=(covariance + covariance.T) / 2)

    def used(self, state: State, row: Row) -> tuple[State, Step]:
        """After one more reading."""
        dt = 0.0 if state.time is None else row.time - state.time
        before = self.predicted(state.filter, dt, row.time)
        state, challenger = state._replace(time=row.time), None
        m = int((~np.isnan(row.reading)).sum())
        if state.challenger is not None:
            challenger = self._tried(lambda: self.predicted(state.challenger, dt, row.time))  # type: ignore[arg-type]
        if not m:
            return state._replace(filter=before, challenger=challenger), Step(row, before, None)
        own, other = self.posterior(before, row), None
        log_odds, trusted, ended, same = state.log_odds, max(state.trusted - 1, 0), True, False
        if challenger is not None:
            rival = challenger
            other = self._tried(lambda: self.posterior(rival, row))
            if other is not None and state.trusted > 0 and other.weights.min() < REJECTED:
                full = self.posterior(rival, row, np.ones(m)).candidate
                scales = other.candidate.scales
                other = other._replace(candidate=full._replace(scales=scales), weights=np.ones(m))
        if other is not None and challenger is not None:
            change = other.log_evidence - own.log_evidence
            log_odds, same = log_odds + change, abs(change) < SAME_LOG_ODDS
            if log_odds > 0:
                own, before = other, challenger
            ended = not ABANDONED_LOG_ODDS < log_odds <= 0
        if (ended or same) and own.weights.min() < REJECTED and own.distance < NO_DIGITS:
            wide = before._replace(covariance=before.covariance * max(own.distance / m, 1.0))
            other = self._tried(lambda: self.posterior(wide, row, np.ones(m)))
            log_odds, trusted = PRIOR_LOG_ODDS, 2 * (-(-len(before.mean) // m) - 1)
        elif ended:
            other = None
        beyond = own.distance > m * (1 - 2 / (9 * m) + _NORMAL_QUANTILE * math.sqrt(2 / (9 * m))) ** 3
        surprises = state.surprises + 1 if beyond else 0
        if surprises == _DIVERGED:
            warnings.warn(
                f"the filter may have diverged: {_DIVERGED} readings in a row, up to time {row.time:g}, are beyond "
                "99.9 % of what it expects",
                stacklevel=4,
            )
        following = None if other is None else other.candidate
        log_odds = -math.inf if following is None else log_odds
        return State(row.time, own.candidate, following, log_odds, trusted, surprises), Step(row, before, own)

    def _tried(self, step: Callable[[], Any]) -> Any:
        """None where f or h fails for a challenger: it ends then."""
        try:
            return step()
        except (ValueError, np.linalg.LinAlgError):
            return None

    def posterior(self, prior: Candidate, row: Row, weights: ndarray | None = None) -> Posterior:
        """After a reading, by its robust weights or by given ones. Iterations are Gauss-Newton steps that may halve."""
        sensor, seen = self.model.sensors[row.sensor], ~np.isnan(row.reading)  # type: ignore[index]
        reading, noise = np.where(seen, row.reading, 0.0), sensor.noise[np.ix_(seen, seen)]
        mean, covariance, *_ = prior
        spread, dual = covariance, np.zeros_like(mean)  # the state is `mean + covariance dual`
        accepted, least, found = dual, math.inf, None
        for _ in range(self.model.iterations):
            point = mean + covariance @ dual
            linear = self.model.reading(row.sensor, point, spread, row.time)
            slope, extra = linear.slope[seen], linear.extra[np.ix_(seen, seen)]
            left = sensor.difference(reading, linear.value)[seen]
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
            distance = innovation @ np.linalg.solve(across @ slope.T + extra + noise, innovation)
            after = Candidate(updated, spread, weighted.scales, weighted.log_odds)
            found = Posterior(after, weighted.weights, weighted.log_evidence, float(distance))
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
        if kind == "reading" or len(noise) == 1 or np.count_nonzero(noise) > m:
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
        error, variance = torch.tensor(innovation)[None], torch.tensor(variance)[None]
        scale = scales.get(key) or NoiseScale.prior(error)
        found = infer_scale(scale.expected(), error, variance, torch.ones_like(error, dtype=torch.bool))
        scales[key] = scale.updated(found)
        return found

    def smoothed(self, rows: Sequence[Row]) -> tuple[list[Candidate], list[ndarray]]:
        """The state at each row by all rows, and their weights, as `recursive_filter.robust_smoother` finds them.

        Backward, a row has the filter's prediction and the same with the future: the one under which it is more
        probable gives its weights. Then the filter goes forward with them, and a pass backward smooths it.
        """
        state, steps = self.start(), list[Step]()
        for row in rows:
            state, step = self.used(state, row)
            steps.append(step)
        weights = self._weights_by_all(steps, state.filter) if self.robust else [np.ones_like(x.reading) for x in rows]
        now, passed, forward = Candidate(*self.model.start, {}, {}), list[Any](), list[Candidate]()
        time = rows[0].time if self.model.start_time is None else self.model.start_time
        for row, given in zip(rows, weights, strict=True):
            dt, linear, noise = row.time - time, None, None
            if dt:
                linear, noise = self.model.step(now.mean, now.covariance, dt, row.time)
                covariance = linear.slope @ now.covariance @ linear.slope.T + noise
                now = now._replace(mean=linear.value, covariance=covariance)
            passed.append((linear, now))
            seen = ~np.isnan(row.reading)
            now = self.posterior(now, row, given[seen]).candidate if seen.any() else now
            forward.append(now)
            time = row.time
        smooth = forward[-1:]
        for before, (linear, predicted) in zip(forward[-2::-1], passed[:0:-1], strict=True):
            after = smooth[-1]
            if linear is not None:
                gain = np.linalg.lstsq(predicted.covariance, linear.slope @ before.covariance, rcond=1e-14)[0].T
                covariance = before.covariance + gain @ (after.covariance - predicted.covariance) @ gain.T
                mean = before.mean + gain @ (after.mean - predicted.mean)
                after = before._replace(mean=mean, covariance=(covariance + covariance.T) / 2)
            smooth.append(after)
        return smooth[::-1], weights

    def _weights_by_all(self, steps: list[Step], last: Candidate) -> list[ndarray]:
        """The weights of each row by earlier and later ones."""
        scales, n = last.scales, len(last.mean)
        later = Information(torch.zeros(1, n, n).double(), torch.zeros(1, n).double(), torch.zeros(1).double())
        weights = list[ndarray]()
        for k in reversed(range(len(steps))):
            row, before, posterior = steps[k]
            weights.append(np.ones_like(row.reading))
            if posterior is not None:
                past = before._replace(scales=scales, log_odds=last.log_odds)
                state = Gaussian(
                    torch.tensor(past.mean)[None], torch.tensor(past.covariance)[None], None, torch.zeros(1)
                )
                both = state.informed(later)[0]
                future = past._replace(mean=both.mean[0].numpy(), covariance=both.covariance[0].numpy())
                found = max(self.posterior(future, row), self.posterior(past, row), key=lambda x: x.log_evidence)
                after = found.candidate.scales
                scales = {key: NoiseScale(x.counts, after[key].last) for key, x in scales.items() if key in after}
                seen = ~np.isnan(row.reading)
                weights[-1][seen] = found.weights
                later = later + self._information(row, found, seen)
            dt = row.time - steps[k - 1].row.time if k else 0.0
            if dt:
                reached = steps[k - 1].before if steps[k - 1].posterior is None else steps[k - 1].posterior.candidate
                linear, noise = self.model.step(reached.mean, reached.covariance, dt, row.time)
                offset = torch.tensor(linear.value - linear.slope @ reached.mean)
                later = later.inflated(torch.tensor(noise)[None])
                later = later._replace(vector=later.vector - later.matrix[0] @ offset)
                later = later.substituted(torch.tensor(linear.slope)[None])
        return weights[::-1]

    def _information(self, row: Row, found: Posterior, seen: ndarray) -> Information:
        """What a reading with its weights says of the state."""
        sensor, mean = self.model.sensors[row.sensor], found.candidate.mean  # type: ignore[index]
        linear = self.model.reading(row.sensor, mean, found.candidate.covariance, row.time)
        slope, inside = linear.slope[seen], np.ix_(seen, seen)
        value = sensor.difference(np.where(seen, row.reading, 0.0), linear.value)[seen] + slope @ mean
        rooted = found.weights**-0.5
        root = np.linalg.cholesky(linear.extra[inside] + rooted[:, None] * sensor.noise[inside] * rooted)
        rows, values = np.linalg.solve(root, slope), np.linalg.solve(root, value)
        return Information.of(torch.tensor(rows)[None], torch.tensor(values)[None])


class NonlinearEstimate(NamedTuple):
    """The state at each of T rows, or query times.

    Args:
        times: `(T,)`.
        mean, covariance: of the state, `(T, n)` and `(T, n, n)`.
        weights: of each reading's components, in (0, 1], `(T, m)`; by sensor where readings were given so. A component
            counts as if its variance were R / weight. NaN where nothing was read, and beyond a sensor's components.
        log_likelihood: the log density of all readings, each predicted from those before. NaN of smooth and forecast.
    """

    times: ndarray
    mean: ndarray
    covariance: ndarray
    weights: Any
    log_likelihood: float


class NonlinearFilter:
    """Filter, smoother and forecast of a `NonlinearModel`, robustly or, with `robust=False`, with all weights 1.

    Readings are `(T, m)` of one sensor; a sequence of T vectors beside `sensor`, a name for each; or a mapping from
    names to `(T, m)`, at the same times. NaN is a missing component. Several may have the same time.

    A `UserWarning` names the time at which 20 readings in a row were beyond 99.9 % of what the filter expects.
    A call that raises leaves the filter as it was.

    Raises:
        ValueError: naming the argument, what was given and expected: for times that go back, a reading of the wrong
            length, an unknown sensor, and f, h or Q that give NaN or another shape, with the time.
    """

    def __init__(self, model: NonlinearModel, robust: bool = True):
        self.model = model
        self.recursion = Recursion(model, robust)
        self.state = self.recursion.start()

    def filter(self, times: Any, readings: Any, sensor: Any = None) -> NonlinearEstimate:
        """The state at each time by the readings up to it, from the model's start. `update` goes on from the last."""
        rows = self._rows(times, readings, sensor, self.model.start_time)
        state, steps = self.recursion.start(), list[Step]()
        for row in rows:
            state, step = self.recursion.used(state, row)
            steps.append(step)
        self.state = state
        return self._estimate(steps, readings)

    def update(self, time: Any, reading: Any, sensor: Any = None) -> NonlinearEstimate:
        """One more reading, in constant time and memory: the row that `filter` of all readings would have."""
        (row,) = self._rows([time], [reading], sensor, self.state.time)
        self.state, step = self.recursion.used(self.state, row)
        return self._estimate([step], None)

    def smooth(self, times: Any, readings: Any, sensor: Any = None) -> NonlinearEstimate:
        """The state at each time by all readings. What `update` goes on from stays."""
        rows = self._rows(times, readings, sensor, self.model.start_time)
        if not rows:
            return self._estimate([], readings)
        states, weights = self.recursion.smoothed(rows)
        steps = [
            Step(row, state, Posterior(state, weight[~np.isnan(row.reading)], math.nan, math.nan))
            for row, state, weight in zip(rows, states, weights, strict=True)
        ]
        return self._estimate(steps, readings)

    def forecast(self, query_times: Any, sensor: str | None = None) -> NonlinearEstimate:
        """The state after the last reading, or with a sensor, its reading with its noise."""
        times = _times("query_times", query_times, self.state.time)
        now, time, found = self.state.filter, self.state.time, list[tuple[ndarray, ndarray]]()
        for query in times:
            now = self.recursion.predicted(now, 0.0 if time is None else query - time, query)
            time = query
            if sensor is None:
                found.append((now.mean, now.covariance))
            else:
                linear = self.model.reading(self._known(sensor), now.mean, now.covariance, query)
                variance = linear.slope @ now.covariance @ linear.slope.T + linear.extra
                found.append((linear.value, variance + self.model.sensors[sensor].noise))  # type: ignore[index]
        mean, covariance = (np.stack(x) for x in zip(*found, strict=True))
        return NonlinearEstimate(times, mean, covariance, np.full((len(times), 0), np.nan), math.nan)

    def _known(self, sensor: Any) -> str:
        """The name of a sensor; None where there is only one."""
        names = list(self.model.sensors)  # type: ignore[arg-type]
        name = names[0] if sensor is None and len(names) == 1 else sensor
        require(name in names, "sensor", sensor, f"one of {', '.join(map(repr, names))}")
        return name

    def _rows(self, times: Any, readings: Any, sensor: Any, last: float | None) -> list[Row]:
        times = _times("times", times, last)
        if isinstance(readings, Mapping):
            given = [(k, name, values) for name, values in readings.items() for k, values in enumerate(values)]
            given.sort(key=lambda one: one[0])
        else:
            names = [sensor] * len(readings) if sensor is None or isinstance(sensor, str) else list(sensor)
            require(len(names) == len(readings), "sensor", len(names), f"{len(readings)} names, one for each reading")
            given = list(zip(range(len(readings)), names, readings, strict=True))
        rows = []
        for k, name, reading in given:
            require(k < len(times), "readings", f"row {k}", f"{len(times)}, one for each time")
            name = self._known(name)
            found = np.atleast_1d(as_array(reading, "readings")).astype(float)
            size = len(self.model.sensors[name].noise)  # type: ignore[index]
            require(found.shape == (size,), f"readings{_of(name)}", found.shape, f"{(size,)} in row {k}")
            require(not np.isinf(found).any(), f"readings{_of(name)}", found, f"finite numbers or NaN in row {k}")
            rows.append(Row(float(times[k]), name, found))
        return rows

    def _estimate(self, steps: list[Step], readings: Any) -> NonlinearEstimate:
        n, likelihood = len(self.model.start[0]), 0.0
        sizes = [len(sensor.noise) for sensor in self.model.sensors.values()]  # type: ignore[union-attr]
        weights, states = np.full((len(steps), max(sizes)), np.nan), list[Candidate]()
        for k, (row, before, posterior) in enumerate(steps):
            states.append(before if posterior is None else posterior.candidate)
            seen = np.flatnonzero(~np.isnan(row.reading))
            if posterior is not None:
                weights[k, seen] = posterior.weights
                noise = self.model.sensors[row.sensor].noise[np.ix_(seen, seen)]  # type: ignore[index]
                units = len(seen) * math.log(2 * math.pi) + np.linalg.slogdet(noise)[1]
                likelihood += posterior.log_evidence - units / 2
        every, found = slice(None), weights
        if isinstance(readings, Mapping) and readings:
            every = slice(len(readings) - 1, None, len(readings))
            found = {
                name: weights[k :: len(readings), : len(self.model.sensors[name].noise)]  # type: ignore[index]
                for k, name in enumerate(readings)
            }
        times = np.array([step.row.time for step in steps])[every]
        mean = np.reshape([state.mean for state in states[every]], (len(times), n))
        covariance = np.reshape([state.covariance for state in states[every]], (len(times), n, n))
        return NonlinearEstimate(times, mean, covariance, found, likelihood)


def _times(name: str, given: Any, last: float | None) -> ndarray:
    times = np.atleast_1d(as_array(given, name)).astype(float)
    good = (
        times.ndim == 1
        and np.isfinite(times).all()
        and (np.diff(times, prepend=times[:1] if last is None else last) >= 0).all()
    )
    require(
        bool(good),
        name,
        f"{times.tolist()!s:.60}",
        "finite numbers that do not go back" + ("" if last is None else f" behind {last:g}"),
    )
    return times
