"""The anisotropic operator of appendix B.1: decay, noises and attention weights of each mode its own."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rfa.dynamics import covariance, decay_kernel
from rfa.ops.dense import (
    DenseRows,
    effective_variance,
    evidence,
    finite,
    log_weights,
    masked_softmax,
    positive,
    rotated,
    row_blocks,
    sees_any,
)
from rfa.ops.positions import Positions, checked_positions
from rfa.ops.problem import Options, Parameters, Weight, validate
from rfa.ops.transforms import without_autocast

_PER_MODE = ("decay", "frequency", "process_noise", "key_noise", "query_noise")


def tensor_filter_attention(
    query: Float[Tensor, "batch heads queries channels"],
    key: Float[Tensor, "batch heads keys channels"],
    value: Float[Tensor, "batch heads keys channels"],
    *,
    decay: Float[Tensor, "heads modes"],
    frequency: Float[Tensor, "heads modes"],
    process_noise: Float[Tensor, "heads modes"],
    key_noise: Float[Tensor, "heads modes"],
    query_noise: Float[Tensor, "heads modes"],
    noise_floor: Float[Tensor, " heads"],
    robustness: Float[Tensor, " heads"],
    inverse_temperature: Float[Tensor, " heads"],
    times: Float[Tensor, "*t keys"] | Int[Tensor, "*t keys"] | None = None,
    query_times: Float[Tensor, "*s queries"] | Int[Tensor, "*s queries"] | None = None,
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    segment_ids: Int[Tensor, "batch keys"] | None = None,
    causal: bool = True,
    weight: Weight = "student_t",
    rotate_values: bool = True,
    return_log_precision: bool = False,
) -> (
    Float[Tensor, "batch heads queries channels"]
    | tuple[Float[Tensor, "batch heads queries channels"], Float[Tensor, "batch heads queries modes"]]
):
    r"""Robust filter attention with decay, noises and weights of each mode its own.

    For one head and the lag `tau = t_i - t_j` (`|tau|` when not causal), with d complex modes k:

        E[k]     = exp(-mu_k tau)
        Sigma[k] = sigma_k^2 phi_k(tau) + eta_k^2 E[k]^2 + sigma_0^2
        D2_ij    = sum_k |q_i[k] - exp((-mu_k + i omega_k) tau) k_j[k]|^2 / (Sigma[k] + gamma_k^2)
        L_ij[k]  = -log Sigma[k] - (nu_s + 1) log(1 + D2_ij / (nu_s d))
        A[k]     = softmax_j(beta_s L[k])
        out_i[k] = sum_j A_ij[k] exp((-mu_k + i omega_k) tau) v_j[k]

    The modes share one distance, but each has its own weights. Where the modes of a head agree this is
    `robust_filter_attention`, which costs d times less: use that where one decay a head is enough.

    The decay is formed for each pair of times. The stationary frame would split it into `exp(-mu t_i) exp(mu t_j)`,
    which overflows (appendix B.2; measured in docs/record/experiments.md).

    Time is `O(N^2 d)`. So is memory where gradients are enabled: fourteen numbers are kept for each mode of each pair
    of a query and a key (4 GB in float32 for one head of 32 modes and 1,500 tokens). Without gradients rows are
    computed in blocks of bounded memory.

    Args:
        query: `(batch, heads, queries, 2 d)`; real parts first, then imaginary parts.
        key: `(batch, heads, keys, 2 d)`.
        value: `(batch, heads, keys, 2 d)`, whether it is rotated or not: each mode has its own weights.
        decay: mu_k >= 0, per unit of time, `(heads, modes)`.
        frequency: omega_k, radians per unit of time, `(heads, modes)`.
        process_noise: sigma_k^2 >= 0, variance per unit of time, `(heads, modes)`.
        key_noise: eta_k^2 >= 0, variance, `(heads, modes)`.
        query_noise: gamma_k^2 >= 0, variance, `(heads, modes)`.
        noise_floor: sigma_0^2 >= 0, variance, `(heads,)`.
        robustness: nu_s > 0, degrees of freedom per mode, `(heads,)`.
        inverse_temperature: beta_s > 0, `(heads,)`.
        times: of the keys, `(keys,)` or `(batch, keys)`, strictly increasing within a segment; 0, 1, 2, ...
        query_times: of the queries, `(queries,)` or `(batch, queries)`; the last of `times`. Later than every
            key is a forecast.
        key_mask: `(batch, keys)`, True for keys that take part.
        segment_ids: `(batch, keys)`; queries see keys of their own segment only and take the last ids.
        causal: key j takes part in query i when `t_j <= t_i`.
        weight: "student_t", the L of the formula, or "exponential", `L[k] = -log Sigma[k] - D2 / (nu_s d)`.
        rotate_values: transport values by rotation too; off, they only decay.
        return_log_precision: also return `log s_i[k] = log sum_j exp(beta_s L_ij[k])`, one for each mode.

    Returns:
        The filtered values `(batch, heads, queries, 2 d)`, before the innovation step, in the query's dtype; and
        the log precisions `(batch, heads, queries, modes)`, in float32 or float64. Half precisions accumulate in
        float32, float64 stays float64. A query that sees no key gets zeros and log precisions of -inf.

    Raises:
        ValueError: naming the argument, what was given and what was expected. Under `torch.compile` shapes, dtypes and
            devices are checked, values are not. Values that `torch.vmap` has batched are not checked either.

    Source: appendix B.1, with the robust weight and temperature of section 3.2, so that agreeing modes give that one.
    """
    parameters = Parameters(
        decay, frequency, process_noise, key_noise, query_noise, noise_floor, robustness, inverse_temperature, None
    )
    options = Options(causal, weight, rotate_values, "lyapunov", True, False, return_log_precision)
    anywhere = options._replace(rotate_values=False)  # the width of the values is checked below, for another reason
    validate(query, key, value, parameters, anywhere, _PER_MODE)
    batch, _, queries, channels = query.shape
    positions = checked_positions(batch, queries, key.shape[2], query.device, times, query_times, key_mask, segment_ids)
    if value.shape[-1] != channels:
        raise ValueError(
            f"value: got {value.shape[-1]} channels, expected {channels}, the query's: each mode has weights of its own"
        )
    estimate, log_precision = _filter(query, key, value, parameters, positions, options)
    return estimate if log_precision is None else (estimate, log_precision)


def _filter(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, positions: Positions, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Rotations, which are safe in a common frame, around blocks of independent rows."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    frequency = parameters.frequency  # stays in its own dtype: phases are formed before rounding
    parameters = parameters.to(dtype)
    key, value = positions.without_absent(key, value)
    with without_autocast(query):
        query_frame = rotated(query.to(dtype), frequency, positions.query_times, inverse=True)
        key_frame = rotated(key.to(dtype), frequency, positions.key_times, inverse=True)
        value_frame = value.to(dtype)
        if options.rotate_values:
            value_frame = rotated(value_frame, frequency, positions.key_times, inverse=True)
        states, poisoned = zip(*map(finite, (query_frame, key_frame, value_frame)), strict=True)
        queries, keys, values = map(_by_mode, states)
        batch, heads, modes, length, _ = queries.shape

        def dense_rows(rows: slice) -> DenseRows:
            return _rows(
                (queries[..., rows, :], keys, values),
                (poisoned[0][..., rows], *poisoned[1:]),
                parameters,
                positions.rows(rows),
                options,
            )

        blocks = row_blocks(batch, heads * modes, length, keys.shape[3])
        estimate, log_sums = masked_softmax(blocks, dense_rows, options.log_precision)
        if options.rotate_values:
            estimate = rotated(estimate, frequency, positions.query_times)
    return estimate.to(query.dtype), None if log_sums is None else log_sums.mT


def _by_mode(x: Tensor) -> Tensor:
    """`(batch, heads, length, 2 d)` as `(batch, heads, d, length, 2)`."""
    return x.unflatten(-1, (2, x.shape[-1] // 2)).permute(0, 1, 4, 2, 3)


def _rows(
    states: tuple[Tensor, ...],
    poisoned: tuple[Tensor, ...],
    parameters: Parameters,
    positions: Positions,
    options: Options,
) -> DenseRows:
    """Scores `(batch, heads, modes, queries, keys)` of some rows in the common frame, from appendix B.1."""
    query, key, value = states
    modes = query.shape[2]
    rate, process_noise, key_noise, query_noise = (
        x[..., None, None]
        for x in (parameters.decay, parameters.process_noise, parameters.key_noise, parameters.query_noise)
    )
    noise_floor, robustness, inverse_temperature = (
        x[:, None, None, None] for x in (parameters.noise_floor, parameters.robustness, parameters.inverse_temperature)
    )
    visible = positions.visible(options.causal)
    lag = (positions.query_times[:, :, None] - positions.key_times[:, None, :]).abs()
    lag = lag.masked_fill(~visible, 0.0)[:, None, None].to(query.dtype)

    decay = decay_kernel(rate, lag)
    variance = covariance(rate, process_noise, key_noise, noise_floor, lag)
    real, imaginary = (query[..., :, None, part] - decay * key[..., None, :, part] for part in (0, 1))
    total = effective_variance(variance, query_noise, options.weight)
    constant = total.detach()  # as in `evidence`, with the least of the modes' variances as its scale
    least = constant.amin(2, keepdim=True)
    scaled = (real.square() + imaginary.square()) * (least / constant) * (constant / total)
    weighed = evidence(scaled.sum(2, keepdim=True), (robustness * modes, least), options.weight)
    log_prior = -torch.log(positive(variance))
    return DenseRows(
        log_weights(log_prior, weighed, robustness, inverse_temperature, options.weight),
        visible,
        lambda weights: (weights * decay @ value).permute(0, 1, 3, 4, 2).flatten(-2),
        poisoned[0] | sees_any(visible, poisoned[1]),
        sees_any(visible, poisoned[2]),
    )
