"""Figures in one style: the theory from its closed forms, and measurements from result files."""

from rfa.checks import needs

needs("matplotlib")

from matplotlib.figure import Figure

from rfa.forecasting.figure import ForecastPanel, forecast_panels
from rfa.forecasting.style import COLOURS, COLUMN, PAGE, save

from .comparison import accuracy_maps, differences, retrieval, speed_over_length
from .heads import (
    BEFORE_DECAY,
    attention_maps,
    near_attention,
    noises_over_training,
    regimes_over_training,
    robustness_over_training,
)
from .series import filtered_series, series_ratios
from .theory import (
    bias_and_gate_over_decay,
    diffusive_and_integrative,
    eigenvalue_spectra,
    rotate_aggregate_counter_rotate,
    temporal_scale_separation,
    transport_factorization,
    transported_measurements,
)
from .training import (
    damping_sweep,
    loss_over_position,
    perplexity_over_length,
    training_and_extrapolation,
    training_curves,
)

__all__ = [
    "BEFORE_DECAY",
    "COLOURS",
    "COLUMN",
    "PAGE",
    "Figure",
    "ForecastPanel",
    "accuracy_maps",
    "attention_maps",
    "bias_and_gate_over_decay",
    "damping_sweep",
    "differences",
    "diffusive_and_integrative",
    "eigenvalue_spectra",
    "filtered_series",
    "forecast_panels",
    "loss_over_position",
    "near_attention",
    "noises_over_training",
    "perplexity_over_length",
    "regimes_over_training",
    "retrieval",
    "robustness_over_training",
    "rotate_aggregate_counter_rotate",
    "save",
    "series_ratios",
    "speed_over_length",
    "temporal_scale_separation",
    "training_and_extrapolation",
    "training_curves",
    "transport_factorization",
    "transported_measurements",
]
