"""One operation, several implementations."""

from .backends import available_backends, choose_backend
from .filter_attention import robust_filter_attention

__all__ = ["available_backends", "choose_backend", "robust_filter_attention"]
