"""The prior of a pair as a fused kernel reads it: `LagTables` for uniform times, a `SeparablePath` for any others.

A kernel knows nothing of the dynamics. For query i and key j it needs the decay E, the bias b of the score in bits, and
the weight w of the squared residual. Both types give them, and both carry gradients back to the parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfa.checks import exported
from rfa.dynamics import accumulated_variance, decay_kernel, riccati_log_gain, time_dtype

from .dense import least_effective_variance, linear_scan
from .positions import Positions, by_group, cumulative_at_queries, take
from .problem import Certified, Options, Parameters, Problem, RiccatiWeights, certificate_missing
from .transforms import readable, values_at_hand

BITS = math.log2(math.e)  # bits in a nat
UNIT = 2.0**40  # lag tables hold w / UNIT for Student-t scores: 1 / (Sigma + gamma^2) may lie beyond float32
SMALLEST = torch.finfo(torch.float32).tiny  # a smaller variance counts as this and has no gradient


class LagTables(NamedTuple):
    """E, b and w of every lag `|i - j|` of positions, in float32.

    Fields:
        tables: `(3, heads, lags)`: E, b in bits, and w (`w / UNIT` for Student-t scores).
        coefficient: c, `(heads,)`.
        bound: `(heads,)`: no score of a head is larger. It has no gradient.
    """

    tables: Tensor
    coefficient: Tensor
    bound: Tensor


class SeparablePath(NamedTuple):
    """E, b and w of a pair from numbers at its key and at its query, for any times.

    M is the cumulative decay and u the accumulated variance from the origin up to a key or a query. With `e` the
    earlier and `l` the later of the two:

        E     = exp(-|M_i - M_j|)
        Sigma = (u_l - u_e) + u_e (1 - E^2) + eta^2 E^2 + sigma_0^2
        w     = W / (Sigma + gamma^2)
        b     = -B log2 Sigma, or key_bias_j - |C_i - C_j| where there is a third row C

    Fields (b is 1 or batch):
        key_path: `(2 or 3, b, heads, keys)` float64: M, u, and C in bits.
        query_path: `(2 or 3, b, heads, queries)` float64, the same at the queries.
        key_bias: `(b, heads, keys)` float32 in bits; None without a third row.
        scalars: `(6, heads)` float32 or float64: c, W, eta^2, sigma_0^2, gamma^2, B.
        bound: `(heads,)`: no score of a head is larger. It has no gradient.
    """

    key_path: Tensor
    query_path: Tensor
    key_bias: Tensor | None
    scalars: Tensor
    bound: Tensor


PathOf = Callable[[Problem], SeparablePath]


@dataclass
class DecodingCache:
    """What a decoder keeps for the next token, valid while the parameters do not change.

    Fields:
        key_norm: `|k|^2` of all keys, `(batch, heads, keys)`.
        tables: lag tables for at least as many lags as there are keys.
        mirrored: these with the longest lag first, as compiled code reads them for one token.
        last_call: of compiled code for one token; a copy has none, because it holds addresses.
        tail: of `certified_tail` for the tables; None to read all keys.
        uncertified: int64 `(batch, heads)`, counts the rows to which keys that the cache has dropped might matter; None
            where it has dropped none.
        reach: number of keys, behind which none can count for any head; None while it is not known.
    """

    key_norm: Tensor | None = None
    tables: LagTables | None = None
    mirrored: Tensor | None = None
    last_call: Any = None
    tail: Tensor | None = None
    uncertified: Tensor | None = None
    reach: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy or a pickle, which must not hold addresses."""
        return {**self.__dict__, "last_call": None}


