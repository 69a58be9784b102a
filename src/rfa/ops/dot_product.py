"""The baselines' operator: softmax attention with a linear bias, decay after normalisation, and turned values."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import decay_kernel, time_dtype

from .backends import backend_for
from .fused import BITS, FusedPrior
from .fused_backend import attend
from .inputs import Positions, by_segment, row_blocks
from .scores import finite, rotated, sees_any
from .transforms import scaled_dot_product_attention

LEAST_GAIN = 1.2e-38  # the smallest normal number of float32, in which gates come


def decayed_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    positions: Positions,
    frequency: Tensor | None = None,
    decay: Tensor | None = None,
    slopes: Tensor | None = None,
    log_gate: Tensor | None = None,
    gains: bool = False,
    rotate_values: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`out_i = sum_j softmax_j(q_i.k_j / sqrt(2 d) - slope tau + G_ij) exp(-mu tau) v_j`, causal, `tau = t_i - t_j`.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`.
        positions: where keys and queries stand, checked already.
        frequency: `(heads, modes)`: states are turned into the common frame by `exp(-i omega t)`; None where they
            stand in it.
        decay: mu >= 0, `(heads,)`; None for none.
        slopes: of ALiBi's bias, `(heads,)`; None for none.
        log_gate: of forget gates, `log f <= 0` of each key, `(batch, heads, keys)`: `G_ij` is their sum over
            the keys from j + 1 to i of a segment that take part. The queries are the last of the keys. None for none.
        gains: the gates are `f = 1 - K` of Kalman gains, and `G_ij` holds `log K_j` too: what a Kalman filter whose
            gains depend on the content gives to a past observation (SPEC section 7).
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
        path = None if log_gate is None else _path(log_gate, gains, positions)
        if kernel is None or not key.shape[2]:
            estimate = _dense(query, key, value, positions, frequency, decay, slopes, path, rotate_values)
        else:
            estimate, _ = attend(
                kernel(),
                query,
                key,
                value,
                frequency=frequency,
                positions=positions,
                prior=_prior(query, decay, slopes, path, positions),
                causal=True,
                score="dot_product",
                rotate_values=rotate_values,
            )
    return estimate.to(query.dtype)


class _Path(NamedTuple):
    """`G_ij = entered_j - left_i`, in `time_dtype`; within a segment both may be off by the same constant."""

    entered: Tensor
    left: Tensor


def _path(log_gate: Tensor, gains: bool, positions: Positions) -> _Path:
    """`left_i = -sum_{l <= i} log f_l` of each key, and what enters there: the same, with gains `log K_j` more."""
    log_gate = log_gate.to(time_dtype(log_gate.device))
    left = _forgotten(log_gate, positions)
    return _Path(left + torch.log(-torch.expm1(log_gate.clamp(max=-LEAST_GAIN))) if gains else left, left)


def _forgotten(log_gate: Tensor, positions: Positions) -> Tensor:
    if positions.key_mask is not None:
        log_gate = log_gate.masked_fill(~positions.key_mask[:, None], 0.0)
    if positions.key_segments is None:
        return -log_gate.cumsum(-1)
    order = by_segment(positions.key_times, None, positions.key_segments)[2][:, None].expand(log_gate.shape)
    return -log_gate.gather(-1, order).cumsum(-1).gather(-1, order.argsort(-1))


def _prior(
    query: Tensor, decay: Tensor | None, slopes: Tensor | None, path: _Path | None, positions: Positions
) -> FusedPrior:
    """`E = exp(-mu tau)` and the bias, as tables over the lag or as a path whose third row is the bias."""
    heads, device = query.shape[1], query.device
    dtype = positions.key_times.dtype
    none = torch.zeros(heads, dtype=dtype, device=device)
    mu = none if decay is None else decay.to(dtype)
    slope = BITS * (none if slopes is None else slopes.to(dtype))
    coefficient = torch.full((heads,), BITS / math.sqrt(query.shape[-1]), device=device)
    bound = torch.zeros(heads, device=device)
    if positions.uniform and path is None:
        lag = torch.arange(positions.key_times.shape[-1], dtype=dtype, device=device).expand(heads, -1)
        tables = torch.stack([decay_kernel(mu[:, None], lag), -slope[:, None] * lag, torch.zeros_like(lag)])
        return FusedPrior(tables.to(torch.float32), None, None, None, coefficient[None], bound)
    zeros = torch.zeros_like(coefficient)
    scalars = torch.stack([coefficient, zeros, zeros, zeros + 1, zeros, zeros])
    entered, left = path or _Path(*[torch.zeros_like(positions.key_times)[:, None]] * 2)
    first = left.shape[-1] - query.shape[2]
    ends = ((positions.key_times, BITS * entered), (positions.query_times, BITS * left[..., first:]))
    key, query_path = (
        torch.stack(torch.broadcast_tensors(mu[:, None] * t, torch.zeros_like(t), slope[:, None] * t + bias), dim=0).to(
            torch.float64
        )
        for t, bias in ((times.to(dtype)[:, None], bias) for times, bias in ends)
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
    path: _Path | None,
    rotate_values: bool,
) -> Tensor:
    """In ordinary autograd code, in float32 or float64."""
    key, value = positions.present(key, value)
    dtype = torch.promote_types(query.dtype, torch.float32)  # half precision cannot tell distant lags apart
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if frequency is not None:
        query = rotated(query, frequency, positions.query_times, inverse=True)
        key = rotated(key, frequency, positions.key_times, inverse=True)
        if rotate_values:
            value = rotated(value, frequency, positions.key_times, inverse=True)
    (query, unknown), (key, unknown_keys), (value, unknown_values) = map(finite, (query, key, value))
    unknown_keys = unknown_keys | unknown_values
    blocks = row_blocks(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    first = key.shape[2] - query.shape[2]
    estimate = torch.cat(
        [
            _rows(
                (query[:, :, rows], key, value),
                (unknown[:, :, rows], unknown_keys),
                positions.rows(rows),
                decay,
                slopes,
                _gates(path, first, rows),
            )
            for rows in blocks
        ],
        dim=2,
    )
    if frequency is not None and rotate_values:
        estimate = rotated(estimate, frequency, positions.query_times)
    return estimate


def _gates(path: _Path | None, first: int, rows: slice) -> Tensor | None:
    """`G_ij` of some of the queries, which begin at the key `first`."""
    if path is None:
        return None
    return path.entered[:, :, None] - path.left[:, :, first + rows.start : first + rows.stop, None]


def _rows(
    states: tuple[Tensor, Tensor, Tensor],
    unknown: tuple[Tensor, Tensor],
    positions: Positions,
    decay: Tensor | None,
    slopes: Tensor | None,
    gates: Tensor | None,
) -> Tensor:
    """Some rows of the attention, with bias, mask and decay; unknown queries and keys stand as zero."""
    query, key, value = states
    visible = positions.visible(causal=True)[:, None]
    empty = ~visible.any(-1, keepdim=True)
    lag = (positions.query_times[:, :, None] - positions.key_times[:, None, :])[:, None]
    lag = lag.masked_fill(~visible, 0.0).to(query.dtype)
    bias = torch.zeros_like(lag).masked_fill(~visible & ~empty, -torch.inf)
    if slopes is not None:
        bias = bias - slopes[:, None, None] * lag
    if gates is not None:
        bias = bias + gates.masked_fill(~visible, 0.0).to(bias.dtype)
    if decay is None:
        estimate = scaled_dot_product_attention(query, key, value, second_derivatives=True, attn_mask=bias)
    else:
        weight = (query @ key.mT / math.sqrt(query.shape[-1]) + bias).softmax(-1)
        estimate = (weight * decay_kernel(decay[:, None, None], lag)) @ value
    poisoned = unknown[0] | sees_any(visible, unknown[1])
    return estimate.masked_fill(poisoned[..., None], torch.nan).masked_fill(empty, 0.0)
