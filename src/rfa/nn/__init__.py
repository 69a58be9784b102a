"""Parameters, initialisation and modules: the RFA layer and its baselines."""

import importlib
from typing import Any

from .attention import Attention
from .cache import FilterCache
from .content import ContentFilterAttention
from .dot_product_attention import DotProductAttention, alibi_slopes
from .dynamics import HeadDynamics
from .filter_attention import RobustFilterAttention
from .projections import NormalLinear

__all__ = [
    "Attention",
    "ContentFilterAttention",
    "DotProductAttention",
    "FilterCache",
    "HeadDynamics",
    "NormalLinear",
    "RobustFilterAttention",
    "alibi_slopes",
]


def __getattr__(name: str) -> Any:
    """`CoupledFilterAttention` by its former path; it is in `rfa.appendix`, which is made of these modules."""
    if name != "CoupledFilterAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("rfa.appendix"), name)
