"""Small matrices in float64: checks of what a caller gives, whitening, inverses and square roots."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

InitialMoments = tuple[Real[Tensor, "*#initial n"], Real[Tensor, "*#initial n n"]]  # mean and covariance

_TOLERANCE = 1e-9  # relative: rounding in a covariance that the caller has computed
_REGULAR = 1e-12  # smallest eigenvalue of a covariance, over the largest
_NO_TURN = 1e-16  # of two products of entries: a pair of states whose product is less turns by rounding alone


def real(name: str, given: object) -> Tensor:
    """`given` in float64."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, expected a tensor")
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"{name}: got dtype {given.dtype}, expected real numbers")
    return given.to(torch.float64)


def check_matrix(name: str, given: Tensor, columns: int | None = None) -> None:
    """Raise `ValueError` unless `given` is finite and `(..., m, columns)`, or square where `columns` is None."""
    shape = tuple(given.shape)
    expected = "(..., n, n)" if columns is None else f"(..., m, {columns})"
    fits = len(shape) >= 2 and 0 not in shape[-2:] and shape[-1] == (shape[-2] if columns is None else columns)
    if not fits:
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
        least = least.min().item()
        raise ValueError(f"{name}: got an eigenvalue of {least:.6g}, expected a positive semi-definite matrix")


def check_initial(size: int, initial: InitialMoments) -> tuple[Tensor, Tensor]:
    """Mean `(..., size)` and covariance `(..., size, size)` of the first state, in float64."""
    if not isinstance(initial, tuple | list) or len(initial) != 2:
        raise ValueError(f"initial: got {type(initial).__name__}, expected a mean and a covariance")
    mean, covariance = (real("initial", part) for part in initial)
    check_covariance("initial", covariance, size)
    if mean.shape[-1:] != (size,) or not bool(mean.isfinite().all()):
        raise ValueError(f"initial: got a mean of shape {tuple(mean.shape)}, expected {size} finite numbers")
    return mean, covariance


