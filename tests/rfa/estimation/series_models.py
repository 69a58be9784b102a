"""Series of the examples, hours that are drawn, and statsmodels' models of them."""

import csv
from pathlib import Path

import numpy as np
import scipy.linalg
import statsmodels.api as sm

from rfa.estimation import LinearSDE

EXAMPLES = Path(__file__).parents[3] / "examples"


def column(name: str, field: str) -> np.ndarray:
    """Of a file of `examples/`, NaN where a field is empty."""
    with (EXAMPLES / name).open(newline="") as file:
        return np.array([float(row[field] or "nan") for row in csv.DictReader(file)])


def hours(count: int) -> np.ndarray:
    """A level that wanders, a daily wave and an autoregression, as an hourly temperature has them."""
    generator = np.random.default_rng(0)
    level, error = (generator.normal(0, s, count) for s in (0.5, 0.7))
    short = np.zeros(count)
    for k in range(1, count):
        short[k] = 0.7 * short[k - 1] + generator.normal()
    return 20 + level.cumsum() + 3 * np.sin(2 * np.pi * np.arange(count) / 24) + short + error


def unobserved_components(values: np.ndarray, parameters: dict[str, float], **specification):
    """Filter and smoother of statsmodels, with an exact diffuse start."""
    model = sm.tsa.UnobservedComponents(values, use_exact_diffuse=True, **specification)
    return model.smooth([parameters[name] for name in model.param_names])


def dense_log_likelihood(sde: LinearSDE, times: np.ndarray, values: np.ndarray, regressors: np.ndarray) -> float:
    """Of all readings as one Gaussian whose first state has a variance c I, for c -> infinity, without `log c`.

    What the states show is cut to its singular values above a millionth: the others come from rounding.
    """
    dynamics, diffusion = sde.dynamics.numpy(), sde.diffusion.numpy()
    row, zeros = sde.observation.numpy()[0], np.zeros_like(dynamics)
    variance, shared = zeros, np.empty((0, len(row)))  # of the state, and with each reading so far
    covariance = np.diag(np.full(len(times), float(sde.observation_noise)))
    for k, gap in enumerate(np.diff(times, prepend=times[0])):
        block = scipy.linalg.expm(np.block([[-dynamics, diffusion], [zeros, dynamics.T]]) * gap)  # Van Loan
        step = block[len(row) :, len(row) :].T
        variance = step @ variance @ step.T + step @ block[: len(row), len(row) :]
        shared = np.r_[shared @ step.T, [variance @ row]]
        covariance[: k + 1, k] += shared @ row
        covariance[k, :k] = covariance[:k, k]
    shown = np.c_[[row @ scipy.linalg.expm(dynamics * (time - times[0])) for time in times], regressors]
    seen = ~np.isnan(values)
    basis, sizes, _ = np.linalg.svd(shown[seen], full_matrices=False)
    basis, sizes = basis[:, sizes > 1e-6 * sizes[0]], sizes[sizes > 1e-6 * sizes[0]]
    root = np.linalg.cholesky(covariance[np.ix_(seen, seen)])
    design, residual = (np.linalg.solve(root, x) for x in (basis * sizes, values[seen]))
    residual = residual - design @ np.linalg.lstsq(design, residual)[0]
    logarithms = np.linalg.slogdet(design.T @ design)[1] + 2 * np.log(np.diag(root)).sum()
    return -(seen.sum() * np.log(2 * np.pi) + logarithms + residual @ residual) / 2
