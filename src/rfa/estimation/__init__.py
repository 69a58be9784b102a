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
from .nonlinear_model import NonlinearModel, Sensor
from .robust_estimator import Estimate, robust_estimate
from .robust_filter import RobustFilter
from .series_estimate import Diagnostics, SeriesEstimate
from .state_estimate import StateEstimate
from .state_filter import StateFilter

RobustFilter.of_model = StateFilter

__all__ = [
    "Autoregression",
    "Component",
    "Cycle",
    "Diagnostics",
    "Estimate",
    "Level",
    "LinearSDE",
    "NonlinearModel",
    "Outliers",
    "RobustFilter",
    "Season",
    "Sensor",
    "SeriesEstimate",
    "SeriesScale",
    "Simulation",
    "StateEstimate",
    "StructuralModel",
    "Trend",
    "robust_estimate",
]
