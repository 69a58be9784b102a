"""Softmax attention of the baselines: a linear bias, forget gates, decay after the softmax, turned values, a window."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.checks import exported, require
from rfa.dynamics import decay_kernel, rotation_of_heads, time_dtype

from .backends import attend, backend_for
from .certified import allowed, certified_tail
from .cumulative import take
from .dense import DenseRows, FiniteStates, dropped, fill_rows, into_frame, masked_softmax, row_blocks, turned
from .kernel import kernel_inputs
from .positions import Positions, by_group, token_groups
from .prior import BITS, LagTables, SeparablePath
from .problem import Certified
from .transforms import scaled_dot_product_attention, without_autocast

LogarithmicBias = tuple[Tensor, Tensor]  # r1 and r2, each `(heads,)`

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
    logarithmic: LogarithmicBias | None = None,
    rotate_values: bool = False,
    sink: bool = False,
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
        logarithmic: r1 and r2 > 0 of a bias `-r1 log(1 + r2 tau)`; None for none. It is no difference of two numbers of
            query and key, so that "cpu" alone has it, at times 0, 1, 2, ..., from tables.
        rotate_values: values are turned too, and the estimate back (RoPER).
        sink: a key of score 0 and value 0 takes part too: the denominator of the softmax is 1 more.
        causal: key j takes part in query i when `t_j <= t_i`; always so with gates.
        dropout: share of the weights that become 0, by the reference only.
        certified, largest: eps as for `robust_filter_attention`, and the largest `|q_i.k_j| / sqrt(2 d)` that there can
            be, `(heads,)`. The bias must fall: slopes or gates, causal, not logarithmic.
        backend: as for `robust_filter_attention`.

    Returns:
        `(batch, heads, queries, 2 d)`; zeros for a query that sees no key.

    Raises:
        ValueError: where a backend asked for by name does not serve such states or such a bias.
        RuntimeError: where it is "cpu" and cannot be compiled.
    """
    kernel = backend_for(backend, query, value, dropout=dropout > 0).kernel
    tables = kernel is None or kernel().tables
    if logarithmic is not None and (log_gate is not None or not positions.uniform or not tables):
        dense = "'auto', 'reference' or, without gates and at times 0, 1, 2, ..., 'cpu' with a logarithmic bias"
        require(backend in ("auto", "reference"), "backend", backend, dense)
        kernel = None
    with without_autocast(query):
        gates = None if log_gate is None else _cumulative_gates(log_gate, gains, positions)
        fading = _Fading(decay, slopes, logarithmic, gates)
        if kernel is None or not key.shape[2]:
            states = query, *positions.without_absent(key, value)
            dtype = torch.promote_types(query.dtype, torch.float32)  # half precision cannot tell distant lags apart
            if frequency is not None:
                of_keys, of_queries = (rotation_of_heads(frequency, times) for times in positions.times_of_heads())
                states = into_frame(states, of_keys, of_queries, dtype, rotate_values)
            estimate = _dense(FiniteStates.of(*(x.to(dtype) for x in states)), positions, fading, sink, causal, dropout)
            if frequency is not None and rotate_values:
                estimate = turned(estimate, of_queries)
        else:
            prior, decode = _prior(query, fading, positions, tables), frequency is None and not torch.is_grad_enabled()
            eps = None if largest is None else allowed(certified, query.dtype)
            tail = certified_tail(prior, positions, eps, largest=largest) if kernel().leaves_out else None
            options: dict[str, Any] = {"causal": causal, "rotate_values": rotate_values, "decode": decode, "tail": tail}
            inputs = kernel_inputs(query, key, value, None, prior, positions, score_kind="dot_product", **options)
            estimate, log_sum = attend(kernel(), inputs, positions, frequency)
            if sink:
                estimate = estimate * torch.sigmoid(math.log(2) * log_sum)[..., None]
    return estimate.to(query.dtype)


class _Fading(NamedTuple):
    """How a key fades with the lag, as the arguments of `decayed_dot_product_attention`; None for what is not there.

    The gates have parts `(batch, heads, keys)` and `(batch, heads, queries)` in `time_dtype`: `G_ij = of_keys_j -
    of_queries_i`. Within a group both may be off by the same constant.
    """

    decay: Tensor | None
    slopes: Tensor | None
    logarithmic: LogarithmicBias | None
    gates: tuple[Tensor, Tensor] | None


def _cumulative_gates(log_gate: Tensor, gains: bool, positions: Positions) -> tuple[Tensor, Tensor]:
    """`-sum_{l <= i} log f_l` of the present keys of a group; with gains `log K_j` is added at the keys."""
    log_gate = log_gate.to(time_dtype(log_gate.device))
    sums = forgotten(log_gate, positions)
    gain = torch.log(-torch.expm1(log_gate.clamp(max=-LEAST_GAIN))) if gains else None
    of_queries = sums[..., sums.shape[-1] - positions.query_times.shape[-1] :]
    return sums if gain is None else sums + gain, of_queries


def forgotten(log_gate: Tensor, positions: Positions) -> Tensor:
    """`-sum_{l <= i} log f_l` of the present keys of a group, `(batch, heads, keys)`."""
    present = positions.present()
    if present is not None:
        log_gate = log_gate.masked_fill(~present[:, None], 0.0)
    if positions.query_groups is None:
        return -log_gate.cumsum(-1)
    order, restore, _ = positions.once("tokens", lambda: by_group(token_groups(positions)))
    return -take(take(log_gate, order).cumsum(-1), restore)


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
        if fading.logarithmic is not None:
            exponent, rate = (x.to(dtype)[:, None] for x in fading.logarithmic)
            bias = bias - BITS * exponent * torch.log1p(rate * lag)
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


