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
from .linear_estimate import LinearEstimate
from .linear_filter import LinearFilter
from .linear_sde import LinearSDE, Outliers, Simulation
from .nonlinear_filter import NonlinearEstimate, NonlinearFilter
from .nonlinear_model import NonlinearModel, Sensor
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
    "LinearEstimate",
    "LinearFilter",
    "LinearSDE",
    "NonlinearEstimate",
    "NonlinearFilter",
    "NonlinearModel",
    "Outliers",
    "RecursiveEstimate",
    "RobustFilter",
    "Season",
    "Sensor",
    "SeriesEstimate",
    "SeriesScale",
    "Simulation",
    "StructuralModel",
    "Trend",
    "recursive_estimate",
    "robust_estimate",
]
