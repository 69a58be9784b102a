"""Softmax attention limited to a window of time, in PyTorch's own kernel over the keys that blocks of rows can see."""

import torch
from torch import Tensor

from .inputs import Positions, row_blocks
from .scores import finite, sees_any
from .transforms import scaled_dot_product_attention


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    positions: Positions,
    window: int,
    second_derivatives: bool = False,
) -> Tensor:
    """`out_i = sum_j softmax_j(q_i.k_j / sqrt(2 d)) v_j` over the keys of lags `0 <= t_i - t_j < window`.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`, turned already.
        positions: where keys and queries stand, checked already.
        window: in units of time; at times 0, 1, 2, ... the number of keys that a query sees, its own included.
        second_derivatives: the result can be differentiated twice, which makes the first derivative slower.

    Returns:
        `(batch, heads, queries, 2 d)`; zeros for a query that sees no key. At times 0, 1, 2, ... in O(N window).
    """
    key, value = positions.present(key, value)
    (query, unknown), (key, unknown_keys), (value, unknown_values) = map(finite, (query, key, value))
    unknown_keys = unknown_keys | unknown_values
    queries, keys = query.shape[2], key.shape[2]
    blocks = row_blocks(query.shape[0], query.shape[1], queries, keys)
    if positions.uniform:
        blocks = [slice(start, min(start + window, queries)) for start in range(0, max(1, queries), window)]
    estimates = []
    for rows in blocks:
        seen = slice(0, keys)
        if positions.uniform:
            seen = slice(max(0, keys - queries + rows.start - window + 1), keys - queries + rows.stop)
        part = positions.rows(rows).keys(seen)
        visible = part.visible(causal=True)
        visible = visible & (part.query_times[:, :, None] - part.key_times[:, None, :] < window)
        visible = visible[:, None]
        empty = ~visible.any(-1, keepdim=True)
        states = query[:, :, rows], key[:, :, seen], value[:, :, seen]
        estimate = scaled_dot_product_attention(*states, second_derivatives, attn_mask=visible | empty)
        poisoned = unknown[:, :, rows] | sees_any(visible, unknown_keys[:, :, seen])
        estimates.append(estimate.masked_fill(poisoned[..., None], torch.nan).masked_fill(empty, 0.0))
    return torch.cat(estimates, dim=2)
