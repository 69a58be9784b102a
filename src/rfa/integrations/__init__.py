"""Robust filter attention in decoders of transformers.

The import registers the attention "rfa" with transformers.
"""

from rfa.checks import needs

needs("transformers")

from .attention_interface import student_t_attention
from .replace_attention import load_replaced, replace_attention
from .replaced_attention import ReplacedAttention

__all__ = ["ReplacedAttention", "load_replaced", "replace_attention", "student_t_attention"]
