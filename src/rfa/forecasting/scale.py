"""The scale on which a channel is filtered: as it is, or one on which no forecast is negative."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
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


def _at_least_0(values: Values) -> Values:
    return np.maximum(values, 0.0)


COUNTS = "linear from 0"  # of counts that are not near 0
SCALES = {
    "linear": ValueScale(np.asarray, np.asarray),
    COUNTS: ValueScale(np.asarray, _at_least_0),
    "log": ValueScale(np.log, np.exp),
    "square root": ValueScale(np.sqrt, lambda values: np.square(_at_least_0(values))),
}
_TOTAL = 0.1  # falls for each rise: a series with fewer is a total, such as a meter's
_FAR = 10.0  # times the largest reading, which few readings say nothing about
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
    for wanted, option, bad, expected in (
        (positive, "positive", values <= 0, "values above 0; --counts takes 0 too"),
        (counts, "counts", values < 0, "values of at least 0"),
    ):
        if wanted:
            first = int(bad.argmax())
            require(not bad.any(), option, f"{values[first]:g} in row {lines[first]} of {name!r}", expected)
    if positive or counts:
        return ["log" if positive else "square root"]
    if seen.min() < 0:
        return ["linear"]
    own = "log" if seen.min() > 0 else "square root"
    near = np.quantile(seen, 0.05) <= _NEAR_ZERO * np.median(seen)
    steps = np.diff(seen)
    near = near and (steps < 0).sum() >= _TOTAL * (steps > 0).sum()  # a total that began at zero has left it
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
    return largest + spread / 2, largest + np.maximum(spread, np.minimum(walk, np.log(_FAR)))
