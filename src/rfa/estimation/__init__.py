"""The theory as usable code: linear SDEs, robust filtering, smoothing, forecasting and fitting."""

from .components import Autoregression, Cycle, Level, Season, Trend
from .linear_estimate import LinearEstimate
from .linear_filter import LinearFilter
from .linear_sde import Diagonalization, LinearSDE, Outliers, Simulation
from .robust_estimator import Estimate, robust_estimate
from .robust_filter import RobustFilter
from .row_filters import RecursiveEstimate, recursive_estimate
from .series_estimate import Diagnostics, SeriesEstimate
from .structural_model import Component, SeriesScale, StructuralModel

__all__ = [
    "Autoregression",
    "Component",
    "Cycle",
    "Diagnostics",
    "Diagonalization",
    "Estimate",
    "Level",
    "LinearEstimate",
    "LinearFilter",
    "LinearSDE",
    "Outliers",
    "RecursiveEstimate",
    "RobustFilter",
    "Season",
    "SeriesEstimate",
    "SeriesScale",
    "Simulation",
    "StructuralModel",
    "Trend",
    "recursive_estimate",
    "robust_estimate",
]
