"""A forecast with its intervals after the recent past of a series."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .style import COLOURS, MUTED, PAGE, plain, styled


class ForecastPanel(NamedTuple):
    """What is drawn of a channel. Times are numbers or dates.

    Fields:
        name: of the channel.
        readings: times and values; NaN where one is missing.
        outliers: times and values.
        past: times, means, and the lower and upper ends of the interval of estimates at readings.
        times, mean: of the forecast.
        intervals: lower and upper ends of the forecast by probability.
    """

    name: str
    readings: tuple[np.ndarray, np.ndarray]
    outliers: tuple[np.ndarray, np.ndarray]
    past: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    times: np.ndarray
    mean: np.ndarray
    intervals: Mapping[float, tuple[np.ndarray, np.ndarray]]


@styled
def forecast_panels(panels: Sequence[ForecastPanel]) -> Figure:
    """One panel for each channel. Outliers beyond the axes stand at their edge."""
    size = (PAGE, 0.4 + 2.0 * len(panels))
    figure, rows = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False)
    for axes, panel in zip(rows[:, 0], panels, strict=True):
        times, mean, lower, upper = panel.past
        axes.fill_between(times, lower, upper, color=COLOURS[0], alpha=0.15, linewidth=0)
        axes.plot(times, mean, color=COLOURS[0], linewidth=0.9, label="estimate")
        usual = _usual(panel)
        axes.plot(panel.readings[0][usual], panel.readings[1][usual], ".", color=MUTED, markersize=2.5, label="reading")
        for level, ends in sorted(panel.intervals.items(), reverse=True):
            look = {"color": COLOURS[1], "alpha": 0.2 + 0.4 * (1 - level), "linewidth": 0}
            axes.fill_between(panel.times, *ends, label=f"{level * 100:.0f} % interval", **look)
        marker = {"marker": "o", "markersize": 2.5} if len(panel.times) == 1 else {}
        axes.plot(panel.times, panel.mean, color=COLOURS[3], label="forecast", **marker)
        low, high = _limits(panel, usual)
        axes.set_ylim(low, high)
        if len(panel.outliers[0]):
            shown = panel.outliers[1].clip(low, high)
            axes.plot(panel.outliers[0], shown, "x", color=COLOURS[3], clip_on=False, label="outlier")
        if len(panel.readings[0]):
            axes.axvline(panel.readings[0][-1], color=MUTED, linestyle=":", linewidth=1)
        axes.set_title(plain(panel.name, 200), loc="left", parse_math=False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    bottom = rows[-1, 0]
    if np.issubdtype(panels[0].times.dtype, np.datetime64):
        locator = mdates.AutoDateLocator()
        bottom.xaxis.set_major_locator(locator)
        bottom.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    bottom.set_xlabel("time; dotted: the last reading")
    return figure


def _usual(panel: ForecastPanel) -> np.ndarray:
    """Which readings are no outliers. Another sensor's reading at the time of an outlier is none."""
    outlier_times = panel.outliers[0].astype(panel.readings[0].dtype)
    wrong = set(zip(outlier_times.tolist(), panel.outliers[1].tolist(), strict=True))
    pairs = zip(*(part.tolist() for part in panel.readings), strict=True)
    return np.array([pair not in wrong for pair in pairs], dtype=bool)


def _limits(panel: ForecastPanel, usual: np.ndarray) -> tuple[float, float]:
    """All usual readings and the forecast with its intervals, and a margin."""
    ends = [end for pair in panel.intervals.values() for end in pair]
    every = np.concatenate([panel.readings[1][usual], panel.past[1], panel.mean, *ends])
    low, high = np.nanmin(every), np.nanmax(every)
    margin = 0.05 * (high - low) or 1.0
    return float(low - margin), float(high + margin)
