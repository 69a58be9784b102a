"""Compare robust filters of known models on public tasks: `python benchmarks/filters.py`, 20 minutes on one core.

Tasks. Three are those of the public repository gerdm/weighted-likelihood-filter (commit 4154b15), written anew:
tracking in the plane with Student-t errors (2.01 degrees of freedom), tracking where 5 % of the readings show twice the
position, and Lorenz 96. Tracks have 500 readings here (there 1,000). Of Lorenz 96 there are 40 components (there 100),
and a component is read as 100 with probability 0.0025 (there 0.001), so that a tenth of the readings has a wrong one.
Three tasks were made here: a target by bearing and range, a pendulum, and a turning target by the ranges to four
stations. A tenth of their components' errors is ten times as large. Each task has a clean variant. Nine more have one
tracker with nine kinds of errors: 120 readings at gaps of 0.2 to 1.8, 15 % of them missing, twelve series a seed. All
filters get one model, with the true f, h, Q and R; in the last task R is told a tenth of what it is.

Peers, from their papers, with Jacobians where nothing else is said:

    EKF                 the (extended) Kalman filter
    UKF                 sigma points, alpha 1, beta 2, kappa 0
    WoLF-IMQ, WoLF-MD   Duran-Martin and others, ICML 2024 (arXiv 2405.05646v1), with distances in units of the noise
    KF-IW               Agamennoni, Nieto and Nebot, IEEE Transactions on Signal Processing 60 (2012)
    KF-B                Wang, Li, Fang and Wang, IEEE Signal Processing Letters 25 (2018)
    EMORF               Chughtai, Tahir and Uppal, EMORF/S (arXiv 2307.02163v2), with sigma points as UKF

A peer's constants are chosen from GRID by its error on ten other seeds of the task with outliers. They stay for the
clean variant. rfa is the same in each task: `RobustFilter(NonlinearModel(f, Q, Sensor(h, R), method="sigma_points"),
start=start, start_at=0)`. A second row has its default, Jacobians. Sigma points were preferred on six other seeds, 500
to 505. For the tracker rfa is `RobustFilter(LinearSDE(A, Q, C, R), start=start, start_at=0)`.

Measures: the root mean square error of the scored states, as a geometric mean over seeds; the negative log density of
the true state, a state and time; the share of times at which it is within the 90 % region; the time of one series over
the EKF's, in turns. Ratios of errors have 95 % t intervals over seeds. Aims, written before the final run:

    1. rfa's error is never above 1.05 times the best tuned peer's, and below it in the median of tasks with outliers.
    2. Without outliers it is at most 1.02 times the EKF's.
    3. Its 90 % regions hold 86 to 94 % of the states as wholes, in each task and variant.

The nine tasks of the tracker came later. Written before they were run: aim 1 holds in each of the nine, aim 2 for
Gaussian errors, aim 3 where R is told truly. rfa's constants were chosen on other draws of this tracker.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg
import scipy.special
import scipy.stats
import torch

from rfa.environment import environment
from rfa.estimation import LinearSDE, NonlinearModel, RobustFilter, Sensor
from rfa.files import write_text_whole

RESULTS = Path(__file__).parent / "results" / "filters.json"
SEEDS, TUNING_SEEDS = 20, 10
RFA, EXTENDED = "rfa", "rfa, Jacobians"

Corrupt = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]  # of h(x) and errors `(..., m)`: readings


@dataclass(frozen=True)
class Task:
    """A model, and how its readings go wrong. Functions take states `(..., n)`."""

    transition: Callable[..., np.ndarray]  # f(x, dt)
    observation: Callable[[np.ndarray], np.ndarray]
    process_noise: Any  # Q, or Q(dt)
    noise: np.ndarray  # the diagonal of R, as filters are told
    start: tuple[np.ndarray, np.ndarray]
    steps: int
    scored: list[int]  # states whose error is measured
    corrupt: Corrupt
    angle: list[bool] = field(default_factory=lambda: [False])
    start_known: bool = False  # whether the first state is the mean of the start
    seeds: int = SEEDS
    sde: LinearSDE | None = None  # what rfa is given in the place of functions

    def draw(self, seed: int, clean: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """True states `(series, T, n)`, readings `(series, T, m)` and the time before each, `(series, T)`."""
        random = np.random.default_rng(seed)
        state = self.start[0] if self.start_known else random.multivariate_normal(*self.start)
        root = np.linalg.cholesky(self.process_noise)
        states, readings = [], []
        for _ in range(self.steps):
            state = self.transition(state, 1.0) + root @ random.standard_normal(len(state))
            shown, errors = self.observation(state), np.sqrt(self.noise) * random.standard_normal(len(self.noise))
            wrong = self.corrupt(random, shown, errors)
            states.append(state)
            readings.append(shown + errors if clean else wrong)
        return np.stack(states)[None], np.stack(readings)[None], np.ones((1, self.steps))

    def difference(self, reading: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """With angles wrapped."""
        found = reading - predicted
        return np.where(self.angle, (found + np.pi) % (2 * np.pi) - np.pi, found)

    def jacobian(self, function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, wrap: bool = False) -> np.ndarray:
        """By central differences at states `(..., n)`: `(..., m, n)`."""
        step = 1e-5 * (1 + np.abs(x))
        moves = step[..., None] * np.eye(x.shape[-1])
        ends = [function(x[..., None, :] + sign * moves) for sign in (1, -1)]
        found = self.difference(*ends) if wrap else ends[0] - ends[1]
        return (found / (2 * step[..., None])).swapaxes(-1, -2)


class Tracker(Task):
    """Twelve series a seed at irregular times. The errors have variance 1, whatever filters are told."""

    def draw(self, seed: int, clean: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As of a task; 15 % of the readings are missing."""
        random = np.random.default_rng(seed)
        gaps = random.uniform(0.2, 1.8, (12, self.steps))
        state, states = random.multivariate_normal(*self.start, len(gaps)), []
        for gap in gaps.T:
            pushes = np.linalg.cholesky(self.process_noise(gap)) @ random.standard_normal((*state.shape, 1))
            state = self.transition(state, gap) + pushes[..., 0]
            states.append(state)
        shown = self.observation(np.stack(states, axis=1))
        readings = self.corrupt(random, shown, random.standard_normal(shown.shape))
        return np.stack(states, axis=1), np.where(random.random(gaps.shape)[..., None] < 0.15, np.nan, readings), gaps


