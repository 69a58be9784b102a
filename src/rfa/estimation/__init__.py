"""The theory as usable code: linear SDEs, robust filtering, smoothing, forecasting and fitting."""

from .components import (
    Autoregression,
    Component,
    Cycle,
    Level,
    Season,
    SeriesScale,
    StructuralModel,
    Trend,
)
from .linear_sde import LinearSDE, Outliers, Simulation
from .robust_estimator import Estimate, RecursiveEstimate, recursive_estimate, robust_estimate
from .robust_filter import RobustFilter
from .series_estimate import Diagnostics, SeriesEstimate

__all__ = [
    "Autoregression",
    "Component",
    "Cycle",
    "Diagnostics",
    "Estimate",
    "Level",
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
