"""A structural model with values of its parameters and the readings of a series, as matrices.

Each reading has its own row of C, its own noise and its own offset: `z_k = C_k x(t_k) + d_k + e_k`, `e_k ~ N(0, R_k)`.
Readings of one time follow each other without a step between them. This is exact where their errors are independent,
and gives each sensor its own weight.
"""

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rfa.checks import require, require_each

from .compiled import LikelihoodProblem, can_run, discretize, run, threads_for
from .components import Component, ComponentMatrices, ParameterValues, SeriesScale, StructuralModel
from .gaussian import Gaussian
from .linear_model import Found, LinearKernel, Rows, fault_error
from .linear_sde import LinearSDE
from .problem import ObservationGrid, Transitions, check_rows
from .recursive_filter import LoopedKernel, kalman_filter, moments
from .series import Readings
from .time_axis import as_numbers, doubtful_period

IRREGULAR = "sigma2.irregular"
_DIFFUSE = 1e8  # variance of a diffuse state, in units of the series' variance
_MANTISSA = 2.0**34  # steps that differ by less, relatively, share a transition: times have been rounded
_NO_SHARE = 1e-12  # relative: a direction that others explain but for less is not told from them
_UNSEEN = 1e-5  # of a direction's size: a reading that shows less shows the rounding of the times


@dataclass(frozen=True)
class Regression(Component):
    """Coefficients that do not change, with a diffuse start. `RobustFilter.fit` adds it for `exog`."""

    regressors: tuple[str, ...]  # their names; the states are `beta.NAME`
    sizes: tuple[float, ...]  # the root mean square of each
    name: str = "regression"

    @property
    def states(self) -> dict[str, float]:
        """One for each regressor. How much of it a reading shows is the regressor itself."""
        return {f"beta.{name}": 0.0 for name in self.regressors}

    def matrices(self, parameters: ParameterValues) -> ComponentMatrices:
        """A = 0 and Q = 0."""
        zeros = torch.zeros(len(self.regressors), len(self.regressors), dtype=torch.float64)
        return zeros, zeros

    def units(self, gap: float) -> tuple[float, ...]:
        """The inverse sizes of the regressors."""
        return tuple(1 / size for size in self.sizes)


def model_of(model: StructuralModel, readings: Readings, unit: str | None) -> StructuralModel:
    """The model of readings: the components, and their regressors. `unit` is that of dates, None for numbers.

    Raises:
        ValueError: for a period longer than the series, and a regressor that is 0 everywhere.
    """
    steps = np.diff(readings.times)
    steps = steps[steps > 0]
    for component in model.components:
        shortest, named = component.shortest_span(), f"period of {component.name}"
        period = getattr(component, "period", None)
        doubt = doubtful_period(period, steps, unit) if period and unit and len(steps) else None
        expected = f"at most the span of the series, {readings.span:g}{f': {doubt}' if doubt else ''}"
        require(shortest <= readings.span, named, shortest, expected)
        if doubt:
            warnings.warn(f"{named}: {doubt}", UserWarning, stacklevel=4)
    if not readings.regressors:
        return model
    size = tuple(float(x) for x in np.sqrt(np.nanmean(readings.exog**2, axis=0)))
    require(all(size), "exog", "a column of zeros", "columns with some values other than 0")
    return model + Regression(readings.regressors, size)


def irregular_names(sensors: tuple[str, ...]) -> list[str]:
    """The parameters of the readings' noise: one for each sensor."""
    return [f"{IRREGULAR}.{sensor}" if sensor else IRREGULAR for sensor in sensors]


ReadingsKernel = LinearKernel | LoopedKernel


@dataclass(frozen=True)
class ReadingsTable:
    """A model and readings: what does not depend on the values of parameters."""

    model: StructuralModel  # the components, and the regressors
    readings: Readings  # in order of time
    rows: Float[Tensor, "T n"]  # C of each reading
    values: Float[Tensor, " T"]  # without their offsets, NaN where nothing was read
    sensor: Int[Tensor, " T"]  # of each reading
    noise: Float[Tensor, " T"]  # known variances, beside the sensors'
    least_noise: Float[Tensor, " sensors"]  # the smallest of them among the readings of each sensor

    @classmethod
    def of(cls, model: StructuralModel, readings: Readings) -> "ReadingsTable":
        """Of readings."""
        values = readings.used - readings.offset
        least = np.full(len(readings.sensors), np.inf)
        seen = ~np.isnan(values)
        np.minimum.at(least, readings.sensor[seen], readings.noise[seen])
        noise = np.nan_to_num(readings.noise)  # of a missing reading
        arrays = values, readings.sensor, noise, least
        tensors = (torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)
        return cls(model, readings, _rows(model, readings), *tensors)

    @functools.cached_property
    def lags(self) -> tuple[Float[Tensor, " lags"], Int[Tensor, " steps"]]:
        """The different steps from a reading to the next, and which of them each step is."""
        lags, index = map(torch.from_numpy, _distinct_lags(np.diff(self.readings.times)))
        return lags, index

    def problem(self, parameters: Mapping[str, float | int | Float[Tensor, " b"]]) -> "ReadingsProblem":
        """With values of the parameters, factors as decay rates: numbers, or `(b,)` of several models."""
        given = {name: torch.as_tensor(value, dtype=torch.float64).reshape(-1) for name, value in parameters.items()}
        b = max(len(value) for value in given.values())
        given = {name: value.expand(b) for name, value in given.items()}
        sde = self.model.sde_of_rates(given, torch.ones(b, dtype=torch.float64))
        sensor_noise = torch.stack([given[name] for name in irregular_names(self.readings.sensors)], dim=-1)
        return ReadingsProblem(self, sde, sensor_noise)


