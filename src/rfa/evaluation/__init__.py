"""Perplexity over context length."""

from .evaluate import evaluate
from .generation import generate
from .perplexity import loss_by_position, perplexities
from .windows import PROTOCOLS, Window, windows

__all__ = ["PROTOCOLS", "Window", "evaluate", "generate", "loss_by_position", "perplexities", "windows"]
