"""Whether a linear process is stable: the real parts of its eigenvalues, with their rounding errors.

Also the covariance that a stable one ends at.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .matrices import symmetric

_LARGEST_BLOCK = 3  # Jordan block whose eigenvalues' errors are still expected
_BALANCING_STEPS = 40
_LEAST_MOVE = 1e-30  # in a state that moves no other, or that no other moves


def real_parts_with_errors(dynamics: Float[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor]:
    """The real parts of the eigenvalues, and their rounding errors, `(..., n)` each.

    An eigenvalue of condition kappa has the error `eps |A| kappa`; one of a Jordan block of k states has the error
    `eps^(1/k) |A|`. A is balanced first, so that units of states do not matter.
    """
    matrix = _balanced(dynamics)
    eigenvalues, basis = torch.linalg.eig(matrix)
    inverse, failed = torch.linalg.inv_ex(basis)
    condition = torch.linalg.vector_norm(inverse, dim=-1) * torch.linalg.vector_norm(basis, dim=-2)
    condition = torch.where((failed > 0)[..., None], torch.inf, condition)
    rounding = 10 * torch.finfo(matrix.dtype).eps
    relative = (rounding * condition).clamp(max=rounding ** (1 / min(matrix.shape[-1], _LARGEST_BLOCK)))
    return eigenvalues.real, relative * torch.linalg.matrix_norm(matrix)[..., None]


def turns_only(dynamics: Float[Tensor, "*batch n n"], diffusion: Float[Tensor, "*batch n n"]) -> bool:
    """Whether `A = -mu I + S` with a skew-symmetric S, and `Q = q I`: states that only turn beside their decay.

    Their eigenvalues have the real part -mu exactly, and their stationary covariance is `q / (2 mu) I`.
    """
    if dynamics.requires_grad or diffusion.requires_grad:
        return False
    decay, noise = -dynamics.diagonal(dim1=-2, dim2=-1), diffusion.diagonal(dim1=-2, dim2=-1)
    skew = dynamics + torch.diag_embed(decay)
    alike = bool((decay == decay[..., :1]).all() & (noise == noise[..., :1]).all())
    return alike and torch.equal(skew, -skew.mT) and torch.equal(diffusion, torch.diag_embed(noise))


def solve_lyapunov(
    dynamics: Float[Tensor, "*batch n n"], diffusion: Float[Tensor, "*batch n n"]
) -> Float[Tensor, "*batch n n"]:
    """P with `A P + P A^T + Q = 0`, as a linear system of n^2 unknowns."""
    n = dynamics.shape[-1]
    identity = torch.eye(n, dtype=dynamics.dtype, device=dynamics.device)
    # row-major vec: vec(A P) = (A x I) vec P, vec(P A^T) = (I x A) vec P
    left = torch.einsum("...ij,kl->...ikjl", dynamics, identity) + torch.einsum("ij,...kl->...ikjl", identity, dynamics)
    solved = torch.linalg.solve(left.reshape(*left.shape[:-4], n * n, n * n), -diffusion.flatten(-2).unsqueeze(-1))
    return symmetric(solved.reshape(diffusion.shape))


def _balanced(matrix: Tensor) -> Tensor:
    """`D^-1 A D` with a diagonal D by which each state moves the others as much as they move it."""
    others = matrix.abs() * (1 - torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device))
    scale = torch.ones_like(matrix[..., 0])
    for _ in range(_BALANCING_STEPS):
        moved = others * scale[..., None, :] / scale[..., :, None]
        by_others, of_others = moved.sum(-1), moved.sum(-2)
        scale = scale * ((by_others + _LEAST_MOVE) / (of_others + _LEAST_MOVE)) ** 0.25
    return matrix * scale[..., None, :] / scale[..., :, None]
