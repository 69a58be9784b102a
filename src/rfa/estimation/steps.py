"""From one moment of a grid to the next: transition and variance, and how information is carried along them."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .information import Information, Measurement
from .linear_sde import LinearSDE
from .observations import Grid

_SHORT = 4.0  # decay over one part of a step
_MOST_PARTS = 1024
_FURTHEST = 200.0  # decay over one part where there would be too many; twice its exponential times 1e100 is finite

Said = TypeVar("Said", Information, Measurement)  # what is known of a state at one moment


@dataclass(frozen=True)
class Steps:
    """`Phi` and `V` of each step of a grid, `(models, G - 1, n, n)`."""

    transition: Tensor
    variance: Tensor

    @classmethod
    def of(cls, sde: LinearSDE, grid: Grid) -> "Steps":
        """Of a grid.

        Raises:
            ValueError: for a gap over which an unstable state outgrows all numbers.
        """
        transition, variance = (_flattened(of, sde, grid, grid.lags) for of in (sde.transition, sde.covariance))
        finite = (transition.isfinite() & variance.isfinite()).all(-1).all(-1)
        if not bool(finite.all()):
            gap = grid.lags[: grid.models][~finite].min().item()
            raise ValueError(f"times: got a gap of {gap:g}, over which the state of an unstable model overflows")
        return cls(transition, variance)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """From moment k to k + 1."""
        return self.transition[:, k], self.variance[:, k]

    def twice(self) -> "Steps":
        """For every series twice; one that all share stays one."""
        if len(self.transition) == 1:
            return self
        return Steps(torch.cat([self.transition] * 2), torch.cat([self.variance] * 2))

    @staticmethod
    def inverse(sde: LinearSDE, grid: Grid) -> Tensor:
        """`Phi^-1` of each step, `(models, G - 1, n, n)`; not finite where a state decays by more than numbers can."""
        return _flattened(sde.transition, sde, grid, -grid.lags)

    def back(self, k: int, information: Said) -> Said:
        """Information on the state at moment k + 1, on the state at k: no inverse is needed."""
        transition, variance = (_at(x, k, information) for x in (self.transition, self.variance))
        return information.widened(variance).pulled(transition)


@dataclass(frozen=True)
class Parts:
    """`Phi^-1` and `V` of the parts that each step is cut into, `(models, G - 1, n, n)`, to carry information forward.

    The inverse grows as the state decays. It multiplies what is known by up to `exp(2 mu dt)`, which costs digits,
    until V is added; so a long gap is crossed in short steps. One of more than 200,000 of the fastest mode's time
    constants is not crossed: what a source by itself says of the state behind it counts as nothing.
    """

    inverse: Tensor
    variance: Tensor
    counts: list[int]
    crossed: Tensor

    @classmethod
    def of(cls, sde: LinearSDE, grid: Grid) -> "Parts":
        """Of a grid."""
        fastest = max(0.0, -torch.linalg.eigvals(sde.dynamics.detach()).real.min().item())
        lags = grid.lags[: grid.models]
        counts = (lags.detach().amax(0) * fastest / _SHORT).ceil().clamp(1, _MOST_PARTS)
        crossed = lags * fastest <= counts * _FURTHEST
        parts = torch.where(crossed, lags / counts, 0.0)
        inverse = _flattened(sde.transition, sde, grid, -parts)
        variance = _flattened(sde.covariance, sde, grid, parts)
        return cls(inverse, variance, [int(count) for count in counts.tolist()], crossed)

    def ahead(self, k: int, information: Said) -> Said:
        """Information on the state at moment k, on the state at k + 1."""
        inverse, variance = (_at(x, k, information) for x in (self.inverse, self.variance))
        for _ in range(self.counts[k]):
            information = information.pulled(inverse).bounded().widened(variance)
        crossed = self.crossed[:, k]
        return information.kept(crossed[:, None] if isinstance(information, Measurement) else crossed)


def _flattened(of, sde: LinearSDE, grid: Grid, lags: Tensor) -> Tensor:
    """A matrix of each lag, `(models, G - 1, n, n)`."""
    shape = torch.Size([1] * len(grid.shape)) if grid.models == 1 else grid.shape
    count, n = lags.shape[-1], sde.state_size
    matrices = of(lags[: grid.models].reshape(*shape, count))
    return matrices.expand(*shape, count, n, n).reshape(grid.models, count, n, n)


def _at(x: Tensor, k: int, said: Information | Measurement) -> Tensor:
    """Step k; with a dimension for sources where it is said by each of them."""
    return x[:, k, None] if isinstance(said, Measurement) else x[:, k]