def scaled(share: float, factor: float, components: bool = False, run: int = 1) -> Corrupt:
    """A share of the readings, or of their components, begins a run of errors that are larger by a factor."""

    def corrupt(random: np.random.Generator, shown: np.ndarray, errors: np.ndarray) -> np.ndarray:
        wrong = random.random((*errors.shape[:-1], errors.shape[-1] if components else 1)) < share
        for _ in range(run - 1):
            wrong[:, 1:] |= wrong[:, :-1]
        return shown + errors * np.where(wrong, factor, 1)

    return corrupt


def student_t(freedom: float) -> Corrupt:
    """One scale for all components."""
    return lambda random, z, errors: z + errors / np.sqrt(random.chisquare(freedom, (*errors.shape[:-1], 1)) / freedom)


def lorenz(x: np.ndarray, dt: Any) -> np.ndarray:
    """`dx_j = (x_{j+1} - x_{j-2}) x_{j-1} - x_j + 8`, one step of 0.05 of Runge and Kutta."""

    def slope(x: np.ndarray) -> np.ndarray:
        return (np.roll(x, -1, -1) - np.roll(x, 2, -1)) * np.roll(x, 1, -1) - x + 8

    step = 0.05
    one = slope(x)
    two = slope(x + step / 2 * one)
    three = slope(x + step / 2 * two)
    return x + step / 6 * (one + 2 * two + 2 * three + slope(x + step * three))


