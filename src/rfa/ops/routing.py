"""Posterior routing: which earlier key is the source of the present state, and how far each moves it (appendix E.8)."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import decay_kernel

from .dense import (
    DenseRows,
    FiniteStates,
    effective_variance,
    evidence,
    masked_softmax,
    rotated,
    row_blocks,
    squared_distance,
)
from .positions import Positions
from .problem import Parameters
from .transforms import without_autocast

LogSource = Callable[[Float[Tensor, "b #heads queries keys"]], Tensor]  # log R_ij of lags; constants cancel


def located_posterior_routing(
    positions: Positions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_value: Tensor,
    parameters: Parameters,
    *,
    causal: bool = True,
    rotate_values: bool = True,
    log_source: LogSource | None = None,
) -> Tensor:
    r"""The posterior mean of a state whose source is one of the earlier keys, and it is not known which.

    A state comes from one of the visible keys, `P(K = j) = R_ij`, and the query is a noisy observation of it:
    `x_i | K = j ~ CN(x_ij, Sigma_ij I)`, `q_i ~ CN(x_i, gamma^2 I)`. For one head, with d complex modes, the lag
    `tau = t_i - t_j` and `Sigma` as in `robust_filter_attention`:

        E, x_ij  = exp(-mu tau), exp((-mu + i omega) tau) v_j
        r_ij     = |q_i - exp((-mu + i omega) tau) k_j|^2
        R_ij     = R(tau) / sum_l R(t_i - t_l),    R(tau) = exp(-rho tau) by default
        alpha_ij = softmax_j(log R_ij - r_ij / (Sigma_ij + gamma^2) - d log(Sigma_ij + gamma^2))
        G_ij     = gamma^2 / (Sigma_ij + gamma^2)
        out_i    = x_i + sum_j alpha_ij G_ij (x_ij - x_i),    x_i the query's own value

    Variances are those of a complex mode: a real channel has half of them, which makes the score the paper's
    `-r' P r / 2 - log|Sigma~| / 2` on 2 d real channels. The step `out_i - x_i` is a convex combination of the steps
    of the single sources, so no longer than the longest of them, however many keys agree.

    The scores of all pairs are held at once for the gradient: O(N^2) memory, as in the reference operator; without
    gradients rows are computed in blocks of bounded memory.

    Args:
        positions: where keys and queries stand, checked already, as all arguments are.
        query, key, value: `(batch, heads, length, 2 d)`; real parts first, then imaginary parts.
        query_value: x_i, `(batch, heads, queries, 2 d)`.
        parameters: of `gaussian_parameters`; `source_rate` is rho, None for 0: before the query is seen each key is as
            likely as the others.
        causal, rotate_values: as `robust_filter_attention`.
        log_source: log R, any finite function of the lags `(b, 1 or heads, queries, keys)`, which it broadcasts with;
            beside `source_rate` their product counts.

    Returns:
        The posterior means `(batch, heads, queries, 2 d)` in float32 or float64: a step that is small beside the value
        would be lost in half precision. A query that sees no key keeps its value.

    Source: appendix E.8, with a prior of the sources that depends on the lag alone.
    """
    frequency = parameters.frequency
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = positions.without_absent(key, value)
    query, key, value, query_value = (x.to(dtype) for x in (query, key, value, query_value))
    query = rotated(query, frequency, positions.query_times, inverse=True)
    key = rotated(key, frequency, positions.key_times, inverse=True)
    if not rotate_values:
        return query_value + routing_step(query, key, value, query_value, parameters, positions, causal, log_source)
    value = rotated(value, frequency, positions.key_times, inverse=True)
    own = rotated(query_value, frequency, positions.query_times, inverse=True)
    step = routing_step(query, key, value, own, parameters, positions, causal, log_source)
    return query_value + rotated(step, frequency, positions.query_times)


def gaussian_parameters(*, decay: Tensor, **given: Any) -> Parameters:
    """Parameters of a Gaussian weight, which has neither robustness nor temperature."""
    one = torch.ones_like(decay)
    return Parameters(decay, **given, robustness=one, inverse_temperature=one)


def routing_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_value: Tensor,
    parameters: Parameters,
    positions: Positions,
    causal: bool = True,
    log_source: LogSource | None = None,
) -> Tensor:
    """`sum_j alpha_ij G_ij (x_ij - x_i)` of states that stand in the common frame, `(batch, heads, queries, 2 d)`.

    Rows are independent, so where no gradient is asked for they are computed in blocks of bounded memory.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = positions.without_absent(key, value)
    states = FiniteStates.of(*(x.to(dtype) for x in (query, key, value)))
    query_value, head = query_value.to(dtype), parameters.to(dtype).unsqueezed(2)
    batch, heads, queries, channels = query.shape

    def dense_rows(rows: slice) -> DenseRows:
        part = positions.rows(rows)
        visible = part.visible(causal)
        lag = part.lags(visible, dtype)
        decay = decay_kernel(head.decay, lag)
        total = effective_variance(head.variance(lag), head.query_noise, "exponential")
        residual = squared_distance(states.query[:, :, rows], states.key, decay)
        score = -evidence(residual, (total,), "exponential") - channels // 2 * total.log()
        if head.source_rate is not None:  # its sum over the keys cancels in the softmax
            score = score - head.source_rate * lag
        if log_source is not None:
            score = score + log_source(lag)

        def step(responsibility: Tensor) -> Tensor:
            weights = responsibility * (head.query_noise / total)
            return (weights * decay) @ states.value - weights.sum(-1, keepdim=True) * query_value[:, :, rows]

        return DenseRows(score, visible, step, states.unknown(rows, visible))

    with without_autocast(query):
        return masked_softmax(row_blocks(batch, heads, queries, key.shape[2]), dense_rows)[0]
