"""Filters for comparison: Kalman, WoLF, Huber, Student-t variational, and filterpy's loop.

All but filterpy's work on many series at once. A robust filter computes a weight w for each row from its innovation and
the covariance C P C^T of the prediction. The row then has the noise R / w. A weight gets both in units of the noise, in
the basis in which the covariance is diagonal: there R is the identity. It takes tensors and NumPy arrays.
"""

from collections.abc import Callable
from typing import Any

import filterpy.kalman
import numpy as np
import torch
from torch import Tensor

from rfa.estimation import LinearSDE, robust_estimate

Found = tuple[Tensor, Tensor]  # mean and covariance
Start = tuple[Tensor, Tensor]
Weight = Callable[[Any, Any], Any]  # of the innovation e (..., m) and the variances h (..., m): w (...)
Estimator = Callable[[LinearSDE, Tensor, Tensor, Start], Found]


def kalman(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start, weight: Weight | None = None) -> Found:
    """The Kalman filter of series `(b, T, m)`. With `weight` it is a robust filter. Rows are complete or missing."""
    observation, noise = sde.observation, sde.observation_noise
    whiten = torch.linalg.inv(torch.linalg.cholesky(noise))
    lags = times.expand(len(seen), -1).diff()
    transition, forcing = sde.transition(lags), sde.covariance(lags)
    mean = start[0].to(torch.float64).expand(len(seen), -1)
    covariance = start[1].to(torch.float64).expand(len(seen), -1, -1)
    means, covariances = [], []
    for k in range(seen.shape[1]):
        if k:
            phi = transition[:, k - 1]
            mean = (phi @ mean[..., None])[..., 0]
            covariance = phi @ covariance @ phi.mT + forcing[:, k - 1]
        here = ~seen[:, k].isnan().any(-1)
        innovation = torch.where(here[:, None], seen[:, k] - mean @ observation.mT, 0.0)
        predicted = observation @ covariance @ observation.mT
        effective = noise
        if weight is not None:
            variances, basis = torch.linalg.eigh(whiten @ predicted @ whiten.mT)
            effective = noise / weight((innovation @ whiten.mT)[:, None] @ basis, variances[:, None])[..., None]
        gain = covariance @ observation.mT @ torch.linalg.inv(predicted + effective)
        gain = torch.where(here[:, None, None], gain, 0.0)
        mean = mean + (gain @ innovation[..., None])[..., 0]
        covariance = covariance - gain @ observation @ covariance
        means.append(mean)
        covariances.append(covariance)
    return torch.stack(means, 1), torch.stack(covariances, 1)


def robust(weight: Weight) -> Estimator:
    """The robust filter with this weight."""
    return lambda *given: kalman(*given, weight=weight)


def wolf(soft: float) -> Weight:
    """Weighted observation likelihood filter with the inverse multi-quadratic weight (Duran-Martin and others, 2024).

    `soft` is c^2. The noise R becomes `R (1 + e^T R^-1 e / c^2)`.
    """
    return lambda innovation, variances: 1 / (1 + (innovation**2).sum(-1) / soft)


def huber(bound: float = 1.345) -> Weight:
    """`min(1, bound / d)` with the Mahalanobis distance d of the innovation."""
    return lambda innovation, variances: 1 / ((innovation**2 / (variances + 1)).sum(-1) / bound**2).clip(1.0) ** 0.5


def variational(nu: float, steps: int = 8) -> Weight:
    """Student-t errors with variational Bayes: the scale of a row and the state are fitted in turns.

    `w = (nu + m) / (nu + tr R^-1 (r r^T + C P C^T))`. The residual r and the variance P are those after the row, with
    the w of the step before.
    """

    def weight(innovation: Any, variances: Any) -> Any:
        left = 1 / (1 + variances)  # I - C K
        for _ in range(steps):
            found = (nu + innovation.shape[-1]) / (nu + ((left * innovation) ** 2 + left * variances).sum(-1))
            left = 1 / (1 + found[..., None] * variances)
        return found

    return weight


def filterpys(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start) -> np.ndarray:
    """The means of filterpy's loop over one series, `(T, n, ...)`."""
    found = filterpy.kalman.KalmanFilter(dim_x=sde.state_size, dim_z=sde.observation_size)
    found.x, found.P = start[0].numpy()[:, None].copy(), start[1].numpy().copy()
    found.H, found.R = sde.observation.numpy(), sde.observation_noise.numpy()
    lags = times.diff()
    transitions, forcings = sde.transition(lags).numpy(), sde.covariance(lags).numpy()
    means = []
    for k, row in enumerate(seen.numpy()):
        if k:
            found.predict(F=transitions[k - 1], Q=forcings[k - 1])
        found.update(None if np.isnan(row).any() else row[:, None])
        means.append(found.x[:, 0].copy())
    return np.array(means)


def ours(**options) -> Estimator:
    """`robust_estimate` with these options, or with its defaults."""

    def estimate(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start) -> Found:
        found = robust_estimate(sde, times, seen, initial=start, return_weights=False, **options)
        return found.mean, found.covariance

    return estimate


def inside(mean: Tensor, covariance: Tensor, truth: Tensor) -> float:
    """The fraction of states within their 90 % intervals."""
    width = 1.6448536 * covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return ((mean - truth).abs() < width).double().mean().item()
