"""The fused estimator of isotropic SDEs. Its attention has states as queries, observations as keys and values.

In the co-rotating frame states only decay, by `E_ij` from time j to time i. So for a query i and an observation j

    d_ij^2 = |x_i - E_ij z_j|^2 / (Sigma_ij + P_i),    xbar_i = sum_j w_ij c_ij E_ij z_j / sum_j w_ij c_ij,

which is the operator's `rfa.ops.prior.SeparablePath`: `Sigma_ij = u_i - E_ij^2 u_j + eta^2 E_ij^2`, and
P_i joins the query's u.

    Lyapunov: c_ij = 1 / Sigma_ij,            P_i = 0
    Riccati:  c_ij = K_j exp(C_i - C_j),      C_i = sum_{l <= i} log(1 - K_l),    K the Kalman gains

Everything is in units of eta and relative to a trajectory of the process through the observations. So series may have
different models, and float32 uses its digits for differences.

Source: docs/theory.md, "On the fused operator".
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rfa.dynamics import accumulated_variance
from rfa.ops.backends import attend, backend_for
from rfa.ops.cumulative import linear_scan
from rfa.ops.kernel import TRITON_CHANNELS, Kernel, ScoreKind
from rfa.ops.positions import Positions, group_numbers
from rfa.ops.prior import BITS, SeparablePath
from rfa.ops.reference import path_attention

from .isotropic import CorotatingSeries
from .problem import EstimationProblem, QueryEstimate
from .robust_weight import RobustWeight

_SMALLEST = 1e-18  # variance that a float32 kernel can divide by
_NEGLIGIBLE = 28.0  # -log 1e-12: the weight of all observations before the first key of a block
_ROWS = 96  # queries of a block, as in the CPU kernels
_LEAST, _MOST = 1e-100, 1e100  # of a squared decay and of a precision: their products stay finite


def fused_estimate(problem: EstimationProblem) -> QueryEstimate:
    """The estimate at every query, `(b, queries, ...)`, without weights and objective, in O(T) memory a series.

    Raises:
        ValueError: for a model or an initial covariance that is not isotropic, or a row with some components missing.
    """
    options, robust_weight = problem.options, problem.options.robust_weight
    series = CorotatingSeries.of(problem)
    if options.riccati:
        filtered = isotropic_filter(series)
        prior = _riccati(series, filtered)
        if robust_weight.gaussian:
            log_total = torch.where(prior.scale > 0, 0.0, -torch.inf)
            restored = series.restored(series.at_queries(filtered.posterior_mean), log_total, prior.scale)
            return QueryEstimate(*restored, None, None)
        prediction = series.at_queries(filtered.predicted_mean)
        precision = series.at_queries(filtered.predicted_precision)
    else:
        prior = _lyapunov(series)
        prediction = torch.zeros_like(series.at_queries(series.observations))
        observed = series.at_queries(series.grid.present)
        precision = torch.zeros_like(observed, dtype=prediction.dtype)
        if not robust_weight.gaussian and (options.start == "leave_one_out" or not bool(observed.all())):
            gaussian = RobustWeight(torch.inf, None, robust_weight.size)
            prediction, log_total = _reweighted(series, prior, gaussian, prediction, strictly_past=True)
            precision = log_total.exp()
    state = series.first_estimate(prediction, precision, options.start == "leave_one_out")
    for _ in range(1 if robust_weight.gaussian else options.iterations):
        state, log_total = _reweighted(series, prior, robust_weight, state)
    return QueryEstimate(*series.restored(state, log_total, prior.scale), None, None)


class IsotropicFilter(NamedTuple):
    """The Kalman filter of isotropic series at each grid time, in the co-rotating frame. Its gains are scalars.

    Args:
        predicted_precision, posterior_precision: `(b, G)`, without and with the observation of that time.
        predicted_mean, posterior_mean: `(b, G, n)`.
        log_gain: `log K`, `(b, G)`, 0 where nothing is observed.
        cumulative: `(b, G)`: C, without the first gain of a diffuse start, which is 1.
    """

    predicted_precision: Float[Tensor, "b grid"]
    posterior_precision: Float[Tensor, "b grid"]
    predicted_mean: Float[Tensor, "b grid n"]
    posterior_mean: Float[Tensor, "b grid n"]
    log_gain: Float[Tensor, "b grid"]
    cumulative: Float[Tensor, "b grid"]


def isotropic_filter(series: CorotatingSeries) -> IsotropicFilter:
    """The filter over the grid.

    Precisions and gains do not depend on observed values, so only they are computed one time after another. The means
    follow by a parallel scan.
    """
    grid = series.grid
    decay = torch.exp(-series.model.decay * grid.lags)
    accumulated = series.process_noise * accumulated_variance(series.model.decay, grid.lags)
    steps = list(zip(decay.square().clamp(min=_LEAST).unbind(1), accumulated.unbind(1), strict=True))
    precision = torch.zeros_like(series.process_noise[:, 0]) if series.initial is None else 1 / series.initial[1]
    predictions, posteriors = [], []
    for k, own in enumerate(grid.present.to(torch.float64).unbind(1)):
        if k:
            squared_decay, variance = steps[k - 1]
            precision = (precision / (squared_decay + variance * precision)).clamp(max=_MOST)
        predictions.append(precision)
        precision = precision + own
        posteriors.append(precision)
    predicted, posterior = torch.stack(predictions, 1), torch.stack(posteriors, 1)
    log_gain = torch.where(grid.present, -torch.log1p(predicted), 0.0)
    counted = grid.present & (predicted > 0)
    log_remaining = torch.where(counted, torch.where(counted, predicted, 1.0).log() - torch.log1p(predicted), 0.0)
    gain = torch.where(grid.present, 1 / (1 + predicted), 0.0)
    term = gain[..., None] * series.observations
    initial = torch.zeros_like(series.observations[:, 0]) if series.initial is None else series.initial[0]
    term = torch.cat([term[:, :1] + ((1 - gain[:, :1]) * initial)[:, None], term[:, 1:]], dim=1)
    mean = linear_scan((F.pad(decay, (1, 0)) * (1 - gain))[:, None], term.mT).mT
    predicted_mean = torch.cat([initial[:, None], decay[..., None] * mean[:, :-1]], dim=1)
    return IsotropicFilter(predicted, posterior, predicted_mean, mean, log_gain, log_remaining.cumsum(-1))


class SeparablePrior(NamedTuple):
    """A prior as the operator takes it.

    Args:
        key_path: `(rows, b, 1, T)`: the rows cumulative_decay, u and, with gains, C in bits.
        query_path: the same at the queries, `(rows, b, 1, queries)`.
        key_bias: `log2 K`, `(b, 1, T)`, or None.
        bound: an upper bound of all scores.
        scale: the precision that a weight of 1 stands for, `(b, queries)`.
        initial: mean `(b, queries, n)` and log weight `(b, queries)` of the initial state at each query, or None.
    """

    key_path: Tensor
    query_path: Tensor
    key_bias: Tensor | None
    bound: float
    scale: Tensor
    initial: tuple[Tensor, Tensor] | None


def _lyapunov(series: CorotatingSeries) -> SeparablePrior:
    """Each observation by itself: `c = 1 / Sigma`."""
    rows = [series.cumulative_decay, series.variance]
    bound = -math.log2(max(_SMALLEST, series.smallest_variance))
    initial = None
    if series.initial is not None:
        mean, variance = series.initial
        decay = torch.exp(-series.at_queries(series.cumulative_decay))
        total = decay.square() * variance[:, None] + series.at_queries(series.variance)
        initial = decay[..., None] * mean[:, None], -torch.log(total)
    scale = torch.ones_like(series.grid.query_index, dtype=torch.float64)
    key_path, query_path = _path(series.at_observations, rows), _path(series.at_queries, rows)
    return SeparablePrior(key_path, query_path, None, bound, scale, initial)


def _riccati(series: CorotatingSeries, filtered: IsotropicFilter) -> SeparablePrior:
    """The contribution of each observation to the Kalman filter: `c = K_j exp(C_i - C_j)`."""
    scale = series.at_queries(filtered.posterior_precision)
    variance = torch.where(scale > 0, 1 / torch.where(scale > 0, scale, 1.0), 0.0)
    rows = [series.cumulative_decay, series.variance, BITS * filtered.cumulative]
    key_path, query_path = _path(series.at_observations, rows), _path(series.at_queries, rows)
    query_path = torch.stack([query_path[0], query_path[1] + variance[:, None], query_path[2]])
    key_bias = BITS * series.at_observations(filtered.log_gain)[:, None]
    initial = None
    if series.initial is not None:
        decay = torch.exp(-series.at_queries(series.cumulative_decay))[..., None]
        initial = decay * series.initial[0][:, None], series.at_queries(filtered.cumulative)
    return SeparablePrior(key_path, query_path, key_bias, 0.0, scale, initial)


def _reweighted(
    series: CorotatingSeries,
    prior: SeparablePrior,
    robust_weight: RobustWeight,
    state: Float[Tensor, "b queries n"],
    strictly_past: bool = False,
) -> tuple[Tensor, Tensor]:
    """One reweighting from `state`: the mean, and the log of the summed weights (-inf where nothing is observed).

    With `strictly_past` the queries do not use an observation of their own time.
    """
    n = state.shape[-1]
    width = n
    if state.device.type == "cuda":
        width = next((channels for channels in TRITON_CHANNELS if channels >= n), n)
    query, key = (F.pad(x, (0, width - n))[:, None] for x in (state, series.at_observations(series.observations)))
    single = key.to(torch.float32)
    found = backend_for("auto", single, single).kernel
    kernel, dtype = (Kernel(path_attention), torch.float64) if found is None else (found(), torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    times, key_times = series.at_queries(series.grid.times), series.at_observations(series.grid.times)
    present = series.at_observations(series.grid.present)
    if strictly_past:
        times = torch.nextafter(times, torch.full_like(times, -torch.inf))
    score_kind: ScoreKind = "exponential" if robust_weight.penalty == "welsch" else "student_t"
    coefficient, ratio = (0.0, 1.0) if robust_weight.gaussian else (robust_weight.exponent, 1 / robust_weight.nu)
    if score_kind == "exponential":
        coefficient, ratio = BITS, 1 / robust_weight.size
    scalars = torch.tensor([[coefficient], [ratio], [1.0], [0.0], [0.0], [1.0]], dtype=dtype, device=state.device)
    bound = scalars.new_full((1,), prior.bound)
    bias = None if prior.key_bias is None else prior.key_bias.to(dtype)
    parts_found = []
    for rows, keys in _blocks(series, prior, robust_weight, state, times, key_times):
        key_bias = None if bias is None else bias[..., keys]
        block_prior = SeparablePath(prior.key_path[..., keys], prior.query_path[..., rows], key_bias, scalars, bound)
        own = key[:, :, keys]
        parts_found.append(
            attend(
                kernel,
                query[:, :, rows],
                own,
                own,
                frequency=None,
                positions=Positions(key_times[:, keys], times[:, rows], *group_numbers(present[:, keys])),
                prior=block_prior,
                causal=True,
                score_kind=score_kind,
                rotate_values=False,
            )
        )
    estimate, log_sum = (torch.cat(parts, dim=2).to(torch.float64)[:, 0] for parts in zip(*parts_found, strict=True))
    mean = estimate[..., :n]
    log_total = log_sum / BITS - math.log(math.prod(robust_weight.consistency()))
    if prior.initial is None:
        return mean, log_total
    initial, log_weight = prior.initial
    both = torch.logaddexp(log_total, log_weight)
    return mean + torch.exp(log_weight - both)[..., None] * (initial - mean), both


@torch.no_grad()
def _blocks(
    series: CorotatingSeries,
    prior: SeparablePrior,
    robust_weight: RobustWeight,
    state: Tensor,
    times: Tensor,
    key_times: Tensor,
) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that it needs. With gains, early observations have no weight.

    All observations before j together weigh at most `exp(C_i - C_j)`. Those after it weigh at least the remaining part
    of 1, times the smallest w of any pair. So where that w is not tiny, time grows with T, not with its square.
    """
    queries, keys = times.shape[1], key_times.shape[1]
    if prior.key_bias is None:
        return [(slice(0, queries), slice(0, keys))]
    reach = state.norm(dim=-1).amax() + series.observations.norm(dim=-1).amax()
    worst = robust_weight.log_weight(reach.square() / max(_SMALLEST, series.smallest_variance))
    budget = BITS * (_NEGLIGIBLE - worst)
    rows = [slice(first, min(first + _ROWS, queries)) for first in range(0, queries, _ROWS)]
    gains, key_gains = prior.query_path[2, :, 0], prior.key_path[2, :, 0]
    highest = torch.stack([gains[:, part].amax(-1) for part in rows], dim=1)
    latest = torch.stack([times[:, part].amax(-1) for part in rows], dim=1)
    first = torch.searchsorted(-key_gains, -(highest + budget), right=True).amin(0)
    last = torch.searchsorted(key_times.contiguous(), latest, right=True).amax(0).clamp(min=1)
    starts = torch.minimum(first, last - 1)
    return [(part, slice(*ends)) for part, ends in zip(rows, torch.stack([starts, last], 1).tolist(), strict=True)]


def _path(at: Callable[[Tensor], Tensor], rows: list[Tensor]) -> Tensor:
    """Rows `at` the queries or the observations, `(rows, b, 1, length)`."""
    return torch.stack([at(row) for row in rows])[:, :, None]
