"""Robust Filter Attention: self-attention as robust, precision-weighted state estimation."""

from rfa import models as models  # registers the model with transformers' Auto classes
from rfa.ops import robust_filter_attention, tensor_filter_attention
from rfa.version import __version__

__all__ = ["__version__", "models", "robust_filter_attention", "tensor_filter_attention"]
