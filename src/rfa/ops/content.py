"""Robust filter attention in which each token sets the dynamics until the next (appendix E.6)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .backends import attend, backend_for
from .cumulative import CumulativeDynamics, TokenDynamics, cumulative_dynamics
from .dense import (
    DenseRows,
    effective_variance,
    evidence,
    finite,
    log_weights,
    masked_softmax,
    positive,
    row_blocks,
    sees_any,
    turned,
)
from .kernel import Kernel
from .positions import Positions
from .prior import BITS, SMALLEST, SeparablePath
from .problem import Weight


class Noises(NamedTuple):
    """The parameters that do not depend on content: eta^2, gamma^2, sigma_0^2, nu_s, beta_s; `(heads,)` each."""

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
    """Causal self-attention in which each token's decay, frequencies and noise hold until the next token.

    With the intervals `dt_l = t_{l+1} - t_l`, the cumulative decay and phase and the accumulated variance are

        M_i = sum_{l<i} mu_l dt_l,    W_i = sum_{l<i} omega_l dt_l,
        u_{l+1} = exp(-2 mu_l dt_l) u_l + sigma_l^2 phi(mu_l, dt_l),    u_0 = 0,

    and between a token j and a later token i `E_ij = exp(-(M_i - M_j))`, the rotation is by `W_i - W_j`, and
    `Sigma_ij = u_i - E_ij^2 u_j + eta^2 E_ij^2 + sigma_0^2`; all else is as in `robust_filter_attention`. The paper's
    sums for M and W name the interval `t_l - t_{l-1}`. Its text gives token l the interval [l, l + 1). That is what is
    computed, and it is causal: what lies between j and i depends on the tokens j .. i - 1.

    Args:
        query, key, value: `(batch, heads, length, 2 d)`, of the same tokens.
        dynamics: mu, sigma^2 and omega of each token.
        noises: of each head.
        positions: where the tokens stand, checked already.
        weight: "student_t" or "exponential".
        backend: as for `robust_filter_attention`. All take the sums from the same O(N) scans in float64. The fused
            kernels form Sigma with an error of 1e-7 of the larger of u_j and Sigma.

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
        at_keys, at_queries, query_times = cumulative_dynamics(dynamics, positions)
        positions = positions._replace(query_times=query_times)
        key, value = positions.without_absent(key, value)
        of_keys = _phases(at_keys)
        of_queries = of_keys if at_queries is at_keys else _phases(at_queries)
        states = _States(
            turned(query.to(dtype), of_queries, inverse=True),
            turned(key.to(dtype), of_keys, inverse=True),
            turned(value.to(dtype), of_keys, inverse=True),
        )
        if kernel is None:
            estimate = _dense(states, at_keys, at_queries, noises.to(dtype), positions, weight)
        else:
            estimate = _fused(kernel(), states, at_keys, at_queries, noises, dynamics, positions, weight)
        estimate = turned(estimate.to(dtype), of_queries, inverse=False)
    return estimate.to(query.dtype)


class _States(NamedTuple):
    """In the frame, `(batch, heads, length, 2 d)`."""

    query: Tensor
    key: Tensor
    value: Tensor


def _phases(sums: CumulativeDynamics) -> tuple[Tensor, Tensor]:
    phase = sums.phase.mT
    return phase.cos(), phase.sin()


def _fused(
    kernel: Kernel,
    states: _States,
    at_keys: CumulativeDynamics,
    at_queries: CumulativeDynamics,
    noises: Noises,
    dynamics: TokenDynamics,
    positions: Positions,
    weight: Weight,
) -> Tensor:
    """The estimate in the frame by a kernel."""
    modes = states.query.shape[-1] // 2
    noises = noises.to(at_keys.decay.dtype)
    inverse_temperature, inverse_freedom = noises.inverse_temperature, 1 / (noises.robustness * modes)
    coefficient = inverse_temperature * (noises.robustness + 1 if weight == "student_t" else BITS)
    scalars = [coefficient, inverse_freedom, noises.key_noise, noises.noise_floor, noises.query_noise]
    prior = SeparablePath(
        key_path=torch.stack([at_keys.decay, at_keys.variance]).to(torch.float64),
        query_path=torch.stack([at_queries.decay, at_queries.variance]).to(torch.float64),
        key_bias=None,
        scalars=torch.stack([*scalars, inverse_temperature]),
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
        score_kind=weight,
        rotate_values=False,
    )
    return estimate


def _bound(noises: Noises, dynamics: TokenDynamics) -> Tensor:
    """`-beta_s log2` of the least Sigma: `V >= s (1 - E^2)`, with s the least stationary variance of any token."""
    noises = Noises(*(p.detach() for p in noises))
    decay, process_noise = (x.detach().to(noises.key_noise.dtype) for x in dynamics[:2])
    stationary = torch.where(decay > 0, process_noise / (2 * decay), torch.inf).amin((0, 2))
    least = (torch.minimum(noises.key_noise, stationary) + noises.noise_floor).clamp(min=SMALLEST)
    return -noises.inverse_temperature * torch.log2(least)


def _dense(
    states: _States,
    at_keys: CumulativeDynamics,
    at_queries: CumulativeDynamics,
    noises: Noises,
    positions: Positions,
    weight: Weight,
) -> Tensor:
    """The estimate in the frame in ordinary autograd code, in float32 or float64."""
    clean, poisoned = zip(*map(finite, states), strict=True)
    all_queries, key, value = clean
    dtype, modes = key.dtype, key.shape[-1] // 2
    key_noise, query_noise, floor, robustness, temperature = (p[:, None, None] for p in noises)

    def dense_rows(rows: slice) -> DenseRows:
        query, visible = all_queries[:, :, rows], positions.rows(rows).visible(causal=True)
        unseen = ~visible[:, None]
        apart = at_queries.decay[..., rows, None] - at_keys.decay[..., None, :]
        apart = apart.masked_fill(unseen, 0.0)
        added = at_queries.variance[..., rows, None] - at_keys.variance[..., None, :] * torch.exp(-2 * apart)
        added = added.masked_fill(unseen, 0.0).clamp(min=0).to(dtype)  # rounding may leave a tiny negative number
        decay = torch.exp(-apart).to(dtype)

        variance = added + key_noise * decay.square() + floor
        residual = (
            query.square().sum(-1)[..., :, None]
            + decay.square() * key.square().sum(-1)[..., None, :]
            - 2 * decay * (query @ key.mT)
        ).relu()
        scale = (robustness * modes, effective_variance(variance, query_noise, weight))
        return DenseRows(
            log_weights(
                -torch.log(positive(variance)), evidence(residual, scale, weight), robustness, temperature, weight
            ),
            visible,
            lambda weights: weights * decay @ value,
            poisoned[0][:, :, rows] | sees_any(visible, poisoned[1] | poisoned[2]),
        )

    batch, heads, queries, _ = all_queries.shape
    return masked_softmax(row_blocks(batch, heads, queries, key.shape[2]), dense_rows)[0]
