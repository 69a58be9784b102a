"""Robust Filter Attention: self-attention as robust, precision-weighted state estimation."""

import importlib
from types import ModuleType

from rfa import models as models  # registers the model with transformers' Auto classes
from rfa.ops import robust_filter_attention, tensor_filter_attention
from rfa.version import __version__

__all__ = ["__version__", "models", "robust_filter_attention", "tensor_filter_attention"]


def __getattr__(name: str) -> ModuleType:
    """Load `rfa.estimation` when it is first used, so that `import rfa` stays fast."""
    if name == "estimation":
        return importlib.import_module("rfa.estimation")
    raise AttributeError(f"module 'rfa' has no attribute {name!r}")
