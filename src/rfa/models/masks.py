"""The masks that transformers and its collators make, read as what the operator takes: a key mask and segments."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from rfa.checks import require
from rfa.ops.transforms import readable

Mask = Shaped[Tensor, "..."]  # two or four dimensions, see `read_mask`

_EXPECTED = "padding, or packed sequences without a cache, under the model's own causal mask"


class TokenFlags(NamedTuple):
    """What a mask says about tokens.

    Fields:
        key_mask: `(batch, keys)`, True for keys that take part; None where all do.
        segment_ids: `(batch, keys)`, the packed sequences; None for one sequence.
    """

    key_mask: Bool[Tensor, "batch keys"] | None = None
    segment_ids: Int[Tensor, "batch keys"] | None = None


def read_mask(mask: Mask | None, batch: int, queries: int, keys: int, causal: bool = True) -> TokenFlags:
    """The key mask and the segments for which the operator sees what the mask shows.

    Args:
        mask: None, `(batch, keys)` with 1 for tokens that take part, or `(batch, 1, queries, keys)`: True, or 0 of an
            additive mask, where a query sees a key. A mask may be longer than the keys, as those of fixed-size caches.
        batch, queries, keys: of the states. The queries are the last keys.
        causal: the operator's queries see keys up to their own.

    Raises:
        ValueError: for anything else, as a sliding window, a mask that differs between heads, or keys that a cache of
            fixed size has room for but does not hold.
    """
    if mask is None:
        return TokenFlags()
    given = type(mask).__name__
    require(isinstance(mask, Tensor), "attention_mask", given, "None or a tensor: the attention 'sdpa' or 'eager'")
    shape = mask.shape
    two = mask.dim() == 2 and shape[0] == batch and shape[1] >= keys
    four = mask.dim() == 4 and shape[0] in (1, batch) and shape[1:3] == (1, queries) and shape[3] >= keys
    if not (two or four):  # no message before it is needed: a compiler cannot form it from sizes
        expected = f"({batch}, {keys}) or ({batch}, 1, {queries}, {keys})"
        raise ValueError(f"attention_mask: got shape {tuple(shape)}, expected {expected}")
    if two:
        return TokenFlags(_none_if_all(mask[:, :keys].bool()))
    visible = mask[:, 0, :, :keys].expand(batch, -1, -1)
    visible = visible if visible.dtype == torch.bool else visible == 0
    times = torch.arange(keys, device=mask.device)
    key_mask = visible.any(1)
    seen = key_mask[:, None].expand(-1, queries, -1)
    if causal:
        seen = seen & (times <= times[keys - queries :, None])
    known = readable(mask)  # under `torch.compile` there is always a mask, and it is trusted
    if (queries < keys and not known) or (known and bool((seen == visible).all())):
        return TokenFlags(_none_if_all(key_mask))
    unfilled = queries < keys and not bool(visible[..., -1].any())
    require(not unfilled, "past_key_values", "a cache of fixed size", "one that grows, as DynamicCache")
    require(queries == keys, "attention_mask", "another mask", _EXPECTED)
    segment_ids = _segments(visible, key_mask)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    fits = not known or bool(((seen & same) == visible).all())
    require(fits, "attention_mask", "another mask", _EXPECTED)
    return TokenFlags(_none_if_all(key_mask), segment_ids)


def _segments(visible: Tensor, key_mask: Tensor) -> Tensor:
    """Numbers of packed sequences: a token that does not see the key that takes part before it begins another one."""
    times = torch.arange(key_mask.shape[1], device=key_mask.device)
    before = torch.where(key_mask, times, 0).cummax(-1).values[:, :-1]
    follows = visible[:, 1:].gather(-1, before[..., None])[..., 0]
    return torch.nn.functional.pad((~follows).long(), (1, 0)).cumsum(-1)


def _none_if_all(key_mask: Tensor) -> Tensor | None:
    return None if readable(key_mask) and bool(key_mask.all()) else key_mask
