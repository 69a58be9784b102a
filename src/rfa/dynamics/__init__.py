"""The linear SDE in closed form: tensors in, tensors out."""

from .covariance import (
    TimeDependentNoise,
    accumulated_variance,
    bias,
    covariance,
    cross_transport,
    gate,
    noise_rate,
    peak_lag,
    prior_response,
    regime,
    riccati_gain,
    riccati_log_gain,
    steady_state_variance,
    time_dependent_variance,
)
from .spectrum import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay
from .transition import decay_kernel, rotate, rotation, rotation_of_heads, time_dtype, turn

__all__ = [
    "TimeDependentNoise",
    "accumulated_variance",
    "bias",
    "covariance",
    "cross_transport",
    "decay_kernel",
    "gate",
    "noise_rate",
    "partitioned_frequencies",
    "peak_lag",
    "prior_response",
    "regime",
    "riccati_gain",
    "riccati_log_gain",
    "rope_frequencies",
    "rotary_frequencies",
    "rotate",
    "rotation",
    "rotation_of_heads",
    "spectral_decay",
    "steady_state_variance",
    "time_dependent_variance",
    "time_dtype",
    "turn",
]