def kernel_prior(
    problem: Problem, cache: DecodingCache | None = None, tables: bool = True, path_of: PathOf | None = None
) -> LagTables | SeparablePath:
    """The prior in the form that suits the times; without `tables` always a path, that of `path_of`.

    Where there is a cache, its tables are made for twice the lags, so that they serve all the tokens in between.
    """
    path_of = path_of or separable_path
    parameters, positions, options, _ = problem
    keys = positions.key_times.shape[-1]
    if not positions.uniform or (options.prior == "riccati" and not _gains_of_lags(positions, options, cache)):
        return path_of(problem)
    if cache is None or torch.is_grad_enabled() or keys < 2:  # the gain of a single key differs
        return lag_tables(parameters, options, keys) if tables else path_of(problem)
    if cache.tables is None or cache.tables.tables.shape[-1] < keys:  # they prove what a cache may drop, too
        cache.tables, cache.mirrored, cache.tail = lag_tables(parameters, options, 2 * keys), None, None
    return cache.tables if tables else path_of(problem)


def _gains_of_lags(positions: Positions, options: Options, cache: DecodingCache | None) -> bool:
    """Whether the Riccati weight of uniform times depends on the lag alone, as far as the values can be read at once.

    A gain depends on the key before. That is one step away where no absent key lies between the keys of a group, as
    with padding on the left. A key that is alone has another gain, which changes the log precision and nothing else: a
    cache that has dropped keys asks for it to count rows, and a key that is alone has no others that were dropped.
    """
    groups = positions.key_groups
    if groups is None:
        return True
    shown = options.log_precision and (cache is None or cache.uncertified is None)
    if shown or torch.is_grad_enabled() or not values_at_hand(groups):
        return False
    return positions.rising()


def _coefficient(parameters: Parameters, options: Options) -> Tensor:
    """The factor of the logarithm, or of the weighted residual, in a score in bits."""
    if options.weight == "student_t":
        return parameters.inverse_temperature * (parameters.robustness + 1)
    return BITS * parameters.inverse_temperature


def lag_tables(parameters: Parameters, options: Options, length: int) -> LagTables:
    """E, `b = -beta_s log2 Sigma` (or the Riccati weight) and `w = 1 / (nu_s d (Sigma + gamma^2))` of `length` lags."""
    modes = parameters.frequency.shape[-1]
    parameters = parameters.to(time_dtype(parameters.decay.device))
    head = parameters.unsqueezed(1)
    decay = head.decay
    steps = torch.arange(length, device=decay.device, dtype=decay.dtype)
    lag = steps if head.horizon is None else steps + head.horizon
    lag = lag.expand(decay.shape[0], length)
    variance = head.variance(lag)
    effective_variance = (variance + head.query_noise).clamp(
        min=least_effective_variance(options.weight, torch.float32)
    )
    if options.prior == "riccati":
        log_gain, log_rest = (part[:, None] for part in log_gains_of_lags(parameters))
        log_prior = (log_gain if length > 1 else 0.0) + log_rest * steps
    else:
        log_prior = -torch.log(
            (variance + head.query_noise if options.query_noise_in_bias else variance).clamp(min=SMALLEST)
        )
    bias = BITS * head.inverse_temperature * log_prior
    unit = UNIT if options.weight == "student_t" else 1.0
    divisor = effective_variance if options.gate else torch.ones_like(effective_variance)
    weight = 1 / (unit * head.robustness * modes * divisor)
    weight = weight.clamp(max=torch.finfo(torch.float32).max)
    tables = torch.stack([decay_kernel(decay, lag), bias, weight]).to(torch.float32)
    bound = tables[1].detach().amax(-1) if length else tables.new_zeros(decay.shape[0])
    return LagTables(tables, _coefficient(parameters, options).to(torch.float32), bound)


def log_gains_of_lags(parameters: Parameters) -> tuple[Tensor, Tensor]:
    """`log K` and `log(1 - K)` of the steady Kalman gain K at steps of one, `(heads,)` each."""
    parameters = parameters.to(time_dtype(parameters.decay.device))
    noise = parameters.key_noise + parameters.noise_floor
    return riccati_log_gain(
        parameters.decay, parameters.process_noise, noise, torch.ones_like(parameters.decay), SMALLEST
    )


