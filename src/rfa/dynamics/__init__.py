"""The linear SDE in closed form: tensors in, tensors out."""

from .covariance import accumulated_variance, covariance, riccati_gain, riccati_log_gain, steady_state_variance
from .regimes import bias, gate, peak_lag, prior_response, regime
from .spectrum import partitioned_frequencies, rope_frequencies, rotary_frequencies, spectral_decay
from .transition import decay_kernel, rotate, rotation, time_dtype, turn

__all__ = [
    "accumulated_variance",
    "bias",
    "covariance",
    "decay_kernel",
    "gate",
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
    "time_dtype",
    "turn",
]
