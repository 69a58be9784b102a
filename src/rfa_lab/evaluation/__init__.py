"""Perplexity over context length, and maps of attention."""

from .attention_maps import MAP_LENGTHS, attention_maps
from .evaluate import evaluate, full_evaluation, generate
from .perplexity import LossByDocument, Window, perplexities, windows

__all__ = [
    "MAP_LENGTHS",
    "LossByDocument",
    "Window",
    "attention_maps",
    "evaluate",
    "full_evaluation",
    "generate",
    "perplexities",
    "windows",
]
