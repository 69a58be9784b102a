"""Small symmetric matrices in float64, and the checks of what is given as one."""

import torch
from torch import Tensor

_TOLERANCE = 1e-9  # relative: rounding in a covariance that the caller has computed


def real(name: str, given: Tensor) -> Tensor:
    """`given` in float64; `ValueError` unless it is a tensor of real numbers."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, expected a tensor")
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"{name}: got dtype {given.dtype}, expected real numbers")
    return given.to(torch.float64)


def check_matrix(name: str, given: Tensor, columns: int | None = None) -> None:
    """Raise `ValueError` unless `given` is finite and `(..., rows, columns)`, square where no number is named."""
    shape = tuple(given.shape)
    wide = shape[-1] if columns is None and len(shape) >= 2 else columns
    fits = len(shape) >= 2 and shape[-1] == wide and (columns is not None or shape[-2] == wide) and 0 not in shape[-2:]
    if not fits:
        expected = "(..., n, n)" if columns is None else f"(..., m, {columns})"
        raise ValueError(f"{name}: got shape {shape}, expected {expected}")
    if not bool(given.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinite values, expected finite numbers")


def check_covariance(name: str, given: Tensor, size: int) -> None:
    """Raise `ValueError` unless `given` is `(..., size, size)`, finite, symmetric and positive semi-definite."""
    if tuple(given.shape[-2:]) != (size, size) or given.dim() < 2:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (..., {size}, {size})")
    check_matrix(name, given)
    detached = given.detach()
    largest = detached.abs().amax(dim=(-2, -1), keepdim=True)
    if bool(((detached - detached.mT).abs() > _TOLERANCE * largest).any()):
        raise ValueError(f"{name}: got a matrix that is not symmetric, expected a covariance")
    least = torch.linalg.eigvalsh(detached)[..., 0]
    if bool((least < -_TOLERANCE * largest[..., 0, 0] * size).any()):
        raise ValueError(
            f"{name}: got an eigenvalue of {least.min().item():.6g}, expected a positive semi-definite matrix"
        )


def check_start(size: int, initial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A mean `(..., size)` and a covariance `(..., size, size)` in float64; `ValueError` for anything else."""
    if not isinstance(initial, tuple | list) or len(initial) != 2:
        raise ValueError(f"initial: got {type(initial).__name__}, expected a mean and a covariance")
    mean, covariance = (real("initial", part) for part in initial)
    check_covariance("initial", covariance, size)
    if mean.shape[-1:] != (size,) or not bool(mean.isfinite().all()):
        raise ValueError(f"initial: got a mean of shape {tuple(mean.shape)}, expected {size} finite numbers")
    return mean, covariance


def symmetric(matrix: Tensor) -> Tensor:
    """Its symmetric part."""
    return (matrix + matrix.mT) / 2


def inverse(matrix: Tensor) -> Tensor:
    """`matrix^-1`; by cofactors for many of up to 2 x 2, which takes a hundredth of a library call for each."""
    if matrix.shape[-1] == 1:
        return 1 / matrix
    if matrix.shape[-1] > 2 or matrix.shape[:-2].numel() < 8:
        return torch.linalg.inv_ex(matrix).inverse
    (a, b), (c, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    rows = torch.stack([torch.stack([d, -b], dim=-1), torch.stack([-c, a], dim=-1)], dim=-2)
    return rows / (a * d - b * c)[..., None, None]


def positive(covariance: Tensor) -> Tensor:
    """Its symmetric part where that is positive semi-definite or infinite; else with all eigenvalues positive.

    Negative ones are rounding. The gradient is that of the covariance as given.
    """
    covariance = symmetric(covariance)
    given = covariance.detach()
    finite = given.isfinite().all(-1).all(-1)[..., None, None]
    units = given.diagonal(dim1=-2, dim2=-1).abs().sqrt()  # those of the states must not matter
    units = torch.where((units > 0) & units.isfinite(), units, 1.0)[..., None]
    eigenvalues, basis = torch.linalg.eigh(torch.where(finite, given / units / units.mT, 0.0))
    negative = (eigenvalues[..., :1] < 0)[..., None]
    if not bool(negative.any()):
        return covariance
    raised = torch.maximum(eigenvalues, _TOLERANCE * eigenvalues.abs().amax(-1, keepdim=True))
    rebuilt = units * symmetric((basis * raised[..., None, :]) @ basis.mT) * units.mT
    return torch.where(negative, rebuilt + (covariance - given), covariance)


def root(covariance: Tensor) -> Tensor:
    """A matrix whose product with its own transpose is `covariance`, which may be singular."""
    eigenvalues, basis = torch.linalg.eigh(symmetric(covariance))
    return basis * eigenvalues.clamp(min=0.0).sqrt()[..., None, :]
