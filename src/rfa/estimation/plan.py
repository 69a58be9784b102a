"""What an estimation is asked for, what it knows at the start, and what it gives for each moment."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .information import Information
from .linear_sde import LinearSDE
from .observations import Grid, flat
from .penalties import Belief

Start = Literal["recursive", "leave_one_out", "query"]
VAGUEST = 100.0  # variance, in units of a measurement's, of a prediction that still may judge it


@dataclass(frozen=True)
class Plan:
    """The options of `robust_estimate`."""

    riccati: bool
    smooth: bool
    belief: Belief
    iterations: int
    start: Start
    with_weights: bool

    @property
    def kalman(self) -> bool:
        """Whether it is the Kalman filter."""
        return self.riccati and self.belief.gaussian


class Row(NamedTuple):
    """mean `(b, n)`, covariance `(b, n, n)`, weights `(b, sources)`, objective `(b, iterations + 1)`.

    Of many rows `(b, rows, ...)`, the weights by observation.
    """

    mean: Tensor
    covariance: Tensor
    weights: Tensor | None
    objective: Tensor | None

    def gathered(self, at: Tensor) -> "Row":
        """Of many rows, those at the places `(b, queries)`."""

        def taken(x: Tensor | None) -> Tensor | None:
            index = at if x is None else at.reshape(*at.shape, *(1,) * (x.dim() - 2))
            return None if x is None else torch.take_along_dim(x, index, dim=1)

        return Row(*map(taken, self))  # type: ignore[arg-type]


def stacked(rows: list[Row]) -> Row:
    """Of one moment each, as one of many."""

    def together(parts: tuple[Tensor | None, ...]) -> Tensor | None:
        given = [part for part in parts if part is not None]
        return torch.stack(given, dim=1) if given else None

    return Row(*map(together, zip(*rows, strict=True)))  # type: ignore[arg-type]


class Known(NamedTuple):
    """Of the first moment: mean `(b, n)` and covariance `(b, n, n)`, which has a batch of one where all share it."""

    mean: Tensor
    covariance: Tensor

    def information(self) -> Information:
        """The same as a quadratic."""
        precision = torch.cholesky_inverse(torch.linalg.cholesky(self.covariance))
        vector = (precision @ self.mean[..., None])[..., 0]
        return Information(precision, vector, (vector * self.mean).sum(-1))


def known_start(grid: Grid, mean: Tensor, covariance: Tensor) -> Known:
    """What `initial` says.

    Raises:
        ValueError: for a covariance that is singular.
    """
    if bool((torch.linalg.cholesky_ex(covariance)[1] > 0).any()):
        raise ValueError("initial: got a singular covariance, expected a positive definite one")
    alike = covariance.shape[:-2].numel() == 1
    covariance = covariance.reshape(1, *covariance.shape[-2:]) if alike else flat(covariance, grid.shape, 2)
    return Known(flat(mean, grid.shape, 1), covariance)


def settled(sde: LinearSDE, grid: Grid, known: Known | None) -> Tensor | None:
    """The stationary covariance, `(b, n, n)`, where there is one and nothing is known of the start."""
    try:
        return None if known is not None else flat(sde.stationary_covariance().detach(), grid.shape, 2)
    except ValueError:
        return None
