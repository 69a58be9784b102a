"""Scores of predictive distributions: squared error, likelihood, CRPS, and coverage of central intervals."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution, Normal, StudentT

from rfa.checks import needs


class ForecastScores(NamedTuple):
    """Means over the targets that are there.

    Fields:
        mse: squared error of the mean, in squared units of the target.
        nll: `-log p(target)`, in nats.
        crps: continuous ranked probability score, in units of the target.
        coverage: fraction of targets within the central 90 % interval.
        targets: their number.
    """

    mse: float
    nll: float
    crps: float
    coverage: float
    targets: int


def forecast_scores(
    distribution: Distribution,
    targets: Float[Tensor, "*shape"],
    present: Bool[Tensor, "*shape"] | None = None,
    level: float = 0.9,
) -> ForecastScores:
    """Score independent predictions of each target.

    Args:
        distribution: a `Normal` or `StudentT` of the targets' shape, in their units.
        targets: what was to be predicted; NaN where it is unknown.
        present: True where a target counts; by default where it is not NaN.
        level: of the central interval whose coverage is counted.

    Raises:
        ValueError: for another distribution, a level outside (0, 1), shapes that differ, or no target.
    """
    shape = tuple(distribution.batch_shape)
    if tuple(targets.shape) != shape:
        raise ValueError(f"targets: got shape {tuple(targets.shape)}, expected {shape}, that of the distribution")
    if present is not None and tuple(present.shape) != shape:
        raise ValueError(f"present: got shape {tuple(present.shape)}, expected {shape}")
    counted = ~targets.isnan() if present is None else present & ~targets.isnan()
    count = int(counted.sum())
    if not count:
        raise ValueError("targets: got none that is known, expected at least one")
    known = torch.where(counted, targets, 0.0)
    lower, upper = central_interval(distribution, level)
    scores = (
        (known - distribution.mean).square(),
        -distribution.log_prob(known),
        crps(distribution, known),
        ((lower <= known) & (known <= upper)).to(known.dtype),
    )
    mse, nll, mean_crps, coverage = (float(score[counted].mean()) for score in scores)
    return ForecastScores(mse, nll, mean_crps, coverage, count)


def crps(distribution: Distribution, targets: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`integral (F(x) - 1{x >= y})^2 dx` for each target y, in its units.

    With `z = (y - loc) / scale`, f and F the standard density and distribution function:

        Normal:    scale (z (2 F(z) - 1) + 2 f(z) - 1 / sqrt(pi))
        Student-t: scale (z (2 F(z) - 1) + 2 f(z) (nu + z^2) / (nu - 1)
                          - 2 sqrt(nu) / (nu - 1) B(1/2, nu - 1/2) / B(1/2, nu/2)^2),    nu > 1

    Raises:
        ValueError: for another distribution, or a Student-t one with `df <= 1`, whose mean does not exist.

    Source: Gneiting and Raftery (2007); Jordan, Krueger and Lerch (2019), appendix A.
    """
    exact = torch.float64  # in float32 the beta functions of many degrees of freedom cancel
    location = _location(distribution).to(exact)
    assert isinstance(distribution, Normal | StudentT)
    scale = distribution.scale.to(exact)
    z = (targets.to(exact) - location) / scale
    cumulative = _cumulative(distribution, z)
    if isinstance(distribution, Normal):
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
        found = scale * (z * (2 * cumulative - 1) + 2 * density - 1 / math.sqrt(math.pi))
        return found.to(distribution.scale.dtype)
    nu = distribution.df.to(exact)
    if bool((nu <= 1).any()):
        raise ValueError(f"distribution: got a Student-t with df = {float(nu.min()):.3g}, expected more than 1")
    density = StudentT(nu, validate_args=False).log_prob(z).exp()
    beta = torch.exp(_log_beta(nu - 0.5) - 2 * _log_beta(nu / 2))
    spread = 2 * nu.sqrt() / (nu - 1) * beta
    found = scale * (z * (2 * cumulative - 1) + 2 * density * (nu + z.square()) / (nu - 1) - spread)
    return found.to(distribution.scale.dtype)


def central_interval(
    distribution: Distribution, level: float
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The two quantiles between which `level` of the probability lies.

    Raises:
        ValueError: for a level outside (0, 1), or a distribution that is neither normal nor Student-t.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1")
    location, scale = _location(distribution), distribution.scale  # type: ignore[attr-defined]
    if isinstance(distribution, Normal):
        half = scale * math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).to(scale)
    else:
        needs("scipy")
        from scipy.special import stdtrit

        half = scale * _with_scipy(lambda df: stdtrit(df, (1 + level) / 2), distribution.df)  # type: ignore[attr-defined]
    return location - half, location + half


def _location(distribution: Distribution) -> Tensor:
    if not isinstance(distribution, Normal | StudentT):
        raise ValueError(f"distribution: got {type(distribution).__name__}, expected Normal or StudentT")
    return distribution.loc


def _cumulative(distribution: Distribution, z: Tensor) -> Tensor:
    """The standard distribution function."""
    if isinstance(distribution, Normal):
        return torch.special.ndtr(z)
    needs("scipy")
    from scipy.special import stdtr

    return _with_scipy(stdtr, distribution.df.expand(z.shape), z)  # type: ignore[attr-defined]


def _with_scipy(function, *given: Tensor) -> Tensor:
    """A function of arrays, applied to tensors, in float64."""
    arrays = (x.detach().to("cpu", torch.float64).numpy() for x in given)
    return torch.as_tensor(function(*arrays)).to(given[-1])


def _log_beta(x: Tensor) -> Tensor:
    """`log B(1/2, x)`."""
    return math.lgamma(0.5) + torch.lgamma(x) - torch.lgamma(x + 0.5)