@dataclass(frozen=True)
class ReadingsProblem:
    """Readings and b models of them."""

    table: ReadingsTable
    sde: LinearSDE  # b models
    sensor_noise: Float[Tensor, "b sensors"]  # the variance of each sensor's errors

    def __post_init__(self) -> None:
        silent = bool((self.sensor_noise + self.table.least_noise <= 0).any())
        require(not silent, IRREGULAR, "a reading without noise", "sigma2.irregular > 0, or noise=... for each reading")

    @functools.cached_property
    def steps(self) -> tuple[Float[Tensor, "b lags n n"], Float[Tensor, "b lags n n"]]:
        """Phi and V of each different lag."""
        transition, variance = discretize(self.sde, self.table.lags[0])
        finite = bool((transition.sum() + variance.sum()).isfinite())
        require(finite, "times", "a gap over which the state overflows", "shorter gaps")
        return transition, variance

    @functools.cached_property
    def initial(self) -> tuple[Float[Tensor, "b n n"], Float[Tensor, " n"]]:
        """The covariance of the stationary states before the first reading, and the units of the diffuse states."""
        return self.table.model.initial(self.sde, self.table.readings.gap)

    def __len__(self) -> int:
        return len(self.table.values)

    def with_readings(self, readings: Readings) -> "ReadingsProblem":
        """Of other readings."""
        return replace(self, table=ReadingsTable.of(self.table.model, readings))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states."""
        return tuple(self.table.model.states)

    @property
    def noise(self) -> Float[Tensor, "b T"]:
        """R of each reading, > 0."""
        table = self.table  # in NumPy: PyTorch would start threads for it
        noise = self.sensor_noise.numpy()[:, table.sensor.numpy()] + table.noise.numpy()
        return torch.from_numpy(np.maximum(noise, np.finfo(float).tiny))  # a reading that is missing may have none

    def transitions(self) -> Transitions:
        """Of each step, by the lags of all models."""
        transition, variance = self.steps
        of_models = transition.shape[1] * torch.arange(len(transition))[:, None] + self.table.lags[1]
        return Transitions(transition.flatten(0, 1), variance.flatten(0, 1), of_models)

    def rows(self, robust: bool) -> Rows:
        """Of one model: the readings as a kernel takes them. `ValueError` where a robust filter would overflow."""
        noise, observation = self.noise[0].numpy(), self.table.rows.numpy()
        if robust:
            check_rows(observation / np.sqrt(noise)[:, None], "sigma2.irregular, noise or observation")
        times, values = self.table.readings.times[None], self.table.values.numpy()[None, :, None]
        return Rows(times, values, None, None, observation[None, :, None], noise[None, :, None, None])

    def of_readings(self, found: Found) -> tuple[np.ndarray, np.ndarray]:
        """Of one model: the mean of what the rows of C show of the states, and its variance with the noise, `(T,)`."""
        shown = self.table.rows.numpy()
        spread = np.einsum("tij,tj->ti", found.covariance, shown)
        variance = np.einsum("ti,ti->t", shown, spread)
        # states far more uncertain than their sum leave it a negative variance by rounding
        return np.einsum("ti,ti->t", shown, found.mean), np.maximum(variance, 0.0) + self.noise[0].numpy()

    def ahead(
        self, sde: LinearSDE, states: Found, origins: Any, targets: Any
    ) -> tuple[Float[np.ndarray, " pairs"], Float[np.ndarray, " pairs"]]:
        """Of one model: mean and variance of the readings `targets`, by the states at the readings `origins` alone."""
        pairs = {name: as_numbers(name, x) for name, x in (("origins", origins), ("targets", targets))}
        shapes, expected = [x.shape for x in pairs.values()], f"whole numbers from 0 to {len(self) - 1}"
        fits = shapes[0] == shapes[1] and len(shapes[0]) == 1
        require(fits, "origins", f"shape {shapes[0]} beside {shapes[1]} of targets", "(pairs,), as many as targets")
        for name, x in pairs.items():
            require_each((x % 1 == 0) & (x >= 0) & (x < len(self)), name, "no reading", x, expected)
        origins, targets = (x.astype(np.int64) for x in pairs.values())
        later = np.subtract(*self.table.readings.times[[targets, origins]]) > 0
        require_each(later, "targets", "a time before its origin's", targets, "readings later than their origins")
        table, times = self.table, self.table.readings.times
        lags, index = _distinct_lags(times[targets] - times[origins])
        transition, variance = (x[0].numpy() for x in discretize(sde, torch.from_numpy(lags)))
        shown = table.rows.numpy()[targets]
        moved = np.einsum("pi,pij->pj", shown, transition[index])
        covariance = states.covariance[origins]
        spread = np.einsum("pi,pij,pj->p", moved, covariance, moved)
        spread = np.maximum(spread, 0.0) + np.einsum("pi,pij,pj->p", shown, variance[index], shown)
        mean = np.einsum("pi,pi->p", moved, states.mean[origins]) + table.readings.offset[targets]
        return mean, spread + self.noise[0].numpy()[targets]

    def drawn(
        self, sde: LinearSDE, state: np.ndarray, paths: int, generator: torch.Generator | None
    ) -> Float[np.ndarray, "T paths"]:
        """Of one model: readings drawn from the state of a kernel before them, whose time is known."""
        n, times = sde.state_size, np.append(state[0, -1], self.table.readings.times)
        start = torch.from_numpy(state[0, :n]), torch.from_numpy(state[0, n : n + n * n].reshape(n, n))
        later = sde.simulate(torch.from_numpy(times), generator, initial=start, sample_shape=(paths,)).states[:, 1:]
        errors = torch.randn(later.shape[:2], generator=generator, dtype=torch.float64) * self.noise[0].sqrt()
        return ((later * self.table.rows).sum(-1) + errors).T.numpy()

    def first(self, kernel: ReadingsKernel, scale: SeriesScale) -> np.ndarray:
        """The state before the first reading, for filters and smoothers of one model.

        Diffuse states have a standard deviation of 10,000 times that of the series, or of its noise where that is
        larger. An exact diffuse recursion loses all digits where many readings tell the directions from each other.
        """
        covariance, units = self.initial
        mean = np.zeros((1, len(units)))
        mean[:, [k for k, name in enumerate(self.names) if name == "level"]] = scale.median
        largest = max(float(self.noise[0].median()), scale.widest)  # of most readings
        wide = torch.diag_embed(units.square() * _DIFFUSE * largest)
        return kernel.start(mean, (covariance + wide).numpy(), np.full(1, np.nan))


def readings_kernel(sde: LinearSDE, names: tuple[str, ...], robust: bool) -> ReadingsKernel:
    """The filter of readings of one model, compiled where that is possible."""
    matrices = sde.dynamics, sde.diffusion, sde.observation, sde.observation_noise
    sde = LinearSDE(*(x.reshape(x.shape[-2:]) for x in matrices))
    return LinearKernel(sde, names, robust, by_component=False) if can_run() else LoopedKernel(sde, robust)


def run_readings(
    kernel: ReadingsKernel, problem: ReadingsProblem, state: np.ndarray, smooth: bool = False, name: str = "times"
) -> Found:
    """Filter readings from the state before them, which becomes the one after. Or smooth them from a start.

    Raises:
        ValueError: with the name of the argument that has the times.
    """
    found, fault = kernel.run(problem.rows(kernel.robust), state, smooth)
    if fault is not None:
        what, _, row = fault
        time = f"{problem.table.readings.times[row]:g}"
        raise fault_error(what, name, time, row if len(problem) > 1 else None)
    return Found(*(x[0] for x in found))


def filter_readings(problem: ReadingsProblem, scale: SeriesScale, robust: bool, smooth: bool = False) -> Found:
    """The filter of one series from its start, or its smoother."""
    kernel = readings_kernel(problem.sde, problem.names, robust)
    return run_readings(kernel, problem, problem.first(kernel, scale), smooth)


@torch.no_grad()
def exact_log_likelihood(problem: ReadingsProblem) -> Float[Tensor, " b"]:
    """`log p` of all readings by the Kalman filter with an exact diffuse start, in nats.

    With e the innovations from a start at zero and W the innovations from a start at each diffuse direction alone, both
    over their standard deviations s:

        -(N log 2 pi + log det W^T W + min_d |e - W d|^2) / 2 - sum_k log s_k

    det is the product of the eigenvalues that are not 0: what no reading shows, such as the sine of a wave whose half
    period is the step, does not count.

    Source: De Jong, The diffuse Kalman filter (1991).
    """
    if not can_run():
        return _looped_log_likelihood(problem)
    table, (transition, variance), (covariance, units) = problem.table, problem.steps, problem.initial
    b, lags, n, _ = transition.shape
    found = covariance.new_empty(b)
    of_models = {"transition": transition, "variance": variance, "covariance": covariance}
    of_models["sensor_noise"] = problem.sensor_noise
    run(
        "likelihood",
        LikelihoodProblem(b, len(problem), n, problem.sensor_noise.shape[1], lags, threads_for(b, len(problem), n)),
        **{name: getattr(table, name) for name in ("rows", "values", "sensor", "noise")},
        **{name: x.contiguous() for name, x in of_models.items()},
        lag_index=table.lags[1],
        units=units,
        log_likelihood=found,
    )
    return found


def _looped_log_likelihood(problem: ReadingsProblem) -> Float[Tensor, " b"]:
    """The same in PyTorch."""
    table, transitions = problem.table, problem.transitions()
    readings = table.readings.times, table.values.numpy(), table.rows.numpy()
    grid = ObservationGrid.of_numbers(*readings, problem.noise.numpy())
    start, sizes = problem.initial
    zero = start.new_zeros(start.shape[:-1])
    states = kalman_filter(grid, transitions, Gaussian(zero, start, None, zero[:, 0]))
    mean, covariance = moments([state.predicted for state in states])
    row = grid.rows[:, :, 0]
    deviation = (1 + (row * (covariance @ row[..., None])[..., 0]).sum(-1)).sqrt()
    residual = (grid.values[..., 0] - (row * mean).sum(-1)) / deviation
    units, diffuse = torch.where(sizes > 0, sizes, 1.0), sizes > 0
    columns = torch.diag(sizes)[:, diffuse].expand(len(zero), -1, -1)
    origin, shown, seen = columns, [], torch.zeros_like(columns[:, 0], dtype=torch.bool)
    for k, state in enumerate(states):
        if k:
            columns, origin = (transitions.steps[k - 1][0] @ x for x in (columns, origin))
        most = (origin != 0).to(row.dtype).mT @ (row[:, k].abs() * units)[..., None]
        size = (origin.abs() / units[:, None]).amax(-2)
        seen = seen | ((row[:, k, None, :] @ origin)[:, 0].abs() > _UNSEEN * size * most[..., 0])
        shown.append(torch.where(seen[:, None], row[:, k, None, :] @ columns, 0.0))
        columns = columns - state.gains[0][..., None] * shown[-1]
    design = torch.cat(shown, dim=-2) / deviation[..., None]
    lengths = design.square().sum(-2, keepdim=True).sqrt()
    basis, shares, turns = torch.linalg.svd(design / torch.where(lengths > 0, lengths, 1.0), full_matrices=False)
    told = shares > _NO_SHARE * shares[:, :1]
    rest = (residual.square().sum(-1) - ((residual[:, None] @ basis)[:, 0] * told).square().sum(-1)).clamp(min=0.0)
    rows = (shares * told)[..., None] * turns * lengths / sizes[diffuse]
    told = torch.arange(told.shape[-1]) < told.sum(-1, keepdim=True)
    determined = torch.where(told, torch.linalg.svdvals(rows), 1.0).log().sum(-1)
    logarithms = torch.where(grid.present, deviation.log() + (problem.noise.log() + math.log(2 * math.pi)) / 2, 0.0)
    return -rest / 2 - determined - logarithms.sum(-1)


def _distinct_lags(lags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different lags, and which of them each one is."""
    mantissa, exponent = np.frexp(lags)
    rounded = np.ldexp(np.round(mantissa * _MANTISSA), exponent)
    _, first, index = np.unique(rounded, return_index=True, return_inverse=True)
    return lags[first], index


def _rows(model: StructuralModel, readings: Readings) -> Float[Tensor, "T n"]:
    """C of each reading: the model's, or the caller's, and the regressors."""
    shown = np.array(list(model.states.values()))
    rows = np.tile(shown, (len(readings), 1))
    own = rows.shape[1] - readings.exog.shape[1]
    if readings.observation is not None:
        shape, names = readings.observation.shape, list(model.states)[:own]
        fits = shape[1] == own
        require(fits, "observation", f"{shape[1]} columns", f"{own}, one for each state: {', '.join(names)}")
        rows[:, :own] = np.nan_to_num(readings.observation)  # NaN of a missing reading, as below
    rows[:, own:] = np.nan_to_num(readings.exog)
    return torch.from_numpy(rows)
