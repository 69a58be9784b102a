"""From the operator's arguments to a fused kernel's, the same way for every kernel."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import rotate

from .fused import Kept, Phases, fused_prior, fused_rotation, fused_visibility, torch_phases
from .inputs import Options, Parameters, Positions


class Kernel(NamedTuple):
    """An implementation of `rfa.ops.fused`.

    attention: `(query, key, value, Rotation | None, FusedPrior, Visibility, score, gate, rotate_values, key_norm)`
        to the estimate and `log2 sum_j 2^z`.
    phases: `(frequency, times)` to cosine and sine.
    """

    attention: Callable[..., tuple[Tensor, Tensor]]
    phases: Phases = torch_phases


def filter_attention(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters,
    positions: Positions,
    options: Options,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The filtered values `(batch, heads, queries, 2 dv)` and, if asked for, the log precision.

    A kernel turns the states itself, but returns no gradient for phases: where frequencies or times are learned,
    autograd turns them.
    """
    frequency, device = parameters.frequency, query.device.type
    with torch.autocast(device, enabled=False):
        prior = fused_prior(parameters, positions, options, kept)
        key_norm = None if kept is None or torch.is_grad_enabled() else kept.key_norm
        visibility = fused_visibility(positions, options.causal)
        turning = (frequency, positions.key_times, positions.query_times)
        learned = torch.is_grad_enabled() and any(factor.requires_grad for factor in turning)
        dtype, ahead = query.dtype, parameters.horizon is not None and prior.tables is None  # tables know of it
        if learned or ahead:  # what is done here is done in float32, and on keys that take part
            query, key, value = query.to(torch.float32), key.to(torch.float32), value.to(torch.float32)
            if positions.key_mask is not None:
                absent = ~positions.key_mask[:, None, :, None]
                key, value = key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
        if ahead and parameters.horizon is not None:
            left = torch.exp(-parameters.decay * parameters.horizon).to(torch.float32)[:, None, None]
            key, value = key * left, value * left
            key_norm = None if key_norm is None else key_norm * left[..., 0].square()
        turns_values = options.rotate_values and not options.in_frame
        rotation = None
        if learned and not options.in_frame:
            query = rotate(query, frequency, positions.query_times, inverse=True)
            key = rotate(key, frequency, positions.key_times, inverse=True)
            if turns_values:
                value = rotate(value, frequency, positions.key_times, inverse=True)
        elif not options.in_frame:
            rotation = fused_rotation(frequency, positions, kernel.phases)
        estimate, log_sum = kernel.attention(
            query,
            key,
            value,
            rotation,
            prior,
            visibility,
            options.weight,
            options.gate,
            options.rotate_values,
            key_norm,
        )
        if learned and turns_values:
            estimate = rotate(estimate, frequency, positions.query_times)
        if turns_values and parameters.horizon is not None:
            angle = frequency * parameters.horizon[:, None]
            estimate = rotate(estimate, angle, torch.ones(query.shape[2], device=query.device))
    log_precision = (log_sum * math.log(2)).to(torch.float32) if options.log_precision else None
    return estimate.to(dtype), log_precision
