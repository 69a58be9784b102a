"""Dense code in any dtype: the operator from its formulas, and a fused kernel's separable path from its own.

`filter_attention` is the specification in code. `path_attention` computes what a kernel computes, for dtypes and head
sizes that no kernel serves.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import decay_kernel, rotation_of_heads

from .dense import (
    DenseRows,
    dropped,
    effective_variance,
    evidence,
    finite,
    log_weights,
    masked_softmax,
    positive,
    rotated,
    row_blocks,
    sees_any,
    turned,
)
from .kernel import KernelInputs
from .positions import Positions
from .prior import riccati_weights
from .problem import Options, Parameters, Problem, RiccatiWeights, Weight
from .transforms import without_autocast

_LN2 = math.log(2)


def filter_attention(query: Tensor, key: Tensor, value: Tensor, problem: Problem) -> tuple[Tensor, Tensor | None]:
    """The filtered values `(batch, heads, queries, 2 dv)` and, if asked for, the log precision.

    Rows are independent: where no gradient is asked for they are computed in blocks of bounded memory.
    """
    parameters, positions, options, riccati = problem
    dtype = torch.promote_types(query.dtype, torch.float32)
    frequency = parameters.frequency  # stays in its own dtype: phases are formed before rounding
    parameters = parameters.to(dtype)
    key, value = positions.without_absent(key, value)
    with without_autocast(query):
        query_frame, key_frame, value_frame = query.to(dtype), key.to(dtype), value.to(dtype)
        if not options.in_frame:
            of_keys, of_queries = (rotation_of_heads(frequency, times) for times in positions.times_of_heads())
            query_frame = turned(query_frame, of_queries, inverse=True)
            key_frame = turned(key_frame, of_keys, inverse=True)
        if options.rotate_values and not options.in_frame:
            value_frame = turned(value_frame, of_keys, inverse=True)
        states, poisoned = zip(*map(finite, (query_frame, key_frame, value_frame)), strict=True)
        if options.prior == "riccati" and riccati is None and key.shape[2]:
            riccati = riccati_weights(parameters, positions, dtype)

        def dense_rows(rows: slice) -> DenseRows:
            of_rows = (states[0][:, :, rows], *states[1:])
            poisoned_rows = (poisoned[0][:, :, rows], *poisoned[1:])
            of_prior = None if riccati is None else riccati._replace(at_queries=riccati.at_queries[..., rows])
            return _rows(of_rows, poisoned_rows, parameters, positions.rows(rows), options, of_prior)

        batch, heads, queries, _ = query.shape
        blocks = row_blocks(batch, heads, queries, key.shape[2])
        estimate, log_precision = masked_softmax(blocks, dense_rows, options.log_precision)
        if options.rotate_values and not options.in_frame:
            estimate = turned(estimate, of_queries)
            if parameters.horizon is not None:
                ahead = frequency * parameters.horizon[:, None]
                estimate = rotated(estimate, ahead, torch.ones(queries, device=query.device))
    return estimate.to(query.dtype), log_precision


class _Pairs(NamedTuple):
    """What queries and keys make of each other, `(batch, heads, queries, keys)`; `visible` has no heads.

    Fields:
        visible: whether the key takes part.
        decay, variance: `E` and `Sigma`.
        evidence: of the residual, `log(1 + r / (nu_s d (Sigma + gamma^2)))`, or the quotient of exponential weights.
    """

    visible: Tensor
    decay: Tensor
    variance: Tensor
    evidence: Tensor


def _pairs(query: Tensor, key: Tensor, head: Parameters, positions: Positions, options: Options) -> _Pairs:
    """Of states in the common frame; the parameters of a head broadcast with queries and keys."""
    modes = query.shape[-1] // 2
    of_keys, of_queries = positions.times_of_heads()
    visible = positions.visible(options.causal)
    lag = (of_queries[..., None] - of_keys[..., None, :]).abs()
    lag = lag.masked_fill(~visible[:, None], 0.0).to(query.dtype)
    if head.horizon is not None:
        lag = lag + head.horizon
    decay = decay_kernel(head.decay, lag)
    variance = head.variance(lag)
    squares = query.square().sum(-1)[..., :, None] + decay.square() * key.square().sum(-1)[..., None, :]
    residual = squares - 2 * decay * (query @ key.mT)
    rounded = (residual <= 0) & (squares > 0)  # at distance 0 a gradient would consist of rounding alone
    residual = residual.masked_fill(rounded, 0.0)
    scale = (head.robustness * modes, effective_variance(variance, head.query_noise, options.weight))
    return _Pairs(visible, decay, variance, evidence(residual, scale if options.gate else scale[:1], options.weight))


def robust_weights(query: Tensor, key: Tensor, problem: Problem) -> Tensor:
    """`1 / (1 + r / (nu_s d (Sigma + gamma^2)))`, or `exp(-r / (nu_s d (Sigma + gamma^2)))` of exponential weights.

    It is the factor by which a key's residual r lowers the key's weight, with an exponent of one. Memory is O(N^2).

    Args:
        query, key: `(batch, heads, length, 2 d)`.
        problem: the other arguments of the operator.

    Returns:
        `(batch, heads, queries, keys)`: 1 for a key that agrees with the query; 0 for a key that is not seen.
    """
    parameters, positions, options, _ = problem
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, _ = positions.without_absent(key, key)
    of_keys, of_queries = (rotation_of_heads(parameters.frequency, times) for times in positions.times_of_heads())
    query = turned(query.to(dtype), of_queries, inverse=True)
    key = turned(key.to(dtype), of_keys, inverse=True)
    pairs = _pairs(query, key, parameters.to(dtype).unsqueezed(2), positions, options)
    return torch.exp(-pairs.evidence).masked_fill(~pairs.visible[:, None], 0.0)


def _rows(
    states: tuple[Tensor, ...],
    poisoned: tuple[Tensor, ...],
    parameters: Parameters,
    positions: Positions,
    options: Options,
    riccati: RiccatiWeights | None,
) -> DenseRows:
    """Scores of some queries with states in the common frame, from the formulas of `robust_filter_attention`.

    Poisoned queries, keys and values stand as zeros.
    """
    query, key, value = states
    head = parameters.unsqueezed(2)
    visible, decay, variance, weighed = _pairs(query, key, head, positions, options)
    if riccati is not None:
        between = riccati.at_queries[..., None] - riccati.cumulative[:, :, None, :]
        log_prior = riccati.log_gain[:, :, None, :].to(query.dtype)
        log_prior = log_prior - between.abs().masked_fill(~visible[:, None], 0.0).to(query.dtype)
    else:
        log_prior = -torch.log(positive(variance + head.query_noise if options.query_noise_in_bias else variance))
    return DenseRows(
        log_weights(log_prior, weighed, head.robustness, head.inverse_temperature, options.weight),
        visible,
        lambda weights: dropped(weights, options.dropout) * decay @ value,
        poisoned[0] | sees_any(visible, poisoned[1]),
        sees_any(visible, poisoned[2]),
    )


def path_attention(inputs: KernelInputs) -> tuple[Tensor, Tensor]:
    """The estimate and `log2 sum_j 2^z` of causal rows in the common frame, as `rfa.ops.kernel` defines them.

    Raises:
        NotImplementedError: for lag tables, phases, rows that are not causal, or dot products.
    """
    query, key, value, key_path, query_path = (
        inputs.query, inputs.key, inputs.value, inputs.key_path, inputs.query_path
    )  # fmt: skip
    known = inputs.key_cos is None and inputs.causal and inputs.score_kind != "dot_product"
    if not known or key_path is None or query_path is None:
        raise NotImplementedError("path_attention: causal rows along a path in the common frame only")
    weight: Weight = "student_t" if inputs.score_kind == "student_t" else "exponential"
    coefficient, scale, key_noise, floor, query_noise, exponent = (x[:, None, None] for x in inputs.scalars.to(query))
    positions = Positions(inputs.key_times, inputs.query_times, inputs.key_groups, inputs.query_groups)

    def dense_rows(rows: slice) -> DenseRows:
        visible = positions.rows(rows).visible(causal=True)
        apart = query_path[..., rows, None] - key_path[..., None, :]
        apart = apart.masked_fill(~visible[:, None], 0.0)
        decay = torch.exp(-apart[0]).to(query.dtype)
        variance = (apart[1] + key_path[1][..., None, :] * -torch.expm1(-2 * apart[0])).to(query.dtype)
        variance = variance + key_noise * decay.square() + floor
        divisors = (1 / scale, effective_variance(variance, query_noise, weight)) if inputs.gate else (1 / scale,)
        if inputs.key_bias is None:
            bias = -exponent * torch.log2(positive(variance))
        else:
            bias = inputs.key_bias.to(query.dtype)[..., None, :] - apart[2].abs().to(query.dtype)
        part = query[:, :, rows]
        residual = part.square().sum(-1)[..., None] + decay.square() * key.square().sum(-1)[..., None, :]
        residual = (residual - 2 * decay * (part @ key.mT)).relu()
        z = bias - coefficient * evidence(residual, divisors, weight) / (_LN2 if weight == "student_t" else 1.0)
        return DenseRows(z * _LN2, visible, lambda weights: weights * decay @ value)

    batch, heads, queries, _ = query.shape
    estimate, log_sums = masked_softmax(row_blocks(batch, heads, queries, key.shape[2]), dense_rows, log_sums=True)
    assert log_sums is not None
    return estimate, (log_sums / _LN2).to(torch.float64)
