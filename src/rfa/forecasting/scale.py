"""The scale on which a channel is filtered: as it is, one on which no forecast is negative, or angles without jumps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from rfa.checks import require

Values = Float[np.ndarray, "*shape"]


class ValueScale(NamedTuple):
    """A function of the values, and its inverse. Both increase, so quantiles stay quantiles.

    Fields:
        forth: to the scale of the filter.
        back: to the scale of the readings.
    """

    forth: Callable[[Values], Values]
    back: Callable[[Values], Values]


COUNTS = "linear from 0"  # of counts that are not near 0
SCALES = {
    "linear": ValueScale(np.asarray, np.asarray),
    COUNTS: ValueScale(np.asarray, partial(np.maximum, 0.0)),
    "log": ValueScale(np.log, np.exp),
    "square root": ValueScale(np.sqrt, lambda values: np.square(np.maximum(values, 0.0))),
}
_MIN_FALLS = 0.1  # falls for each rise: a series with fewer is a total, such as a meter's
_MAX_GROWTH = 10.0  # times the largest reading, which few readings say nothing about
_NEAR_ZERO = 0.1  # of the median: a series that comes so near to zero, and never below


def allowed_scales(
    name: str, values: Float[np.ndarray, " T"], positive: bool, counts: bool, lines: Sequence[int]
) -> list[str]:
    """The scales that a channel may have, the usual one first.

    Args:
        name: of the channel.
        values: its readings, NaN where there is none.
        positive: they are known to be above 0: the logarithm.
        counts: they are known to be counts, or never negative: the square root.
        lines: of the file, where the values stand.

    Raises:
        ValueError: for a reading that such values do not have, with its row.
    """
    seen = values[~np.isnan(values)]
    if positive or counts:
        bad = values <= 0 if positive else values < 0
        first = int(bad.argmax())
        said = f"{values[first]:g} in row {lines[first]} of {name!r}"
        expected = "values above 0; --counts takes 0 too" if positive else "values of at least 0"
        require(not bad.any(), "positive" if positive else "counts", said, expected)
        return ["log" if positive else "square root"]
    if seen.min() < 0:
        return ["linear"]
    own = "log" if seen.min() > 0 else "square root"
    near = np.quantile(seen, 0.05) <= _NEAR_ZERO * np.median(seen)
    steps = np.diff(seen)
    near = near and (steps < 0).sum() >= _MIN_FALLS * (steps > 0).sum()  # a total that began at zero has left it
    linear = COUNTS if (seen == np.rint(seen)).all() else "linear"
    return ["square root", *(["log"] if own == "log" else [])] if near else [linear, own]


def supported_growth(
    times: Float[np.ndarray, " T"], logs: Float[np.ndarray, " T"], lags: Float[np.ndarray, " steps"]
) -> tuple[float, Float[np.ndarray, " steps"]]:
    """The largest logarithms that readings support at later times: of the mean, and of the ends of a band, `(steps,)`.

    Forecasts are tested over half of the span of the readings. So the mean may grow by half of what they differ by. A
    band may reach as far beyond the largest as the readings differ; after a longer time than their span as far as a
    random walk does, by the square root of the time, up to ten times the largest.

    Args:
        times, logs: of the readings, NaN where there is none.
        lags: from the last one to the times of the forecast.
    """
    seen = ~np.isnan(logs)
    largest, spread, span = logs[seen].max(), np.ptp(logs[seen]), np.ptp(times[seen])
    walk = spread * np.sqrt(lags / span) if span > 0 else np.full(len(lags), np.inf)
    return largest + spread / 2, largest + np.maximum(spread, np.minimum(walk, np.log(_MAX_GROWTH)))


_NEIGHBOURS = 5  # readings whose median direction tells in which turn an angle is
_MIN_ROTATION = 0.5  # length of the mean step on the unit circle, from which on it is a rotation
_MIN_JUMP = 0.75  # of a turn
_MAX_JUMP_ERROR = 5.0  # median steps that a jump may differ from a turn


def continuous_angles(values: Float[np.ndarray, " T"], period: float) -> Float[np.ndarray, " T"]:
    """Angles without jumps: each in the turn in which it is nearest to the median direction of five readings.

    So a wrong reading leaves those after it where they are. A steady rotation is taken out before. NaN stays.
    """
    turns, rows = np.array(values, dtype=np.float64), np.flatnonzero(~np.isnan(values))
    if not len(rows):
        return turns
    angle = turns[rows] * (2 * np.pi / period)
    steps = np.exp(1j * np.diff(angle))[np.diff(rows) == 1]
    mean = steps.mean() if len(steps) else 0.0
    rotation = np.angle(mean) * rows * (abs(mean) > _MIN_ROTATION)
    steady = pd.DataFrame({"x": np.cos(angle - rotation), "y": np.sin(angle - rotation)})
    usual = steady.rolling(_NEIGHBOURS, center=True, min_periods=1).median()
    usual = (np.unwrap(np.arctan2(usual["y"], usual["x"])) + rotation) * (period / (2 * np.pi))
    turns[rows] += period * np.rint((usual - turns[rows]) / period)
    return turns


def angles_from(values: Float[np.ndarray, "*shape"], least: float, period: float) -> Float[np.ndarray, "*shape"]:
    """Angles from `least` on, below a turn more."""
    return np.round(least + np.mod(values - least, period), 9)


def jumps_of_angle(values: Float[np.ndarray, " T"]) -> int:
    """How often values in [0, 360) or [-180, 180) jump by nearly a turn: as a wind around north."""
    seen = values[~np.isnan(values)]
    if not any(((least <= seen) & (seen <= least + 360)).all() for least in (0, -180)):
        return 0
    steps = np.abs(np.diff(seen))
    jumps = steps[steps > _MIN_JUMP * 360]
    usual = np.median(steps[steps <= _MIN_JUMP * 360]) if len(jumps) < len(steps) else 0.0
    return len(jumps) if len(jumps) and np.median(360 - jumps) <= _MAX_JUMP_ERROR * usual else 0
