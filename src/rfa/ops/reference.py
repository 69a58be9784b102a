"""The dense operator in ordinary autograd code, any dtype: the specification in code."""

import torch
from torch import Tensor

from rfa.dynamics import decay_kernel

from .inputs import Options, Parameters, Positions, row_blocks
from .prior import RiccatiPath, latest, riccati_path
from .scores import evidence, finite, judged, log_sum, positive, rotated, sees_any


def filter_attention(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, positions: Positions, options: Options
) -> tuple[Tensor, Tensor | None]:
    """The filtered values `(batch, heads, queries, 2 dv)` and, if asked for, the log precision.

    Rows are independent, so where no gradient is asked for they are computed in blocks of bounded memory.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    frequency = parameters.frequency  # kept in its own dtype: phases are formed before rounding
    parameters = parameters.to(dtype)
    key, value = positions.present(key, value)
    with torch.autocast(query.device.type, enabled=False):
        query_frame, key_frame, value_frame = query.to(dtype), key.to(dtype), value.to(dtype)
        if not options.in_frame:
            query_frame = rotated(query_frame, frequency, positions.query_times, inverse=True)
            key_frame = rotated(key_frame, frequency, positions.key_times, inverse=True)
        if options.rotate_values and not options.in_frame:
            value_frame = rotated(value_frame, frequency, positions.key_times, inverse=True)
        frame, poisoned = zip(*map(finite, (query_frame, key_frame, value_frame)), strict=True)
        path = riccati_path(parameters, positions, dtype) if options.prior == "riccati" and key.shape[2] else None

        batch, heads, queries, _ = query.shape
        rows = [
            _rows(
                (frame[0][:, :, rows], *frame[1:]),
                (poisoned[0][:, :, rows], *poisoned[1:]),
                parameters,
                positions.rows(rows),
                options,
                path,
            )
            for rows in row_blocks(batch, heads, queries, key.shape[2])
        ]
        estimate = torch.cat([row[0] for row in rows], dim=2)
        totals = [total for _, total in rows if total is not None]
        log_precision = torch.cat(totals, dim=2) if totals else None
        if options.rotate_values and not options.in_frame:
            estimate = rotated(estimate, frequency, positions.query_times)
            if parameters.horizon is not None:
                ahead = frequency * parameters.horizon[:, None]
                estimate = rotated(estimate, ahead, torch.ones(queries, device=query.device))
    return estimate.to(query.dtype), log_precision


def _rows(
    states: tuple[Tensor, ...],
    poisoned: tuple[Tensor, ...],
    parameters: Parameters,
    positions: Positions,
    options: Options,
    path: RiccatiPath | None,
) -> tuple[Tensor, Tensor | None]:
    """The estimate, still in the common frame, and the log precision of some rows; SPEC section 2, line by line.

    What is no number stands as zero in queries, keys and values; `poisoned` says where.
    """
    query, key, value = states
    modes = query.shape[-1] // 2
    head = parameters.unsqueezed(2)
    signed_lag = positions.query_times[:, :, None] - positions.key_times[:, None, :]
    visible = positions.visible(options.causal)
    lag = signed_lag.abs().masked_fill(~visible, 0.0)[:, None].to(query.dtype)
    if head.horizon is not None:
        lag = lag + head.horizon

    decay = decay_kernel(head.decay, lag)
    variance = head.variance(lag)

    squares = query.square().sum(-1)[..., :, None] + decay.square() * key.square().sum(-1)[..., None, :]
    residual = squares - 2 * decay * (query @ key.mT)
    rounded = (residual <= 0) & (squares > 0)  # of no distance rounding is all that a gradient is
    residual = residual.masked_fill(rounded, 0.0)
    scale = (head.robustness * modes, judged(variance, head.query_noise, options.weight))
    lost = evidence(residual, scale if options.gate else scale[:1], options.weight)

    if path is not None:
        between = latest(path, positions)[..., None] - path.cumulative[:, :, None, :]
        prior = path.log_gain[:, :, None, :] - between.abs().masked_fill(~visible[:, None], 0.0).to(query.dtype)
    else:
        prior = -torch.log(positive(variance + head.query_noise if options.query_noise_in_bias else variance))
    exponent = head.robustness + 1 if options.weight == "student_t" else 1.0
    score = head.inverse_temperature * (prior - exponent * lost)

    empty = ~visible.any(-1, keepdim=True)[:, None]
    score = score.masked_fill(~visible[:, None] & ~empty, -torch.inf)
    attention = torch.softmax(score, dim=-1) * decay
    unknown = poisoned[0] | sees_any(visible[:, None], poisoned[1])
    estimate = (attention @ value).masked_fill(
        (unknown | sees_any(visible[:, None], poisoned[2]))[..., None], torch.nan
    )
    estimate = estimate.masked_fill(empty, 0.0)
    if not options.log_precision:
        return estimate, None
    log_precision = log_sum(score).masked_fill(unknown, torch.nan)
    return estimate, log_precision.masked_fill(empty[..., 0], -torch.inf)
