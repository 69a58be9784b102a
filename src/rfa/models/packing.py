"""What other tools say about padding and packed sequences, by masks and positions, as a key mask and segments."""

from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from rfa.checks import require
from rfa.ops.positions import check_flags, check_given, check_tensor, numbered, run_starts
from rfa.ops.transforms import readable

# The name of a model's cache: `past_key_values`, and `cache` from transformers 5.24 on. Models take both

CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache under either name; `ValueError` where both are given."""
    require(past_key_values is None or cache is None, "cache", "given beside past_key_values", "one of the two")
    return past_key_values if cache is None else cache


NO_COLUMNS = "none with frequencies='as_released', whose turns depend on the column of a token"
_HIDDEN = -1e4  # at most this in an additive mask: the weight exp(-1e4) is 0

Mask = Shaped[Tensor, "..."]  # two to four dimensions, see `read_mask`


class TokenFlags(NamedTuple):
    """What a mask says about tokens."""

    key_mask: Bool[Tensor, "batch keys"] | None = None  # True for keys that take part; None where all do
    segment_ids: Int[Tensor, "batch keys"] | None = None  # the packed sequences; None for one sequence


class NewTokens(NamedTuple):
    """The new tokens of a call, `(batch, length)`, after cached ones."""

    batch: int
    length: int
    cached: int
    device: torch.device
    key_mask: Tensor | None  # `(batch, cached + length)`, True for keys that take part; None where all do

    def places(self) -> Int[Tensor, "batch keys"] | None:
        """The place of each key of its row, where padding between tokens has none; None without such padding."""
        if self.key_mask is None:
            return None
        begun = self.key_mask.cumsum(-1) > 0
        gaps = (begun & ~self.key_mask).cumsum(-1)
        if readable(self.key_mask) and not bool((gaps.bool() & self.key_mask).any()):
            return None
        return torch.arange(self.cached + self.length, device=self.device) - gaps

    def padding_before(self) -> Int[Tensor, "batch 1"]:
        """The number of absent keys before the first cached one of each row."""
        if self.key_mask is None:
            return torch.zeros(self.batch, 1, dtype=torch.int64, device=self.device)
        return self.key_mask[:, : self.cached].int().argmax(-1, keepdim=True)

    @property
    def present(self) -> Bool[Tensor, "batch length"]:
        """Which of the new tokens take part."""
        if self.key_mask is None:
            return torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device)
        return self.key_mask[:, self.cached :]


def read_key_mask(
    attention_mask: Shaped[Tensor, "batch keys"] | None, batch: int, keys: int
) -> Bool[Tensor, "batch keys"] | None:
    """The mask of keys as booleans; None where all take part. `ValueError` for another shape or other values."""
    if attention_mask is None:
        return None
    check_tensor("attention_mask", attention_mask)
    shape = tuple(attention_mask.shape)
    require(shape == (batch, keys), "attention_mask", f"shape {shape}", f"(batch, keys) = {(batch, keys)}")
    mask = attention_mask == 1
    if not readable(mask):
        return mask
    if bool(mask.all()):
        return None
    known = mask | (attention_mask == 0)
    if not bool(known.all()):
        other = attention_mask[~known][0].item()
        require(False, "attention_mask", other, "1 for tokens that take part and 0 for the others; see segment_ids")
    return mask


def read_mask(attention_mask: Mask | None, batch: int, queries: int, keys: int, causal: bool = True) -> TokenFlags:
    """The key mask and the segments for which tokens see what a mask shows.

    Args:
        attention_mask: `(batch, keys)`, see `read_key_mask`; or of all pairs, `(batch or 1, 1, queries, keys)`, also
            without heads, see `visible_pairs`. What padding sees does not count.
        batch, queries, keys: of the states. The queries are the last keys.
        causal: tokens see earlier tokens only.

    Raises:
        ValueError: for another shape or other values, or a mask that is not of documents beside each other and of
            padding; after cached tokens, for several documents. Under `torch.compile` values are not read.
    """
    if attention_mask is None:
        return TokenFlags()
    check_tensor("attention_mask", attention_mask)
    shape, dims = tuple(attention_mask.shape), attention_mask.dim()
    if shape == (batch, keys):
        return TokenFlags(read_key_mask(attention_mask, batch, keys))
    one_head = dims == 3 or (dims == 4 and shape[1] == 1)
    if not (one_head and shape[0] in (1, batch) and shape[-2:] == (queries, keys)):
        expected = f"({batch}, {keys}) or ({batch}, 1, {queries}, {keys})"
        raise ValueError(f"attention_mask: got shape {shape}, expected {expected}")
    visible = visible_pairs(attention_mask).reshape(-1, queries, keys).expand(batch, -1, -1)
    known, columns = readable(visible), torch.arange(keys, device=visible.device)
    padding = torch.zeros_like(visible[..., 0])
    if causal and queries > 1:  # masks for SDPA let padding see all keys, because it makes NaN of a row of none
        every = visible.all(-1)
        padding = every & (every.roll(1, -1) | (columns[keys - queries :] < keys - 1))  # the last token sees all anyway
        padding = padding & ~padding.all(-1, keepdim=True)
    key_mask = (visible & ~padding[..., None]).any(1)
    seen = key_mask[:, None].expand(visible.shape)
    if causal:
        seen = seen & (columns <= columns[keys - queries :, None])
    counts, segment_ids = key_mask[:, keys - queries :, None], None
    if queries == keys and not (known and bool(((visible == seen) | ~counts).all())):
        segment_ids = numbered(visible.int().argmax(-1))  # all tokens of a document see the same first one
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if known and bool((wrong := (visible != seen) & counts).any()):
        row, query, key = wrong.nonzero()[0].tolist()
        sees = "sees" if visible[row, query, key] else "does not see"
        given = f"another mask: token {keys - queries + query} {sees} token {key} (batch row {row})"
        kind = "under a causal mask" if causal else "whose tokens all see each other"
        packed = "one sequence a row" if queries < keys else "one or several documents a row"
        require(False, "attention_mask", given, f"padding and {packed}, {kind}")
    return TokenFlags(None if known and bool(key_mask.all()) else key_mask, segment_ids)


def visible_pairs(mask: Mask) -> Bool[Tensor, "..."]:
    """Where a mask of all pairs lets a query see a key; `ValueError` for other values than these.

    True or 1 where it sees it, and else False or 0; or, to be added to scores, 0 and else -10,000 or less.
    """
    if mask.dtype == torch.bool:
        return mask
    ones, zeros = mask == 1, mask == 0
    flags = ones.any() if mask.is_floating_point() else ones.new_ones(())
    if readable(mask) and bool((wrong := ~(zeros | torch.where(flags, ones, mask <= _HIDDEN))).any()):
        expected = "1 where a query sees a key and else 0; or, to be added to scores, 0 and else -10,000 or less"
        require(False, "attention_mask", mask[wrong][0].item(), expected)
    return torch.where(flags, ones, zeros)


def check_absolute(
    tokens: NewTokens,
    segment_ids: Int[Tensor, "batch keys"] | None,
    position_ids: Int[Tensor, "*p length"] | None,
) -> None:
    """Raise `ValueError` for segments, padding before tokens or other positions, if states turn by absolute ones."""
    require(segment_ids is None, "segment_ids", "segments", NO_COLUMNS)
    mask = tokens.key_mask
    if mask is not None and readable(mask):
        shifted = tokens.places() is not None or not bool(mask[:, :1].all())
        require(not shifted, "attention_mask", "padding before or between tokens", NO_COLUMNS)
    if position_ids is not None and readable(position_ids) and position_ids.numel():
        first = position_ids.reshape(-1, position_ids.shape[-1])[:, 0]
        counts = bool((first == tokens.cached).all())
        require(
            counts, "position_ids", f"{first.tolist()[:8]} at the first tokens", f"{tokens.cached}, or {NO_COLUMNS}"
        )


def packed_segments(
    tokens: NewTokens,
    segment_ids: Int[Tensor, "batch keys"] | None,
    documents: Int[Tensor, "batch length"] | None = None,
    position_ids: Int[Tensor, "*p length"] | None = None,
) -> Int[Tensor, "batch keys"] | None:
    """The segments of all keys of a packed batch; None for a single one.

    Args:
        tokens: the new tokens.
        segment_ids: segments of all keys as given, which count before everything else.
        documents: the numbers that a mask of all pairs shows, of the new tokens.
        position_ids: of the new tokens; where they restart a segment begins.

    Raises:
        ValueError: for other positions, or arguments that disagree. Under `torch.compile` values are not compared.
    """
    check_flags("segment_ids", segment_ids, tokens.batch, tokens.cached + tokens.length, tokens.device, integer=True)
    found: dict[str, Tensor] = {} if segment_ids is None else {"segment_ids": segment_ids[:, tokens.cached :]}
    if documents is not None:
        found["attention_mask"] = documents
    if position_ids is not None:
        located = _per_token("position_ids", position_ids, tokens)
        numbers = _segments_of_positions(located, tokens, continues=segment_ids is None)
        if not readable(numbers) or bool(numbers.any()):
            found["position_ids"] = numbers
    _check_agreement(found, tokens)
    if segment_ids is not None or not found:
        return segment_ids
    name, numbers = next(iter(found.items()))
    if tokens.cached:
        several = not readable(numbers) or bool((numbers != numbers[:, :1]).any())
        expected = "segment_ids of all tokens, cached ones included"
        require(not several, name, f"several sequences after {tokens.cached} cached tokens", expected)
        return None
    return numbers.expand(tokens.batch, -1)


def _per_token(name: str, given: object, tokens: NewTokens) -> Tensor:
    """Integers `(batch, length)` of an argument that may have one row for all, or no dimension of rows."""
    shape, row = (tokens.batch, tokens.length), (tokens.length,)
    check_given(name, given, "an integer dtype", tokens.device, shape, (1, *row), row)
    return cast(Tensor, given).expand(shape)


def _segments_of_positions(position_ids: Tensor, tokens: NewTokens, continues: bool) -> Tensor:
    """Numbers 0, 1, 2, ... of the runs of positions `(batch, length)`; absent tokens belong to the run before them."""
    present, index = tokens.present, torch.arange(tokens.length, device=tokens.device)
    offset = position_ids - _expected_positions(position_ids, tokens)
    # that of the last present token; of the first one where none is before
    last = torch.where(present, index, -1).cummax(-1).values
    first = present.int().argmax(-1, keepdim=True) if tokens.length else last
    held = offset.gather(-1, torch.where(last < 0, first, last))
    begins = run_starts(held)
    begins[:, :1] = False
    if readable(position_ids, present) and tokens.length:
        base = position_ids.gather(-1, first)
        wrong = begins & (position_ids != 0) & (position_ids != base)
        if bool(wrong.any()):
            row, at = wrong.nonzero()[0].tolist()
            pair = position_ids[row, at - 1 : at + 1].tolist()
            restarts = " or ".join(map(str, sorted({0, int(base[row])})))
            expected = f"positions that count up by one, or restart at {restarts}; real times are no positions"
            require(False, "position_ids", f"{pair[0]} followed by {pair[1]} (batch row {row})", expected)
        if tokens.cached and continues:
            _check_continued(position_ids.gather(-1, first), offset.gather(-1, first), tokens)
    return begins.cumsum(-1)


def _expected_positions(position_ids: Tensor, tokens: NewTokens) -> Tensor:
    """What the positions count, `(batch or 1, length)`: the places of tokens, or the columns of each row."""
    columns = torch.arange(tokens.cached, tokens.cached + tokens.length, device=tokens.device)[None]
    places, present = tokens.places(), tokens.present
    if places is None or not tokens.length:
        return columns
    places, first = places[:, tokens.cached :], present.int().argmax(-1, keepdim=True)
    start, offset = (position_ids - columns).gather(-1, first), (position_ids - places).gather(-1, first)
    by_column = ((position_ids - columns == start) | ~present).all(-1, keepdim=True)
    if tokens.cached:
        by_column = by_column & (offset != 0) & (offset != -tokens.padding_before())
    return torch.where(by_column, columns, places)


def _check_continued(given: Tensor, offset: Tensor, tokens: NewTokens) -> None:
    """The positions `(batch, 1)` continue those of the cached tokens, counted with or without padding before them."""
    before, counts = tokens.padding_before(), tokens.present.any(-1, keepdim=True)
    if tokens.key_mask is not None:
        counts = counts & tokens.key_mask[:, : tokens.cached].any(-1, keepdim=True)
    wrong = counts & (offset != 0) & (offset != -before)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        fitting = sorted({int(given[row] - offset[row]), int(given[row] - offset[row] - before[row])})
        expected = f"{' or '.join(map(str, fitting))}, which continues the cached tokens, or segment_ids of all tokens"
        require(False, "position_ids", f"{int(given[row])} for the first new token (batch row {row})", expected)


def _check_agreement(found: Mapping[str, Tensor], tokens: NewTokens) -> None:
    """Raise `ValueError` where two arguments let sequences begin at different tokens."""
    if len(found) < 2 or not readable(*found.values()):
        return
    present = tokens.present
    both = present[:, 1:] & present[:, :-1]  # padding belongs to no sequence
    (name, first), *others = found.items()
    expected = (first[:, 1:] != first[:, :-1]) & both
    for other, numbers in others:
        begins = (numbers[:, 1:] != numbers[:, :-1]) & both
        if not torch.equal(begins, expected):
            row = int((begins != expected).any(-1).nonzero()[0])
            at, wanted = ((x[row].nonzero()[:, 0] + 1).tolist()[:16] for x in (begins, expected))
            given = f"sequences that begin at {[0, *at]} (batch row {row})"
            require(False, other, given, f"{[0, *wanted]}, as in {name}")
