"""Filter, smoother and likelihood of a structural model, one reading after another.

Each reading has its own row of C, its own noise and its own offset: `z_k = C_k x(t_k) + d_k + e_k`, `e_k ~ N(0, R_k)`.
Readings of one time follow each other without a step between them. This is exact where their errors are independent,
and gives each sensor its own weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rfa.checks import require

from .gaussian import Gaussian, Information
from .grid import ObservationGrid, Transitions
from .kalman import backward_information, combined, kalman_filter
from .linear_sde import LinearSDE
from .recursive_filter import Recursion, resumed_filter, robust_smoother
from .series import Readings
from .structural_model import SeriesScale, StructuralModel

IRREGULAR = "sigma2.irregular"
_NO_PART = 1e-12  # relative: a direction of which the readings show less is not shown
_DIFFUSE = 1e8  # variance of a diffuse state, in units of the series' variance
_MANTISSA = 2.0**34  # steps that differ by less, relatively, share a transition: times have been rounded
Carried = Gaussian | Recursion  # what the Kalman filter and the robust filter carry from one reading to the next


def irregular_names(sensors: tuple[str, ...]) -> list[str]:
    """The parameters of the readings' noise: one for each sensor."""
    return [f"{IRREGULAR}.{sensor}" if sensor else IRREGULAR for sensor in sensors]


@dataclass(frozen=True)
class ReadingsProblem:
    """A model with values of its parameters, and readings. b parameter vectors have b series.

    Args:
        names: of the states.
        sde: the model, with batch dimension b.
        rows: C of each reading, `(T, n)`.
        noise: R of each reading, `(b, T)`.
        grid: the readings in units of their noise.
        transitions: from each reading to the next.
        covariance: of the stationary states before the first reading, `(b, n, n)`, 0 elsewhere.
        units: of the diffuse states, `(n,)`, 0 elsewhere.
    """

    names: tuple[str, ...]
    sde: LinearSDE
    rows: Float[Tensor, "T n"]
    noise: Float[Tensor, "b T"]
    grid: ObservationGrid
    transitions: Transitions
    covariance: Float[Tensor, "b n n"]
    units: Float[Tensor, " n"]

    @classmethod
    def of(
        cls,
        model: StructuralModel,
        parameters: Mapping[str, float | int | Float[Tensor, " b"]],
        readings: Readings,
    ) -> "ReadingsProblem":
        """With values of the parameters: numbers, or `(b,)` of several models.

        Raises:
            ValueError: for a reading without any noise, and `observation` of another width than the states.
        """
        given = {name: torch.as_tensor(value, dtype=torch.float64).reshape(-1) for name, value in parameters.items()}
        b = max(len(value) for value in given.values())
        given = {name: value.expand(b) for name, value in given.items()}
        sde = model.to_sde(given, torch.ones(b, dtype=torch.float64))
        variances = torch.stack([given[name] for name in irregular_names(readings.sensors)], dim=-1)
        noise = variances[:, torch.from_numpy(readings.sensor)] + torch.from_numpy(readings.noise)
        values = torch.from_numpy(readings.values - readings.offset)
        present = ~values.isnan()
        silent = bool((noise[:, present] <= 0).any())
        require(not silent, IRREGULAR, "a reading without noise", "sigma2.irregular > 0, or noise=... for each reading")
        rows = _rows(model, readings)
        scale = noise.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        whitened = torch.where(present[:, None], rows / scale[..., None], 0.0)[:, :, None, :]
        observed = torch.where(present, values, 0.0).expand(b, -1)
        seen = (observed / scale)[..., None]
        times = torch.from_numpy(readings.times).expand(b, -1)
        index = torch.arange(len(readings)).expand(b, -1)
        shape, counts = torch.Size([b]), present.to(torch.long).expand(b, -1)
        information = Information.of(whitened, seen)
        present, lags = present.expand(b, -1), times.diff(dim=-1)
        observations = observed[..., None]
        grid = ObservationGrid(
            times, whitened, seen, observations, information, index, index, present, counts, lags, shape
        )
        covariance, units = model.initial(sde, readings.gap)
        return cls(tuple(model.states), sde, rows, noise, grid, steps(sde, readings.times), covariance, units)

    def first(self, scale: SeriesScale) -> Gaussian:
        """The state before the first reading, for filters and smoothers.

        Diffuse states have a standard deviation of 10,000 times that of the series, around its median in the level. So
        the start changes estimates by a relative 1e-8. An exact diffuse recursion loses all digits where many readings
        are needed to tell the directions from each other, such as a season's from a slope.
        """
        mean = torch.zeros_like(self.covariance[..., 0])
        mean[:, [k for k, name in enumerate(self.names) if name == "level"]] = scale.median
        wide = torch.diag(self.units.square() * (_DIFFUSE * scale.variance))
        return Gaussian(mean, self.covariance + wide, None, mean.new_zeros(len(mean)))


