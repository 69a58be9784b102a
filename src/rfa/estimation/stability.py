"""Whether a linear process is stable: the real parts of its eigenvalues, with their rounding errors.

Also the covariance that a stable one ends at.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .matrices import symmetric


def real_parts_with_errors(dynamics: Float[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor]:
    """The real parts of the eigenvalues, and estimates of their rounding errors, `(..., n)` each.

    With the computed `A X = X diag(l) + r` and `Y = X^-1` the error is about `(|Y| (|r| + eps |A| |X|))_ii`. In a
    Jordan block of two it is `eps^(1/2) rho(|A|)`. Units of states change neither. In a larger block the errors differ
    in direction, so that some real part is not negative.
    """
    eigenvalues, vectors = torch.linalg.eig(dynamics)
    inverse, failed = torch.linalg.inv_ex(vectors)
    size, rounding = dynamics.abs(), 10 * torch.finfo(dynamics.dtype).eps
    residual = (dynamics.to(vectors.dtype) @ vectors - vectors * eigenvalues[..., None, :]).abs()
    errors = 3 * (inverse.abs() @ (residual + rounding * size @ vectors.abs())).diagonal(dim1=-2, dim2=-1)
    errors = torch.where((failed > 0)[..., None] | errors.isnan(), torch.inf, errors)
    largest = torch.linalg.eigvals(size).real.amax(-1, keepdim=True)
    return eigenvalues.real, torch.minimum(errors, rounding**0.5 * largest)


def turns_only(dynamics: Float[Tensor, "*batch n n"], diffusion: Float[Tensor, "*batch n n"]) -> bool:
    """Whether `A = -mu I + S` with a skew-symmetric S, and `Q = q I`: states that only turn beside their decay.

    Their eigenvalues have the real part -mu exactly, and their stationary covariance is `q / (2 mu) I`. With gradients
    the general way is taken, which needs a decay beyond its rounding error.
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
    """P with `A P + P A^T + Q = 0`, as a linear system of n^2 unknowns.

    Raises:
        ValueError: for a singular system.
    """
    n = dynamics.shape[-1]
    identity = torch.eye(n, dtype=dynamics.dtype, device=dynamics.device)
    # row-major vec: vec(A P) = (A x I) vec P, vec(P A^T) = (I x A) vec P
    left = torch.einsum("...ij,kl->...ikjl", dynamics, identity) + torch.einsum("ij,...kl->...ikjl", identity, dynamics)
    right = -diffusion.flatten(-2).unsqueeze(-1)
    solved, failed = torch.linalg.solve_ex(left.reshape(*left.shape[:-4], n * n, n * n), right)
    if bool((failed > 0).any()):
        raise ValueError("dynamics: got a singular Lyapunov equation, expected eigenvalues with real parts < 0")
    return symmetric(solved.reshape(diffusion.shape))
