"""Series in the common frame of an isotropic model, in which states only decay."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rfa.dynamics import accumulated_variance

from .isotropic import Isotropic, is_scalar, mean_diagonal
from .observations import Grid
from .penalties import FAINTEST
from .plan import VAGUEST, Known


@dataclass(frozen=True)
class Series:
    """b series in the common frame, in units of eta, less the reference; moments `(b, G)` as those of the grid.

    Args:
        model: as given.
        elapsed: since the first moment.
        damping: `mu t`.
        variance: u, of the forcing since the first moment.
        forcing: sigma^2, `(b, 1)`.
        reference: the trajectory that is subtracted, `(b, G, n)`.
        seen: z, `(b, G, n)`; zero where nothing was.
        start: mean `(b, n)` and variance `(b,)` of what is known of the first moment, or None.
        unit: eta, `(b, 1)`.
        keys: where the observations stand, `(b, T)`.
    """

    model: Isotropic
    grid: Grid
    elapsed: Tensor
    damping: Tensor
    variance: Tensor
    forcing: Tensor
    reference: Tensor
    seen: Tensor
    start: tuple[Tensor, Tensor] | None
    unit: Tensor
    keys: Tensor

    @classmethod
    def of(cls, model: Isotropic, grid: Grid, known: Known | None) -> "Series":
        """Of a grid, and what is known of the first moment.

        Raises:
            ValueError: for a row that is missing in part, or an initial covariance that is not isotropic.
        """
        here = grid.whitened[0].diagonal(dim1=-2, dim2=-1) != 0
        if bool((here.any(-1) & ~here.all(-1)).any()):
            raise ValueError(
                "observations: got a row with some components missing, expected with backend='fused' whole rows, or "
                "NaN in all of one"
            )
        elapsed = grid.times - grid.times[:, :1]
        variance = model.observation_noise / model.observation.square()
        unit = torch.where(variance > 0, variance, 1.0).sqrt()
        damping, forcing = model.decay * elapsed, model.process_noise / unit.square()
        seen = model.turned(grid.values / (model.observation * unit)[..., None], elapsed, inverse=True)
        reference = torch.exp(-damping)[..., None] * _middle(seen, grid.present & (damping < 1))
        start = None
        if known is not None:
            if not is_scalar(known.covariance):
                raise ValueError(
                    "initial: got a covariance that is not a multiple of the identity, expected one with "
                    "backend='fused'"
                )
            start = known.mean / unit - reference[:, 0], mean_diagonal(known.covariance) / unit[:, 0].square()
        keys = (grid.key < 0).int().argsort(dim=-1, stable=True)[:, : int(grid.key.max()) + 1]
        seen = torch.where(grid.present[..., None], seen - reference, 0.0)
        grown = forcing * accumulated_variance(model.decay, elapsed)
        return cls(model, grid, elapsed, damping, grown, forcing, reference, seen, start, unit, keys)

    @property
    def present(self) -> Tensor:
        """Whether anything was seen."""
        return self.grid.present

    @property
    def settled(self) -> Tensor:
        """`(b, 1)`: the stationary variance, infinite without decay."""
        decays = self.model.decay > 0
        return torch.where(decays, self.forcing / (2 * torch.where(decays, self.model.decay, 1.0)), torch.inf)

    @property
    def least(self) -> float:
        """What no Sigma of any pair lies below: it runs from 1 to the stationary variance."""
        return min(1.0, self.settled.min().item())

    @property
    def settles(self) -> bool:
        """Whether the stationary distribution stands for what is not known: where every series has one."""
        return self.start is None and bool((self.model.decay > 0).all())

    def wanted(self, x: Tensor) -> Tensor:
        """At the queries."""
        return _taken(x, self.grid.wanted)

    def observed(self, x: Tensor) -> Tensor:
        """At the observations."""
        return _taken(x, self.keys)

    def first(self, without: Tensor, precision: Tensor, leave_one_out: bool) -> Tensor:
        """Where the first weights are taken, `(b, queries, n)`.

        Args:
            without: the Gaussian estimate without what was seen at the query's time.
            precision: its own, in units of a measurement's, `(b, queries)`; 0 where there is none.
            leave_one_out: whether it counts where something was seen.
        """
        present, seen = self.wanted(self.present)[..., None], self.wanted(self.seen)
        if not leave_one_out:
            return torch.where(present, seen, without)
        share = precision[..., None]
        start = torch.where(share * VAGUEST >= 1, without, (share * without + seen) / (share + 1))
        if self.settles:
            blank = (share == 0) & (self.settled <= VAGUEST)[..., None]
            start = torch.where(blank, -self.wanted(self.reference), start)
        return torch.where(present, start, without)

    def restored(self, mean: Tensor, total: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance in the units and the frame of the observations.

        Args:
            mean: in the frame.
            total: log of the believed precision, -inf where nothing was seen.
            scale: what its unit is.
        """
        told = total > -torch.inf
        mean = (mean + self.wanted(self.reference)).masked_fill(~told[..., None], 0.0)
        mean = self.model.turned(mean * self.unit[..., None], self.wanted(self.elapsed))
        settled = self.settled if self.settles else torch.full_like(self.settled, torch.inf)
        precision = torch.where(told, total, 0.0).clamp(min=FAINTEST).exp() * torch.where(told, scale, 1.0)
        variance = torch.where(told, 1 / precision, settled) * self.unit.square()
        identity = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
        return mean, torch.where(identity, variance[..., None, None], 0.0)


@torch.no_grad()
def _middle(seen: Tensor, counts: Tensor) -> Tensor:
    """The median of what counts, `(b, 1, n)`, 0 where nothing does: an outlier must not take the others' digits."""
    ordered = torch.where(counts[..., None], seen, torch.inf).sort(dim=1).values
    at = ((counts.sum(1) - 1) // 2).clamp(min=0)
    return _taken(ordered, at[:, None]).nan_to_num(posinf=0.0)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """`x` `(b, G, ...)` at the moments `(b, length)`."""
    return torch.take_along_dim(x, index.reshape(*index.shape, *(1,) * (x.dim() - 2)), dim=1)
