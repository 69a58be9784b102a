"""One model on several processes."""

from .context import ring_filter_attention

__all__ = ["ring_filter_attention"]
