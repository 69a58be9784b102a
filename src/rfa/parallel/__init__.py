"""One model on several processes."""

from .context import ring_filter_attention
from .sequences import context_parallel, fully_sharded, sequence_shard

__all__ = ["context_parallel", "fully_sharded", "ring_filter_attention", "sequence_shard"]
