"""The linear SDE in closed form: tensors in, tensors out."""

from .coupling import cross_transport
from .covariance import accumulated_variance, covariance, riccati_gain, riccati_log_gain, steady_state_variance
from .regimes import bias, gate, peak_lag, prior_response, regime
from .spectrum import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay
from .time_dependent_noise import TimeDependentNoise, noise_rate, time_dependent_variance
from .transition import decay_kernel, rotate, rotation, time_dtype, turn

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
    "spectral_decay",
    "steady_state_variance",
    "time_dependent_variance",
    "time_dtype",
    "turn",
]
