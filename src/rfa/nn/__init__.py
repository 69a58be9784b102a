"""Parameters, initialisation and modules: the RFA layer and its baselines."""

from .attention import Attention
from .cache import FilterCache
from .content import ContentFilterAttention
from .dot_product_attention import DotProductAttention, Yarn, alibi_slopes
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
    "Yarn",
    "alibi_slopes",
]