def turn(x: np.ndarray, dt: Any) -> np.ndarray:
    """A coordinated turn over one unit of time. States: x, its velocity, y, its velocity, rate of turn."""
    a, u, b, v, rate = np.moveaxis(x, -1, 0)
    small = np.abs(rate) < 1e-6
    safe = np.where(small, 1.0, rate)
    sine, cosine = np.sin(rate), np.cos(rate)
    along, aside = np.where(small, 1.0, sine / safe), np.where(small, 0.0, (1 - cosine) / safe)
    moved = a + along * u - aside * v, cosine * u - sine * v, b + aside * u + along * v, sine * u + cosine * v, rate
    return np.stack(moved, axis=-1)


def ranges(x: np.ndarray) -> np.ndarray:
    stations = np.array([[-350, -350], [350, -350], [350, 350], [-350, 350]])
    return np.linalg.norm(x[..., None, [0, 2]] - stations, axis=-1)


def pushed(dt: Any) -> np.ndarray:
    """The covariance of a position and its velocity after white acceleration over dt, `(..., 2, 2)`."""
    return np.moveaxis(np.array([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]]), (0, 1), (-2, -1))


def tracker(corrupt: Corrupt, noise: float = 1.0) -> Tracker:
    """A point in the plane with white acceleration, whose position is read. States: x, y and their velocities."""
    forward, pushes = np.kron(np.eye(2, k=1), np.eye(2)), np.diag([0.0, 0.0, 0.2, 0.2])

    def transition(x: np.ndarray, dt: Any) -> np.ndarray:
        return x + np.reshape(dt, (-1, *[1] * (x.ndim - 1))) * (x @ forward.T)

    return Tracker(
        transition, lambda x: x[..., :2], lambda dt: 0.2 * np.kron(pushed(dt), np.eye(2)), np.full(2, noise),
        (np.zeros(4), np.diag([25.0, 25, 4, 4])), 120, [0, 1], corrupt,
        sde=LinearSDE(forward, pushes, np.eye(2, 4), noise * np.eye(2)),
    )  # fmt: skip


