"""From the operator's arguments to a fused kernel's, the same way for every kernel."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .fused import FusedPrior, Kept, Phases, Score, fused_prior, fused_rotation, fused_visibility, torch_phases
from .inputs import Options, Parameters, Positions
from .scores import of_numbers, rotated
from .transforms import transformed


class Kernel(NamedTuple):
    """An implementation of `rfa.ops.fused`.

    attention: `(query, key, value, Rotation | None, FusedPrior, Visibility, score, gate, rotate_values, key_norm,
        decode)` to the estimate and `log2 sum_j 2^z`.
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
    """The filtered values `(batch, heads, queries, 2 dv)` and, if asked for, the log precision."""
    with torch.autocast(query.device.type, enabled=False):
        prior = fused_prior(parameters, positions, options, kept)
        key_norm = None if kept is None else kept.key_norm
        dtype, frequency = query.dtype, None if options.in_frame else parameters.frequency
        if parameters.horizon is not None and prior.tables is None:  # tables know of it
            left = torch.exp(-parameters.decay * parameters.horizon).to(torch.float32)[:, None, None]
            query = query.to(torch.float32)
            key, value = (of_numbers(left.mul, x.to(torch.float32)) for x in positions.present(key, value))
            key_norm = None if key_norm is None else key_norm * left[..., 0].square()
        estimate, log_sum = attend(
            kernel,
            query,
            key,
            value,
            frequency=frequency,
            positions=positions,
            prior=prior,
            causal=options.causal,
            score=options.weight,
            gate=options.gate,
            rotate_values=options.rotate_values,
            key_norm=key_norm,
        )
        if parameters.horizon is not None and frequency is not None and options.rotate_values:
            angle = frequency * parameters.horizon[:, None]
            estimate = rotated(estimate, angle, torch.ones(query.shape[2], device=query.device))
    log_precision = (log_sum * math.log(2)).to(torch.float32) if options.log_precision else None
    return estimate.to(dtype), log_precision


def attend(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    frequency: Tensor | None,
    positions: Positions,
    prior: FusedPrior,
    causal: bool,
    score: Score,
    gate: bool = True,
    rotate_values: bool,
    key_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The estimate in float32 and `log2 sum_j 2^z`; a `frequency` of None says that states stand in the frame.

    A kernel turns the states itself, but returns no gradient for phases: where frequencies or times are learned,
    autograd turns them, in float32.
    """
    rotation, learned = None, False
    if frequency is not None:
        turning = (frequency, positions.key_times, positions.query_times)
        learned = transformed() or (torch.is_grad_enabled() and any(factor.requires_grad for factor in turning))
    if frequency is not None and learned:
        key, value = positions.present(key, value)
        query = rotated(query.to(torch.float32), frequency, positions.query_times, inverse=True)
        key = rotated(key.to(torch.float32), frequency, positions.key_times, inverse=True)
        value = value.to(torch.float32)
        if rotate_values:
            value = rotated(value, frequency, positions.key_times, inverse=True)
    elif frequency is not None:
        rotation = fused_rotation(frequency, positions, kernel.phases)
    visibility = fused_visibility(positions, causal)
    decode = frequency is None and not torch.is_grad_enabled()
    estimate, log_sum = kernel.attention(
        query, key, value, rotation, prior, visibility, score, gate, rotate_values, key_norm, decode
    )
    if frequency is not None and learned and rotate_values:
        estimate = rotated(estimate, frequency, positions.query_times)
    return estimate, log_sum
