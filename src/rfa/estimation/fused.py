"""Robust estimates of isotropic SDEs on the fused attention operator: queries are states, keys and values observations.

In the common frame states only decay, so that for one query i and one observation j

    d_ij^2 = |x_i - E_ij z_j|^2 / (Sigma_ij + P_i),    xbar_i = sum_j w_ij c_ij E_ij z_j / sum_j w_ij c_ij,

which is the operator's `rfa.ops.prior.SeparablePath`: `Sigma_ij = u_i - E_ij^2 u_j + eta^2 E_ij^2`, and
P_i joins the query's u. Lyapunov: `c_ij = 1 / Sigma_ij`, P = 0. Riccati: `c_ij = K_j exp(C_i - C_j)` with exact gains.
All is in units of eta, relative to a trajectory of the process that runs through the observations. So series may differ
in their models, and float32 spends its digits on differences.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rfa.ops.backends import TRITON_CHANNELS, attend, backend_for
from rfa.ops.kernel import Kernel, Score
from rfa.ops.positions import Positions, group_numbers
from rfa.ops.prior import BITS, SeparablePath
from rfa.ops.reference import path_attention

from .gains import Filtered, filtered
from .isotropic import Isotropic
from .linear_sde import LinearSDE
from .observations import Grid
from .penalties import Belief
from .plan import Known, Plan, Row
from .series import Series

_SMALLEST = 1e-18  # variance that a float32 kernel can divide by
_NEGLIGIBLE = 28.0  # -log 1e-12: what lies behind a block's first key may weigh so little
_ROWS = 96  # queries of a block, as in the CPU kernels


def fused_rows(sde: LinearSDE, grid: Grid, plan: Plan, known: Known | None) -> Row:
    """Every query's row of `robust_estimate`, without weights and objective, in O(T) memory a series.

    Raises:
        ValueError: for a model or an initial covariance that is not isotropic, or a row that is missing in part.
    """
    model, belief = Isotropic.of(sde, grid.shape), plan.belief
    series = Series.of(model, grid, known)
    if plan.riccati:
        past = filtered(series)
        weights = _riccati(series, past)
        if belief.gaussian:
            total = torch.where(weights.scale > 0, 0.0, -torch.inf)
            return Row(*series.restored(series.wanted(past.mean), total, weights.scale), None, None)
        without, precision = series.wanted(past.prediction), series.wanted(past.before)
    else:
        weights = _lyapunov(series)
        without = torch.zeros_like(series.wanted(series.seen))
        seen_here = series.wanted(series.present)
        precision = torch.zeros_like(seen_here, dtype=without.dtype)
        if not belief.gaussian and (plan.start == "leave_one_out" or not bool(seen_here.all())):
            alone = Belief(torch.inf, None, belief.size)
            without, total = _step(series, weights, alone, without, strictly_past=True)
            precision = total.exp()
    state = series.first(without, precision, plan.start == "leave_one_out")
    for _ in range(1 if belief.gaussian else plan.iterations):
        state, total = _step(series, weights, belief, state)
    return Row(*series.restored(state, total, weights.scale), None, None)


class _Weights(NamedTuple):
    """A prior as the operator takes it.

    key_path: M, u and, with gains, C in bits, `(rows, b, 1, T)`; query_path: `(rows, b, 1, queries)`.
    key_bias: `log2 K`, `(b, 1, T)`, or None.
    bound: no score lies above it.
    scale: the precision that a weight of one stands for, `(b, queries)`.
    start: what is known of the first moment: its mean `(b, queries, n)` and log weight `(b, queries)`, or None.
    """

    key_path: Tensor
    query_path: Tensor
    key_bias: Tensor | None
    bound: float
    scale: Tensor
    start: tuple[Tensor, Tensor] | None


def _lyapunov(series: Series) -> _Weights:
    """Each observation by itself: `c = 1 / Sigma`."""
    rows = [series.damping, series.variance]
    bound = -math.log2(max(_SMALLEST, series.least))
    start = None
    if series.start is not None:
        mean, variance = series.start
        left = torch.exp(-series.wanted(series.damping))
        start = left[..., None] * mean[:, None], -torch.log(left.square() * variance[:, None] + series.wanted(rows[1]))
    scale = torch.ones_like(series.grid.wanted, dtype=torch.float64)
    return _Weights(_path(series.observed, rows), _path(series.wanted, rows), None, bound, scale, start)


def _riccati(series: Series, past: Filtered) -> _Weights:
    """Each observation's part in the Kalman filter: `c = K_j exp(C_i - C_j)`."""
    scale = series.wanted(past.after)
    known = torch.where(scale > 0, 1 / torch.where(scale > 0, scale, 1.0), 0.0)
    key_path, query_path = (
        _path(at, [series.damping, series.variance, BITS * past.cumulative]) for at in (series.observed, series.wanted)
    )
    query_path = torch.stack([query_path[0], query_path[1] + known[:, None], query_path[2]])
    key_bias = BITS * series.observed(past.log_gain)[:, None]
    start = None
    if series.start is not None:
        left = torch.exp(-series.wanted(series.damping))[..., None]
        start = left * series.start[0][:, None], series.wanted(past.cumulative)
    return _Weights(key_path, query_path, key_bias, 0.0, scale, start)


