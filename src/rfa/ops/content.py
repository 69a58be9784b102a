"""Robust filter attention under dynamics that each token sets anew (appendix E.6), on the fused kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from rfa.dynamics import turn

from .backends import backend_for
from .fused import BITS, SMALLEST, FusedPrior
from .fused_backend import Kernel, attend
from .inputs import Positions, Weight, row_blocks
from .path import Along, TokenDynamics, content_path
from .scores import among_visible, evidence, finite, judged, log_weights, of_numbers, sees_any


class Noises(NamedTuple):
    """What does not depend on content: eta^2, gamma^2, sigma_0^2, nu_s and beta_s, `(heads,)` each."""

    key_noise: Tensor
    query_noise: Tensor
    noise_floor: Tensor
    robustness: Tensor
    inverse_temperature: Tensor

    def to(self, dtype: torch.dtype) -> "Noises":
        """The same in another dtype."""
        return Noises(*(p.to(dtype) for p in self))


def content_filter_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dynamics: TokenDynamics,
    noises: Noises,
    positions: Positions,
    weight: Weight = "student_t",
    backend: str = "auto",
) -> Tensor:
    """Causal self-attention in which each token's decay, frequencies and noise rule from it to the next token.

    With the intervals `dt_l = t_{l+1} - t_l`, the cumulative damping, phases and variance of a path are

        M_i = sum_{l<i} mu_l dt_l,    W_i = sum_{l<i} omega_l dt_l,
        u_{l+1} = exp(-2 mu_l dt_l) u_l + sigma_l^2 phi(mu_l, dt_l),    u_0 = 0,

    and between a token j and a later token i `E_ij = exp(-(M_i - M_j))`, the rotation is by `W_i - W_j`, and
    `Sigma_ij = u_i - E_ij^2 u_j + eta^2 E_ij^2 + sigma_0^2`; all else is as in `robust_filter_attention`. The paper's
    sums for M and W name the interval `t_l - t_{l-1}`; its text lets token l rule over [l, l + 1), which is what is
    computed, and is causal: the way from j to i depends on the tokens j .. i - 1.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`, of the same tokens.
        dynamics: mu, sigma^2 and omega of each token.
        noises: of each head.
        positions: where the tokens stand, checked already.
        weight: "student_t" or "exponential".
        backend: as for `robust_filter_attention`; every one takes the path from the same O(N) scans, in float64. The
            fused kernels form Sigma with an error of 1e-7 of the larger of u_j and Sigma.

    Returns:
        `(batch, heads, length, 2 d)`, in the query's dtype; zeros for a query that sees no key.

    Raises:
        ValueError: where a backend asked for by name does not serve such states.
        RuntimeError: where it is "cpu" and cannot be compiled.
    """
    kernel = backend_for(backend, query, value).kernel
    dtype = torch.promote_types(query.dtype, torch.float32)
    if not query.numel():  # no tokens, or no sequences
        return torch.zeros_like(query)
    with torch.autocast(query.device.type, enabled=False):
        key_path, query_path, query_times = content_path(dynamics, positions)
        positions = positions._replace(query_times=query_times)
        key, value = positions.present(key, value)
        inwards = _phases(key_path)
        outwards = inwards if query_path is key_path else _phases(query_path)
        states = _States(
            _turned(query.to(dtype), outwards, inverse=True),
            _turned(key.to(dtype), inwards, inverse=True),
            _turned(value.to(dtype), inwards, inverse=True),
        )
        if kernel is None:
            estimate = _dense(states, key_path, query_path, noises.to(dtype), positions, weight)
        else:
            estimate = _fused(kernel(), states, key_path, query_path, noises, dynamics, positions, weight)
        estimate = _turned(estimate.to(dtype), outwards, inverse=False)
    return estimate.to(query.dtype)


class _States(NamedTuple):
    """In the frame, `(batch, heads, length, 2 d)`."""

    query: Tensor
    key: Tensor
    value: Tensor


def _phases(path: Along) -> tuple[Tensor, Tensor]:
    phase = path.phase.mT
    return phase.cos(), phase.sin()


def _turned(x: Tensor, phases: tuple[Tensor, Tensor], inverse: bool) -> Tensor:
    cos, sin = phases
    return of_numbers(lambda x: turn(x, cos, -sin if inverse else sin), x)


def _fused(
    kernel: Kernel,
    states: _States,
    key_path: Along,
    query_path: Along,
    noises: Noises,
    dynamics: TokenDynamics,
    positions: Positions,
    weight: Weight,
) -> Tensor:
    """The estimate in the frame, by a kernel that knows the prior as a separable path."""
    modes = states.query.shape[-1] // 2
    dtype = key_path.damping.dtype
    noises = noises.to(dtype)
    beta_s, nu_s = noises.inverse_temperature, noises.robustness
    coefficient = beta_s * (nu_s + 1) if weight == "student_t" else BITS * beta_s
    share = 1 / (nu_s * modes)
    scalars = [coefficient, share, noises.key_noise, noises.noise_floor, noises.query_noise, beta_s]
    prior = FusedPrior(
        tables=None,
        key_path=torch.stack([key_path.damping, key_path.variance]).to(torch.float64),
        query_path=torch.stack([query_path.damping, query_path.variance]).to(torch.float64),
        key_bias=None,
        scalars=torch.stack(scalars),
        bound=_bound(noises, dynamics).to(torch.float32),
    )
    estimate, _ = attend(
        kernel,
        states.query,
        states.key,
        states.value,
        frequency=None,
        positions=positions,
        prior=prior,
        causal=True,
        score=weight,
        rotate_values=False,
    )
    return estimate


def _bound(noises: Noises, dynamics: TokenDynamics) -> Tensor:
    """`-beta_s log2` of the least Sigma: `V >= s (1 - E^2)` with s the least steady state that any token sets."""
    noises = Noises(*(p.detach() for p in noises))
    decay, process_noise = (x.detach().to(noises.key_noise.dtype) for x in dynamics[:2])
    settled = torch.where(decay > 0, process_noise / (2 * decay), torch.inf).amin((0, 2))
    least = (torch.minimum(noises.key_noise, settled) + noises.noise_floor).clamp(min=SMALLEST)
    return -noises.inverse_temperature * torch.log2(least)


def _dense(
    states: _States,
    key_path: Along,
    query_path: Along,
    noises: Noises,
    positions: Positions,
    weight: Weight,
) -> Tensor:
    """The estimate in the frame in ordinary autograd code, in float32 or float64; rows as `row_blocks` has them."""
    clean, poisoned = zip(*map(finite, states), strict=True)
    states = _States(*clean)
    batch, heads, queries, _ = states.query.shape
    blocks = row_blocks(batch, heads, queries, states.key.shape[2])
    estimates = [
        _rows(
            states._replace(query=states.query[:, :, rows]),
            poisoned[0][:, :, rows],
            poisoned[1] | poisoned[2],
            key_path,
            Along(query_path.damping[..., rows], query_path.variance[..., rows], query_path.phase),
            noises,
            positions.rows(rows).visible(causal=True)[:, None],
            weight,
        )
        for rows in blocks
    ]
    return torch.cat(estimates, dim=2)


def _rows(
    states: _States,
    unknown: Tensor,
    unknown_keys: Tensor,
    key_path: Along,
    query_path: Along,
    noises: Noises,
    visible: Tensor,
    weight: Weight,
) -> Tensor:
    """Some rows of the attention; `visible` `(b, 1, rows, keys)`, the unknown ones stand as zero."""
    query, key, value = states
    dtype, modes = query.dtype, query.shape[-1] // 2
    key_noise, query_noise, floor, robustness, temperature = (p[:, None, None] for p in noises)
    damping = query_path.damping[..., :, None] - key_path.damping[..., None, :]
    damping = damping.masked_fill(~visible, 0.0)
    grown = query_path.variance[..., :, None] - key_path.variance[..., None, :] * torch.exp(-2 * damping)
    grown = grown.masked_fill(~visible, 0.0).clamp(min=0).to(dtype)  # rounding may leave a tiny negative number
    decay = torch.exp(-damping).to(dtype)

    variance = grown + key_noise * decay.square() + floor
    residual = (
        query.square().sum(-1)[..., :, None]
        + decay.square() * key.square().sum(-1)[..., None, :]
        - 2 * decay * (query @ key.mT)
    ).relu()
    lost = evidence(residual, (robustness * modes, judged(variance, query_noise, weight)), weight)
    score, empty = among_visible(log_weights(lost, variance, robustness, temperature, weight), visible)
    unknown = unknown | sees_any(visible, unknown_keys)
    return (score.softmax(-1) * decay @ value).masked_fill(unknown[..., None], torch.nan).masked_fill(empty, 0.0)
