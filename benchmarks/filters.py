"""Filters to compare with: Kalman, WoLF, Huber, Student-t variational, filterpy's loop.

All but filterpy's filter many series at once. A robust one judges each row by its innovation e, whose prediction has
the variance H = C P C^T beside R, and gives it a weight w: the row counts as if its noise were R / w.
"""

from collections.abc import Callable

import filterpy.kalman
import numpy as np
import torch
from torch import Tensor

from rfa.estimation import LinearSDE, robust_estimate

Found = tuple[Tensor, Tensor]  # mean and covariance
Start = tuple[Tensor, Tensor]
Weight = Callable[[Tensor, Tensor, Tensor], Tensor]  # of e (b, m), H (b, m, m) and R (m, m): w (b,)
Estimator = Callable[[LinearSDE, Tensor, Tensor, Start], Found]


def kalman(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start, weight: Weight | None = None) -> Found:
    """The Kalman filter of series `(b, T, m)`, whose rows are seen or missing as a whole; weighted, a robust one."""
    observation, noise = sde.observation, sde.observation_noise
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
        missed = torch.where(here[:, None], seen[:, k] - mean @ observation.mT, 0.0)
        predicted = observation @ covariance @ observation.mT
        judged = noise if weight is None else noise / weight(missed, predicted, noise)[:, None, None]
        gain = covariance @ observation.mT @ torch.linalg.inv(predicted + judged)
        gain = torch.where(here[:, None, None], gain, 0.0)
        mean = mean + (gain @ missed[..., None])[..., 0]
        covariance = covariance - gain @ observation @ covariance
        means.append(mean)
        covariances.append(covariance)
    return torch.stack(means, 1), torch.stack(covariances, 1)


def robust(weight: Weight) -> Estimator:
    """The filter with a weight."""
    return lambda *given: kalman(*given, weight=weight)


def _distance(missed: Tensor, variance: Tensor) -> Tensor:
    """`e^T S^-1 e`."""
    return (missed[..., None, :] @ torch.linalg.inv(variance) @ missed[..., None])[..., 0, 0]


def wolf(soft: float) -> Weight:
    """Weighted observation likelihood filter, inverse multi-quadratic (Duran-Martin and others, 2024), soft = c^2.

    R becomes `R (1 + e^T R^-1 e / c^2)`.
    """
    return lambda missed, predicted, noise: 1 / (1 + _distance(missed, noise) / soft)


def huber(bound: float = 1.345) -> Weight:
    """`min(1, bound / d)`, d the innovation's Mahalanobis distance."""
    return lambda missed, predicted, noise: bound / _distance(missed, predicted + noise).sqrt().clamp(min=bound)


def variational(nu: float, steps: int = 8) -> Weight:
    """Errors of a Student-t distribution; a row's scale and the state are fitted in turns (variational Bayes).

    `w = (nu + m) / (nu + tr R^-1 (r r^T + C P C^T))` with residual r and variance P after the row with the last w.
    """

    def weight(missed: Tensor, predicted: Tensor, noise: Tensor) -> Tensor:
        found = missed.new_ones(len(missed))
        for _ in range(steps):
            judged = noise / found[:, None, None]
            left = judged @ torch.linalg.inv(predicted + judged)  # I - C K
            residual = (left @ missed[..., None])[..., 0]
            variance = torch.linalg.solve(noise, left @ predicted).diagonal(dim1=-2, dim2=-1).sum(-1)
            found = (nu + missed.shape[-1]) / (nu + _distance(residual, noise) + variance)
        return found

    return weight


def filterpys(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start) -> np.ndarray:
    """Means of filterpy's loop over one series."""
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
    """`robust_estimate`: by default its own choice."""

    def estimate(sde: LinearSDE, times: Tensor, seen: Tensor, start: Start) -> Found:
        found = robust_estimate(sde, times, seen, initial=start, return_weights=False, **options)
        return found.mean, found.covariance

    return estimate


def inside(mean: Tensor, covariance: Tensor, truth: Tensor) -> float:
    """The share of states within their 90 % intervals."""
    width = 1.6448536 * covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return ((mean - truth).abs() < width).double().mean().item()
