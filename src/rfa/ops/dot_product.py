"""Softmax attention of the baselines: a linear bias, forget gates, decay after the softmax, turned values."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import decay_kernel, rotation_of_heads, time_dtype

from .backends import attend, backend_for
from .dense import DenseRows, FiniteStates, dropped, fill_rows, into_frame, masked_softmax, row_blocks, turned
from .kernel import kernel_inputs
from .positions import Positions, by_group, take, token_groups
from .prior import BITS, LagTables, SeparablePath, certified_tail, eps_of_dtype
from .problem import Certified
from .transforms import scaled_dot_product_attention, without_autocast

LEAST_GAIN = 1.2e-38  # the smallest normal number of float32, the dtype of the gates


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
    causal: bool = True,
    dropout: float = 0.0,
    certified: Certified = None,
    largest: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`out_i = sum_j softmax_j(q_i.k_j / sqrt(2 d) - slope tau + G_ij) exp(-mu tau) v_j`, `tau = |t_i - t_j|`.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`.
        positions: where keys and queries stand, checked already.
        frequency: `(heads, modes)`: states are turned into the common frame by `exp(-i omega t)`; None where they
            stand in it.
        decay: mu >= 0, `(heads,)`; None for none.
        slopes: of ALiBi's bias, `(heads,)`; None for none.
        log_gate: of forget gates, `log f <= 0` of each key, `(batch, heads, keys)`: `G_ij` is their sum over
            the keys from j + 1 to i of a segment that take part. The queries are the last of the keys. None for none.
        gains: the gates are `f = 1 - K` of Kalman gains, and `G_ij` holds `log K_j` too: the weight that a Kalman
            filter gives to a past observation where its gains depend on the content.
        rotate_values: values are turned too, and the estimate back (RoPER).
        causal: key j takes part in query i when `t_j <= t_i`; always so with gates.
        dropout: share of the weights that become 0, by the reference only.
        certified, largest: eps as for `robust_filter_attention`, and the largest `|q_i.k_j| / sqrt(2 d)` that there can
            be, `(heads,)`. The bias must fall: slopes or gates, causal.
        backend: as for `robust_filter_attention`.

    Returns:
        `(batch, heads, queries, 2 d)`; zeros for a query that sees no key.

    Raises:
        ValueError: where a backend asked for by name does not serve such states.
        RuntimeError: where it is "cpu" and cannot be compiled.
    """
    kernel = backend_for(backend, query, value, dropout=dropout > 0).kernel
    with without_autocast(query):
        gates = None if log_gate is None else _cumulative_gates(log_gate, gains, positions)
        fading = _Fading(decay, slopes, gates)
        if kernel is None or not key.shape[2]:
            states = query, *positions.without_absent(key, value)
            dtype = torch.promote_types(query.dtype, torch.float32)  # half precision cannot tell distant lags apart
            if frequency is not None:
                of_keys, of_queries = (rotation_of_heads(frequency, times) for times in positions.times_of_heads())
                states = into_frame(states, of_keys, of_queries, dtype, rotate_values)
            estimate = _dense(FiniteStates.of(*(x.to(dtype) for x in states)), positions, fading, causal, dropout)
            if frequency is not None and rotate_values:
                estimate = turned(estimate, of_queries)
        else:
            prior = _prior(query, fading, positions, kernel().tables)
            decode = frequency is None and not torch.is_grad_enabled()
            eps = None if largest is None else eps_of_dtype(certified, query.dtype)
            tail = certified_tail(prior, positions, eps, largest=largest) if kernel().leaves_out else None
            options: dict[str, Any] = {"causal": causal, "rotate_values": rotate_values, "decode": decode, "tail": tail}
            inputs = kernel_inputs(query, key, value, None, prior, positions, score_kind="dot_product", **options)
            estimate, _ = attend(kernel(), inputs, positions, frequency)
    return estimate.to(query.dtype)


class _Fading(NamedTuple):
    """How a key fades with the lag, as the arguments of `decayed_dot_product_attention`; None for what is not there.

    The gates have parts `(batch, heads, keys)` and `(batch, heads, queries)` in `time_dtype`: `G_ij = of_keys_j -
    of_queries_i`. Within a group both may be off by the same constant.
    """

    decay: Tensor | None
    slopes: Tensor | None
    gates: tuple[Tensor, Tensor] | None


