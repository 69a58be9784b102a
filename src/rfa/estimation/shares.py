"""With the Riccati prior: each source's share in the Kalman filter's mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from .gaussian import Correction, Gaussian
from .information import Information
from .observations import Grid
from .steps import Steps

_WORST = 10.0  # a share, in standard deviations: to disbelieve its source would throw the estimate about
_ROUNDING = 1e-14  # relative, a few times what a product loses


class Shares(NamedTuple):
    """`sum_j M_ij` is the identity less what the start has, `sum_j v_ij` is the mean less what the start has.

    Of the past `M_ij = P_i N_ij = Psi_ij K_j C Phi_ij^-1` and `v_ij = Psi_ij K_j z_j`; of the future, before it is
    joined to the past, `N_ij` and `u_ij` themselves, parts of its information.

    Args:
        matrix: `(models, j, n, n)`.
        vector: `(b, j, n)`.
        gain: `(b, j)`: of each source's row, in units of the Kalman filter's; 1 but in the robust filter.
    """

    matrix: Tensor
    vector: Tensor
    gain: Tensor

    @classmethod
    def none(cls, grid: Grid) -> "Shares":
        """Before anything is seen."""
        return cls(grid.seen.matrix[:, :0], grid.seen.vector[:, :0], grid.seen.constant[:, :0])

    def seen(self, grid: Grid, k: int, correction: Correction, gain: Tensor) -> "Shares":
        """At moment k, where `m -> keep m + gain z`: all shares shrink, what is seen gets its own."""
        rows, values = (part[:, k] for part in grid.whitened)
        kept = self.kept(correction.keep)
        if not bool(grid.present[:, k].any()):
            return kept
        vector = (correction.gain @ values[..., None])[:, None, :, 0]
        own = Shares((correction.gain @ rows)[:, None], vector, gain[:, None])
        return kept.beside(own)

    def beside(self, other: "Shares") -> "Shares":
        """Both."""
        return Shares(*(torch.cat(parts, dim=1) for parts in zip(self, other, strict=True)))

    def whole(self) -> "Shares":
        """What they would be had each row had the Kalman filter's gain."""
        return self._replace(matrix=self.matrix / self.gain[..., None, None], vector=self.vector / self.gain[..., None])

    def inherited(self, replaced: Tensor, challenged: Tensor) -> "Shares":
        """Of series and their challengers, `(2 b, ...)`: where those take over, `(b,)`, and where they begin anew."""
        index = parents(replaced, challenged)
        return Shares(*(x[index] for x in self))

    def forgotten(self, challengers: Tensor) -> "Shares":
        """Of series and their challengers, `(2 b, ...)`: nothing in challengers, `(b,)`, that begin without a mean."""
        if not bool(challengers.any()):
            return self
        here = torch.cat([torch.zeros_like(challengers), challengers])
        matrix = torch.where(here[:, None, None, None], 0.0, self.matrix)
        return self._replace(matrix=matrix, vector=torch.where(here[:, None, None], 0.0, self.vector))

    def first(self, count: int) -> "Shares":
        """Of the first series."""
        return Shares(*(x[:count] for x in self))

    def kept(self, matrix: Tensor) -> "Shares":
        """All of them times a matrix `(models, n, n)`."""
        return Shares(matrix[:, None] @ self.matrix, (matrix[:, None] @ self.vector[..., None])[..., 0], self.gain)

    def ahead(self, transition: Tensor, inverse: Tensor, covariance: Tensor) -> "Shares":
        """Over a step, to a state of that covariance: `M -> Phi M Phi^-1`, `v -> Phi v`.

        A source is left to the Kalman filter, with no share that could be taken from it, once transport back to it has
        lost all digits: where modes of very different decay are coupled, M holds `exp(+mu dt)` of the fastest beside
        Psi of the slowest.
        """
        matrix, vector, gain = self.kept(transition)
        finite = inverse.isfinite().all(-1).all(-1)
        matrix = matrix @ torch.where(finite[:, None, None], inverse, 0.0)[:, None]
        relative = matrix.detach().abs() / units_of(covariance)[:, None]
        sound = (relative.amax((-2, -1)) <= _WORST) & finite[:, None]
        return Shares(
            torch.where(sound[..., None, None], matrix, 0.0), torch.where(sound[..., None], vector, 0.0), gain
        )

    def rest(self, state: Gaussian) -> tuple[Tensor, Tensor]:
        """M_0 `(models, n, n)` and v_0 `(b, n)`: the share of the start, and of sources left to the filter.

        Rounding in it must not outweigh sources that are hardly believed, so what may be rounding counts as zero.
        """
        identity = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        matrix, units = identity - self.matrix.sum(1), units_of(state.covariance)
        noise = _ROUNDING * (identity + self.matrix.detach().abs().sum(1) + units)
        matrix = matrix - torch.where(matrix.detach().abs() <= noise, matrix.detach(), 0.0)  # its gradient stays
        vector = state.mean - self.vector.sum(1)
        vector = vector - torch.where(matrix.any(-1), 0.0, vector.detach())
        return matrix, vector

    def seen_behind(self, grid: Grid, k: int, gain: Tensor) -> "Shares":
        """Of the future: the information of what is seen at moment k joins."""
        if not bool(grid.present[:, k].any()):
            return self
        matrix, vector, _ = (part[:, k : k + 1] for part in grid.seen)
        return self.beside(Shares(matrix, vector, gain[:, None]))

    def back(self, steps: Steps, k: int, total: Information) -> "Shares":
        """Of the future: from moment k + 1 to k, as the information `total` of all of them moves."""
        transition, variance = steps[k]
        left = transition.mT @ total.gain(variance)
        matrix, vector, gain = self.kept(left)
        return Shares(matrix @ transition[:, None], vector, gain)


def parents(replaced: Tensor, challenged: Tensor) -> Tensor:
    """`(2 b,)`: from which of the series and their challengers each goes on, given `(b,)` of each kind of change."""
    b = len(replaced)
    index = torch.arange(2 * b, device=replaced.device)
    index[:b] += b * replaced
    index[b:] -= b * challenged
    return index


def units_of(covariance: Tensor) -> Tensor:
    """What an entry of a share is measured in: the ratio of two states' standard deviations; 1 where there are none."""
    size = covariance.detach().diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    size = torch.where(size > 0, size, size.amax(-1, keepdim=True))
    size = torch.where(size > 0, size, 1.0)
    return size[..., :, None] / size[..., None, :]
