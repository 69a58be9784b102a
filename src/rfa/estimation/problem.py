"""The estimation problem: model, grid of times and observations, options, initial state. It is checked once, here."""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .gaussian import Information
from .grid import ObservationGrid
from .linear_sde import LinearSDE
from .matrices import InitialMoments, check_initial, flattened, real
from .robust_weight import RobustWeight

Start = Literal["recursive", "leave_one_out", "query"]
LARGEST_VARIANCE = 100.0  # of a prediction, in units of the noise: a less certain one weights nothing
_GAP = 1e7  # ratio of a fill value's distance to that of the next observation


@dataclass(frozen=True)
class EstimatorOptions:
    """The options of `robust_estimate`."""

    riccati: bool
    smooth: bool
    robust_weight: RobustWeight
    iterations: int
    start: Start
    with_weights: bool

    @property
    def kalman(self) -> bool:
        """Whether the estimate is the Kalman filter's or smoother's."""
        return self.riccati and self.robust_weight.gaussian


class InitialState(NamedTuple):
    """What is known of the state at the first grid time: `N(mean, covariance)`."""

    mean: Float[Tensor, "b n"]
    covariance: Float[Tensor, "#b n n"]

    def information(self) -> Information:
        """The same as a log-likelihood."""
        precision = torch.cholesky_inverse(torch.linalg.cholesky(self.covariance))
        vector = (precision @ self.mean[..., None])[..., 0]
        return Information(precision, vector, (vector * self.mean).sum(-1))


@dataclass(frozen=True)
class EstimationProblem:
    """A checked problem. All estimators take it as it is.

    Args:
        sde: the model.
        grid: times and observations.
        options: what to estimate, and how.
        initial: the state at the first grid time, or None where nothing is known of it.
    """

    sde: LinearSDE
    grid: ObservationGrid
    options: EstimatorOptions
    initial: InitialState | None

    @functools.cached_property
    def stationary(self) -> Float[Tensor, "b n n"] | None:
        """The stationary covariance. None where the model has none, or an initial state is known."""
        if self.initial is not None:
            return None
        try:
            return flattened(self.sde.stationary_covariance().detach(), self.grid.batch_shape, 2)
        except ValueError:
            return None

    def observation_counts(self) -> Int[Tensor, "b grid"]:
        """How many observations the estimate at each grid time uses."""
        present = self.grid.present
        return present.sum(-1, keepdim=True).expand(present.shape) if self.options.smooth else present.cumsum(-1)


class QueryEstimate(NamedTuple):
    """The estimate at one query.

    It has a mean `(b, n)`, a covariance `(b, n, n)`, weights `(b, T)` and an objective `(b, iterations + 1)`.
    Of many queries each has a second dimension, `(b, queries, ...)`.
    """

    mean: Tensor
    covariance: Tensor
    weights: Tensor | None
    objective: Tensor | None

    @classmethod
    def stacked(cls, estimates: "list[QueryEstimate]") -> "QueryEstimate":
        """Estimates at one query each, as one of many queries."""

        def together(parts: tuple[Tensor | None, ...]) -> Tensor | None:
            given = [part for part in parts if part is not None]
            return torch.stack(given, dim=1) if given else None

        return cls(*map(together, zip(*estimates, strict=True)))  # type: ignore[arg-type]

    def gathered(self, index: Int[Tensor, "b queries"]) -> "QueryEstimate":
        """Of many queries, those with the given indices."""

        def taken(x: Tensor | None) -> Tensor | None:
            return None if x is None else along_grid(x, index)

        return QueryEstimate(*map(taken, self))  # type: ignore[arg-type]


def along_grid(x: Float[Tensor, "b grid ..."] | Bool[Tensor, "b grid"], index: Int[Tensor, "#b length"]) -> Tensor:
    """`x` at some time indices of each series, `(b, length, ...)`."""
    return torch.take_along_dim(x, index.reshape(*index.shape, *(1,) * (x.dim() - 2)), dim=1)


