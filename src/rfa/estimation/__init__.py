"""The theory as usable code: linear SDEs, robust filtering, smoothing, forecasting and fitting."""

from .fit import Fit, fit
from .likelihood import log_likelihood
from .linear_sde import Diagonalization, LinearSDE, Outliers, Simulation
from .recursive import RecursiveEstimate, recursive_estimate
from .robust import Estimate, robust_estimate

__all__ = [
    "Diagonalization",
    "Estimate",
    "Fit",
    "LinearSDE",
    "Outliers",
    "RecursiveEstimate",
    "Simulation",
    "fit",
    "log_likelihood",
    "recursive_estimate",
    "robust_estimate",
]
