"""The estimation problem, checked once: a model, and a grid of rows by time, one for each observation or query.

    z_k = C x(t_k) + e_k, e_k ~ N(0, R), R = L L^T    is kept as    L^-1 z_k = H_k x(t_k) + N(0, I),    H_k = L^-1 C
    x(t_k+1) = Phi_k x(t_k) + N(0, V_k)

A missing component has a row of zeros in H_k. So C and R are never inverted, and C may have any shape.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rfa.checks import require

from .compiled import can_run
from .gaussian import Gaussian, Information
from .linear_sde import InitialMoments, LinearSDE, broadcast_shapes, check_initial, identity_like, real

LARGEST_VALUE = 1e100  # of an observation in units of its noise; squares of larger ones overflow
_LARGEST_ROW = 1e45  # entry of H: squares of squares must not overflow
_GAP = 1e7  # ratio of a fill value's distance to that of the next observation


@dataclass(frozen=True)
class ObservationGrid:
    """The G rows of b series, sorted by time. A query at an observation's time shares its row.

    Quantities of the model have a batch of b, or of 1 where all series share everything but values.
    """

    times: Float[Tensor, "b grid"]
    rows: Float[Tensor, "#b grid m n"]  # H, zeros where nothing is observed
    values: Float[Tensor, "b grid m"]  # L^-1 z, zeros where nothing is observed
    observation_index: Int[Tensor, "b grid"]  # which observation stands at each time, -1 at a query
    query_index: Int[Tensor, "_ queries"]  # the row of each query
    observed_components: Int[Tensor, "b grid"]  # how many of the m components are observed
    batch_shape: torch.Size  # of the caller's series; b is its product

    @classmethod
    def of(
        cls,
        sde: LinearSDE,
        times: Float[Tensor, "b T"],
        observations: Float[Tensor, "b T m"],
        queries: Float[Tensor, "b queries"] | None,
        batch_shape: torch.Size,
        shared: bool,
    ) -> "ObservationGrid":
        """Of checked times and queries in any order (None: the times). `shared`: series have one model and one set."""
        length, m = observations.shape[1:]
        observation_index = torch.arange(length, device=times.device).expand_as(times)
        query_index = observation_index
        if queries is not None:
            both = torch.cat([times, queries], dim=-1)
            times, order = both.sort(dim=-1, stable=True)
            position = order.argsort(dim=-1)
            observation_index = torch.where(order < length, order, -1)
            at = torch.searchsorted(both[:, :length].contiguous(), queries.contiguous()).clamp(max=length - 1)
            same = both.gather(-1, at) == queries  # the query takes the row of the observation
            query_index = torch.where(same, position.gather(-1, at), position[:, length:])
            missing = torch.full_like(queries[..., None].expand(-1, -1, m), torch.nan)
            observations = torch.cat([observations, missing], dim=1).gather(1, order[..., None].expand(-1, -1, m))
        present = ~observations.isnan()
        models = 1 if shared and bool((present == present[:1]).all()) else len(times)
        matrices = (sde.observation, sde.observation_noise)
        observation, noise = (flattened(x, batch_shape, 2)[:models, None] for x in matrices)
        shown = present[:models]  # a missing component has a row of zeros and a noise of 1
        both, ones = shown[..., :, None] & shown[..., None, :], torch.diag_embed((~shown).to(noise.dtype))
        factor, failed = torch.linalg.cholesky_ex(torch.where(both, noise, 0.0) + ones)
        if bool((failed > 0).any()):
            raise ValueError(
                "observation_noise: got a singular observation noise, expected a positive definite R for what is seen"
            )
        whiten = torch.linalg.solve_triangular(factor, identity_like(noise), upper=False)
        rows = whiten @ torch.where(shown[..., None], observation, 0.0)
        values = (whiten @ observations.masked_fill(~present, 0.0)[..., None])[..., 0]
        return cls(times, rows, values, observation_index, query_index, present.sum(-1), batch_shape)

    @classmethod
    def of_numbers(
        cls,
        times: Float[np.ndarray, " T"],
        values: Float[np.ndarray, " T"],
        rows: Float[np.ndarray, "T n"],
        noise: Float[np.ndarray, "b T"],
    ) -> "ObservationGrid":
        """Of numbers, NaN where missing, each with its row of C, and the variance > 0 of its error in b models."""
        present, deviation = ~np.isnan(values), np.sqrt(noise)
        whitened_rows = torch.from_numpy(np.where(present[:, None], rows / deviation[..., None], 0.0))
        whitened = torch.from_numpy(np.where(present, values / deviation, 0.0))
        every = torch.from_numpy(times).expand_as(whitened)
        index, seen = torch.arange(len(values)).expand_as(every), torch.from_numpy(present.astype(np.int64))
        parts = every, whitened_rows[:, :, None], whitened[..., None], index, index, seen.expand_as(every)
        return cls(*parts, torch.Size(every.shape[:1]))

    @property
    def models(self) -> int:
        """1 where all series share everything but the observed values, else b."""
        return len(self.rows)

    @property
    def length(self) -> int:
        """G."""
        return self.times.shape[1]

    @property
    def present(self) -> Bool[Tensor, "b grid"]:
        """Whether anything is observed."""
        return self.observed_components > 0

    @functools.cached_property
    def information(self) -> Information:
        """Of each observation on the state, `(b or 1, G, n, n)` and `(b, G, n)`. Zero at a query."""
        return Information.of(self.rows, self.values)

    @functools.cached_property
    def lags(self) -> Float[Tensor, "b steps"]:
        """From each time to the next one."""
        return self.times.diff(dim=-1)

    @functools.cached_property
    def observation_rows(self) -> Int[Tensor, "b T"]:
        """The row of each observation."""
        count = int(self.observation_index.max()) + 1
        return torch.where(self.observation_index < 0, self.length, self.observation_index).argsort(-1)[:, :count]

    def used_rows(self, index: int, smooth: bool) -> Int[Tensor, " j"]:
        """The observed rows that an estimate at a row uses: earlier ones in order, then later ones from the last."""
        seen = self.present.any(0).nonzero()[:, 0]
        earlier = seen[seen <= index]
        return torch.cat([earlier, seen[seen > index].flip(0)]) if smooth else earlier

    def by_series(self, x: Float[Tensor, "b ..."]) -> Tensor:
        """With the caller's dimensions of series."""
        return x.reshape(*self.batch_shape, *x.shape[1:])

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """Rows `(b or 1, m, n)` and values `(b, m)` at a time index."""
        return self.rows[:, index], self.values[:, index]

    def bounded(self) -> "ObservationGrid":
        """With values bounded so that their squares do not overflow. Such values are outliers in any case."""
        check_rows(self.rows.detach())
        if not bool((self.values.abs() > LARGEST_VALUE).any()):
            return self
        return replace(self, values=self.values.clamp(min=-LARGEST_VALUE, max=LARGEST_VALUE))

    def weighted(self, weight: Float[Tensor, "b grid"]) -> "ObservationGrid":
        """With the noise of each observation divided by a weight. Each series then has its own rows."""
        root = weight.sqrt()
        return replace(self, rows=self.rows * root[..., None, None], values=self.values * root[..., None])

    def doubled(self) -> "ObservationGrid":
        """All series, followed by all of them again. Shared rows stay shared."""
        names = ("times", "values", "observation_index", "observed_components") + (self.models > 1) * ("rows",)
        doubled: dict[str, Any] = {name: torch.cat([getattr(self, name)] * 2) for name in names}
        return replace(self, **doubled)


