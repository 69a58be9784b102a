"""Where the tokens of a call stand, and what a cache of transformers notes about the tokens that it holds."""

import copy
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rfa.checks import require
from rfa.models import packing
from rfa.models.packing import Mask, NewTokens, TokenFlags, packed_segments, visible_pairs
from rfa.nn.cache_layer import Turns, TurnTable, turns
from rfa.ops.positions import Positions, checked_positions
from rfa.ops.prior import DecodingCache
from rfa.ops.transforms import readable

# The masks that transformers hands to an attention layer, read as what the operator takes: a key mask and segments


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


TOKEN_ARGUMENTS = ("segment_ids", "position_ids")  # arguments of a model that say where its tokens stand
UNREAD_ARGUMENTS = ("times", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")  # others that say so, and are refused


class Located(NamedTuple):
    """The tokens of a call and those in the cache.

    Fields:
        positions: of the new tokens as queries and of all tokens as keys.
        places: `(batch, keys)`, the times since the row's first place; None for 0, 1, 2, ...
        packed: whether a row holds several sequences.
    """

    positions: Positions
    places: Tensor | None
    packed: bool

    def turns(self, frequency: Tensor, dtype: torch.dtype, table: TurnTable | None) -> Turns:
        """Turns of the new tokens by `(heads, modes)`, in a dtype; the table serves where places count 0, 1, 2, ..."""
        if self.places is None and table is not None:
            return table.at(frequency, self.positions, dtype)
        times = self.positions.query_times
        if self.places is not None:  # positions count from another origin
            times = self.places[:, self.places.shape[1] - times.shape[1] :]
        return turns(frequency, times[:, None], dtype)


class LayerNote:
    """What a layer of a cache notes about its tokens. The parameters may change only while there are none.

    Args:
        owner: the attention module that fills the layer.

    Attributes:
        tables: tables of lags, and `turns` those of the rotation: each token would make them again.
        dynamics: the owner's parameters as the operator takes them.
        located: the tokens as the last call found them.
    """

    def __init__(self, owner: nn.Module):
        self._owner: weakref.ref[nn.Module] | None = weakref.ref(owner)
        self.tables, self.turns = DecodingCache(), TurnTable()
        self.dynamics: dict[str, Any] | None = None
        self.located: Located | None = None

    def is_of(self, module: nn.Module) -> bool:
        """Whether the module has filled the layer. The first to ask owns a layer that was loaded from a file."""
        if self._owner is None:
            self._owner = weakref.ref(module)
        return self._owner() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerNote":
        """A copy with the same owner."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """For `pickle`, which cannot store whose tokens these are."""
        return {**self.__dict__, "_owner": None}


def note_of(cache: Cache, module: Any, cached: int) -> LayerNote:
    """The note of a layer with its `cached` tokens; a new one for an empty layer.

    Raises:
        ValueError: where another module has filled the layer: its keys are in another frame.
    """
    if not cached:
        return LayerNote(module)
    note = getattr(cache.layers[module.layer_idx], "rfa_note", None)
    own = note is not None and note.is_of(module)
    require(own, "past_key_values", f"{cached} tokens of another model", "an empty cache or this model's own")
    assert isinstance(note, LayerNote)
    return note


def locate(
    tokens: NewTokens,
    mask: Mask | None,
    given: Mapping[str, Any],
    cache: Cache | None = None,
    layer_idx: int = 0,
    note: LayerNote | None = None,
) -> Located:
    """The tokens of a call. Layers of one call with a cache get the same arguments and share the answer.

    Args:
        tokens: the new tokens, whose mask is read here.
        mask: as the model makes it, see `read_mask`.
        given: arguments by the names in `TOKEN_ARGUMENTS`.
        cache, layer_idx, note: the cache that the tokens continue, the layer's place in it, and its note.

    Raises:
        ValueError: for a mask or arguments that do not fit, or that differ from those of the tokens in the cache.
    """
    if cache is None or note is None:
        return _new_positions(tokens, mask, given, None)
    arguments = (mask, *(given.get(name) for name in TOKEN_ARGUMENTS))
    shared = getattr(cache, "rfa_shared", None)
    if shared is not None:
        first, tokens_then, arguments_then, located = shared
        same = all(one is other for one, other in zip(arguments, arguments_then, strict=True))
        if same and first < layer_idx and tokens_then == tokens:  # the first layer reads anew in each call
            note.located = located
            return located
    located = _new_positions(tokens, mask, given, note.located if tokens.cached else None)
    cache.rfa_shared = (layer_idx, tokens, arguments, located)  # type: ignore[attr-defined]
    note.located = located
    return located


def _new_positions(tokens: NewTokens, mask: Mask | None, given: Mapping[str, Any], before: Located | None) -> Located:
    keys = tokens.cached + tokens.length
    flags = read_mask(mask, tokens.batch, tokens.length, keys)
    tokens = tokens._replace(key_mask=flags.key_mask)
    position_ids = given.get("position_ids")
    position_ids = None if _are_default_positions(position_ids, tokens) else position_ids
    segment_ids = packed_segments(tokens, given.get("segment_ids"), flags.segment_ids, position_ids)
    places = tokens.places()
    if before is not None:
        known = segment_ids is not None or not before.packed
        require(known, "past_key_values", "a cache of packed sequences", "one sequence a row, or segment_ids of all")
        _check_places(places, before.places, tokens)
    positions = checked_positions(
        tokens.batch, tokens.length, keys, tokens.device, places, None, flags.key_mask, segment_ids
    )
    if segment_ids is None or not readable(segment_ids):
        return Located(positions, places, packed=False)
    return Located(positions, places, packed=bool((segment_ids != segment_ids[:, :1]).any()))


def _are_default_positions(position_ids: object, tokens: NewTokens) -> bool:
    """Whether positions are those that models make themselves, or cannot be read after cached tokens."""
    if not isinstance(position_ids, Tensor):
        return False
    if not readable(position_ids):
        return tokens.cached > 0
    columns = torch.arange(tokens.cached, tokens.cached + tokens.length, device=position_ids.device)
    return position_ids.shape[-1:] == columns.shape and bool((position_ids == columns).all())


def _check_places(places: Tensor | None, before: Tensor | None, tokens: NewTokens) -> None:
    """Raise `ValueError` where cached tokens would change their places. Rows of a cache may have been reordered."""
    if (places is None and before is None) or not readable(places, before):
        return
    columns = torch.arange(tokens.cached, device=tokens.device)[None]
    now, then = (columns if x is None else x[:, : tokens.cached] for x in (places, before))
    other = now[:, None] != then
    if tokens.key_mask is not None:
        other = other & tokens.key_mask[:, None, : tokens.cached]
    changed = bool(other.any(-1).all(-1).any())
    require(not changed, "attention_mask", "new padding between cached tokens", "the mask that they had, continued")