def _step(
    series: Series, weights: _Weights, belief: Belief, state: Tensor, strictly_past: bool = False
) -> tuple[Tensor, Tensor]:
    """One step of reweighting from `state`: the mean, and the log of the believed precision (-inf: nothing seen).

    Where the queries are `strictly_past`, they do not see what was observed at their own time.
    """
    n = state.shape[-1]
    width = n
    if state.device.type == "cuda":
        width = next((channels for channels in TRITON_CHANNELS if channels >= n), n)
    query, key = (F.pad(x, (0, width - n))[:, None] for x in (state, series.observed(series.seen)))
    single = key.to(torch.float32)
    found = backend_for("auto", single, single).kernel
    kernel, dtype = (Kernel(path_attention), torch.float64) if found is None else (found(), torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    times, key_times, present = (
        series.wanted(series.grid.times), series.observed(series.grid.times), series.observed(series.present)
    )  # fmt: skip
    if strictly_past:
        times = torch.nextafter(times, torch.full_like(times, -torch.inf))
    score: Score = "exponential" if belief.penalty == "welsch" else "student_t"
    coefficient, share = (0.0, 1.0) if belief.gaussian else (belief.exponent, 1 / belief.nu)
    if score == "exponential":
        coefficient, share = BITS, 1 / belief.size
    scalars = torch.tensor([[coefficient], [share], [1.0], [0.0], [0.0], [1.0]], dtype=dtype, device=state.device)
    bound = scalars.new_full((1,), weights.bound)
    bias = None if weights.key_bias is None else weights.key_bias.to(dtype)
    found_here = []
    for rows, keys in _blocks(series, weights, belief, state, times, key_times):
        key_bias = None if bias is None else bias[..., keys]
        prior = SeparablePath(weights.key_path[..., keys], weights.query_path[..., rows], key_bias, scalars, bound)
        own = key[:, :, keys]
        found_here.append(
            attend(
                kernel,
                query[:, :, rows],
                own,
                own,
                frequency=None,
                positions=Positions(key_times[:, keys], times[:, rows], *group_numbers(present[:, keys])),
                prior=prior,
                causal=True,
                score=score,
                rotate_values=False,
            )
        )
    estimate, log_sum = (torch.cat(parts, dim=2).to(torch.float64)[:, 0] for parts in zip(*found_here, strict=True))
    mean = estimate[..., :n]
    total = log_sum / BITS - math.log(math.prod(belief.consistency()))
    if weights.start is None:
        return mean, total
    start, weight = weights.start
    both = torch.logaddexp(total, weight)
    return mean + torch.exp(weight - both)[..., None] * (start - mean), both


@torch.no_grad()
def _blocks(
    series: Series, weights: _Weights, belief: Belief, state: Tensor, times: Tensor, key_times: Tensor
) -> list[tuple[slice, slice]]:
    """Some queries at a time, and the keys that count for them: with gains, what lies behind is forgotten.

    All sources before j together weigh at most `exp(C_i - C_j)`, those after it at least what is left of 1 times the
    least w of any pair. So time grows with T, not with its square, where the weights have a lower bound to speak of.
    """
    queries, keys = times.shape[1], key_times.shape[1]
    if weights.key_bias is None:
        return [(slice(0, queries), slice(0, keys))]
    reach = state.norm(dim=-1).amax() + series.seen.norm(dim=-1).amax()
    worst = belief.log_weight(reach.square() / max(_SMALLEST, series.least))
    budget = BITS * (_NEGLIGIBLE - worst)
    rows = [slice(first, min(first + _ROWS, queries)) for first in range(0, queries, _ROWS)]
    gains, key_gains = weights.query_path[2, :, 0], weights.key_path[2, :, 0]
    highest = torch.stack([gains[:, part].amax(-1) for part in rows], dim=1)
    latest = torch.stack([times[:, part].amax(-1) for part in rows], dim=1)
    first = torch.searchsorted(-key_gains, -(highest + budget), right=True).amin(0)
    last = torch.searchsorted(key_times.contiguous(), latest, right=True).amax(0).clamp(min=1)
    starts = torch.minimum(first, last - 1)
    return [(part, slice(*ends)) for part, ends in zip(rows, torch.stack([starts, last], 1).tolist(), strict=True)]


def _path(at: Callable[[Tensor], Tensor], rows: list[Tensor]) -> Tensor:
    """M, u and, with gains, C, `at` the queries or the observations: `(rows, b, 1, length)`."""
    return torch.stack([at(row) for row in rows])[:, :, None]
