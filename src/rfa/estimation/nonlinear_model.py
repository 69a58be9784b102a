"""A nonlinear model, linearised where the filter stands: by Jacobians, or by sigma points.

    x_k = f(x_{k-1}, dt) + q,  q ~ N(0, Q(dt)),      z_k = h(x_k) + e,  e ~ N(0, R)

f and h are replaced by `value + slope (x - m)` with an error N(0, extra). With Jacobians at the mean m extra is 0. With
sigma points of N(m, P) it is what a line does not explain (statistical linear regression).

Source: Särkkä and Svensson, Bayesian Filtering and Smoothing (2023), chapters 7 to 9.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from rfa.checks import check_choice, require

from .linear_sde import check_covariance
from .time_axis import as_numbers

Linearisation = Literal["jacobian", "sigma_points"]

REGULAR = 1e-14  # relative: a direction without variance


class Linear(NamedTuple):
    """`value + slope (x - mean)`, with an error of covariance `extra`."""

    value: ndarray  # `(m,)`
    slope: ndarray  # `(m, n)`
    extra: ndarray  # `(m, m)`


@dataclass(frozen=True)
class Sensor:
    """How a sensor reads the state of a `NonlinearModel`.

    Args:
        observation: `h(x)`, from `(n,)` to `(m,)`. Of PyTorch; of NumPy with a `jacobian`, or with sigma points.
        observation_noise: R, `(m, m)` or its diagonal `(m,)`: variances. Positive definite.
        jacobian: of h, `jacobian(x)`, `(m, n)`. None: by PyTorch.
        angle: which components are angles in radians, one flag or m: differences are wrapped to [-pi, pi).
        residual: `residual(z, predicted)`, `(m,)`, instead of a difference.
    """

    observation: Callable[..., Any]
    observation_noise: Any
    jacobian: Callable[..., Any] | None = None
    angle: Any = False
    residual: Callable[[Any, Any], Any] | None = None

    def difference(self, reading: ndarray, predicted: ndarray) -> ndarray:
        """Reading minus prediction."""
        if self.residual is not None:
            found = _as_finite("residual", self.residual(reading, predicted))
            require(found.shape == reading.shape, "residual", f"shape {found.shape}", f"{reading.shape}")
            return found
        difference = reading - predicted
        return np.where(self.angle, (difference + math.pi) % (2 * math.pi) - math.pi, difference)

    def checked(self, name: str) -> "Sensor":
        """The same with R as a matrix and a flag for each component. Raises `ValueError`."""
        argument = f"observation_noise{of_sensor(name)}"
        noise = as_numbers(argument, self.observation_noise)
        noise = np.diag(noise) if noise.ndim == 1 else noise
        check_covariance(argument, torch.tensor(noise), len(np.atleast_1d(noise)))
        least, most = np.linalg.eigvalsh(noise)[[0, -1]]
        require(least > REGULAR * most, argument, f"an eigenvalue of {least:.3g}", "a positive definite matrix")
        flags = np.asarray(self.angle, dtype=bool)
        require(flags.shape in ((), (1,), (len(noise),)), f"angle{of_sensor(name)}", self.angle, f"{len(noise)} flags")
        return replace(self, observation_noise=noise, angle=np.broadcast_to(flags, len(noise)))


@dataclass(frozen=True)
class NonlinearModel:
    """A state that moves by f and is read through h of one or several sensors, for `RobustFilter`.

    Args:
        transition: `f(x, dt)`, from `(n,)` to `(n,)`; `f(x, dt, u)` where `control=` is given beside the readings. Of
            PyTorch; of NumPy with a Jacobian, or with sigma points.
        process_noise: `Q(dt)`, `(n, n)`, or one Q that is added between any two times of rows. Positive semi-definite.
        sensors: one `Sensor`, or several by name. Their errors are independent.
        transition_jacobian: of f, as `jacobian(x, dt)`, `(n, n)`. None: by PyTorch.
        method: "jacobian" is the extended Kalman filter. "sigma_points" needs no derivatives and is often better, but
            asks for f and h at 2 n + 1 states around the mean.
        iterations: updates by each reading, each linearised where the last one ended, from the same prior.
        alpha, beta, kappa: of sigma points: the mean, and `mean -+ sqrt(alpha^2 (n + kappa))` Cholesky columns. The
            defaults 1, 0, 0 are the cubature rule, in which the mean itself has weight 0.

    Raises:
        ValueError: for an R that is not positive definite, and unknown choices. Where the filter calls them: for
            functions that give NaN or another shape.
    """

    transition: Callable[..., Any]
    process_noise: Any
    sensors: Sensor | Mapping[str, Sensor]
    transition_jacobian: Callable[..., Any] | None = None
    method: Linearisation = "jacobian"
    iterations: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    kappa: float = 0.0

    def __post_init__(self) -> None:
        check_choice("method", self.method, Linearisation)
        require(isinstance(self.iterations, int) and self.iterations >= 1, "iterations", self.iterations, "at least 1")
        given = {"": self.sensors} if isinstance(self.sensors, Sensor) else self.sensors
        fits = isinstance(given, Mapping) and len(given) > 0 and all(isinstance(x, Sensor) for x in given.values())
        require(fits, "sensors", self.sensors, "a Sensor, or several by name")
        object.__setattr__(self, "sensors", {str(name): sensor.checked(str(name)) for name, sensor in given.items()})

    @property
    def needs_control(self) -> bool:
        """Whether the transition is `f(x, dt, u)`."""
        return not _takes(self.transition, 2) and _takes(self.transition, 3)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments. One without a signature can."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


class Linearised:
    """The functions of a model of n states, checked and linearised.

    Args:
        model: its functions.
        n: number of states.
        scale: a factor of Q.
    """

    def __init__(self, model: NonlinearModel, n: int, scale: float):
        self.model, self.scale, self.spread = model, scale, model.alpha**2 * (n + model.kappa)
        require(self.spread > 0, "kappa", model.kappa, f"alpha^2 (n + kappa) > 0 with n = {n}")
        self._checked_noise: ndarray | None = None
        self._takes_tensors, self._differentiable = set[str](), set[str]()

    def step(self, mean: ndarray, covariance: ndarray, *given: Any) -> tuple[Linear, ndarray]:
        """f over a step `dt` or `dt, u`, linearised, and the covariance that the step adds."""
        functions = self.model.transition, self.model.transition_jacobian
        linear = self._linearisation("transition", functions, mean, covariance, np.subtract, *given)
        require(len(linear.value) == len(mean), "transition", f"{len(linear.value)} states", f"{len(mean)}, as x has")
        noise = self.model.process_noise
        noise = _as_finite("process_noise", noise(given[0]) if callable(noise) else noise)
        if self._checked_noise is None or not np.array_equal(noise, self._checked_noise):  # of equal steps once
            check_covariance("process_noise", torch.tensor(noise), len(mean))
            self._checked_noise = noise
        return linear, linear.extra + self.scale * noise

    def reading(self, name: str, sensor: Sensor, mean: ndarray, covariance: ndarray) -> Linear:
        """h of a sensor, linearised."""
        argument, size = f"observation{of_sensor(name)}", len(sensor.observation_noise)
        functions = sensor.observation, sensor.jacobian
        found = self._linearisation(argument, functions, mean, covariance, sensor.difference)
        expected = f"{size}, as observation_noise has"
        require(len(found.value) == size, argument, f"{len(found.value)} components", expected)
        return found

    def _linearisation(
        self, name: str, functions: Any, mean: ndarray, covariance: ndarray, difference: Any, *given: Any
    ) -> Linear:
        function, jacobian = functions
        if self.model.method == "sigma_points":
            n, spread = len(mean), self.spread
            root = _square_root(covariance)
            offsets = math.sqrt(spread) * np.concatenate([np.zeros((1, n)), root.T, -root.T])
            weights = np.full(2 * n + 1, 0.5 / spread)
            weights[0] = 1 - n / spread
            values = [self._value_of(name, function, mean + offset, *given) for offset in offsets]
            moved = np.stack([difference(value, values[0]) for value in values])
            average = weights @ moved
            weights[0] += 1 - self.model.alpha**2 + self.model.beta
            moved -= average
            across = (weights[:, None] * offsets).T @ moved
            slope = np.linalg.lstsq(covariance, across, rcond=REGULAR)[0].T
            extra = (weights[:, None] * moved).T @ moved - slope @ across
            return Linear(values[0] + average, slope, (extra + extra.T) / 2)
        if jacobian is not None:
            value = self._value_of(name, function, mean, *given)
            slope = self._value_of(f"{name}, jacobian", jacobian, mean, *given)
        else:
            try:
                slope, value = (_as_finite(name, x) for x in self._derivative(name, function, mean, *given))
            except (TypeError, RuntimeError) as error:
                wanted = "one of PyTorch, its Jacobian beside it, or method='sigma_points'"
                message = f"{name}: got a function that PyTorch cannot differentiate, expected {wanted}"
                raise ValueError(f"{message} ({str(error).splitlines()[0]})") from error
        require(value.ndim == 1, name, f"shape {value.shape}", "(m,)")
        expected = (len(value), len(mean))
        require(slope.shape == expected, f"{name}, jacobian", f"shape {slope.shape}", f"{expected}")
        return Linear(value, slope, np.zeros((len(value), len(value))))

    def _derivative(self, name: str, function: Callable[..., Any], mean: ndarray, *given: Any) -> tuple[Tensor, Tensor]:
        """Jacobian and value: by gradients, in a third of the time of `jacfwd`.

        That has the first call, because it refuses numbers taken out of tensors, which gradients would not know of. And
        those for which gradients fail, as after some operations in place.
        """
        if name in self._differentiable:
            with contextlib.suppress(RuntimeError), torch.inference_mode(False), torch.enable_grad():
                x = torch.tensor(mean, requires_grad=True)
                value = function(x.clone(), *given)
                if not value.requires_grad:
                    return value.new_zeros(len(value), len(x)), value
                options: Any = {"retain_graph": True, "materialize_grads": True}
                rows = [torch.autograd.grad(each, x, **options)[0] for each in value.unbind()]
                return torch.stack(rows), value
        found = torch.func.jacfwd(lambda x: (y := function(x, *given), y), has_aux=True)(torch.tensor(mean))
        self._differentiable.add(name)
        return found

    def _value_of(self, name: str, function: Callable[..., Any], x: ndarray, *given: Any) -> ndarray:
        """The value of a function of NumPy or of PyTorch: one that refuses an array gets a tensor from then on."""
        if name not in self._takes_tensors:
            try:
                return _as_finite(name, function(x, *given))
            except (TypeError, AttributeError):
                pass
        try:
            found = _as_finite(name, function(torch.tensor(x), *given))
        except TypeError as error:
            expected = "one of x, and of f dt, and u where `control=` is given"
            raise ValueError(f"{name}: got a function that fails ({error}), expected {expected}") from error
        self._takes_tensors.add(name)
        return found


def of_sensor(name: str) -> str:
    """For messages."""
    return f" of {name}" if name else ""


def _as_finite(name: str, given: Any) -> ndarray:
    try:
        found = np.asarray(given.detach() if isinstance(given, torch.Tensor) else given, dtype=float)
    except ValueError as error:
        raise ValueError(f"{name}: got {type(given).__name__} ({error}), expected numbers") from error
    require(bool(np.isfinite(found).all()), name, "NaN or infinite values", "finite numbers")
    return found


def _square_root(covariance: ndarray) -> ndarray:
    """The Cholesky factor, or of a singular matrix a root by its eigenvectors."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        values, basis = np.linalg.eigh(covariance)
        return basis * np.sqrt(values.clip(0))
