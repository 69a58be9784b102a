"""One operation, several implementations."""

from .filter_attention import available_backends, choose_backend, robust_filter_attention

__all__ = ["available_backends", "choose_backend", "robust_filter_attention"]