def _dense(
    states: FiniteStates, positions: Positions, fading: _Fading, sink: bool, causal: bool, dropout: float
) -> Tensor:
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
        if fading.logarithmic is not None:
            exponent, rate = (x.to(lag.dtype)[:, None, None] for x in fading.logarithmic)
            bias = bias - exponent * torch.log1p(rate * lag)
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
        seen = (F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))) if sink else (key, value)
        bias = F.pad(bias, (0, 1)) if sink else bias
        options: dict[str, Any] = {"attn_mask": bias, "dropout_p": dropout}
        estimate = scaled_dot_product_attention(query[:, :, rows], *seen, second_derivatives=True, **options)
        return fill_rows(estimate, states.unknown(rows, visible), empty)

    blocks = row_blocks(batch, heads, queries, key.shape[2])
    if fading.decay is None:
        return torch.cat([without_decay(rows) for rows in blocks], dim=2)
    estimate, log_sum = masked_softmax(blocks, partial(with_decay, decay=fading.decay), log_sums=sink)
    return estimate if log_sum is None else estimate * torch.sigmoid(log_sum)[..., None]


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    positions: Positions,
    window: int,
    causal: bool = True,
    dropout: float = 0.0,
    second_derivatives: bool = False,
) -> Tensor:
    """`out_i = sum_j softmax_j(q_i.k_j / sqrt(2 d)) v_j` over the keys of lags below the window.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`, turned already.
        positions: where keys and queries stand, checked already.
        window: in units of time; at times 0, 1, 2, ... the number of keys that a query sees, its own included.
        causal: only keys of no later time take part.
        dropout: share of the weights that become 0.
        second_derivatives: the result can be differentiated twice, which makes the first derivative slower.

    Returns:
        `(batch, heads, queries, 2 d)`; zeros for a query that sees no key. At times 0, 1, 2, ... it costs O(N window).
    """
    states = FiniteStates.of(query, *positions.without_absent(key, value))
    query, key, value, *_ = states
    queries, keys = query.shape[2], key.shape[2]
    blocks = row_blocks(query.shape[0], query.shape[1], queries, keys)
    if positions.uniform and not exported():
        blocks = [slice(start, min(start + window, queries)) for start in range(0, max(1, queries), window)]
    estimates = []
    for rows in blocks:
        seen = slice(0, keys)
        if positions.uniform:
            first, last = keys - queries + rows.start - window + 1, keys - queries + rows.stop
            seen = slice(max(0, first), min(keys, last if causal else last + window - 1))
        part = positions.rows(rows).keys(seen)
        lag = part.query_times[:, :, None] - part.key_times[:, None, :]
        visible = part.visible(causal) & (lag.abs() < window)
        empty = ~visible.any(-1, keepdim=True)[:, None]
        given = query[:, :, rows], key[:, :, seen], value[:, :, seen]
        mask = visible[:, None] | empty
        estimate = scaled_dot_product_attention(
            *given, second_derivatives, first_key=seen.start, attn_mask=mask, dropout_p=dropout
        )
        estimates.append(fill_rows(estimate, states.unknown(rows, visible, seen), empty))
    return torch.cat(estimates, dim=2)


# Softmax attention with a forget gate of each channel: the products of a score each fade at their own rate

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
    dtype, (batch, heads, queries, channels) = torch.promote_types(query.dtype, torch.float32), query.shape
    given = query, *positions.without_absent(key, value)
    with without_autocast(query):
        states = FiniteStates.of(*(x.to(dtype) for x in given))
        q, k, v, *_ = states
        of_channels = log_gate.to(time_dtype(log_gate.device)).mT.flatten(1, 2)
        sums = forgotten(of_channels, positions).unflatten(1, (heads, channels)).mT
        own = sums[:, :, k.shape[2] - queries :]

        def in_blocks(rows: slice) -> DenseRows:
            seen = slice(0, rows.stop)
            first = sums[:, :, rows.start, None]
            of_rows = (first - sums[:, :, rows]).to(dtype).exp() * q[:, :, rows]
            before = (sums[:, :, : rows.start] - first).to(dtype).exp() * k[:, :, : rows.start]
            within = positions.rows(rows).keys(rows).visible(True)
            score = torch.cat([of_rows @ before.mT / math.sqrt(channels), pairs(rows, rows, within)], dim=-1)
            return of_scores(score, rows, seen, positions.rows(rows).keys(seen).visible(True))

        def of_all_pairs(rows: slice) -> DenseRows:
            visible, seen = positions.rows(rows).visible(True), slice(0, k.shape[2])
            return of_scores(pairs(rows, seen, visible), rows, seen, visible)

        def pairs(rows: slice, keys: slice, visible: Tensor) -> Tensor:
            between = sums[:, :, None, keys] - own[:, :, rows, None]
            remaining = between.masked_fill(~visible[:, None, :, :, None], 0.0).to(dtype).exp()
            return (q[:, :, rows, None] * k[:, :, None, keys] * remaining).sum(-1) / math.sqrt(channels)

        def of_scores(score: Tensor, rows: slice, seen: slice, visible: Tensor) -> DenseRows:
            unknown = states.unknown(rows, visible, seen)
            return DenseRows(score, visible, lambda weights: dropped(weights, dropout) @ v[:, :, seen], unknown)

        if positions.key_groups is None and queries == k.shape[2]:
            blocks = [slice(start, min(start + BLOCK, queries)) for start in range(0, max(1, queries), BLOCK)]
            return masked_softmax(blocks, in_blocks)[0].to(query.dtype)
        blocks = row_blocks(batch, heads * channels, queries, k.shape[2])
        return masked_softmax(blocks, of_all_pairs)[0].to(query.dtype)
