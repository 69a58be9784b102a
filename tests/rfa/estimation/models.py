"""Models and series that the tests share, and statsmodels' filter of them."""

import numpy as np
import statsmodels.api as sm
import torch

from rfa.estimation import Estimate, LinearSDE, robust_estimate
from rfa.estimation.problem import Transitions, make_problem
from rfa.estimation.recursive_filter import (
    Recursion,
    diffuse_start,
    kalman_pass,
    moments,
    resumed_filter,
    robust_smoother,
)

PAPERS = {"kappa": None, "prior": "lyapunov", "iterations": 1, "start": "query"}
GAUSSIAN = {"nu": torch.inf, "kappa": 1.0}


def papers_estimate(*given, **options) -> Estimate:
    """`robust_estimate` with the paper's options in the place of its own defaults: one Gaussian step from the query."""
    return robust_estimate(*given, **(PAPERS | ({} if "nu" in options else GAUSSIAN) | options))


def matrix(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


EYE = matrix([[1.0, 0.0], [0.0, 1.0]])


def rotating(decay=0.3, frequency=2.0, process=0.5, measurement=0.5) -> LinearSDE:
    """The rotating process of docs/filtering-benchmark.md in its real form."""
    dynamics = matrix([[-decay, -frequency], [frequency, -decay]])
    return LinearSDE(dynamics, process / 2 * EYE, EYE, measurement / 2 * EYE)


def coupled() -> LinearSDE:
    """Three states with different decays that drive each other, seen through two components with correlated noise."""
    dynamics = matrix([[-0.5, 1.0, 0.0], [-0.8, -0.2, 0.3], [0.0, 0.0, -0.05]])
    diffusion = matrix([[0.3, 0.1, 0.0], [0.1, 0.2, 0.0], [0.0, 0.0, 0.1]])
    observation = matrix([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    return LinearSDE(dynamics, diffusion, observation, matrix([[0.4, 0.1], [0.1, 0.3]]))


def trend() -> LinearSDE:
    """A local linear trend: not diagonalisable, not stationary, its level seen."""
    return LinearSDE(
        matrix([[0.0, 1.0], [0.0, 0.0]]), matrix([[0.2, 0.0], [0.0, 0.05]]), matrix([[1.0, 0.0]]), matrix([[0.5]])
    )


def statsmodels_of(sde: LinearSDE, observations: torch.Tensor, lag: float = 1.0, start=None):
    """statsmodels' filter and smoother of a regular series, from a known start or a diffuse one."""
    n = sde.state_size
    diffuse = {"initialization": "diffuse"} if start is None else {}
    model = sm.tsa.statespace.MLEModel(observations.numpy(), k_states=n, k_posdef=n, **diffuse)
    model["transition"], model["state_cov"] = sde.transition(lag).numpy(), sde.covariance(lag).numpy()
    model["selection"], model["design"] = np.eye(n), sde.observation.numpy()
    model["obs_cov"] = sde.observation_noise.numpy()
    if start is not None:
        model.initialize_known(*(part.numpy() for part in start))
    return model.smooth([])


def irregular_times(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, generator=generator, dtype=torch.float64).mul(0.9).add(0.1).cumsum(0)


def with_gaps(observations: torch.Tensor, share: float = 0.3, seed: int = 0) -> torch.Tensor:
    """Some components and some whole rows missing; the first rows stay."""
    generator = torch.Generator().manual_seed(seed)
    lost = torch.rand(observations.shape, generator=generator, dtype=torch.float64) < share / 2
    lost |= torch.rand(observations.shape[:-1], generator=generator, dtype=torch.float64)[..., None] < share / 2
    lost[..., :3, :] = False
    return observations.masked_fill(lost, torch.nan)


def looped(sde: LinearSDE, times, observations, initial=None, direction="filter", robust=True):
    """Mean, covariance and weights of the Kalman filter, the robust filter or their smoothers in PyTorch's loop."""
    smooth = direction == "smooth"
    problem = make_problem(sde, times, observations, None, initial, robust=robust)
    steps = Transitions.of(sde, problem.grid)
    start = diffuse_start(problem.grid, steps) if initial is None else problem.initial
    if robust:
        found = (robust_smoother if smooth else resumed_filter)(problem.grid, steps, Recursion.first(start))[0]
    else:
        found = kalman_pass(problem.grid, steps, start)
    mean, covariance = moments(found.estimates(smooth))
    weights = found.weight[: len(mean)].where(problem.grid.present, torch.nan)
    return (problem.grid.by_series(x).numpy() for x in (mean, covariance, weights))