class FilteredReadings(NamedTuple):
    """A filter or a smoother of one series of T readings.

    Args:
        predicted: the state before each reading is used.
        estimates: the state at each reading: after it in a filter, given all readings in a smoother.
        weights: of each reading, `(T,)`, in (0, 1].
        carried: what the filter carries on from the last reading.
    """

    predicted: list[Gaussian]
    estimates: list[Gaussian]
    weights: Float[Tensor, " T"]
    carried: Carried


@torch.no_grad()
def filter_readings(problem: ReadingsProblem, first: Carried, robust: bool) -> FilteredReadings:
    """The Kalman filter, or the robust filter, of one series.

    Args:
        problem: with b = 1.
        first: the state before the first reading, or what earlier readings carry on, predicted to it.
        robust: which of the two.
    """
    grid, transitions = problem.grid, problem.transitions
    if not robust:
        assert isinstance(first, Gaussian)
        states = kalman_filter(grid, transitions, first)
        ones = torch.ones(grid.length, dtype=torch.float64)
        found = [state.posterior for state in states]
        return FilteredReadings([state.predicted for state in states], found, ones, found[-1])
    grid = grid.bounded()
    start = Recursion.first(grid, first) if isinstance(first, Gaussian) else first
    passed, recursion = resumed_filter(grid, transitions, start)
    predicted = [passed.without_challengers(state.predicted) for state in passed.states]
    estimates = [passed.without_challengers(state.posterior) for state in passed.states]
    return FilteredReadings(predicted, estimates, _weights(passed.grid, grid), recursion)


@torch.no_grad()
def smooth_readings(
    problem: ReadingsProblem, first: Gaussian, filtered: FilteredReadings, robust: bool
) -> FilteredReadings:
    """The Kalman smoother, or the robust smoother, of one series, its start and its filter."""
    grid, weights, states = problem.grid, filtered.weights, filtered.estimates
    if robust:
        bounded = problem.grid.bounded()
        passed = robust_smoother(bounded, problem.transitions, first)
        grid, weights = passed.grid, _weights(passed.grid, bounded)
        states = [state.posterior for state in passed.states]
    later = backward_information(grid, problem.transitions)
    estimates = [combined(state, information)[0] for state, information in zip(states, later, strict=True)]
    return filtered._replace(estimates=estimates, weights=weights)


@torch.no_grad()
def forecast_readings(problem: ReadingsProblem, carried: Carried, lags: np.ndarray) -> FilteredReadings:
    """The state after each lag from the last reading. Nothing is observed."""
    state = carried.state.selected(slice(1)) if isinstance(carried, Recursion) else carried
    at = torch.from_numpy(lags)
    transition, variance = (matrices(at)[0] for matrices in (problem.sde.transition, problem.sde.covariance))
    states = [state.predicted(*step) for step in zip(transition[:, None], variance[:, None], strict=True)]
    return FilteredReadings(states, states, torch.ones(len(lags), dtype=torch.float64), carried)