def broadcast_shapes(name: str, of: str, shapes: Sequence[torch.Size]) -> torch.Size:
    """The batch dimensions to which some broadcast."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name}: got batch dimensions {given}{of}, expected shapes that broadcast") from None


def flattened(x: Tensor, batch_shape: torch.Size, trailing: int) -> Tensor:
    """`x`, broadcast to `(*batch_shape, ...)`, as `(b, ...)`. The last `trailing` dimensions stay as they are."""
    return x.expand(*batch_shape, *x.shape[x.dim() - trailing :]).reshape(-1, *x.shape[x.dim() - trailing :])


def identity_like(matrix: Float[Tensor, "... rows n"]) -> Float[Tensor, "n n"]:
    """The identity with as many rows as `matrix` has columns, of its type and on its device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def trace(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """The sum of the diagonal."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def symmetric(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The symmetric part, `(M + M^T) / 2`."""
    return (matrix + matrix.mT) / 2


def inverse(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """`matrix^-1`. Many of up to 2 x 2 are inverted by cofactors: the library would take 100 times as long."""
    if matrix.shape[-1] == 1:
        return 1 / matrix
    if matrix.shape[-1] > 2 or matrix.shape[:-2].numel() < 8:
        return torch.linalg.inv_ex(matrix).inverse
    (a, b), (c, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    rows = torch.stack([torch.stack([d, -b], dim=-1), torch.stack([-c, a], dim=-1)], dim=-2)
    return rows / (a * d - b * c)[..., None, None]


def positive(covariance: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The symmetric part, with its negative eigenvalues raised to small positive ones: they come from rounding.

    An infinite matrix stays as it is. The gradient is that of the covariance as given.
    """
    covariance = symmetric(covariance)
    given = covariance.detach()
    finite = given.isfinite().all(-1).all(-1)[..., None, None]
    units = given.diagonal(dim1=-2, dim2=-1).abs().sqrt()  # the units of the states must not change the result
    units = torch.where((units > 0) & units.isfinite(), units, 1.0)[..., None]
    eigenvalues, basis = torch.linalg.eigh(torch.where(finite, given / units / units.mT, 0.0))
    negative = (eigenvalues[..., :1] < 0)[..., None]
    if not bool(negative.any()):
        return covariance
    raised = torch.maximum(eigenvalues, _TOLERANCE * eigenvalues.abs().amax(-1, keepdim=True))
    rebuilt = units * symmetric((basis * raised[..., None, :]) @ basis.mT) * units.mT
    return torch.where(negative, rebuilt + (covariance - given), covariance)


def plus_identity(matrix: Float[Tensor, "b n n"], factor: Float[Tensor, " b"]) -> Float[Tensor, "b n n"]:
    """`M + factor I`."""
    return matrix + torch.diag_embed(factor[:, None].expand(-1, matrix.shape[-1]))


def deviation_ratios(covariance: Float[Tensor, "#b n n"]) -> Float[Tensor, "#b n n"]:
    """The ratio of two states' standard deviations, the unit of an entry of M. It is 1 where there are none."""
    size = covariance.detach().diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    size = torch.where(size > 0, size, size.amax(-1, keepdim=True))
    size = torch.where(size > 0, size, 1.0)
    return size[..., :, None] / size[..., None, :]


def regular_root(covariance: Float[Tensor, "#b n n"]) -> Float[Tensor, "#b n n"]:
    """L with `L L^T = P`, made regular. Where rounding makes P indefinite, L loses the correlations."""
    identity = identity_like(covariance)
    units = deviation_ratios(covariance)[..., :1]  # of each state, the first is 1
    scaled = covariance / units / units.mT
    size = scaled.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    size = torch.where((size > 0) & size.isfinite(), size, 1.0)
    factor, failed = torch.linalg.cholesky_ex(scaled / size + _REGULAR * identity)
    return units * size.sqrt() * torch.where((failed > 0)[..., None, None], identity, factor)


def least_eigenvalue(
    matrix: Float[Tensor, "b n n"], root: Float[Tensor, "#b n n"], below: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Of the symmetric part of `L^-1 M L`, with the root L. It has a gradient only where it is below a bound."""
    if matrix.shape[-1] == 1:
        return matrix[:, 0, 0]
    similar = symmetric(torch.linalg.solve_triangular(root, matrix @ root, upper=False))
    finite = similar.isfinite().all(-1).all(-1)  # a matrix that overflows stays as it is
    least = torch.linalg.eigvalsh(torch.where(finite[:, None, None], similar.detach(), 0.0))[..., 0]
    least = torch.where(finite, least, 1.0)
    low = finite & (least < below)
    if not bool(low.any()):
        return least
    # Equal eigenvalues have no second derivative. So where none is needed, a diagonal with unequal ones is used.
    unequal = torch.diag(torch.arange(1.0, matrix.shape[-1] + 1)).to(similar)
    with_slope = torch.linalg.eigvalsh(torch.where(low[:, None, None], similar, unequal))[..., 0]
    return torch.where(low, with_slope, least)


def without_rounding(transition: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Phi with zeros where two states turn into each other by rounding alone, as after half a period; or stay so.

    The products `Phi_ij Phi_ji` and `Phi_ii Phi_jj` do not depend on the units of states.
    """
    diagonal = transition.diagonal(dim1=-2, dim2=-1)
    turned, stayed = (transition * transition.mT).abs(), (diagonal[..., :, None] * diagonal[..., None, :]).abs()
    gone = torch.diag_embed((stayed < _NO_TURN * turned).any(-1))
    return torch.where(((turned > 0) & (turned < _NO_TURN * stayed)) | gone, 0.0, transition)


def square_root(covariance: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """A matrix L with `L L^T = covariance`. The covariance may be singular."""
    eigenvalues, basis = torch.linalg.eigh(symmetric(covariance))
    return basis * eigenvalues.clamp(min=0.0).sqrt()[..., None, :]


def without_missing(
    observation: Float[Tensor, "*#rows m n"], noise: Float[Tensor, "*#rows m m"], present: Bool[Tensor, "*rows m"]
) -> tuple[Tensor, Tensor]:
    """C and R with a row of zeros and a noise of 1 for each missing component."""
    both = present[..., :, None] & present[..., None, :]
    ones = torch.diag_embed((~present).to(noise.dtype))
    return torch.where(present[..., None], observation, 0.0), torch.where(both, noise, 0.0) + ones


def whitened(
    observation: Float[Tensor, "*#rows m n"], noise: Float[Tensor, "*#rows m m"], values: Float[Tensor, "*rows m"]
) -> tuple[Tensor, Tensor]:
    """`L^-1 C` and `L^-1 z` with `R = L L^T`: the same observation with noise of unit covariance."""
    factor, failed = torch.linalg.cholesky_ex(noise)
    if bool((failed > 0).any()):
        raise ValueError(
            "observation_noise: got a singular observation noise, expected a positive definite R for what is seen"
        )
    whiten = torch.linalg.solve_triangular(factor, identity_like(noise), upper=False)
    return whiten @ observation, (whiten @ values[..., None])[..., 0]