def _cumulative_gates(log_gate: Tensor, gains: bool, positions: Positions) -> tuple[Tensor, Tensor]:
    """`-sum_{l <= i} log f_l` of the present keys of a group; with gains `log K_j` is added at the keys."""
    log_gate = log_gate.to(time_dtype(log_gate.device))
    present = positions.present()
    counted = log_gate if present is None else log_gate.masked_fill(~present[:, None], 0.0)
    if positions.query_groups is None:
        sums = -counted.cumsum(-1)
    else:
        order, restore, _ = positions.once("tokens", lambda: by_group(token_groups(positions)))
        sums = -take(take(counted, order).cumsum(-1), restore)
    of_queries = sums[..., sums.shape[-1] - positions.query_times.shape[-1] :]
    return sums + torch.log(-torch.expm1(log_gate.clamp(max=-LEAST_GAIN))) if gains else sums, of_queries


def _prior(query: Tensor, fading: _Fading, positions: Positions, tables: bool) -> LagTables | SeparablePath:
    """`E = exp(-mu tau)` and the bias, as tables over the lag or as a path whose third row is the bias."""
    heads, device = query.shape[1], query.device
    dtype = positions.key_times.dtype
    none = torch.zeros(heads, dtype=dtype, device=device)
    decay = none if fading.decay is None else fading.decay.to(dtype)
    slope = BITS * (none if fading.slopes is None else fading.slopes.to(dtype))
    coefficient = torch.full((heads,), BITS / math.sqrt(query.shape[-1]), device=device)
    bound = torch.zeros(heads, device=device)
    if tables and positions.uniform and fading.gates is None:
        lag = torch.arange(positions.key_times.shape[-1], dtype=dtype, device=device).expand(heads, -1)
        bias = -slope[:, None] * lag
        of_lags = torch.stack([decay_kernel(decay[:, None], lag), bias, torch.zeros_like(lag)])
        return LagTables(of_lags.to(torch.float32), coefficient, bound)
    zeros = torch.zeros_like(coefficient)
    scalars = torch.stack([coefficient, zeros, zeros, zeros + 1, zeros, zeros])
    times = positions.times_of_heads()
    gates = tuple(map(torch.zeros_like, times)) if fading.gates is None else fading.gates
    key_path, query_path = (
        torch.stack(
            torch.broadcast_tensors(decay[:, None] * t, torch.zeros_like(t), slope[:, None] * t + BITS * gate), dim=0
        ).to(torch.float64)
        for t, gate in ((t.to(dtype), gate) for t, gate in zip(times, gates, strict=True))
    )
    return SeparablePath(key_path, query_path, torch.zeros(key_path.shape[1:], device=device), scalars, bound)


def _dense(states: FiniteStates, positions: Positions, fading: _Fading, causal: bool, dropout: float) -> Tensor:
    """The estimate of states in the common frame in ordinary autograd code, in float32 or float64."""
    query, key, value, *_ = states
    batch, heads, queries, channels = query.shape

    def biased(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Bias, lag `(b, heads or 1, rows, keys)` and visibility of some queries."""
        part = positions.rows(rows)
        visible = part.visible(causal)
        lag = part.lags(visible, query.dtype)
        bias = torch.zeros_like(lag)
        if fading.slopes is not None:
            bias = bias - fading.slopes[:, None, None] * lag
        if fading.gates is not None:
            of_keys, of_queries = fading.gates
            between = of_keys[:, :, None] - of_queries[:, :, rows, None]
            bias = bias + between.masked_fill(~visible[:, None], 0.0).to(bias.dtype)
        return bias, lag, visible

    def with_decay(rows: slice, decay: Tensor) -> DenseRows:
        bias, lag, visible = biased(rows)
        remaining = decay_kernel(decay[:, None, None], lag)
        score = query[:, :, rows] @ key.mT / math.sqrt(channels) + bias
        unknown = states.unknown(rows, visible)
        return DenseRows(score, visible, lambda weights: (dropped(weights, dropout) * remaining) @ value, unknown)

    def without_decay(rows: slice) -> Tensor:
        bias, _, visible = biased(rows)
        empty = ~visible.any(-1, keepdim=True)[:, None]
        bias = bias.masked_fill(~visible[:, None] & ~empty, -torch.inf)
        options: dict[str, Any] = {"attn_mask": bias, "dropout_p": dropout}
        estimate = scaled_dot_product_attention(query[:, :, rows], key, value, second_derivatives=True, **options)
        return fill_rows(estimate, states.unknown(rows, visible), empty)

    blocks = row_blocks(batch, heads, queries, key.shape[2])
    if fading.decay is None:
        return torch.cat([without_decay(rows) for rows in blocks], dim=2)
    return masked_softmax(blocks, partial(with_decay, decay=fading.decay))[0]