def check_rows(rows: Any, name: str = "observation_noise") -> None:
    """Raise `ValueError`, with the name of the argument, where rows of C over the noise are too large to be robust."""
    least = f"a standard deviation of less than 1 / {_LARGEST_ROW:g} of what the states show"
    expected = "another unit for observations and states"
    require(not bool((abs(rows) > _LARGEST_ROW).any()), name, least, expected)


def along_grid(x: Shaped[Tensor, "b grid ..."], index: Int[Tensor, "#b length"]) -> Tensor:
    """`x` at some time indices of each series, `(b, length, ...)`."""
    return torch.take_along_dim(x, index.reshape(*index.shape, *(1,) * (x.dim() - 2)), dim=1)


@dataclass(frozen=True)
class Transitions:
    """`Phi` and `V` of each different lag of a grid."""

    transition: Float[Tensor, "lags n n"]
    variance: Float[Tensor, "lags n n"]
    index: Int[Tensor, "#b steps"]  # which of them each step has

    @classmethod
    def of(cls, sde: LinearSDE, grid: ObservationGrid) -> "Transitions":
        """Of a grid, with gradients."""
        matrices = sde.transition, sde.covariance
        transition, variance = (each_step(of, sde, grid, grid.lags).flatten(0, 1) for of in matrices)
        lags = grid.lags[: grid.models]
        index = torch.arange(lags.numel(), device=lags.device).view(lags.shape)
        lags = lags.flatten()
        finite = (transition.isfinite() & variance.isfinite()).all(-1).all(-1)
        if not bool(finite.all()):
            gap = lags[~finite].min().item()
            raise ValueError(f"times: got a gap of {gap:g}, over which the state of an unstable model overflows")
        return cls(transition, variance, index)

    @functools.cached_property
    def steps(self) -> list[tuple[Tensor, Tensor]]:
        """Phi and V of each step, `(b or 1, n, n)`."""
        return list(zip(*(x[self.index].unbind(1) for x in (self.transition, self.variance)), strict=True))

    def doubled(self) -> "Transitions":
        """As `ObservationGrid.doubled`."""
        return self if len(self.index) == 1 else replace(self, index=torch.cat([self.index] * 2))


