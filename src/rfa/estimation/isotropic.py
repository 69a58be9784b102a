"""Isotropic SDEs, whose states decay alike and turn in pairs, and the frame in which they only decay."""

from typing import NamedTuple

import torch
from torch import Tensor

from .linear_sde import LinearSDE
from .observations import flat

_TOLERANCE = 1e-9  # relative: rounding in a model that was fitted or transformed


class Isotropic(NamedTuple):
    """`A = -mu I + S`, `Q = sigma^2 I`, `C = c I`, `R = eta^2 I`, S turning pairs of states; one of each for b series.

    Args:
        decay: mu, `(b, 1)`.
        frequency: |omega| of each state, `(b, n)`; 0 for a state without a partner.
        quarter: signs of S, `(b, n, n)`: `exp(S t) = cos(omega t) + sin(omega t) quarter`.
        process_noise: sigma^2 of one state, `(b, 1)`.
        observation: c, `(b, 1)`.
        observation_noise: eta^2 of one component, `(b, 1)`.
    """

    decay: Tensor
    frequency: Tensor
    quarter: Tensor
    process_noise: Tensor
    observation: Tensor
    observation_noise: Tensor

    @classmethod
    def of(cls, sde: LinearSDE, shape: torch.Size) -> "Isotropic":
        """Of a model, for series of a batch shape. Gradients are those of the isotropic family.

        Raises:
            ValueError: naming the matrix that is not isotropic.
        """
        diagonal = sde.dynamics * _identity(sde.dynamics)
        decay, turning = -mean_diagonal(sde.dynamics), sde.dynamics - diagonal
        slack = _TOLERANCE * sde.dynamics.detach().abs().amax((-2, -1), keepdim=True)
        turns = turning.detach().abs() > slack
        pairs = bool((turning + turning.mT).detach().abs().le(slack).all()) and bool((turns.sum(-1) <= 1).all())
        for holds, given in (
            (pairs, "states that do more to each other than turn in pairs"),
            (is_scalar(diagonal), "states that decay each in its own way"),
            (bool((decay >= 0).all()), "states that grow"),
        ):
            if not holds:
                raise ValueError(
                    f"dynamics: got {given}, expected with backend='fused' -mu I with mu >= 0 and rotations of pairs "
                    "of states, [[0, -omega], [omega, 0]]"
                )
        for name in ("diffusion", "observation", "observation_noise"):
            given = getattr(sde, name)
            if given.shape[-2] != given.shape[-1] or not is_scalar(given):
                raise ValueError(
                    f"{name}: got a matrix that is not a multiple of the identity, expected one with backend='fused'"
                )
        if bool((mean_diagonal(sde.observation) == 0).any()):
            raise ValueError("observation: got zero, expected with backend='fused' a multiple of the identity")
        quarter = torch.where(turns, turning.detach().sign(), 0.0)
        numbers = [decay, *map(mean_diagonal, (sde.diffusion, sde.observation, sde.observation_noise))]
        decay, diffusion, observation, noise = (flat(x[..., None], shape, 1) for x in numbers)
        frequency = flat((turning * quarter).sum(-1), shape, 1)
        return cls(decay, frequency, flat(quarter, shape, 2), diffusion, observation, noise)

    def turned(self, states: Tensor, elapsed: Tensor, inverse: bool = False) -> Tensor:
        """`exp(S t) x`, or `exp(-S t) x`: out of the common frame, or into it; x `(b, length, n)`, t `(b, length)`."""
        phase = self.frequency[:, None, :] * elapsed[..., None]
        turn = phase.sin() * (states @ self.quarter.mT)
        return phase.cos() * states + (-turn if inverse else turn)


def mean_diagonal(matrix: Tensor) -> Tensor:
    """Of `a I`, a."""
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def is_scalar(matrix: Tensor) -> bool:
    """Whether it is a multiple of the identity."""
    matrix = matrix.detach()
    apart = (matrix - mean_diagonal(matrix)[..., None, None] * _identity(matrix)).abs().amax((-2, -1))
    return bool((apart <= _TOLERANCE * matrix.abs().amax((-2, -1))).all())


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
