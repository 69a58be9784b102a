"""Robust filter attention in which each token sets the dynamics until the next (appendix E.6)."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.dynamics import accumulated_variance, time_dtype

from .backends import attend, backend_for
from .dense import (
    DenseRows,
    FiniteStates,
    effective_variance,
    evidence,
    into_frame,
    linear_scan,
    log_weights,
    masked_softmax,
    positive,
    row_blocks,
    squared_distance,
    turned,
)
from .kernel import kernel_inputs
from .positions import Positions, beside, by_group, take, token_groups
from .prior import BITS, SMALLEST, SeparablePath
from .problem import Weight
from .transforms import without_autocast


class TokenDynamics(NamedTuple):
    """The dynamics from each token to the next one.

    Fields:
        decay: mu, `(batch, heads, length)`, per unit of time.
        process_noise: sigma^2, `(batch, heads, length)`, variance per unit of time.
        frequency: omega, `(batch, heads, modes, length)`, radians per unit of time.
    """

    decay: Tensor
    process_noise: Tensor
    frequency: Tensor


class CumulativeDynamics(NamedTuple):
    """Sums from the origin of a group up to each token, in `time_dtype`.

    Between a token j and a later token i: `E = exp(-(M_i - M_j))`, `V = u_i - E^2 u_j`, and the phase `W_i - W_j`.

    Fields:
        decay: the cumulative decay M, `(batch, heads, length)`.
        variance: the accumulated variance u, `(batch, heads, length)`.
        phase: the cumulative phase W, `(batch, heads, modes, length)`.
    """

    decay: Tensor
    variance: Tensor
    phase: Tensor


def cumulative_dynamics(
    dynamics: TokenDynamics, positions: Positions
) -> tuple[CumulativeDynamics, CumulativeDynamics, Tensor]:
    """The sums at the keys and at the queries, which are the last of the keys' tokens, and the times of the queries.

    An absent key does not count: the dynamics of the key before it last until the next one. As a query it lies in that
    interval, at its own time, or at the nearer end where its time lies outside. Each group has its own sums, in any
    order of the groups. The first key of a group has u = 0.
    """
    tokens = _tokens(positions)
    elapsed = tokens.elapsed[:, None]
    rate, process_noise, frequency = map(tokens.before, dynamics)
    decay, phase = rate * elapsed, frequency * elapsed[:, None]
    remaining = torch.exp(-2 * decay) * tokens.follows[:, None]
    added = process_noise * accumulated_variance(rate, elapsed)
    queries = positions.query_times.shape[-1]
    sums = tokens.sums(decay), tokens.growth(remaining, added), tokens.sums(phase)
    at_keys, at_queries = zip(*(tokens.placed(each, queries) for each in sums), strict=True)
    times = _last(tokens.restored(tokens.times), queries)
    return CumulativeDynamics(*at_keys), CumulativeDynamics(*at_queries), times


def clocked(positions: Positions, rate: Tensor) -> Positions:
    """Positions with the clock of each head, `t_i = sum_{l < i} rate_l (t_{l+1} - t_l)`.

    The rate of a token `(batch, heads, keys)`, the head's time per unit of the common time, holds until the next token.
    The queries are the last of the keys' tokens. Absent keys and groups count as in `cumulative_dynamics`.
    """
    tokens = _tokens(positions)
    sums = tokens.sums(tokens.before(rate) * tokens.elapsed[:, None])
    return positions.replace(clock=tokens.placed(sums, positions.query_times.shape[-1]), uniform=False)


class _Tokens(NamedTuple):
    """The tokens of a sequence, group after group, `(b, length)` each.

    Fields:
        times: in `time_dtype`, those of absent tokens moved between the present ones before and after them.
        elapsed: the time since the last present token of the group, 0 where there is none.
        follows: 1 where there is one, else 0.
        first: True where a group begins.
        present: True where a token takes part; None where all do.
        order, restore: the order of the tokens and the one that takes it back; None where they stand as they came.
    """

    times: Tensor
    elapsed: Tensor
    follows: Tensor
    first: Tensor
    present: Tensor | None
    order: Tensor | None
    restore: Tensor | None

    def sorted(self, x: Tensor) -> Tensor:
        """`x` `(b, ..., length)` of the sequence, group after group."""
        return x if self.order is None else take(x, self.order)

    def restored(self, x: Tensor) -> Tensor:
        """`x` `(b, ..., length)` in the order of the sequence."""
        return x if self.restore is None else take(x, self.restore)

    def placed(self, sums: tuple[Tensor, Tensor], queries: int) -> tuple[Tensor, Tensor]:
        """Sums at all keys and at the last tokens, the queries, in the order of the sequence; one tensor if alike."""
        key = self.restored(sums[0])
        return key, _last(key if sums[1] is sums[0] else self.restored(sums[1]), queries)

    def before(self, x: Tensor) -> Tensor:
        """`x` `(b, ..., length)` of the sequence at the last present token before each token in its group, sorted."""
        return _before(self.sorted(x.to(self.times.dtype)), self.present, self.first)

    def sums(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the steps at the tokens as keys and as queries: the step to an absent token is its own only."""
        if self.present is None:
            total = self._cumulative(step)
            return total, total
        counted = step.masked_fill(~beside(step, self.present), 0.0)
        total = self._cumulative(counted)
        return total, total + (step - counted)

    def _cumulative(self, step: Tensor) -> Tensor:
        """Sums that begin at 0 in each group. So a group that is read later changes no sum of the others."""
        total = step.cumsum(-1)
        if self.order is None:
            return total
        start = torch.where(self.first, torch.arange(self.first.shape[-1], device=step.device), 0).cummax(-1).values
        return total - take(total, start)

    def growth(self, remaining: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """`u_{l+1} = remaining_l u_l + added_l` at the tokens as keys and as queries, as `sums`."""
        if self.present is None:
            total = linear_scan(remaining, added)
            return total, total
        absent = ~beside(added, self.present)
        total = linear_scan(remaining.masked_fill(absent, 1.0), added.masked_fill(absent, 0.0))
        return total, torch.where(absent, remaining * total + added, total)


def _tokens(positions: Positions) -> _Tokens:
    """The tokens of the keys. The last of them are the queries, which have a time and a group even where absent."""
    keys, queries = positions.key_times.shape[-1], positions.query_times.shape[-1]
    times = torch.cat([positions.key_times[:, : keys - queries], positions.query_times], dim=-1)
    times, present, order, restore = times.to(time_dtype(times.device)), positions.present(), None, None
    first = torch.zeros_like(times, dtype=torch.bool)
    first[..., :1] = True
    if positions.query_groups is not None:
        order, restore, joined = positions.once("tokens", lambda: by_group(token_groups(positions)))
        times, first = times.expand(order.shape).gather(-1, order), ~joined
        present = None if present is None else present.gather(-1, order)
    before = _before(times[:, None], present, first)[:, 0]
    follows = _before(torch.ones_like(times)[:, None], present, first)[:, 0]
    if present is not None:
        backwards = present.flip(-1), F.pad(first[:, 1:], (0, 1), value=True).flip(-1)
        after = _before(times[:, None].flip(-1), *backwards)
        last = _before(torch.ones_like(after), *backwards) == 0
        after = after.masked_fill(last, torch.inf).flip(-1)[:, 0]
        between = torch.minimum(torch.where(follows > 0, torch.maximum(times, before), times), after)
        times = torch.where(present, times, between)
    return _Tokens(times, torch.where(follows > 0, times - before, 0.0), follows, first, present, order, restore)


def _before(x: Tensor, present: Tensor | None, first: Tensor) -> Tensor:
    """The value of x `(b, ..., length)` at the last present token before each token in its group; 0 without one."""
    if present is not None:
        holds = beside(x, ~present & ~first).to(x.dtype)
        x = linear_scan(holds, x.masked_fill(~beside(x, present), 0.0))
    return x.roll(1, -1).masked_fill(beside(x, first), 0.0)  # the first token of a row is the first of its group


def _last(x: Tensor, length: int) -> Tensor:
    return x if x.shape[-1] == length else x[..., x.shape[-1] - length :]


# The operator


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
