"""Filters that know the model of a simulated process: Kalman, WoLF, this library's, and one that knows the outliers."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal

from rfa.estimation import LinearSDE, recursive_estimate
from rfa_lab.data.series_batch import SeriesBatch

_LEAST_VARIANCE = 1e-12


class _Row(NamedTuple):
    """A row of many series, whitened by the noise: `z - C m-`, `C P- C^T`, and the true factor of the error."""

    residual: Tensor
    predicted: Tensor
    factor: Tensor


_Weight = Callable[[_Row, float], Tensor]
_WEIGHTS: Mapping[str, _Weight] = MappingProxyType(
    {
        "kalman": lambda row, _: torch.ones_like(row.residual),
        "wolf": lambda row, soft: (1 / (1 + row.residual.square().sum(-1, keepdim=True) / soft)).expand_as(
            row.residual
        ),
        "informed": lambda row, _: row.factor**-2,
    }
)
SOFT = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # values of c^2 from which WoLF's is chosen
FILTERS = (*_WEIGHTS, "robust")


def known_filter(name: str, sde: LinearSDE, batch: SeriesBatch, soft: float = 4.0) -> Normal:
    """What a filter with the true model says of the signal `C x` at each row, from the readings up to and including it.

    It starts at the stationary distribution of the process, or at zero where there is none, as the simulation does.
    Each component has the noise `R / w`, with w by the name:

        kalman      1
        wolf        1 / (1 + e^T R^-1 e / c^2),  e the innovation (Duran-Martin and others, 2024)
        informed    1 / s^2, s the factor by which the error is too large: it knows the outliers
        robust      `recursive_estimate`

    Args:
        name: one of `FILTERS`.
        sde: the true model. R is diagonal.
        batch: the series.
        soft: c^2 of WoLF.
    """
    start = torch.zeros(sde.state_size, dtype=torch.float64), _start_covariance(sde)
    if name == "robust":
        found = recursive_estimate(sde, batch.times, batch.values, initial=start)
        mean, covariance = found.mean, found.covariance
    else:
        mean, covariance = _weighted_filter(sde, batch, start, _WEIGHTS[name], soft)
    row = sde.observation
    variance = (row @ covariance @ row.mT).diagonal(dim1=-2, dim2=-1)
    return Normal(mean @ row.mT, variance.clamp(min=_LEAST_VARIANCE).sqrt())


def _start_covariance(sde: LinearSDE) -> Float[Tensor, "n n"]:
    try:
        return sde.stationary_covariance()
    except ValueError:  # a tracker starts at zero
        return 1e-9 * torch.eye(sde.state_size, dtype=torch.float64)


def _weighted_filter(
    sde: LinearSDE, batch: SeriesBatch, start: tuple[Tensor, Tensor], weight: _Weight, soft: float
) -> tuple[Tensor, Tensor]:
    """Mean and covariance at each row, `(batch, rows, ...)`."""
    lags = batch.times.diff(dim=-1)
    transition, variance = sde.transition(lags), sde.covariance(lags)
    deviation = sde.observation_noise.diagonal().sqrt()
    rows = sde.observation / deviation[:, None]
    values, seen = batch.values / deviation, ~batch.values.isnan()
    factors = torch.ones_like(values) if batch.noise is None else batch.noise
    mean = start[0].expand(len(values), -1)
    covariance = start[1].expand(len(values), -1, -1)
    means, covariances = [], []
    for k in range(values.shape[1]):
        if k:
            phi = transition[:, k - 1]
            mean = (phi @ mean[..., None])[..., 0]
            covariance = phi @ covariance @ phi.mT + variance[:, k - 1]
        here = seen[:, k]
        residual = torch.where(here, values[:, k] - mean @ rows.mT, 0.0)
        predicted = rows @ covariance @ rows.mT
        w = torch.where(here, weight(_Row(residual, predicted, factors[:, k]), soft), 0.0)
        root = w.sqrt()  # a missing component has weight 0, and no gain
        innovation = root[..., None] * predicted * root[..., None, :] + torch.eye(len(rows), dtype=torch.float64)
        shown = covariance @ rows.mT * root[..., None, :]
        gain = torch.linalg.solve(innovation, shown, left=False)
        mean = mean + (gain @ (root * residual)[..., None])[..., 0]
        covariance = covariance - gain @ shown.mT
        means.append(mean)
        covariances.append(covariance)
    return torch.stack(means, 1), torch.stack(covariances, 1)
