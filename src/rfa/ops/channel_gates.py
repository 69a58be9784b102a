"""Softmax attention with a forget gate of each channel: the products of a score each fade at their own rate."""

import math

import torch
from torch import Tensor

from rfa.dynamics import time_dtype

from .dense import DenseRows, dropped, finite, masked_softmax, row_blocks, sees_any
from .dot_product import forgotten
from .positions import Positions
from .transforms import without_autocast

BLOCK = 8  # rows whose pairs of a query and a key of their own are formed one by one


def channel_gated_attention(
    query: Tensor, key: Tensor, value: Tensor, *, positions: Positions, log_gate: Tensor, dropout: float = 0.0
) -> Tensor:
    """`out_i = sum_j softmax_j(sum_n q_in k_jn exp(sum_{l = j + 1 .. i} log f_ln) / sqrt(2 d)) v_j` over keys j <= i.

    The exponential of each pair and channel is formed as it is: no factor overflows, and fast gates lose no digits. It
    costs O(N^2 d) memory where gradients are asked for, and bounded memory without. Sequences without segments, padding
    and cache form it for pairs in a block of 8 only. Pairs of a block and the keys before it have two factors, the
    gates up to the block's first token and those from there on, neither above 1. There is no fused kernel.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`.
        positions: where keys and queries stand, checked already. The queries are the last of the keys.
        log_gate: `log f <= 0` of each key and channel, `(batch, heads, keys, 2 d)`. Sums are over the tokens of a
            segment that take part.
        dropout: share of the weights that become 0.

    Returns:
        `(batch, heads, queries, 2 d)` in the dtype of the queries; zeros for a query that sees no key.

    Source: the score of Wall Attention as its public README has it (Pai et al. 2026,
    github.com/tilde-research/wall-attention-release). Nothing else of it is here.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = positions.without_absent(key, value)
    heads, channels = query.shape[1], query.shape[-1]
    with without_autocast(query):
        states, poisoned = zip(*(finite(x.to(dtype)) for x in (query, key, value)), strict=True)
        q, k, v = states
        of_channels = log_gate.to(time_dtype(log_gate.device)).mT.flatten(1, 2)
        sums = forgotten(of_channels, positions).unflatten(1, (heads, channels)).mT
        own = sums[:, :, k.shape[2] - q.shape[2] :]

        def in_blocks(rows: slice) -> DenseRows:
            seen = slice(0, rows.stop)
            first = sums[:, :, rows.start, None]
            of_rows = (first - sums[:, :, rows]).to(dtype).exp() * q[:, :, rows]
            before = (sums[:, :, : rows.start] - first).to(dtype).exp() * k[:, :, : rows.start]
            within = positions.rows(rows).keys(rows).visible(True)
            score = torch.cat([of_rows @ before.mT / math.sqrt(channels), pairs(rows, rows, within)], dim=-1)
            visible = positions.rows(rows).keys(seen).visible(True)
            unknown = poisoned[0][:, :, rows] | sees_any(visible, (poisoned[1] | poisoned[2])[:, :, seen])
            return DenseRows(score, visible, lambda weights: dropped(weights, dropout) @ v[:, :, seen], unknown)

        def pairs(rows: slice, keys: slice, visible: Tensor) -> Tensor:
            between = sums[:, :, None, keys] - own[:, :, rows, None]
            remaining = between.masked_fill(~visible[:, None, :, :, None], 0.0).to(dtype).exp()
            return (q[:, :, rows, None] * k[:, :, None, keys] * remaining).sum(-1) / math.sqrt(channels)

        def dense_rows(rows: slice) -> DenseRows:
            visible = positions.rows(rows).visible(True)
            score = pairs(rows, slice(0, k.shape[2]), visible)
            unknown = poisoned[0][:, :, rows] | sees_any(visible, poisoned[1] | poisoned[2])
            return DenseRows(score, visible, lambda weights: dropped(weights, dropout) @ v, unknown)

        if positions.key_groups is None and q.shape[2] == k.shape[2]:
            starts = range(0, max(1, q.shape[2]), BLOCK)
            blocks = [slice(start, min(start + BLOCK, q.shape[2])) for start in starts]
            return masked_softmax(blocks, in_blocks)[0].to(query.dtype)
        blocks = row_blocks(q.shape[0], heads * channels, q.shape[2], k.shape[2])
        return masked_softmax(blocks, dense_rows)[0].to(query.dtype)
