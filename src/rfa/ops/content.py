"""Robust filter attention in which each token sets the dynamics until the next (appendix E.6)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import attend, backend_for
from .cumulative import CumulativeDynamics, TokenDynamics, cumulative_dynamics
from .dense import (
    DenseRows,
    FiniteStates,
    effective_variance,
    evidence,
    into_frame,
    log_weights,
    masked_softmax,
    positive,
    row_blocks,
    squared_distance,
    turned,
)
from .kernel import kernel_inputs
from .positions import Positions
from .prior import BITS, SMALLEST, SeparablePath
from .problem import Weight
from .transforms import without_autocast


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
    with without_autocast(query):
        path = content_path(dynamics, positions)
        of_keys, of_queries = path.rotations()
        states, dtype = (query, *positions.without_absent(key, value)), torch.promote_types(query.dtype, torch.float32)
        in_frame = into_frame(states, of_keys, of_queries, dtype)
        estimate = content_attention_in_frame(*in_frame, path=path, noises=noises, weight=weight, backend=backend)
        return turned(estimate, of_queries).to(query.dtype)


class ContentPath(NamedTuple):
    """What the dynamics of tokens come to at each key and query.

    Fields:
        dynamics: of each token.
        at_keys, at_queries: the sums up to each.
        positions: where they stand; absent queries have moved into the interval in which they lie.
    """

    dynamics: TokenDynamics
    at_keys: CumulativeDynamics
    at_queries: CumulativeDynamics
    positions: Positions

    def rotations(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cosine and sine of the phases at keys and at queries, `(batch, heads, length, modes)` each."""
        of_queries = self.of_queries()
        same = self.at_keys.phase is self.at_queries.phase
        return of_queries if same else _cosine_and_sine(self.at_keys.phase.mT), of_queries

    def of_queries(self) -> tuple[Tensor, Tensor]:
        """Those at queries alone."""
        return _cosine_and_sine(self.at_queries.phase.mT)


def content_path(dynamics: TokenDynamics, positions: Positions) -> ContentPath:
    """The path of tokens, the last of which are the queries."""
    at_keys, at_queries, query_times = cumulative_dynamics(dynamics, positions)
    return ContentPath(dynamics, at_keys, at_queries, positions.replace(query_times=query_times))


def content_attention_in_frame(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    path: ContentPath,
    noises: Noises,
    weight: Weight = "student_t",
    backend: str = "auto",
) -> Tensor:
    """`content_filter_attention` of states in the common frame, in float32 or float64; the estimate stays in it.

    Queries are turned by `exp(-i W_i)` already, keys and values by `exp(-i W_j)`. `path` is that of the keys' tokens.
    """
    kernel = backend_for(backend, query, value).kernel
    dtype = torch.promote_types(query.dtype, torch.float32)
    if not query.numel():  # no tokens, or no sequences
        return torch.zeros_like(query, dtype=dtype)
    with without_autocast(query):
        states = query, *path.positions.without_absent(key, value)
        query, key, value = (x.to(dtype) for x in states)
        if kernel is None:
            return _dense(query, key, value, path, noises.to(dtype), weight)
        prior, decode = _prior(path, noises, query.shape[-1] // 2, weight), not torch.is_grad_enabled()
        options: dict[str, Any] = {"causal": True, "score_kind": weight, "decode": decode}
        inputs = kernel_inputs(query, key, value, None, prior, path.positions, **options)
        return attend(kernel(), inputs, path.positions)[0].to(dtype)


def _cosine_and_sine(phase: Tensor) -> tuple[Tensor, Tensor]:
    return phase.cos(), phase.sin()


def _prior(path: ContentPath, noises: Noises, modes: int, weight: Weight) -> SeparablePath:
    """The prior of a fused kernel."""
    dynamics, at_keys, at_queries, _ = path
    noises = noises.to(at_keys.decay.dtype)
    inverse_temperature, inverse_freedom = noises.inverse_temperature, 1 / (noises.robustness * modes)
    coefficient = inverse_temperature * (noises.robustness + 1 if weight == "student_t" else BITS)
    scalars = [coefficient, inverse_freedom, noises.key_noise, noises.noise_floor, noises.query_noise]
    return SeparablePath(
        key_path=torch.stack([at_keys.decay, at_keys.variance]).to(torch.float64),
        query_path=torch.stack([at_queries.decay, at_queries.variance]).to(torch.float64),
        key_bias=None,
        scalars=torch.stack([*scalars, inverse_temperature]),
        bound=_bound(noises, dynamics).to(torch.float32),
    )


def _bound(noises: Noises, dynamics: TokenDynamics) -> Tensor:
    """`-beta_s log2` of the least Sigma: `V >= s (1 - E^2)`, with s the least stationary variance of any token."""
    noises = Noises(*(p.detach() for p in noises))
    decay, process_noise = (x.detach().to(noises.key_noise.dtype) for x in dynamics[:2])
    stationary = torch.where(decay > 0, process_noise / (2 * decay), torch.inf).amin((0, 2))
    least = (torch.minimum(noises.key_noise, stationary) + noises.noise_floor).clamp(min=SMALLEST)
    return -noises.inverse_temperature * torch.log2(least)


def _dense(query: Tensor, key: Tensor, value: Tensor, path: ContentPath, noises: Noises, weight: Weight) -> Tensor:
    """The estimate in the frame in ordinary autograd code, in float32 or float64."""
    _, at_keys, at_queries, positions = path
    states = FiniteStates.of(query, key, value)
    batch, heads, queries, channels = query.shape
    key_noise, query_noise, floor, robustness, temperature = (p[:, None, None] for p in noises)

    def dense_rows(rows: slice) -> DenseRows:
        visible = positions.rows(rows).visible(causal=True)
        unseen = ~visible[:, None]
        apart = at_queries.decay[..., rows, None] - at_keys.decay[..., None, :]
        apart = apart.masked_fill(unseen, 0.0)
        added = at_queries.variance[..., rows, None] - at_keys.variance[..., None, :] * torch.exp(-2 * apart)
        added = added.masked_fill(unseen, 0.0).clamp(min=0).to(key.dtype)  # rounding may leave a tiny negative number
        decay = torch.exp(-apart).to(key.dtype)
        variance = added + key_noise * decay.square() + floor
        scale = (robustness * (channels // 2), effective_variance(variance, query_noise, weight))
        weighed = evidence(squared_distance(states.query[:, :, rows], states.key, decay), scale, weight)
        return DenseRows(
            log_weights(-torch.log(positive(variance)), weighed, robustness, temperature, weight),
            visible,
            lambda weights: weights * decay @ states.value,
            states.unknown(rows, visible),
        )

    return masked_softmax(row_blocks(batch, heads, queries, key.shape[2]), dense_rows)[0]
