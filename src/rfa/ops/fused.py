"""What every fused kernel receives: the prior as lag tables or along a path, and who sees whom.

A kernel knows nothing of dynamics. It forms, for query i and key j, in the common frame,

    r  = |q_i|^2 + E^2 |k_j|^2 - 2 E q_i.k_j
    z  = b - c log2(1 + w r)      student_t        scores in bits, z = log2(e) beta_s L
    z  = b - c w r                exponential
    z  = b + c q_i.k_j            dot_product
    out_i = sum_j 2^(z - z_i) E v_j,    z_i = log2 sum_j 2^z

and returns gradients for q, k, v and for every number of the prior; autograd carries them on to the parameters.
E, b, w come from tables over the lag where times are uniform, from numbers at keys and queries elsewhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import accumulated_variance, decay_kernel, riccati_log_gain, rotation, time_dtype

from .inputs import Options, Parameters, Positions, numbered
from .prior import latest, riccati_path
from .scores import least_judged
from .transforms import transformed

Phases = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Score = Literal["student_t", "exponential", "dot_product"]
BITS = math.log2(math.e)  # a nat
SMALLEST = torch.finfo(torch.float32).tiny  # variance: what lies below counts as this and has no gradient


class FusedPrior(NamedTuple):
    """E, b and w of every pair, in one of two forms; all carry gradients except `bound`.

    Tables over the lag, float32:
        tables: `(3, heads, lags)`: E, b in bits, w, at the lag `|i - j|` of positions.
        scalars: `(1, heads)`: c.

    A separable path, `b` = 1 or batch. With the cumulative damping M, the accumulated variance u and `e` the
    earlier, `l` the later of the two: `E = exp(-|M_i - M_j|)`,
    `Sigma = (u_l - u_e) + u_e (1 - E^2) + eta^2 E^2 + sigma_0^2`, `w = W / (Sigma + gamma^2)`,
    and `b = -B log2 Sigma`, or, with a third row C, `b = key_bias_j - |C_i - C_j|`.
        key_path: `(2 or 3, b, heads, keys)` float64: M, u, and C in bits.
        query_path: the same at the queries.
        key_bias: `(b, heads, keys)` float32, in bits, where there is a third row.
        scalars: `(6, heads)` float32 or float64, and so are their gradients: c, W, eta^2, sigma_0^2, gamma^2, B.

    bound: `(heads,)`: no z of a head lies above it.
    """

    tables: Tensor | None
    key_path: Tensor | None
    query_path: Tensor | None
    key_bias: Tensor | None
    scalars: Tensor
    bound: Tensor


@dataclass
class Kept:
    """What a cache keeps for the next token: `|k|^2` of its keys, tables for more lags than it has keys yet, and the
    layer's dynamics. The last two hold as long as the parameters stay as they are.
    """

    key_norm: Tensor | None = None
    tables: FusedPrior | None = None
    dynamics: dict[str, Any] | None = None


class Visibility(NamedTuple):
    """Key j takes part in query i where `key_times_j <= query_times_i`, if causal, and the groups are equal.

    Times `(b, length)` in float64; groups `(batch, length)` int32, -1 at keys that take no part, or None.
    """

    key_times: Tensor
    query_times: Tensor
    key_groups: Tensor | None
    query_groups: Tensor | None
    causal: bool


class Rotation(NamedTuple):
    """Cosine and sine of the phases, `(b, heads, length, modes)` in float32, at keys and queries."""

    key_cos: Tensor
    key_sin: Tensor
    query_cos: Tensor
    query_sin: Tensor


def torch_phases(frequency: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `frequency * times`, `(b, heads, length, modes)` in float32."""
    cos, sin = (part.to(torch.float32) for part in rotation(frequency, times))
    return cos, sin


def fused_rotation(frequency: Tensor, positions: Positions, phases: Phases = torch_phases) -> Rotation:
    """The tables by which a kernel turns states into the common frame and the estimate out of it."""
    key = phases(frequency, positions.key_times)
    if positions.uniform:
        first = positions.key_times.shape[-1] - positions.query_times.shape[-1]
        return Rotation(*key, *(part[..., first:, :] for part in key))
    return Rotation(*key, *phases(frequency, positions.query_times))


def fused_visibility(positions: Positions, causal: bool) -> Visibility:
    """Mask and segments as one group number a key."""
    dtype = time_dtype(positions.key_times.device)
    times = positions.key_times.detach().to(dtype), positions.query_times.detach().to(dtype)
    groups = queries = None
    if positions.key_segments is not None and positions.query_segments is not None:
        both = torch.cat([positions.key_segments, positions.query_segments], dim=-1)
        both = numbered(both).to(torch.int32)
        groups, queries = both.split([times[0].shape[-1], times[1].shape[-1]], dim=-1)
    if positions.key_mask is not None:
        batch = positions.key_mask.shape[0]
        if groups is None:
            groups = torch.zeros(positions.key_mask.shape, dtype=torch.int32, device=times[0].device)
            queries = torch.zeros(batch, times[1].shape[-1], dtype=torch.int32, device=times[0].device)
        groups = groups.masked_fill(~positions.key_mask, -1)
    return Visibility(*times, groups, queries, causal)


