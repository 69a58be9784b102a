"""The operator for CUDA, in Triton. Importing this package does not import triton; the first call does."""

from .operator import fused_attention

__all__ = ["fused_attention"]
