"""Robust filter attention in other libraries: in decoders of transformers, and by PyTorch's flex attention.

The import registers the attention "rfa" with transformers.
"""

from rfa.checks import needs

needs("transformers")

from .attention_interface import student_t_attention
from .flex import flex_filter_attention
from .replace_attention import load_replaced, replace_attention
from .replaced_attention import ReplacedAttention

__all__ = ["ReplacedAttention", "flex_filter_attention", "load_replaced", "replace_attention", "student_t_attention"]