def fused_prior(parameters: Parameters, positions: Positions, options: Options, kept: Kept | None = None) -> FusedPrior:
    """The prior in the form that suits the times: tables where they are uniform, a path elsewhere.

    Where a cache keeps tables, they are made for twice the lags, once for all the tokens in between.
    """
    keys = positions.key_times.shape[-1]
    depends_on_mask = options.prior == "riccati" and not (positions.key_mask is None and positions.key_segments is None)
    if not positions.uniform or depends_on_mask:
        return path_prior(parameters, positions, options)
    if kept is None or torch.is_grad_enabled() or transformed() or keys < 2:  # a lone key has a gain of its own
        return lag_tables(parameters, options, keys)
    if kept.tables is None or kept.tables.tables is None or kept.tables.tables.shape[-1] < keys:
        kept.tables = lag_tables(parameters, options, 2 * keys)
    return kept.tables


def _coefficient(parameters: Parameters, options: Options) -> Tensor:
    if options.weight == "student_t":
        return parameters.inverse_temperature * (parameters.robustness + 1)
    return BITS * parameters.inverse_temperature


def lag_tables(parameters: Parameters, options: Options, length: int) -> FusedPrior:
    """E, `b = -beta_s log2 Sigma` (or the Riccati weight) and `w = 1 / (nu_s d Sigma~)` of the lags 0 .. length - 1."""
    modes = parameters.frequency.shape[-1]
    parameters = parameters.to(time_dtype(parameters.decay.device))
    head = parameters.unsqueezed(1)
    mu, sigma2, eta2, floor = head.decay, head.process_noise, head.key_noise, head.noise_floor
    steps = torch.arange(length, device=mu.device, dtype=mu.dtype)
    lag = steps if head.horizon is None else steps + head.horizon
    lag = lag.expand(mu.shape[0], length)
    variance = head.variance(lag)
    judged = (variance + head.query_noise).clamp(min=least_judged(options.weight, torch.float32))
    if options.prior == "riccati":
        log_gain, log_rest = riccati_log_gain(mu, sigma2, eta2 + floor, torch.ones_like(mu), SMALLEST)
        log_prior = (log_gain if length > 1 else 0.0) + log_rest * steps
    else:
        log_prior = -torch.log(
            (variance + head.query_noise if options.query_noise_in_bias else variance).clamp(min=SMALLEST)
        )
    bias = BITS * head.inverse_temperature * log_prior
    weight = 1 / (head.robustness * modes * (judged if options.gate else torch.ones_like(judged)))
    weight = weight.clamp(max=torch.finfo(torch.float32).max)
    tables = torch.stack([decay_kernel(mu, lag), bias, weight]).to(torch.float32)
    bound = tables[1].detach().amax(-1) if length else tables.new_zeros(mu.shape[0])
    return FusedPrior(tables, None, None, None, _coefficient(parameters, options).to(torch.float32)[None], bound)


def path_prior(parameters: Parameters, positions: Positions, options: Options) -> FusedPrior:
    """Constant dynamics along irregular times: `M_i = mu t_i`, `u_i = sigma^2 phi(t_i - t_0)`.

    A horizon h is `exp(-mu h)` on keys and values, which the caller applies, and on the noises here.
    """
    modes = parameters.frequency.shape[-1]
    path = None
    dtype = time_dtype(parameters.decay.device)
    parameters = parameters.to(dtype)
    if options.prior == "riccati":
        path = riccati_path(parameters, positions, dtype, SMALLEST)
    mu, sigma2 = parameters.decay[:, None], parameters.process_noise[:, None]
    ends = [t.detach().amin(-1, keepdim=True) for t in (positions.key_times, positions.query_times) if t.shape[-1]]
    origin = torch.stack(torch.broadcast_tensors(*ends)).amin(0) if ends else 0.0
    ahead = torch.zeros_like(parameters.decay) if parameters.horizon is None else parameters.horizon
    left = decay_kernel(2 * parameters.decay, ahead)  # of a variance after the horizon
    rows = []
    for times in (positions.key_times, positions.query_times):
        elapsed = (times - origin).to(dtype)[:, None, :]
        damping = (mu * elapsed).expand(-1, mu.shape[0], -1)
        rows.append([damping, left[:, None] * sigma2 * accumulated_variance(mu, elapsed)])
    eta2 = left * parameters.key_noise
    floor = parameters.noise_floor + parameters.process_noise * accumulated_variance(parameters.decay, ahead)
    beta_s = parameters.inverse_temperature
    key_bias = None
    if path is not None:
        key_bias = (BITS * beta_s[:, None] * path.log_gain).to(torch.float32)
        scale = BITS * beta_s[:, None]
        rows[0].append(scale * path.cumulative)
        rows[1].append(scale * latest(path, positions))
        bound = key_bias.detach().amax((0, 2)) if key_bias.numel() else torch.zeros_like(beta_s)
    else:
        settled = torch.where(mu > 0, sigma2 / (2 * mu), torch.inf)[:, 0]
        least = torch.minimum(eta2 + floor, left * settled + floor).clamp(min=SMALLEST)
        bound = -beta_s * torch.log2(least + parameters.query_noise if options.query_noise_in_bias else least)
    if options.query_noise_in_bias:  # Sigma~ in both places: gamma^2 joins the floor
        floor, gamma2 = floor + parameters.query_noise, torch.zeros_like(floor)
    else:
        gamma2 = parameters.query_noise
    share = 1 / (parameters.robustness * modes)
    scalars = torch.stack([_coefficient(parameters, options), share, eta2, floor, gamma2, beta_s])
    batch = max(part.shape[0] for part in rows[0])
    key_path, query_path = (
        torch.stack([part.expand(batch, -1, -1).to(torch.float64) for part in parts]) for parts in rows
    )
    return FusedPrior(None, key_path, query_path, key_bias, scalars, bound.detach().to(torch.float32))
