"""The past (or the future) of a moment: what each source says of the state there, and what share a prior gives it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .information import Information, joined
from .observations import Grid, Steps

_WORST = 1e10  # a share that exceeds all information by that has lost its digits


@dataclass(frozen=True)
class Sources:
    """Everything seen on one side of a moment.

    Args:
        alone: what each source says by itself, transported to the moment: `(b, j, ...)`.
        matrix: N_ij, `(b, j, n, n)`, and
        vector: u_ij, `(b, j, n)`: the estimate is `(sum_j w_ij N_ij)^-1 sum_j w_ij u_ij`. With the Lyapunov prior they
            are the precision and information of the source alone; with the Riccati prior its part in the information
            of the Kalman filter, `N_ij = P_i^-1 Psi_ij K_j C Phi_ij^-1` and `u_ij = P_i^-1 Psi_ij K_j z_j`.
        total: of the Gaussian filter: all of it, with what was known at the start.
        base: the part of `total` that was known at the start; its weight is always 1.
        moments: which moments the sources stand at, `(j,)`.
    """

    alone: Information
    matrix: Tensor
    vector: Tensor
    total: Information
    base: Information
    moments: list[int]

    def with_source(self, grid: Grid, k: int, riccati: bool) -> "Sources":
        """What is seen at moment k joins, for all series at once; where one is missing it says nothing."""
        if not bool(grid.present[:, k].any()):
            return self
        vector = grid.seen.vector[:, k]
        new = Information(grid.seen.matrix[:, k].expand(len(vector), -1, -1), vector, grid.seen.constant[:, k])
        total = self.total + new if riccati else self.total
        source = Information(new.matrix[:, None], new.vector[:, None], new.constant[:, None])
        alone = joined([self.alone, source])
        if not riccati:
            return Sources(alone, alone.matrix, alone.vector, total, self.base, [*self.moments, k])
        shares = torch.cat([self.matrix, source.matrix], dim=1), torch.cat([self.vector, source.vector], dim=1)
        return Sources(alone, *shares, total, self.base, [*self.moments, k])

    def moved(self, steps: Steps, k: int, forward: bool, riccati: bool) -> "Sources":
        """From moment k to k + 1, or back from k + 1 to k."""
        move = steps.forward if forward else steps.backward
        alone = move(k, self.alone)
        if not riccati:
            base = move(k, self.base)
            return Sources(alone, alone.matrix, alone.vector, base, base, self.moments)
        total, base, matrix, vector = self.total, self.base, self.matrix, self.vector
        variance = steps.variance[:, k]
        phi = (steps.inverse if forward else steps.transition)[:, k]
        for _ in range(steps.parts[k]):
            # all shares move as the total does: they are its summands
            held = total.pulled(phi).bounded() if forward else total
            gain = held.gain(variance)
            left = gain @ phi.mT if forward else phi.mT @ gain
            total = held.widened(variance, gain) if forward else held.widened(variance, gain).pulled(phi)
            base = Information(left @ base.matrix @ phi, (left @ base.vector[..., None])[..., 0], base.constant)
            matrix = left[:, None] @ matrix @ phi[:, None]
            vector = (left[:, None] @ vector[..., None])[..., 0]
        matrix, vector = _sound(matrix, vector, total)
        return Sources(alone, matrix, vector, total, base, self.moments)


def nothing(start: Information) -> Sources:
    """Before anything is seen; `start`: what is known of the first moment, `(b, ...)`."""
    matrix = start.matrix.expand(len(start.vector), -1, -1)
    none = Information(matrix[:, None][:, :0], start.vector[:, None][:, :0], start.constant[:, None][:, :0])
    return Sources(none, none.matrix, none.vector, start, start, [])


def _sound(matrix: Tensor, vector: Tensor, total: Information) -> tuple[Tensor, Tensor]:
    """Without the shares of sources so far off that transport back to them has lost all digits.

    Where modes of very different decay are coupled, N_ij holds exp(+mu dt) of the fastest beside Psi of the slowest.
    """
    size, all_of_it = (x.detach().abs().amax((-2, -1)) for x in (matrix, total.matrix))
    fine = size <= _WORST * all_of_it[:, None]  # False for NaN
    return torch.where(fine[..., None, None], matrix, 0.0), torch.where(fine[..., None], vector, 0.0)
