"""One model on several processes."""

from .context import ring_filter_attention
from .heads import tensor_parallel
from .weights import fully_sharded

__all__ = ["fully_sharded", "ring_filter_attention", "tensor_parallel"]