def make_problem(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    options: EstimatorOptions,
    query_times: Tensor | None = None,
    initial: InitialMoments | None = None,
) -> EstimationProblem:
    """The problem of one call of `robust_estimate`, with its arguments.

    In robust smoothing, fill values among the first observations count as missing (`without_fill_values`).

    Raises:
        ValueError: for times that do not increase or are not finite, observations of another width or length, infinite
            observations, no series at all, batch dimensions that do not broadcast, or an initial state that is not a
            finite mean and a positive definite covariance.
    """
    mean, covariance = (None, None) if initial is None else check_initial(sde.state_size, initial)
    times, observations = real("times", times), real("observations", observations)
    _check_times("times", times)
    m, length = sde.observation_size, times.shape[-1]
    if bool((times.diff(dim=-1) <= 0).any()):
        raise ValueError("times: got times that do not increase, expected strictly increasing ones")
    if observations.dim() < 2 or tuple(observations.shape[-2:]) != (length, m):
        raise ValueError(
            f"observations: got shape {tuple(observations.shape)}, expected (..., {length}, {m}), one row of {m} "
            "numbers a time"
        )
    if bool(observations.isinf().any()):
        raise ValueError("observations: got infinite values, expected finite numbers, or NaN for what is missing")
    shared = [sde.batch_shape, times.shape[:-1]]
    if query_times is not None:
        query_times = real("query_times", query_times)
        _check_times("query_times", query_times)
        shared.append(query_times.shape[:-1])
    shapes = [*shared[:2], observations.shape[:-2], *shared[2:]]
    try:
        shape = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        given = ", ".join(str(tuple(part)) for part in shapes)
        raise ValueError(f"observations: got batch dimensions {given}, expected shapes that broadcast") from None
    if mean is not None and covariance is not None:
        starts = mean.shape[:-1], covariance.shape[:-2]
        try:
            shape = torch.broadcast_shapes(shape, *starts)
        except RuntimeError:
            given = ", ".join(str(tuple(part)) for part in starts)
            raise ValueError(
                f"initial: got batch dimensions {given} of mean and covariance, expected shapes that broadcast with "
                f"{tuple(shape)}"
            ) from None
    if not shape.numel():
        raise ValueError(f"observations: got batch dimensions {tuple(shape)}, expected at least one series")
    if options.smooth and not options.robust_weight.gaussian:
        observations = without_fill_values(sde, times.expand(*shape, length), observations.expand(*shape, length, m))
    times, observations = flattened(times, shape, 1), flattened(observations, shape, 2)
    queries = None if query_times is None else flattened(query_times, shape, 1)
    alike = all(part.numel() == 1 for part in shared)
    grid = ObservationGrid.of(sde, times, observations, queries, shape, alike)
    if mean is None or covariance is None:
        return EstimationProblem(sde, grid, options, None)
    if bool((torch.linalg.cholesky_ex(covariance)[1] > 0).any()):
        raise ValueError("initial: got a singular covariance, expected a positive definite one")
    one = covariance.shape[:-2].numel() == 1
    covariance = covariance.reshape(1, *covariance.shape[-2:]) if one else flattened(covariance, shape, 2)
    return EstimationProblem(sde, grid, options, InitialState(flattened(mean, shape, 1), covariance))


def without_fill_values(
    sde: LinearSDE, times: Float[Tensor, "*batch T"], observations: Float[Tensor, "*batch T m"]
) -> Float[Tensor, "*batch T m"]:
    """Observations with NaN instead of fill values, such as -3.4e38, among the first ones.

    The first rows determine the state and have no prediction. A fill value there would cost all digits of the others.
    A component of these rows counts as missing where its distance from the series' median is more than 1e7 times
    - the next smaller distance of the series,
    - the standard deviation of the noise and of the process over the whole series.
    Fewer than half of the component's values may lie that far.
    """
    deviation = sde.observation_noise.detach().diagonal(dim1=-2, dim2=-1).sqrt()[..., None, :]
    values = observations.detach().to(torch.float64)
    distance = ((values - values.nanmedian(dim=-2, keepdim=True).values) / deviation).abs()
    if not bool((distance > _GAP).any()):
        return observations
    with torch.no_grad():
        variance = sde.covariance(times[..., -1:] - times[..., :1])
        rows = sde.observation[..., None, :, :]
        process = (rows @ variance @ rows.mT).diagonal(dim1=-2, dim2=-1).sqrt() / deviation
        ordered = distance.sort(dim=-2).values.nan_to_num(nan=torch.inf)
        count = (~values.isnan()).sum(-2, keepdim=True)
        rank = torch.arange(1, ordered.shape[-2], device=distance.device)[:, None]
        gap = ordered[..., 1:, :] > _GAP * torch.maximum(ordered[..., :-1, :], 1 + process)
        gap = gap & (rank < count) & (2 * rank > count)
        least = torch.where(gap, ordered[..., 1:, :], torch.inf).amin(-2, keepdim=True)
        sound = (~values.isnan()).any(-1) & ~(distance >= least).any(-1)
        determining = -(-sde.state_size // sde.observation_size)  # rows that determine a state
        first = sound.cumsum(-1) - sound.to(torch.long) < determining
    return torch.where((distance >= least) & first[..., None], torch.nan, observations)


def _check_times(name: str, given: Tensor) -> None:
    if not given.dim() or not given.shape[-1]:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (..., T) with at least one time")
    if not bool(given.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinite values, expected finite numbers")
