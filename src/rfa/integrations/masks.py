"""The masks that transformers hands to an attention layer, read as what the operator takes: a key mask and segments."""

from torch import Tensor

from rfa.checks import require
from rfa.models import packing
from rfa.models.packing import Mask, TokenFlags, visible_pairs


def read_mask(mask: Mask | None, batch: int, queries: int, keys: int) -> TokenFlags:
    """The key mask and the segments for which a causal operator sees what the mask shows.

    Args:
        mask: as in `rfa.models.packing.read_mask`. It may be longer than the keys, as those of fixed-size caches.
        batch, queries, keys: of the states. The queries are the last keys.

    Raises:
        ValueError: for anything else, as a sliding window, a mask that differs between heads, or keys that a cache of
            fixed size has room for but does not hold.
    """
    if mask is None:
        return TokenFlags()
    given = type(mask).__name__
    require(isinstance(mask, Tensor), "attention_mask", given, "None or a tensor: the attention 'sdpa' or 'eager'")
    mask = mask[..., :keys]
    try:
        return packing.read_mask(mask, batch, queries, keys)
    except ValueError:
        unfilled = queries < keys and mask.dim() == 4 and not bool(visible_pairs(mask)[..., -1].any())
        require(not unfilled, "past_key_values", "a cache of fixed size", "one that grows, as DynamicCache")
        raise
