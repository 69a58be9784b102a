"""Filter, smoother and likelihood of the readings of a series, on compiled code, in linear time and memory.

Where there is no compiler they run in PyTorch (`readings_loop`).
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .compiled import FilterProblem, LikelihoodProblem, can_run, run, threads_for
from .gaussian import Gaussian
from .grid import bounded_values
from .kalman import overflow_error
from .noise_scale import NoiseScale
from .readings_loop import looped_filter, looped_log_likelihood, looped_smoother
from .readings_problem import Carried, FilteredReadings, ReadingsProblem, StateMoments
from .recursive_filter import Recursion


@torch.no_grad()
def filter_readings(problem: ReadingsProblem, first: Carried, robust: bool) -> FilteredReadings:
    """The Kalman filter, or the robust filter, of one series.

    Args:
        problem: with b = 1.
        first: the state before the first reading, or what earlier readings carry on, predicted to it.
        robust: which of the two.

    Raises:
        ValueError: where the covariance overflows.
    """
    if not can_run():
        return looped_filter(problem, first, robust)
    found = _compiled(problem, "robust_filter" if robust else "filter", first)
    predicted = StateMoments(found["predicted_mean"][0], found["predicted_covariance"][0])
    estimates = StateMoments(found["mean"][0], found["covariance"][0])
    if robust:
        carried: Carried = _unpacked(found["carried"], predicted.mean.shape[-1])
    else:
        carried = Gaussian(found["mean"][:, -1], found["covariance"][:, -1], None, found["least_squares"][:, -1])
    return FilteredReadings(predicted, estimates, found["weight"][0], carried)


@torch.no_grad()
def smooth_readings(
    problem: ReadingsProblem, first: Gaussian, filtered: FilteredReadings, robust: bool
) -> FilteredReadings:
    """The Kalman smoother, or the robust smoother, of one series, its start and its filter."""
    if not can_run():
        estimates, weights = looped_smoother(problem, first, robust)
        return filtered._replace(estimates=estimates, weights=weights)
    weight = _compiled(problem, "robust_filter", first, smooth=True)["weight"] if robust else None
    found = _compiled(problem, "filter", first, smooth=True, weight=weight)
    return filtered._replace(
        estimates=StateMoments(found["mean"][0], found["covariance"][0]), weights=found["weight"][0]
    )


@torch.no_grad()
def exact_log_likelihood(problem: ReadingsProblem) -> Float[Tensor, " b"]:
    """`log p` of all readings by the Kalman filter with an exact diffuse start, in nats.

    With e the innovations from a start at zero and W the innovations from a start at each diffuse direction alone, both
    over their standard deviations s:

        -(N log 2 pi + log det W^T W + min_d |e - W d|^2) / 2 - sum_k log s_k

    This is the value of the diffuse recursion. It keeps its digits where many readings are needed to tell the diffuse
    directions from each other.

    Source: De Jong, The diffuse Kalman filter (1991).
    """
    if not can_run():
        return looped_log_likelihood(problem)
    table = problem.table
    b, lags, n, _ = problem.transition.shape
    found = problem.covariance.new_empty(b)
    sizes = b, len(problem), n, problem.sensor_noise.shape[1], lags, threads_for(b, len(problem), n)
    run(
        "likelihood",
        LikelihoodProblem(*sizes),
        rows=table.rows,
        values=table.values,
        sensor=table.sensor,
        noise=table.noise,
        sensor_noise=problem.sensor_noise.contiguous(),
        lag_index=table.lag_index,
        transition=problem.transition.contiguous(),
        variance=problem.variance.contiguous(),
        covariance=problem.covariance.contiguous(),
        units=problem.units,
        log_likelihood=found,
    )
    return found


def _compiled(
    problem: ReadingsProblem,
    entry: Literal["filter", "robust_filter"],
    first: Carried,
    *,
    smooth: bool = False,
    weight: Float[Tensor, "1 T"] | None = None,
) -> dict[str, Tensor]:
    """What the kernels write, each with a dimension for one series. `weight`: of the readings, for "filter"."""
    rows, values = problem.whitened()
    (_, length, n), robust = rows.shape, entry == "robust_filter"
    if robust or weight is not None:
        values = bounded_values(rows, values)
    if weight is not None:
        rows, values = rows * weight.sqrt()[..., None], values * weight.sqrt()
    start = Recursion.first(first) if isinstance(first, Gaussian) else first
    mean, covariance = start.state.mean[:1], start.state.covariance[:1]
    written = {"mean": values.new_empty(1, length, n), "covariance": values.new_empty(1, length, n, n)}
    written |= {f"predicted_{name}": torch.empty_like(x) for name, x in written.items()}
    overflow = torch.full((1,), -1)
    others: dict[str, Any] = {}
    if robust:
        others["resumed"] = packed = _packed(start)
        written |= {"weight": torch.empty_like(values), "carried": torch.empty_like(packed)}
    else:
        written["least_squares"] = torch.empty_like(values)
    run(
        entry,
        FilterProblem(1, 1, 1, length, 1, n, 1, smooth, False),
        rows=rows.contiguous(),
        row_index=torch.arange(length),
        values=values.contiguous(),
        transition=problem.transition[0].contiguous(),
        variance=problem.variance[0].contiguous(),
        lag_index=problem.table.lag_index,
        start_mean=mean.contiguous(),
        start_covariance=covariance.contiguous(),
        overflow=overflow,
        **written,
        **others,
    )
    if overflow >= 0:
        raise overflow_error(int(overflow))
    if not robust:
        written["weight"] = torch.ones_like(values) if weight is None else weight
    return written


def _packed(carried: Recursion) -> Tensor:
    """As robust.cpp has it, of one filter and its challenger."""
    state, scale, trusted, log_odds = carried
    each = [state.mean, state.covariance.flatten(1), scale.counts, scale.last]
    return torch.cat([torch.cat(each, dim=1).flatten(), trusted, log_odds])


def _unpacked(carried: Tensor, n: int) -> Recursion:
    """What `_packed` has packed, of states of n entries."""
    scales = NoiseScale.prior(carried[:1]).counts.shape[1]
    mean, covariance, counts, last = carried[:-2].reshape(2, -1).split([n, n * n, scales, scales], dim=1)
    state = Gaussian(mean, covariance.reshape(2, n, n), None, mean.new_zeros(2))
    return Recursion(state, NoiseScale(counts, last), carried[-2:-1], carried[-1:])
