"""The baselines' operator: softmax attention with a linear bias, decay after normalisation, and turned values."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import decay_kernel, rotate

from .backends import backend_for
from .fused import BITS, FusedPrior
from .fused_backend import attend
from .inputs import Positions, row_blocks


def decayed_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    positions: Positions,
    frequency: Tensor | None = None,
    decay: Tensor | None = None,
    slopes: Tensor | None = None,
    rotate_values: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`out_i = sum_j softmax_j(q_i.k_j / sqrt(2 d) - slope tau) exp(-mu tau) v_j`, causal, with lags `tau = t_i - t_j`.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`.
        positions: where keys and queries stand, checked already.
        frequency: `(heads, modes)`: states are turned into the common frame by `exp(-i omega t)`; None where they
            stand in it.
        decay: mu >= 0, `(heads,)`; None for none.
        slopes: of ALiBi's bias, `(heads,)`; None for none.
        rotate_values: values are turned too, and the estimate back (RoPER).
        backend: as for `robust_filter_attention`.

    Returns:
        `(batch, heads, queries, 2 d)`; zeros for a query that sees no key.

    Raises:
        ValueError: where a backend asked for by name does not serve such states.
        RuntimeError: where it is "cpu" and cannot be compiled.
    """
    kernel = backend_for(backend, query, value).kernel
    with torch.autocast(query.device.type, enabled=False):
        if kernel is None or not key.shape[2]:
            estimate = _dense(query, key, value, positions, frequency, decay, slopes, rotate_values)
        else:
            estimate, _ = attend(
                kernel(),
                query,
                key,
                value,
                frequency=frequency,
                positions=positions,
                prior=_prior(query, decay, slopes, positions),
                causal=True,
                score="dot_product",
                rotate_values=rotate_values,
            )
    return estimate.to(query.dtype)


def _prior(query: Tensor, decay: Tensor | None, slopes: Tensor | None, positions: Positions) -> FusedPrior:
    """`E = exp(-mu tau)` and `b = -slope tau`, as tables over the lag or as a path whose third row is the bias."""
    heads, device = query.shape[1], query.device
    dtype = positions.key_times.dtype
    none = torch.zeros(heads, dtype=dtype, device=device)
    mu = none if decay is None else decay.to(dtype)
    slope = BITS * (none if slopes is None else slopes.to(dtype))
    coefficient = torch.full((heads,), BITS / math.sqrt(query.shape[-1]), device=device)
    bound = torch.zeros(heads, device=device)
    if positions.uniform:
        lag = torch.arange(positions.key_times.shape[-1], dtype=dtype, device=device).expand(heads, -1)
        tables = torch.stack([decay_kernel(mu[:, None], lag), -slope[:, None] * lag, torch.zeros_like(lag)])
        return FusedPrior(tables.to(torch.float32), None, None, None, coefficient[None], bound)
    zeros = torch.zeros_like(coefficient)
    scalars = torch.stack([coefficient, zeros, zeros, zeros + 1, zeros, zeros])
    key, query_path = (
        torch.stack([mu[:, None] * t, 0 * t.expand(-1, heads, -1), slope[:, None] * t]).to(torch.float64)
        for t in (positions.key_times.to(dtype)[:, None], positions.query_times.to(dtype)[:, None])
    )
    return FusedPrior(None, key, query_path, torch.zeros(key.shape[1:], device=device), scalars, bound)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Positions,
    frequency: Tensor | None,
    decay: Tensor | None,
    slopes: Tensor | None,
    rotate_values: bool,
) -> Tensor:
    """In ordinary autograd code, in float32 or float64."""
    key, value = positions.present(key, value)
    dtype = torch.promote_types(query.dtype, torch.float32)  # half precision cannot tell distant lags apart
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if frequency is not None:
        query = rotate(query, frequency, positions.query_times, inverse=True)
        key = rotate(key, frequency, positions.key_times, inverse=True)
        if rotate_values:
            value = rotate(value, frequency, positions.key_times, inverse=True)
    blocks = row_blocks(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    rows = [_rows(query[:, :, rows], key, value, positions.rows(rows), decay, slopes) for rows in blocks]
    estimate = torch.cat(rows, dim=2)
    if frequency is not None and rotate_values:
        estimate = rotate(estimate, frequency, positions.query_times)
    return estimate


def _rows(
    query: Tensor, key: Tensor, value: Tensor, positions: Positions, decay: Tensor | None, slopes: Tensor | None
) -> Tensor:
    """Some rows of the attention, with bias, mask and decay."""
    visible = positions.visible(causal=True)[:, None]
    empty = ~visible.any(-1, keepdim=True)
    lag = (positions.query_times[:, :, None] - positions.key_times[:, None, :])[:, None]
    lag = lag.masked_fill(~visible, 0.0).to(query.dtype)
    bias = torch.zeros_like(lag).masked_fill(~visible & ~empty, -torch.inf)
    if slopes is not None:
        bias = bias - slopes[:, None, None] * lag
    if decay is None:
        estimate = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    else:
        score = query @ key.mT / math.sqrt(query.shape[-1]) + bias
        estimate = (score.softmax(-1) * decay_kernel(decay[:, None, None], lag)) @ value
    return estimate.masked_fill(empty, 0.0)
