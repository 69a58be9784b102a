"""One model on several processes."""

from .context import ring_filter_attention
from .heads import tensor_parallel
from .sequences import context_parallel, sequence_shard
from .weights import fully_sharded

__all__ = ["context_parallel", "fully_sharded", "ring_filter_attention", "sequence_shard", "tensor_parallel"]