def each_step(of, sde: LinearSDE, grid: ObservationGrid, lags: Tensor) -> Float[Tensor, "models steps n n"]:
    """A matrix of each lag, such as its transition."""
    shape = grid.batch_shape if grid.models > 1 else torch.Size([1] * len(grid.batch_shape))
    count, n = lags.shape[-1], sde.state_size
    matrices = of(lags[: grid.models].reshape(*shape, count))
    return matrices.expand(*shape, count, n, n).reshape(grid.models, count, n, n)


@dataclass(frozen=True)
class EstimationProblem:
    """A checked problem. All estimators take it as it is."""

    sde: LinearSDE
    grid: ObservationGrid
    initial: Gaussian | None  # the state at the first grid time, or None where nothing is known of it
    smooth: bool

    @functools.cached_property
    def compiled(self) -> bool:
        """Whether compiled code takes it: one model, on the CPU, with a compiler, without gradients."""
        sde, grid, initial = self.sde, self.grid, self.initial
        given = [sde.dynamics, sde.diffusion, grid.times, grid.rows, grid.values]
        given += [] if initial is None else [initial.mean, initial.covariance]
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        return sde.batch_shape.numel() == 1 and not wanted and can_run(*given)

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
        return present.sum(-1, keepdim=True).expand(present.shape) if self.smooth else present.cumsum(-1)


def make_problem(
    sde: LinearSDE,
    times: Tensor,
    observations: Tensor,
    query_times: Tensor | None = None,
    initial: InitialMoments | None = None,
    *,
    robust: bool,
    smooth: bool = False,
) -> EstimationProblem:
    """The problem of an estimator's arguments. In robust smoothing, fill values at the start count as missing."""
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
    shape = broadcast_shapes("observations", "", [*shared[:2], observations.shape[:-2], *shared[2:]])
    if mean is not None and covariance is not None:
        shapes = mean.shape[:-1], covariance.shape[:-2], shape
        shape = broadcast_shapes("initial", " of mean, covariance and series", shapes)
    if not shape.numel():
        raise ValueError(f"observations: got batch dimensions {tuple(shape)}, expected at least one series")
    if smooth and robust:
        observations = without_fill_values(sde, times.expand(*shape, length), observations.expand(*shape, length, m))
    times, observations = flattened(times, shape, 1), flattened(observations, shape, 2)
    queries = None if query_times is None else flattened(query_times, shape, 1)
    alike = all(part.numel() == 1 for part in shared)
    grid = ObservationGrid.of(sde, times, observations, queries, shape, alike)
    grid = grid.bounded() if robust else grid
    if mean is None or covariance is None:
        return EstimationProblem(sde, grid, None, smooth)
    if bool((torch.linalg.cholesky_ex(covariance)[1] > 0).any()):
        raise ValueError("initial: got a singular covariance, expected a positive definite one")
    one = covariance.shape[:-2].numel() == 1
    covariance = covariance.reshape(1, *covariance.shape[-2:]) if one else flattened(covariance, shape, 2)
    start = Gaussian(flattened(mean, shape, 1), covariance, None, grid.values.new_zeros(len(times)))
    return EstimationProblem(sde, grid, start, smooth)


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


def flattened(x: Tensor, batch_shape: torch.Size, trailing: int) -> Tensor:
    """`x`, broadcast to `(*batch_shape, ...)`, as `(b, ...)`. The last `trailing` dimensions stay as they are."""
    return x.expand(*batch_shape, *x.shape[x.dim() - trailing :]).reshape(-1, *x.shape[x.dim() - trailing :])