def separable_path(problem: Problem) -> SeparablePath:
    """Constant dynamics at any times: `M_i = mu t_i` and `u_i = sigma^2 phi(t_i - t_0)`.

    A horizon h changes the noises here. Its decay `exp(-mu h)` of keys and values is applied by the caller.
    """
    parameters, positions, options, riccati = problem
    modes = parameters.frequency.shape[-1]
    dtype = time_dtype(parameters.decay.device)
    parameters = parameters.to(dtype)
    if options.prior == "riccati" and riccati is None:
        riccati = riccati_weights(parameters, positions, dtype, SMALLEST)
    decay, process_noise = parameters.decay[:, None], parameters.process_noise[:, None]
    times_of_heads = positions.times_of_heads()
    ends = [t.detach().amin(-1, keepdim=True) for t in times_of_heads if t.shape[-1]]
    origin = torch.stack(torch.broadcast_tensors(*ends)).amin(0) if ends else 0.0
    key_noise, noise_floor, diffusion = parameters.key_noise, parameters.noise_floor, process_noise
    if parameters.horizon is not None:
        remaining = decay_kernel(2 * parameters.decay, parameters.horizon)  # of a variance after the horizon
        key_noise, diffusion = remaining * key_noise, remaining[:, None] * process_noise
        noise_floor = noise_floor + parameters.process_noise * accumulated_variance(
            parameters.decay, parameters.horizon
        )
    rows: list[list[Tensor]] = []
    for times in times_of_heads[: 1 if times_of_heads[0] is times_of_heads[1] else 2]:
        elapsed = (times - origin).to(dtype)
        cumulative_decay = (decay * elapsed).expand(-1, decay.shape[0], -1)
        rows.append([cumulative_decay, diffusion * accumulated_variance(decay, elapsed)])
    rows = rows if len(rows) == 2 else [*rows, list(rows[0])]
    inverse_temperature = parameters.inverse_temperature
    key_bias = None
    if riccati is not None:
        key_bias = (BITS * inverse_temperature[:, None] * riccati.log_gain).to(torch.float32)
        scale = BITS * inverse_temperature[:, None]
        rows[0].append(scale * riccati.cumulative)
        rows[1].append(scale * riccati.at_queries)
        bound = key_bias.detach().amax((0, 2)) if key_bias.numel() else torch.zeros_like(inverse_temperature)
    else:
        stationary = torch.where(decay > 0, diffusion / (2 * decay), torch.inf)[:, 0]
        least = torch.minimum(key_noise + noise_floor, stationary + noise_floor).clamp(min=SMALLEST)
        bound = -inverse_temperature * torch.log2(
            least + parameters.query_noise if options.query_noise_in_bias else least
        )
    if options.query_noise_in_bias:  # Sigma + gamma^2 in both places: gamma^2 joins the floor
        noise_floor, query_noise = noise_floor + parameters.query_noise, torch.zeros_like(noise_floor)
    else:
        query_noise = parameters.query_noise
    inverse_freedom = 1 / (parameters.robustness * modes)
    scalars = torch.stack(
        [_coefficient(parameters, options), inverse_freedom, key_noise, noise_floor, query_noise, inverse_temperature]
    )
    (batch,) = torch.broadcast_shapes(*(part.shape[:1] for part in [*rows[0], *rows[1]]))
    key_path, query_path = (
        torch.stack([part.expand(batch, -1, -1).to(torch.float64) for part in parts]) for parts in rows
    )
    return SeparablePath(key_path, query_path, key_bias, scalars, bound.detach().to(torch.float32))


class KeyIntervals(NamedTuple):
    """The time before each key, group after group, `(b, 1 or heads, keys)` each.

    Fields:
        time: since the key before it in its group. The first key of a group has that of the next one.
        follows: True where a key of the group stands before it.
        leads: True where one stands after it.
        restore: `(b, keys)`, the order that takes these back to the keys' own; None where they stand in it.
    """

    time: Tensor
    follows: Tensor
    leads: Tensor
    restore: Tensor | None


def key_intervals(positions: Positions) -> KeyIntervals:
    """The intervals between keys that take part: absent keys do not count."""
    times, groups, restore = positions.times_of_heads()[0], positions.key_groups, None
    if groups is None:
        follows = torch.ones_like(times[:, :1], dtype=torch.bool)
        follows[..., :1] = False
    else:
        order, restore, follows = positions.once("keys", lambda: by_group(groups))
        times = take(times, order)
        follows = follows[:, None]
    leads = follows.roll(-1, -1)
    between = torch.where(follows, times - times.roll(1, -1), torch.where(leads, times.roll(-1, -1) - times, 1.0))
    return KeyIntervals(between, follows, leads, restore)


