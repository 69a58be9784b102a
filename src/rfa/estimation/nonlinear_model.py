"""A nonlinear model, linearised where the filter stands: by Jacobians, or by sigma points.

    x_k = f(x_{k-1}, dt) + q,  q ~ N(0, Q(dt)),      z_k = h(x_k) + e,  e ~ N(0, R)

f and h are replaced by `value + slope (x - m)` with an error N(0, extra). With Jacobians at the mean m extra is 0. With
sigma points of N(m, P) it is what a line does not explain (statistical linear regression).

Source: Särkkä and Svensson, Bayesian Filtering and Smoothing (2023), chapters 7 to 9.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from rfa.checks import check_choice, require

from .linear_sde import check_covariance

Linearisation = Literal["jacobian", "sigma_points"]
Weighting = Literal["auto", "reading", "component"]

_REGULAR = 1e-14  # relative: a direction without variance


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
        return np.where(self.angle, (difference + math.pi) % (2 * math.pi) - math.pi, difference)


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
        method: "jacobian" is the extended Kalman filter. "sigma_points" needs no derivatives and is often better, but
            asks for f and h at 2 n + 1 states around the mean.
        iterations: updates by each reading, each linearised where the last one ended, from the same prior.
        alpha, beta, kappa: of sigma points: the mean, and `mean -+ sqrt(alpha^2 (n + kappa))` Cholesky columns. The
            defaults 1, 0, 0 are the cubature rule, in which the mean itself has weight 0.
        weighting: whether a robust weight counts for a whole reading, or for each component of one, which needs a
            diagonal R. "auto": the one under which the readings so far are more probable.

    Raises:
        ValueError: for a shape that does not fit, an R that is not positive definite, and unknown choices.
    """

    transition: Callable[..., Any]
    process_noise: Any
    sensors: Sensor | Mapping[str, Sensor]
    start: tuple[Any, Any]
    start_time: float | None = None
    transition_jacobian: Callable[..., Any] | None = None
    method: Linearisation = "jacobian"
    iterations: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    kappa: float = 0.0
    weighting: Weighting = "auto"
    by_name: dict[str, Sensor] = field(default_factory=dict, init=False, repr=False)
    checked_noise: dict[float, ndarray] = field(default_factory=dict, init=False, repr=False)
    takes_tensors: dict[str, bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("method", self.method, Linearisation)
        check_choice("weighting", self.weighting, Weighting)
        require(isinstance(self.iterations, int) and self.iterations >= 1, "iterations", self.iterations, "at least 1")
        mean, covariance = (np.array(x, dtype=float) for x in self.start)
        good = mean.ndim == 1 and mean.size > 0 and bool(np.isfinite(mean).all())
        require(good, "start", mean.tolist(), "a mean of finite numbers, (n,)")
        _check_covariance("start", covariance, len(mean))
        require(self.spread(len(mean)) > 0, "kappa", self.kappa, f"alpha^2 (n + kappa) > 0 with n = {len(mean)}")
        object.__setattr__(self, "start", (mean, covariance))
        for name, sensor in ({"": self.sensors} if isinstance(self.sensors, Sensor) else self.sensors).items():
            noise = np.array(sensor.noise, dtype=float)
            noise = np.diag(noise) if noise.ndim == 1 else noise
            _check_covariance(f"noise{of_sensor(name)}", noise, len(noise), definite=True)
            diagonal = np.count_nonzero(noise) == len(noise)
            require(
                diagonal or self.weighting != "component", "weighting", "component",
                f"another one: the noise{of_sensor(name)} is not diagonal",
            )  # fmt: skip
            angle = np.broadcast_to(np.asarray(sensor.angle, dtype=bool), len(noise))
            self.by_name[name] = replace(sensor, noise=noise, angle=angle)
        require(bool(self.by_name), "sensors", self.sensors, "at least one Sensor")

    def spread(self, n: int) -> float:
        """`alpha^2 (n + kappa)`: the squared distance of sigma points from the mean, in standard deviations."""
        return self.alpha**2 * (n + self.kappa)

    def step(self, mean: ndarray, covariance: ndarray, dt: float, time: float) -> tuple[Linear, ndarray]:
        """f over a step that ends at a time, linearised, and the covariance that the step adds."""
        functions = self.transition, self.transition_jacobian
        linear = self._linearised("transition", functions, mean, covariance, np.subtract, time, dt)
        require(len(linear.value) == len(mean), "transition", f"{len(linear.value)} states", f"{len(mean)}, as x has")
        noise = self.process_noise(dt) if callable(self.process_noise) else self.process_noise
        noise = np.asarray(noise, dtype=float)
        if not np.array_equal(noise, self.checked_noise.get(dt, math.nan)):  # of equal steps once
            _check_covariance("process_noise", noise, len(mean))
            self.checked_noise.clear()
            self.checked_noise[dt] = noise
        return linear, linear.extra + noise

    def reading(self, name: str, mean: ndarray, covariance: ndarray, time: float) -> Linear:
        """h of a sensor, linearised."""
        sensor, argument = self.by_name[name], f"observation{of_sensor(name)}"
        functions = sensor.observation, sensor.jacobian
        found = self._linearised(argument, functions, mean, covariance, sensor.difference, time)
        size = len(sensor.noise)
        require(len(found.value) == size, argument, f"{len(found.value)} components", f"{size}, as noise has")
        return found

    def _linearised(
        self, name: str, functions: Any, mean: ndarray, covariance: ndarray, difference: Any, time: float, *args: float
    ) -> Linear:
        function, jacobian = functions
        if self.method == "sigma_points":
            n, spread = len(mean), self.spread(len(mean))
            root = _square_root(covariance)
            offsets = math.sqrt(spread) * np.concatenate([np.zeros((1, n)), root.T, -root.T])
            weights = np.full(2 * n + 1, 0.5 / spread)
            weights[0] = 1 - n / spread
            values = [self._called(name, function, mean + offset, args, time) for offset in offsets]
            moved = np.stack([difference(value, values[0]) for value in values])
            average = weights @ moved
            weights[0] += 1 - self.alpha**2 + self.beta
            moved -= average
            across = (weights[:, None] * offsets).T @ moved
            slope = np.linalg.lstsq(covariance, across, rcond=_REGULAR)[0].T
            extra = (weights[:, None] * moved).T @ moved - slope @ across
            return Linear(values[0] + average, slope, (extra + extra.T) / 2)
        if jacobian is not None:
            value = self._called(name, function, mean, args, time)
            slope = self._called(f"{name}, jacobian", jacobian, mean, args, time)
        else:
            try:
                value_and_slope = torch.func.jacfwd(lambda x: (y := function(x, *args), y), has_aux=True)
                slope, value = (_as_finite(name, x, time) for x in value_and_slope(torch.tensor(mean)))
            except (TypeError, RuntimeError) as error:
                wanted = "one of PyTorch, its Jacobian beside it, or method='sigma_points'"
                message = f"{name}: got a function that PyTorch cannot differentiate, expected {wanted} ({error})"
                raise ValueError(message) from error
        if slope.shape != (*value.shape, len(mean)):
            raise ValueError(f"{name}, jacobian: got shape {slope.shape}, expected {(*value.shape, len(mean))}")
        return Linear(value, slope, np.zeros((len(value), len(value))))

    def _called(self, name: str, function: Callable[..., Any], x: ndarray, args: Any, time: float) -> ndarray:
        """The value of a function of NumPy or of PyTorch: one that refuses an array gets a tensor from then on."""
        if not self.takes_tensors.get(name):
            try:
                return _as_finite(name, function(x, *args), time)
            except (TypeError, AttributeError):
                pass
        found = _as_finite(name, function(torch.tensor(x), *args), time)
        self.takes_tensors[name] = True
        return found


def of_sensor(name: str) -> str:
    """For messages."""
    return f" of {name!r}" if name else ""


def _as_finite(name: str, given: Any, time: float) -> ndarray:
    found = np.asarray(given.detach() if isinstance(given, torch.Tensor) else given, dtype=float)
    if not np.isfinite(found).all():
        raise ValueError(f"{name}: got NaN or infinite values at time {time:g}, expected finite numbers")
    return found


def _check_covariance(name: str, given: ndarray, n: int, definite: bool = False) -> None:
    check_covariance(name, torch.tensor(given), n)
    if definite:
        least, most = np.linalg.eigvalsh(given)[[0, -1]]
        require(least > _REGULAR * most, name, f"an eigenvalue of {least:.3g}", "a positive definite matrix")


def _square_root(covariance: ndarray) -> ndarray:
    """The Cholesky factor, or of a singular matrix a root by its eigenvectors."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        values, basis = np.linalg.eigh(covariance)
        return basis * np.sqrt(values.clip(0))
