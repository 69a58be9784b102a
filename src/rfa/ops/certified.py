"""Certified windows: a query leaves out old keys where the prior proves that they cannot change its estimate.

A robust score is never above the prior's part of it, and with the Riccati prior that part falls with time. So before
any content is seen, all keys up to j together weigh at most

    tail_i(j) = sum_{l <= j} 2^(b_l - (G_i - G_l)) = 2^(-(G_i - G_j)) S_j

in query i's estimate, b and G in bits. Query i may leave them out where `tail_i(j) <= eps s_i`, with s_i the sum over
the keys behind j. Then `|out - exact| <= 2 eps max_j |v_j|`, and `log s_i` is at most eps too small.
"""

import math

import torch
from torch import Tensor

from rfa.checks import exported

from .dense import linear_scan
from .positions import Positions, by_group, take
from .prior import BITS, LagTables, SeparablePath
from .problem import Certified, Options, certificate_missing
from .transforms import readable

# what "auto" leaves out: less than the rounding of the states
_AUTO = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-12, torch.float16: 2.0**-12}


def allowed(certified: Certified, dtype: torch.dtype) -> float | None:
    """The eps for states of a dtype; None to visit all keys."""
    return _AUTO.get(dtype) if certified == "auto" else certified


def eps_of(options: Options, dtype: torch.dtype) -> float:
    """The eps of a call for states of a dtype; 0 where all keys are visited."""
    bounded = options.certified is not None and certificate_missing(options.prior, options.causal) is None
    return allowed(options.certified, dtype) or 0.0 if bounded else 0.0


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
    """The same less `b_0` for a bias that is linear in the lag, `(heads, lags)` in bits: `-log2(1 - 2^-slope)`."""
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