def steady_gains(
    parameters: Parameters, intervals: KeyIntervals, dtype: torch.dtype, smallest: float | None = None
) -> tuple[Tensor, Tensor]:
    """`log K` and `log(1 - K)` of the steady Kalman gain of each interval, `(b, heads, keys)`.

    The first key of a group takes the gain of the first interval, 1 where it is alone, and its `log(1 - K)` counts as
    0. `smallest` is passed to `riccati_log_gain`.
    """
    decay, process_noise, key_noise, noise_floor = (
        p.to(dtype)[:, None]
        for p in (parameters.decay, parameters.process_noise, parameters.key_noise, parameters.noise_floor)
    )
    noise = key_noise + noise_floor
    log_gain, log_rest = riccati_log_gain(decay, process_noise, noise, intervals.time.to(dtype), smallest)
    known = intervals.follows | intervals.leads
    return log_gain.masked_fill(~known, 0.0), log_rest.masked_fill(~intervals.follows, 0.0)


def riccati_weights(
    parameters: Parameters, positions: Positions, dtype: torch.dtype, smallest: float | None = None
) -> RiccatiWeights:
    """Steady-state Kalman gains of each interval between two keys, and their sums along the keys."""
    intervals = key_intervals(positions)
    log_gain, step_down = steady_gains(parameters, intervals, dtype, smallest)
    cumulative = step_down.cumsum(-1, dtype=time_dtype(step_down.device))
    if intervals.restore is not None:
        log_gain, cumulative = take(log_gain, intervals.restore), take(cumulative, intervals.restore)
    return RiccatiWeights(log_gain, cumulative, cumulative_at_queries(cumulative, positions))


# Certified windows: a query leaves out old keys where the prior proves that they cannot change its estimate.
#
# A robust score is never above the prior's part of it, and with the Riccati prior that part falls with time. So before
# any content is seen, all keys up to j together weigh at most
#
#     tail_i(j) = sum_{l <= j} 2^(b_l - (G_i - G_l)) = 2^(-(G_i - G_j)) S_j
#
# in query i's estimate, b and G in bits. Query i may leave them out where `tail_i(j) <= eps s_i`, with s_i the sum over
# the keys behind j. Then `|out - exact| <= 2 eps max_j |v_j|`, and `log s_i` is at most eps too small.

# what "auto" leaves out: less than the rounding of the states
_AUTO = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-12, torch.float16: 2.0**-12}


def eps_of_dtype(certified: Certified, dtype: torch.dtype) -> float | None:
    """The eps for states of a dtype; None to visit all keys."""
    return _AUTO.get(dtype) if certified == "auto" else certified


def eps_of(options: Options, dtype: torch.dtype) -> float:
    """The eps of a call for states of a dtype; 0 where all keys are visited."""
    bounded = options.certified is not None and certificate_missing(options.prior, options.causal) is None
    return eps_of_dtype(options.certified, dtype) or 0.0 if bounded else 0.0


def tail_of_keys(rising: Tensor, key_bias: Tensor, positions: Positions) -> Tensor:
    """`log2 S_j`, `S_j = sum_{l <= j} 2^(b_l - (G_j - G_l))` over the keys of j's group, `(b, heads, keys)` in float32.

    `rising` is G and `key_bias` b, in bits. It is one scan over the keys: `S_j = 2^(G_{j-1} - G_j) S_{j-1} + 2^b_j`.
    """
    rising, bias = rising.detach(), key_bias.detach().to(rising.dtype)
    least = math.log2(torch.finfo(bias.dtype).tiny)  # in units of the largest a key counts for so much at least
    highest = bias.amax(-1, keepdim=True) if bias.shape[-1] else bias
    mass = torch.exp2((bias - highest).clamp(min=least))
    groups, restore = positions.key_groups, None
    if groups is not None:
        order, restore, follows = positions.once("keys", lambda: by_group(groups))
        rising, mass = take(rising, order), take(mass, order)
    remaining = torch.exp2(rising[..., :-1] - rising[..., 1:])
    remaining = torch.cat([torch.zeros_like(mass[..., :1]), remaining], dim=-1)
    if groups is not None:
        remaining = remaining.masked_fill(~follows[:, None], 0.0)
    tail = torch.log2(linear_scan(remaining, mass))
    if restore is not None:
        tail = take(tail, restore)
    return (tail + highest).to(torch.float32)


