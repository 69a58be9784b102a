"""A stand-in with the names of the engine: a random walk with bands, and the weights of a robust median filter."""

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Series(NamedTuple):
    """One series."""

    times: np.ndarray
    values: np.ndarray
    period: float = 0.0
    regressors: np.ndarray | None = None
    ahead: np.ndarray = np.zeros(0)
    ahead_regressors: np.ndarray | None = None


class SeriesForecast(NamedTuple):
    """The forecast of one series."""

    mean: np.ndarray
    quantiles: np.ndarray
    fitted: np.ndarray
    low: np.ndarray
    high: np.ndarray
    weights: np.ndarray
    outliers: np.ndarray
    one_step: np.ndarray
    members: dict[str, tuple[float, float]]
    note: str
    state: bytes


def forecast_panel(
    series: Sequence[Series],
    probabilities: Sequence[float],
    *,
    robust: bool = True,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[SeriesForecast | str]:
    """Forecast each series."""
    found = []
    for place, one in enumerate(series):
        found.append(_walk(one, probabilities, robust))
        if progress is not None:
            progress(place + 1)
    return found


def _walk(one: Series, probabilities: Sequence[float], robust: bool) -> SeriesForecast | str:
    read = np.flatnonzero(~np.isnan(one.values))
    if not len(read):
        return "no reading: all values are missing"
    y, x = one.values[read], np.zeros(len(one.ahead))
    if one.regressors is not None and one.ahead_regressors is not None:
        design = np.column_stack([np.ones(len(read)), one.regressors[read]])
        slope = np.linalg.lstsq(design, y, rcond=None)[0][1:]
        y, x = y - one.regressors[read] @ slope, one.ahead_regressors @ slope
    near = np.array([np.median(y[max(i - 3, 0) : i + 4]) for i in range(len(y))])
    spread = 1.4826 * float(np.median(np.abs(y - near))) or float(np.abs(y - near).mean())
    weights = (
        np.ones(len(y))
        if not robust or spread == 0
        else np.minimum(1, (4 * spread / np.maximum(np.abs(y - near), 1e-9 * spread)) ** 4)
    )
    good = np.flatnonzero(weights > 0.1)
    last, step = (
        y[good[-1]],
        (float(np.median(np.abs(np.diff(y[good])))) if len(good) > 1 else 0.0) or 0.1 * abs(float(y[good[-1]])) or 1.0,
    )
    state = np.array([last, step, one.times[-1]]).tobytes()
    every = {name: np.full(len(one.values), np.nan) for name in ("fitted", "weights", "one_step")}
    every["fitted"] = np.interp(one.times, one.times[read], near)
    every["weights"][read] = weights
    every["one_step"][read[1:]] = y[:-1]
    return _ahead(state, one.ahead, probabilities, x, every)


def _ahead(
    state: bytes, ahead: np.ndarray, probabilities: Sequence[float], x: np.ndarray, every: dict
) -> SeriesForecast:
    last, step, time = np.frombuffer(state)
    z = np.array([NormalDist().inv_cdf(p) for p in probabilities])
    mean = last + x
    quantiles = mean[:, None] + step * np.sqrt(np.maximum(ahead - time, 1e-9))[:, None] * z
    band = 1.645 * step
    return SeriesForecast(
        mean=mean,
        quantiles=quantiles,
        low=every["fitted"] - band,
        high=every["fitted"] + band,
        outliers=every["weights"] < 0.1,
        members={"walk": (1.0, step)},
        note="",
        state=state,
        **every,
    )


def updated(
    state: bytes, times: np.ndarray, values: np.ndarray, ahead: np.ndarray, probabilities: Sequence[float]
) -> SeriesForecast:
    """Go on from a forecast: rows are those of the new readings."""
    last, step, _ = np.frombuffer(state)
    read = ~np.isnan(values)
    every = {"fitted": values.copy(), "weights": np.where(read, 1.0, np.nan), "one_step": np.full(len(values), last)}
    state = np.array([values[read][-1] if read.any() else last, step, times[-1]]).tobytes()
    return _ahead(state, ahead, probabilities, np.zeros(len(ahead)), every)
