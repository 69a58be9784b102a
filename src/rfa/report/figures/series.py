"""A series with gaps and wrong readings, and what filters and networks make of it."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .style import COLOURS, MUTED, PAGE, styled

Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@styled
def filtered_series(
    readings: tuple[np.ndarray, np.ndarray, np.ndarray],
    truth: tuple[np.ndarray, np.ndarray],
    bands: Mapping[str, Band],
    now: float,
) -> Figure:
    """One panel for each model: its estimates with their 90 % intervals, over the readings and the true signal.

    Args:
        readings: times, values, and which of them are wrong, `(T,)` each.
        truth: times and the signal.
        bands: for each model, times, means, and the lower and upper end of the interval, in order of time.
        now: the time of the last reading, after which all is forecast.
    """
    times, values, wrong = readings
    size = (PAGE, 1.5 * len(bands))
    figure, panels = plt.subplots(len(bands), 1, figsize=size, sharex=True, sharey=True, squeeze=False)
    low, high = np.min(truth[1]), np.max(truth[1])
    margin = 0.8 * (high - low)
    for axes, (name, (at, mean, lower, upper)), colour in zip(panels[:, 0], bands.items(), COLOURS, strict=False):
        axes.fill_between(at, lower, upper, color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, mean, color=colour, label=name)
        axes.plot(*truth, color="black", linewidth=0.7, label="signal")
        axes.plot(times[~wrong], values[~wrong], ".", color=MUTED, markersize=2.5, label="reading")
        shown = values[wrong].clip(low - margin, high + margin)  # points beyond the axes stand at their edge
        axes.plot(times[wrong], shown, "^", color=COLOURS[3], label="wrong")
        axes.axvline(now, color=MUTED, linestyle=":", linewidth=1)
        axes.set_ylim(low - margin, high + margin)
        axes.legend(loc="upper left", ncols=4)
    panels[-1, 0].set_xlabel("time; dotted: the last reading")
    return figure