@torch.no_grad()
def exact_log_likelihood(problem: ReadingsProblem) -> Float[Tensor, " b"]:
    """`log p` of all readings by the Kalman filter with an exact diffuse start, in nats.

    With e the innovations from a start at zero and W the innovations from a start at each diffuse direction alone, both
    over their standard deviations s:

        -(N log 2 pi + log det W^T W + min_d |e - W d|^2) / 2 - sum_k log s_k

    This is the value of the diffuse recursion. It keeps its digits where many readings are needed to tell the diffuse
    directions from each other.

    Source: De Jong, The diffuse Kalman filter (1991).
    """
    grid = problem.grid
    zero = problem.covariance.new_zeros(problem.covariance.shape[:-1])
    states = kalman_filter(grid, problem.transitions, Gaussian(zero, problem.covariance, None, zero[:, 0]))
    mean = torch.stack([state.predicted.mean for state in states], dim=1)
    covariance = torch.stack([state.predicted.covariance for state in states], dim=1)
    row = grid.rows[:, :, 0]
    deviation = (1 + (row * (covariance @ row[..., None])[..., 0]).sum(-1)).sqrt()
    residual = (grid.values[..., 0] - (row * mean).sum(-1)) / deviation
    columns = torch.diag(problem.units)[:, problem.units > 0].expand(len(zero), -1, -1)
    shown = []
    for k, state in enumerate(states):
        columns = problem.transitions[k - 1][0] @ columns if k else columns
        shown.append(row[:, k, None, :] @ columns)
        columns = columns - state.gains[0][..., None] * shown[-1]
    design = torch.cat(shown, dim=-2) / deviation[..., None]
    reduced = torch.linalg.qr(torch.cat([design, residual[..., None]], dim=-1), mode="r").R.diagonal(dim1=-2, dim2=-1)
    count = min(design.shape[-1], reduced.shape[-1])
    sizes, lengths = reduced[:, :count].abs(), design[..., :count].square().sum(-2).sqrt()
    determined = (
        torch.where(sizes > _NO_PART * lengths, sizes, 1.0).log().sum(-1) - problem.units[problem.units > 0].log().sum()
    )
    rest = reduced[:, count:].square().sum(-1)
    logarithms = torch.where(grid.present, deviation.log() + (problem.noise.log() + math.log(2 * math.pi)) / 2, 0.0)
    return -rest / 2 - determined - logarithms.sum(-1)


def predicted_state(state: Carried, transition: Tensor, variance: Tensor) -> Carried:
    """What is carried, at a later time."""
    if isinstance(state, Gaussian):
        return state.predicted(transition, variance)
    return state._replace(state=state.state.predicted(transition, variance))


def steps(sde: LinearSDE, times: np.ndarray) -> Transitions:
    """Transition and variance of each step. Equal steps are computed once."""
    mantissa, exponent = np.frexp(np.diff(times))
    rounded = np.ldexp(np.round(mantissa * _MANTISSA), exponent)
    _, first, inverse = np.unique(rounded, return_index=True, return_inverse=True)
    lags = torch.from_numpy(np.diff(times)[first])
    at = torch.from_numpy(inverse)
    found = [matrices(lags)[:, at] for matrices in (sde.transition, sde.covariance)]
    require(
        all(bool(x.isfinite().all()) for x in found), "times", "a gap over which the state overflows", "shorter gaps"
    )
    return Transitions(*found)


def _rows(model: StructuralModel, readings: Readings) -> Float[Tensor, "T n"]:
    """C of each reading: the model's, or the caller's, and the regressors."""
    shown = np.array(list(model.states.values()))
    rows = np.tile(shown, (len(readings), 1))
    own = rows.shape[1] - readings.exog.shape[1]
    if readings.observation is not None:
        shape, names = readings.observation.shape, list(model.states)[:own]
        fits = shape[1] == own
        require(fits, "observation", f"{shape[1]} columns", f"{own}, one for each state: {', '.join(names)}")
        rows[:, :own] = readings.observation
    rows[:, own:] = readings.exog
    return torch.from_numpy(rows)


def _weights(weighted: ObservationGrid, grid: ObservationGrid) -> Float[Tensor, " T"]:
    """The weights by which the rows of one series were multiplied. 1 where nothing was read."""
    before, after = (x.rows[0].square().sum((-2, -1)) for x in (grid, weighted))
    return torch.where(before > 0, after / torch.where(before > 0, before, 1.0), 1.0)