def slope_of_lags(bias: Tensor) -> Tensor:
    """By how many bits a bias that is linear in the lag falls from each key to the one before, `(heads,)`."""
    return (bias[:, 0].detach().double() - bias[:, -1].detach().double()) / (bias.shape[1] - 1)


def tail_of_lags(bias: Tensor) -> Tensor:
    """`tail_of_keys` less `b_0` for a bias linear in the lag, `(heads, lags)` in bits: `-log2(1 - 2^-slope)`."""
    return -torch.log2(-torch.expm1(-math.log(2) * slope_of_lags(bias))).to(torch.float32)[None, :, None]


def certified_tail(
    prior: LagTables | SeparablePath,
    positions: Positions,
    certified: float | None,
    *,
    largest: Tensor | None = None,
) -> Tensor | None:
    """What a kernel compares: keys up to j may go where `tail_j - (G_i - G_j) <= log2 s_i`; None to visit all keys.

    It is `(1, heads, 1)` beside tables, where the difference is the bias of the lag, and `(b, heads, keys)` beside a
    path. `largest` is the largest product of a dot-product score in nats, `(heads,)`; there G is the third row of the
    path itself, and the negative one of a filter.
    """
    keys = positions.key_times.shape[-1]
    if not certified or keys < 2 or exported():  # an exported program must serve other lengths
        return None
    if isinstance(prior, LagTables):
        tail = tail_of_lags(prior.tables[1])
    elif not readable():  # a scan that is recorded would serve one length
        return None
    else:
        assert prior.key_bias is not None
        tail = tail_of_keys(prior.key_path[2] * (-1 if largest is None else 1), prior.key_bias, positions)
        if prior.key_bias.shape[0] == 1:  # one path for all samples, whose segments may differ
            tail = tail.amax(0, keepdim=True)
    if largest is not None:
        tail = tail + BITS * largest.detach()[:, None]
    return tail - math.log2(certified)


def reach_of(tables: LagTables, certified: float, reserve: float) -> float:
    """The lag from which on no key counts for any head whose row sums to at least `2^bound e^-reserve`; 1 or more."""
    least = float(slope_of_lags(tables.tables[1]).min())
    return max(1.0, float(math.ceil((BITS * reserve - math.log2(certified)) / least))) if least > 0 else math.inf


def misses_dropped(tables: LagTables, tail: Tensor, log_sum: Tensor, keys: int) -> Tensor:
    """To which rows keys before the `keys` that are held might matter, `(batch, heads, queries)`.

    `log_sum` is of the rows, the last of the keys, in bits; -inf for one that sees no key.
    """
    queries, bias = log_sum.shape[-1], tables.tables[1].double()
    lag = torch.arange(keys - queries + 1, keys + 1, device=bias.device)  # of the newest key that was dropped
    mass = bias[:, :1] - slope_of_lags(bias)[:, None] * lag + tail[0]
    return ~(mass <= log_sum) & (log_sum != -torch.inf)


def left_out(score: Tensor, tail: Tensor, certified: float) -> Tensor:
    """Which keys each row leaves out, `(batch, heads, rows, keys)`: the rule itself, row by row.

    Args:
        score: in nats, -inf where a key is not seen.
        tail: `log tail_i(j)` in nats, as `score`.
        certified: eps.
    """
    total = score.detach().flip(-1).logcumsumexp(-1).flip(-1)  # of a key and all behind it
    behind = torch.cat([total[..., 1:], torch.full_like(total[..., :1], -torch.inf)], dim=-1)
    return (tail <= behind + math.log(certified)) & behind.isfinite()
