"""The grid: all observation times and query times in order, what is observed at each, and the transitions between them.

    z_k = C x(t_k) + e_k, e_k ~ N(0, R), R = L L^T    is kept as    L^-1 z_k = H_k x(t_k) + N(0, I),    H_k = L^-1 C
    x(t_k+1) = Phi_k x(t_k) + N(0, V_k)

A missing component has a row of zeros in H_k. So C and R are never inverted, and C may have any shape.
"""

import functools
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .gaussian import Information
from .linear_sde import LinearSDE
from .matrices import flattened, whitened, without_missing

_LARGEST_VALUE = 1e100  # of an observation in units of its noise; squares of larger ones overflow
_LARGEST_ROW = 1e45  # entry of H: squares of squares must not overflow
_LONGEST_DECAY = 4.0  # decay over one part of a step
_MOST_PARTS = 1024
_LARGEST_DECAY = 200.0  # decay over one part, where 1,024 parts are not enough: exp(2 * 200) times 1e100 is finite


@dataclass(frozen=True)
class ObservationGrid:
    """Observation times and query times of b series, sorted. A query at an observation's time shares its grid time.

    A grid has G times. Quantities of the model have a batch of b, or of 1 where all series share them.

    Args:
        times: `(b, G)`.
        rows: H, `(b or 1, G, m, n)`, zeros where nothing is observed.
        values: `L^-1 z`, `(b, G, m)`, zeros where nothing is observed.
        observations: z, `(b, G, m)`, zeros where nothing is observed.
        information: of each observation on the state, `(b or 1, G, n, n)` and `(b, G, n)`. Zero at a query.
        observation_index: `(b, G)`: which observation stands at each time, -1 at a query.
        query_index: `(b, queries)`: the time index of each query.
        present: `(b, G)`: whether anything is observed.
        observed_components: `(b, G)`: how many of the m components are observed.
        lags: `(b, G - 1)`.
        batch_shape: the batch dimensions as given. b is their product.
    """

    times: Float[Tensor, "b grid"]
    rows: Float[Tensor, "#b grid m n"]
    values: Float[Tensor, "b grid m"]
    observations: Float[Tensor, "b grid m"]
    information: Information
    observation_index: Int[Tensor, "b grid"]
    query_index: Int[Tensor, "_ queries"]
    present: Bool[Tensor, "b grid"]
    observed_components: Int[Tensor, "b grid"]
    lags: Float[Tensor, "b steps"]
    batch_shape: torch.Size

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
        """The grid of checked times and observations.

        Args:
            sde: its batch dimensions broadcast to `batch_shape`.
            times: strictly increasing.
            observations: NaN where a component is missing.
            queries: further times, in any order. None: the observation times.
            batch_shape: of which b is the product.
            shared: whether all series have one model and one set of times.

        Raises:
            ValueError: where R is singular for the observed components.
        """
        length, m = observations.shape[1:]
        observation_index = torch.arange(length, device=times.device).expand_as(times)
        query_index = observation_index
        if queries is not None:
            both = torch.cat([times, queries], dim=-1)
            times, order = both.sort(dim=-1, stable=True)
            position = order.argsort(dim=-1)
            observation_index = torch.where(order < length, order, -1)
            at = torch.searchsorted(both[:, :length].contiguous(), queries.contiguous()).clamp(max=length - 1)
            same = both.gather(-1, at) == queries  # the query takes the time index of the observation
            query_index = torch.where(same, position.gather(-1, at), position[:, length:])
            missing = torch.full_like(queries[..., None].expand(-1, -1, m), torch.nan)
            observations = torch.cat([observations, missing], dim=1).gather(1, order[..., None].expand(-1, -1, m))
        present = ~observations.isnan()
        models = 1 if shared and bool((present == present[:1]).all()) else len(times)
        matrices = (sde.observation, sde.observation_noise)
        observation, noise = (flattened(x, batch_shape, 2)[:models, None] for x in matrices)
        observation, noise = without_missing(observation, noise, present[:models])
        observations = observations.masked_fill(~present, 0.0)
        rows, values = whitened(observation, noise, observations)
        return cls(
            times,
            rows,
            values,
            observations,
            Information.of(rows, values),
            observation_index,
            query_index,
            present.any(-1),
            present.sum(-1),
            times.diff(dim=-1),
            batch_shape,
        )

    @property
    def models(self) -> int:
        """1 where all series share everything but the observed values, else b."""
        return len(self.rows)

    @property
    def length(self) -> int:
        """G."""
        return self.times.shape[1]

    @functools.cached_property
    def observation_count(self) -> int:
        """T."""
        return int(self.observation_index.max()) + 1

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """Rows `(b or 1, m, n)` and values `(b, m)` at a time index."""
        return self.rows[:, index], self.values[:, index]

    def bounded(self) -> "ObservationGrid":
        """With values bounded so that their squares do not overflow. Such values are outliers in any case.

        Raises:
            ValueError: where the noise is so small that squares of H overflow.
        """
        values = bounded_values(self.rows, self.values)
        if values is self.values:
            return self
        return replace(self, values=values, information=Information.of(self.rows, values))

    def weighted(self, weight: Float[Tensor, "b grid"]) -> "ObservationGrid":
        """With the noise of each observation divided by a weight. Each series then has its own rows."""
        root = weight.sqrt()
        rows, values = self.rows * root[..., None, None], self.values * root[..., None]
        return replace(self, rows=rows, values=values, information=self.information.weighted(weight))

    def doubled(self) -> "ObservationGrid":
        """All series, followed by all of them again. Shared rows stay shared."""

        def twice(x: Tensor) -> Tensor:
            return torch.cat([x, x])

        shared = self.models == 1
        matrix, vector, constant = self.information
        return replace(
            self,
            times=twice(self.times),
            rows=self.rows if shared else twice(self.rows),
            values=twice(self.values),
            observations=twice(self.observations),
            information=Information(matrix if shared else twice(matrix), twice(vector), twice(constant)),
            observation_index=twice(self.observation_index),
            present=twice(self.present),
            observed_components=twice(self.observed_components),
            lags=twice(self.lags),
        )