def tasks() -> dict[str, Task]:
    """All tasks with outliers."""
    plane = np.kron([[1, 0.1], [0, 1]], np.eye(2))
    track = partial(
        Task, lambda x, dt: x @ plane.T, lambda x: x[..., :2], 0.1 * np.eye(4), np.full(2, 10.0),
        (np.array([0.0, 0, 1, 1]), np.eye(4)), 500, [0, 1], start_known=True,
    )  # fmt: skip
    forward = np.kron([[1, 1], [0, 1]], np.eye(2))
    shares = (5, 10), (10, 10), (20, 10), (5, 100), (20, 100)
    curve = scipy.linalg.block_diag(0.1 * pushed(1.0), 0.1 * pushed(1.0), 1e-4)
    return {
        "tracking, Student-t": track(corrupt=student_t(2.01)),
        "tracking, mixture": track(corrupt=lambda random, z, errors: z * (2 if random.random() < 0.05 else 1) + errors),
        "Lorenz 96": Task(
            lorenz, lambda x: x, 0.05**2 * np.eye(40), np.ones(40), (np.full(40, 2.5), 12 * np.eye(40)), 150,
            [*range(40)], lambda random, z, errors: np.where(random.random(40) < 0.0025, 100.0, z + errors), seeds=10,
        ),
        "bearing and range": Task(
            lambda x, dt: x @ forward.T,
            lambda x: np.stack([np.arctan2(x[..., 1], x[..., 0]), np.hypot(x[..., 0], x[..., 1])], axis=-1),
            0.02 * np.kron(pushed(1.0), np.eye(2)), np.array([0.05**2, 0.5**2]),
            (np.array([-20.0, -4, 0.5, 0.1]), np.diag([4, 4, 0.1, 0.1])), 200,
            [0, 1], scaled(0.1, 10, components=True), angle=[True, False],
        ),
        "pendulum": Task(
            lambda x, dt: np.stack([x[..., 0] + 0.05 * x[..., 1], x[..., 1] - 0.05 * 9.81 * np.sin(x[..., 0])], -1),
            lambda x: np.sin(x[..., :1]), 0.1 * pushed(0.05), np.array([0.3**2]),
            (np.array([1.5, 0.0]), 0.1 * np.eye(2)), 400, [0], scaled(0.1, 10), start_known=True,
        ),
        "turning target": Task(
            turn, ranges, curve, np.full(4, 10.0**2), (np.array([0.0, 5, 0, 5, 0.05]), np.diag([100, 4, 100, 4, 1e-3])),
            200, [0, 2], scaled(0.1, 10, components=True),
        ),
        "tracker, Gaussian": tracker(scaled(0.0, 1)),
        **{f"tracker, {share} % x{size}": tracker(scaled(share / 100, size)) for share, size in shares},
        "tracker, bursts of 5, x10": tracker(scaled(0.02, 10, run=5)),
        "tracker, Student-t": tracker(student_t(1)),
        "tracker, R told 0.1, 10 % x10": tracker(scaled(0.1, 10), noise=0.1),
    }  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """Readings beside the states of many series: innovation, slope, the error of linearising and R."""

    mean: np.ndarray
    covariance: np.ndarray
    innovation: np.ndarray
    slope: np.ndarray
    extra: np.ndarray
    noise: np.ndarray  # `(m, m)`

    def updated(self, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With noises `(S, m, m)`."""
        across = self.slope @ self.covariance
        error = noise + self.extra
        gain = np.linalg.solve(across @ self.slope.swapaxes(1, 2) + error, across).swapaxes(1, 2)
        kept = np.eye(self.mean.shape[1]) - gain @ self.slope
        covariance = kept @ self.covariance @ kept.swapaxes(1, 2) + gain @ error @ gain.swapaxes(1, 2)
        return self.mean + (gain @ self.innovation[..., None])[..., 0], covariance

    def remaining(self, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """`E (z - h)(z - h)^T` after an update."""
        left = self.innovation - (self.slope @ (mean - self.mean)[..., None])[..., 0]
        return left[:, :, None] * left[:, None] + self.slope @ covariance @ self.slope.swapaxes(1, 2)

    @property
    def distance(self) -> np.ndarray:
        """The squared innovation in units of the noise, `(S, 1, 1)`."""
        return (self.innovation**2 / self.noise.diagonal()).sum(-1)[:, None, None]


def inverse_wishart(linear: Linear, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """R of a reading is inverse Wishart around R, with `scale` degrees of freedom: in turns with the state."""
    mean, covariance = linear.mean, linear.covariance
    for _ in range(10):
        noise = (scale * linear.noise + linear.remaining(mean, covariance)) / (scale + 1)
        mean, covariance = linear.updated(noise)
    return mean, covariance


def bernoulli(linear: Linear, inlier: float, outlier: float) -> tuple[np.ndarray, np.ndarray]:
    """A reading is right or says nothing; the probability is Beta."""
    right, size = np.ones(len(linear.mean)), linear.noise.diagonal()
    for _ in range(10):
        mean, covariance = linear.updated(linear.noise / np.maximum(right, 1e-7)[:, None, None])
        left = (linear.remaining(mean, covariance).diagonal(axis1=1, axis2=2) / size).sum(-1)
        log_in = scipy.special.digamma(inlier + right) - left / 2
        right = scipy.special.expit(log_in - scipy.special.digamma(outlier + 1 - right))
    return mean, covariance


def emorf(linear: Linear, points: Callable[..., tuple[np.ndarray, np.ndarray]], small: float = 1e-6) -> Any:
    """A component is right, or has R / 1e-6: by the more probable one, in turns with the state, a priori equal."""
    size, right = linear.noise.diagonal(), np.ones(linear.innovation.shape, dtype=bool)
    for _ in range(10):
        mean, covariance = linear.updated(np.where(right, size, size / small)[:, None] * np.eye(len(size)))
        left, spread = points(mean, covariance)
        now = (left**2 + spread.diagonal(axis1=1, axis2=2)) * (1 - small) / size < -np.log(small)
        if (now == right).all():
            break
        right = now
    return mean, covariance


PEERS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "EKF": lambda linear: linear.updated(linear.noise[None]),
    "UKF": lambda linear: linear.updated(linear.noise[None]),
    "WoLF-IMQ": lambda linear, c: linear.updated(linear.noise * (1 + linear.distance / c**2)),
    "WoLF-MD": lambda linear, c: linear.updated(linear.noise * np.where(linear.distance > c**2, 1e12, 1)),
    "KF-IW": inverse_wishart,
    "KF-B": bernoulli,
    "EMORF": emorf,
}
GRID: dict[str, list[tuple[float, ...]]] = {
    "WoLF-IMQ": [(c,) for c in (1, 1.5, 2, 3, 4, 5, 6, 8, 12, 20, 40, 80)],
    "WoLF-MD": [(c,) for c in (2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 80)],
    "KF-IW": [(s,) for s in (0.5, 1, 2, 3, 4, 6, 10, 20, 50, 100, 300)],
    "KF-B": [(e, f) for e in (0.5, 0.9, 2, 5) for f in (0.01, 0.1, 0.5, 2)],
}


def sigma_points(function: Any, mean: np.ndarray, covariance: np.ndarray, difference: Any) -> tuple[np.ndarray, ...]:
    """Value, slope and extra covariance by sigma points with alpha 1, beta 2, kappa 0."""
    size, n = mean.shape
    root = np.linalg.cholesky((covariance + covariance.swapaxes(1, 2)) / 2 + 1e-12 * np.eye(n)).swapaxes(1, 2) * n**0.5
    offsets = np.concatenate([np.zeros((size, 1, n)), root, -root], axis=1)
    values = function(mean[:, None] + offsets)
    moved = difference(values, values[:, :1])
    average = moved[:, 1:].mean(1)
    moved = moved - average[:, None]
    weights = np.r_[2.0, np.full(2 * n, 0.5 / n)][:, None]
    across = (weights * offsets).swapaxes(1, 2) @ moved
    slope = np.linalg.solve(covariance + 1e-12 * np.eye(n), across).swapaxes(1, 2)
    return values[:, 0] + average, slope, (weights * moved).swapaxes(1, 2) @ moved - slope @ across


def run_peer(
    task: Task, name: str, readings: np.ndarray, gaps: np.ndarray, constants: tuple[float, ...]
) -> tuple[np.ndarray, ...]:
    """Means `(S, T, n)` and covariances of a peer on readings `(S, T, m)`, NaN where missing."""

    def linearised(function: Any, mean: np.ndarray, covariance: np.ndarray, wrap: bool) -> tuple[np.ndarray, ...]:
        if name in ("UKF", "EMORF"):
            return sigma_points(function, mean, covariance, task.difference if wrap else np.subtract)
        return function(mean), task.jacobian(function, mean, wrap), np.zeros(())

    mean, covariance = (np.repeat(x[None], len(readings), axis=0) for x in task.start)
    found = []
    for z, gap in zip(readings.swapaxes(0, 1), gaps.T, strict=True):
        mean, slope, extra = linearised(partial(task.transition, dt=gap), mean, covariance, False)
        extra = extra + (task.process_noise(gap) if callable(task.process_noise) else task.process_noise)
        covariance = slope @ covariance @ slope.swapaxes(1, 2) + extra
        value, slope, extra = linearised(task.observation, mean, covariance, True)
        seen = ~np.isnan(z).any(1, keepdims=True)
        z = np.where(seen, z, value)
        linear = Linear(mean, covariance, task.difference(z, value), slope, extra, np.diag(task.noise))
        if name == "EMORF":

            def points(mean: np.ndarray, covariance: np.ndarray, z: np.ndarray = z) -> tuple[np.ndarray, np.ndarray]:
                value, slope, extra = linearised(task.observation, mean, covariance, True)
                return task.difference(z, value), slope @ covariance @ slope.swapaxes(1, 2) + extra

            updated = emorf(linear, points)
        else:
            updated = PEERS[name](linear, *constants)
        mean, covariance = np.where(seen, updated[0], mean), np.where(seen[..., None], updated[1], covariance)
        found.append((mean, covariance))
    return tuple(np.stack(part, axis=1) for part in zip(*found, strict=True))


def run_rfa(task: Task, readings: np.ndarray, gaps: np.ndarray, **options: Any) -> tuple[np.ndarray, ...]:
    """The same of rfa with its defaults."""
    times = gaps.cumsum(1)
    if task.sde is not None:
        tracks = RobustFilter(task.sde, start=task.start, start_at=0.0).filter(times, readings)
        return tracks.states, tracks.state_covariances
    model = NonlinearModel(
        task.transition, task.process_noise,
        Sensor(task.observation, task.noise, partial(task.jacobian, task.observation, wrap=True), task.angle),
        lambda x, dt: task.jacobian(partial(task.transition, dt=dt), x), **options,
    )  # fmt: skip
    live = RobustFilter(model, start=task.start, start_at=0.0)
    found = [live.filter(*each) for each in zip(times, readings, strict=True)]
    return np.stack([x.states for x in found]), np.stack([x.state_covariances for x in found])


def scores(task: Task, seeds: int, states: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> dict[str, Any]:
    """Of each seed."""
    error, n = states - mean, states.shape[-1]
    covariance = (covariance + covariance.swapaxes(-1, -2)) / 2
    distance = (error * np.linalg.solve(covariance, error[..., None])[..., 0]).sum(-1)
    density = (distance + np.linalg.slogdet(covariance)[1] + n * np.log(2 * np.pi)) / (2 * n)
    values = (error[..., task.scored] ** 2).sum(-1), density, distance <= scipy.stats.chi2.ppf(0.9, n)
    square, nlpd, coverage = (x.reshape(seeds, -1).mean(1) for x in values)
    found = {"rmse": np.sqrt(square), "nlpd": nlpd, "coverage": coverage}
    return {key: x.round(6).tolist() for key, x in found.items()}


def geometric(values: list[float]) -> float:
    """The geometric mean; infinite where a filter gave up."""
    return float(np.exp(np.log(values).mean())) if np.isfinite(values).all() else np.inf


def scored_run(task: Task, name: str, draws: Any, constants: tuple[float, ...] = ()) -> dict[str, list[float]]:
    """The scores of a filter on draws. Infinite errors where its arithmetic breaks down."""
    states, *given = (np.concatenate(x) for x in zip(*draws, strict=True))
    try:
        with np.errstate(all="ignore"):
            if name in PEERS:
                found = run_peer(task, name, *given, constants)
            else:
                found = run_rfa(task, *given, method="jacobian" if name == EXTENDED else "sigma_points")
            return scores(task, len(draws), states, *found)
    except (np.linalg.LinAlgError, ValueError):
        return dict.fromkeys(("rmse", "nlpd", "coverage"), [np.inf] * len(draws))


def measured(name: str, task: Task) -> list[dict[str, Any]]:
    """A line for each variant and filter of a task."""
    tuning = [task.draw(seed, clean=False) for seed in range(TUNING_SEEDS)]
    chosen: dict[str, tuple[float, ...]] = dict.fromkeys((RFA,) if task.sde else (RFA, EXTENDED), ())
    for peer in PEERS:
        grid = GRID.get(peer, [()])
        errors = [geometric(scored_run(task, peer, tuning, x)["rmse"]) if len(grid) > 1 else 0.0 for x in grid]
        chosen[peer] = grid[int(np.argmin(errors))]
    few = [tuple(x[:, :100] for x in tuning[0])]
    seconds: dict[str, list[float]] = {filter_name: [] for filter_name in chosen}
    for _ in range(3):
        for filter_name, taken in seconds.items():
            begin = time.perf_counter()
            scored_run(task, filter_name, few, chosen[filter_name])
            taken.append(time.perf_counter() - begin)
    lines = []
    for clean in (False,) if task.sde else (False, True):
        draws = [task.draw(1000 + seed, clean) for seed in range(task.seeds)]
        for filter_name, constants in chosen.items():
            ratio = round(float(np.median(np.array(seconds[filter_name]) / np.array(seconds["EKF"]))), 3)
            line = {"task": name, "clean": clean, "filter": filter_name, "constants": constants, "time": ratio}
            lines.append(line | scored_run(task, filter_name, draws, constants))
            print(name, clean, filter_name, constants, geometric(lines[-1]["rmse"]), flush=True)
    return lines


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """The geometric mean of ratios over seeds, and its 95 % t interval."""
    logs = np.log(ratios)
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    return tuple(np.exp([logs.mean(), logs.mean() - half, logs.mean() + half]))


def tables(lines: list[dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """rfa beside the best peer of each task and beside the EKF, and all filters."""
    summary, errors = [], []
    for (task, clean), rows in pd.DataFrame(lines).groupby(["task", "clean"], sort=False):
        found = {line["filter"]: line for line in rows.to_dict("records")}
        of: dict[str, dict[str, Any]] = {"rmse": {name: geometric(line["rmse"]) for name, line in found.items()}}
        of |= {key: {name: np.mean(x[key]) for name, x in found.items()} for key in ("nlpd", "coverage")}
        best, densest = (min(PEERS, key=of[key].__getitem__) for key in ("rmse", "nlpd"))
        for name in (x for x in (RFA, EXTENDED) if x in found):
            row: dict[str, Any] = {"task": task, "clean": clean, "filter": name}
            for key, other in (("to EKF", "EKF"), ("to the best peer", best)):
                mean, low, high = interval(np.array(found[name]["rmse"]) / np.array(found[other]["rmse"]))
                row[key] = f"{mean:.3f} ({low:.3f} to {high:.3f})"
            row |= {"best peer": best, "nlpd": of["nlpd"][name], "least of a peer": of["nlpd"][densest]}
            row |= {"coverage": of["coverage"][name], "of the best peer": of["coverage"][best]}
            summary.append(row | {"time": found[name]["time"], "time of the best peer": found[best]["time"]})
        errors += [{"task": task, "clean": clean, "measure": measure} | values for measure, values in of.items()]
    return {"rfa": pd.DataFrame(summary), "all": pd.DataFrame(errors)}


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """rfa's error over that of the best peer, for each kind of the tracker's errors."""
    import matplotlib.pyplot as plt

    rows = tables(lines)["rfa"].set_index("task")["to the best peer"].filter(like="tracker, ")[::-1]
    mean, low, high = rows.str.extract(r"(\S+) \((\S+) to (\S+)\)").astype(float).to_numpy().T
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.errorbar(mean, rows.index.str.removeprefix("tracker, "), xerr=(mean - low, high - mean), fmt="o", linewidth=2)
    axes.axvspan(1.0, 1.05, color="0.9", zorder=0)  # the aim
    axes.set(xlabel="error / that of the best tuned filter")
    figure.savefig(file, dpi=150)


def main() -> None:
    """Measure, keep the results, and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="TASK", help="by default all; without a name only stored tables")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the errors of the tracker")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"lines": []}
    for name in tasks() if given.only is None else given.only:
        lines = [line for line in results["lines"] if line["task"] != name] + measured(name, tasks()[name])
        lines.sort(key=lambda line: list(tasks()).index(line["task"]))
        results["lines"] = lines
        rows = ",\n".join(json.dumps(line) for line in lines)
        write_text_whole(given.out, f'{{"environment": {json.dumps(environment())}, "lines": [\n{rows}\n]}}\n')
    for title, table in tables(results["lines"]).items() if results["lines"] else ():
        print(title, table.to_string(float_format="{:.4g}".format), sep="\n", end="\n\n")
    if given.figure:
        draw(results["lines"], given.figure)


if __name__ == "__main__":
    main()
