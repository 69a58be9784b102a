"""The operator from its formulas, in dense code for any dtype: the specification in code."""

import torch
from torch import Tensor

from rfa.checks import exported
from rfa.dynamics import decay_kernel, rotation_of_heads

from .dense import (
    DenseRows,
    dropped,
    effective_variance,
    evidence,
    finite,
    into_frame,
    log_weights,
    masked_softmax,
    positive,
    rotated,
    row_blocks,
    sees_any,
    squared_distance,
    turned,
)
from .positions import Positions
from .prior import BITS, left_out, riccati_weights, tail_of_keys
from .problem import Options, Parameters, Problem
from .transforms import without_autocast


def filter_attention(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> tuple[Tensor, Tensor | None]:
    """The filtered values `(batch, heads, queries, 2 dv)` and, if asked for, the log precision.

    Rows are independent: where no gradient is asked for they are computed in blocks of bounded memory.
    """
    parameters, positions, options, riccati = problem
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads, queries, _ = query.shape
    frequency = parameters.frequency  # stays in its own dtype: phases are formed before rounding
    parameters = parameters.to(dtype)
    head, turns_values = parameters.unsqueezed(2), options.rotate_values and not options.in_frame
    key, value = positions.without_absent(key, value)
    with without_autocast(query):
        states = query.to(dtype), key.to(dtype), value.to(dtype)
        if not options.in_frame:
            of_keys, of_queries = (rotation_of_heads(frequency, times) for times in positions.times_of_heads())
            states = into_frame(states, of_keys, of_queries, dtype, turns_values)
        (in_frame, nonfinite), (keys, nonfinite_keys), (values, nonfinite_values) = map(finite, states)
        if options.prior == "riccati" and riccati is None and key.shape[2]:
            riccati = riccati_weights(parameters, positions, dtype)
        tail = None
        eps = None if options.certified == "auto" else options.certified  # dense code would save nothing
        if eps and riccati is not None and not exported():  # a scan would serve one length
            scale = head.inverse_temperature[..., 0]
            tail = tail_of_keys(-BITS * scale * riccati.cumulative, BITS * scale * riccati.log_gain, positions) / BITS

        def dense_rows(rows: slice) -> DenseRows:
            """Queries, keys and values that are not finite stand as zeros."""
            visible, decay, variance, weighed = _pairs(in_frame[:, :, rows], keys, head, positions.rows(rows), options)
            if riccati is not None:
                between = riccati.at_queries[..., rows, None] - riccati.cumulative[:, :, None, :]
                since = between.abs().masked_fill(~visible[:, None], 0.0).to(dtype)
                log_prior = riccati.log_gain[:, :, None, :].to(dtype) - since
            else:
                total = variance + head.query_noise if options.query_noise_in_bias else variance
                log_prior = -torch.log(positive(total))
            score = log_weights(log_prior, weighed, head.robustness, head.inverse_temperature, options.weight)
            if tail is not None and eps:
                of_pairs = tail[:, :, None] - head.inverse_temperature * since
                seen = score.masked_fill(~visible[:, None], -torch.inf)
                score = score.masked_fill(left_out(seen, of_pairs, eps), -torch.inf)
            return DenseRows(
                score,
                visible,
                lambda weights: dropped(weights, options.dropout) * decay @ values,
                nonfinite[:, :, rows] | sees_any(visible, nonfinite_keys),
                sees_any(visible, nonfinite_values),
            )

        blocks = row_blocks(batch, heads, queries, key.shape[2])
        estimate, log_precision = masked_softmax(blocks, dense_rows, options.log_precision)
        if turns_values:
            estimate = turned(estimate, of_queries)
            if parameters.horizon is not None:
                ahead = frequency * parameters.horizon[:, None]
                estimate = rotated(estimate, ahead, torch.ones(queries, device=query.device))
    return estimate.to(query.dtype), log_precision


def _pairs(
    query: Tensor, key: Tensor, head: Parameters, positions: Positions, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Visible pairs `(b, queries, keys)`; E, Sigma and the evidence of the residual, with heads, in the common frame.

    The parameters of a head broadcast with queries and keys.
    """
    visible = positions.visible(options.causal)
    lag = positions.lags(visible, query.dtype)
    if head.horizon is not None:
        lag = lag + head.horizon
    decay, variance = decay_kernel(head.decay, lag), head.variance(lag)
    scale = (head.robustness * (query.shape[-1] // 2), effective_variance(variance, head.query_noise, options.weight))
    residual = squared_distance(query, key, decay)
    return visible, decay, variance, evidence(residual, scale if options.gate else scale[:1], options.weight)