def bounded_values(rows: Float[Tensor, "*rows n"], values: Float[Tensor, "*values"]) -> Float[Tensor, "*values"]:
    """As `ObservationGrid.bounded`."""
    if bool((rows.detach().abs() > _LARGEST_ROW).any()):
        raise ValueError(
            f"observation_noise: got a standard deviation of less than 1 / {_LARGEST_ROW:g} of what the states "
            "show, expected another unit for observations and states"
        )
    if not bool((values.abs() > _LARGEST_VALUE).any()):
        return values
    return values.clamp(min=-_LARGEST_VALUE, max=_LARGEST_VALUE)


T = TypeVar("T", bound="Transportable")


@runtime_checkable  # for the shape checks of the tests
class Transportable(Protocol):
    """What is known of a state at one time, and can be carried to another time."""

    def inflated(self: T, variance: Tensor) -> T:
        """On `x + e`, `e ~ N(0, V)`."""

    def substituted(self: T, matrix: Tensor) -> T:
        """On x, where this is on `M x`."""

    def bounded(self: T) -> T:
        """With a precision whose products do not overflow."""

    def where(self: T, condition: Tensor) -> T:
        """Nothing where the condition, `(b or 1,)`, does not hold."""


@dataclass(frozen=True)
class Transitions:
    """`Phi` and `V` of each step of a grid."""

    transition: Float[Tensor, "#b steps n n"]
    variance: Float[Tensor, "#b steps n n"]

    @classmethod
    def of(cls, sde: LinearSDE, grid: ObservationGrid) -> "Transitions":
        """Of a grid.

        Raises:
            ValueError: for a gap over which an unstable state overflows.
        """
        transition, variance = (_each_step(of, sde, grid, grid.lags) for of in (sde.transition, sde.covariance))
        check_gaps(transition, variance, grid.lags[: grid.models])
        return cls(transition, variance)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """From a time index to the next one."""
        return self.transition[:, index], self.variance[:, index]

    def doubled(self) -> "Transitions":
        """As `ObservationGrid.doubled`."""
        if len(self.transition) == 1:
            return self
        return Transitions(torch.cat([self.transition] * 2), torch.cat([self.variance] * 2))

    def backward(self, index: int, known: T) -> T:
        """Knowledge of the state at `index + 1`, as knowledge of the state at `index`. Phi is not inverted."""
        transition, variance = self[index]
        return known.inflated(variance).substituted(transition)


def check_gaps(
    transition: Float[Tensor, "*steps n n"], variance: Float[Tensor, "*steps n n"], lags: Float[Tensor, "*steps"]
) -> None:
    """Raise `ValueError` for a gap over which an unstable state overflows."""
    finite = (transition.isfinite() & variance.isfinite()).all(-1).all(-1)
    if not bool(finite.all()):
        gap = lags[~finite].min().item()
        raise ValueError(f"times: got a gap of {gap:g}, over which the state of an unstable model overflows")


def inverse_transitions(sde: LinearSDE, grid: ObservationGrid) -> Float[Tensor, "models steps n n"]:
    """`Phi^-1` of each step. It is not finite where it overflows."""
    return _each_step(sde.transition, sde, grid, -grid.lags)


@dataclass(frozen=True)
class ForwardTransitions:
    """`Phi^-1` and `V` of the parts of each step, by which knowledge of a state is carried forward.

    Phi^-1 grows as the state decays. It multiplies a precision by up to `exp(2 mu dt)`, and digits are lost until V is
    added. So a long step is divided into parts. A step of more than 200,000 time constants of the fastest mode cannot
    be crossed: behind it, one observation alone says nothing of the state.
    """

    inverse: Float[Tensor, "#b steps n n"]
    variance: Float[Tensor, "#b steps n n"]
    counts: list[int]
    crossed: Bool[Tensor, "#b steps"]

    @classmethod
    def of(cls, sde: LinearSDE, grid: ObservationGrid) -> "ForwardTransitions":
        """Of a grid."""
        fastest = max(0.0, -torch.linalg.eigvals(sde.dynamics.detach()).real.min().item())
        lags = grid.lags[: grid.models]
        counts = (lags.detach().amax(0) * fastest / _LONGEST_DECAY).ceil().clamp(1, _MOST_PARTS)
        crossed = lags * fastest <= counts * _LARGEST_DECAY
        parts = torch.where(crossed, lags / counts, 0.0)
        inverse = _each_step(sde.transition, sde, grid, -parts)
        variance = _each_step(sde.covariance, sde, grid, parts)
        return cls(inverse, variance, [int(count) for count in counts.tolist()], crossed)

    def forward(self, index: int, known: T) -> T:
        """Knowledge of the state at `index`, as knowledge of the state at `index + 1`."""
        for _ in range(self.counts[index]):
            known = known.substituted(self.inverse[:, index]).bounded().inflated(self.variance[:, index])
        return known.where(self.crossed[:, index])


def _each_step(of, sde: LinearSDE, grid: ObservationGrid, lags: Tensor) -> Tensor:
    """A matrix of each lag, `(b or 1, G - 1, n, n)`."""
    shape = torch.Size([1] * len(grid.batch_shape)) if grid.models == 1 else grid.batch_shape
    count, n = lags.shape[-1], sde.state_size
    matrices = of(lags[: grid.models].reshape(*shape, count))
    return matrices.expand(*shape, count, n, n).reshape(grid.models, count, n, n)
