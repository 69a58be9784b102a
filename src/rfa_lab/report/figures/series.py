"""Figures of series: what filters and networks make of one, and their errors beside a reference's."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from rfa.forecasting.style import COLOURS, MARKERS, MUTED, PAGE, no_formulas, plain, styled

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


@styled
def series_ratios(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float | None] | None]]],
    columns: Sequence[str],
    reference: str,
) -> Figure:
    """One panel for each part: the ratio of each model's error to the reference's in each setting, with its interval.

    Args:
        panels: for each part and model, the ratio and its relative half width in each column; None where it is missing.
        columns: the settings.
        reference: its label.
    """
    labels = list(dict.fromkeys(label for models in panels.values() for label in models))
    size = (PAGE, 2.6 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False)
    for panel, (part, models) in zip(axes[:, 0], panels.items(), strict=True):
        panel.axhline(1.0, color=MUTED, linewidth=1)
        for index, label in enumerate(labels):
            known = [(k, *found) for k, found in enumerate(models.get(label, ())) if found is not None]
            if not known:
                continue
            shift = 0.7 * ((index + 0.5) / len(labels) - 0.5)
            place = [k + shift for k, _, _ in known]
            mean = np.array([value for _, value, _ in known])
            factor = np.array([1 + (half or 0.0) for _, _, half in known])
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index // len(COLOURS) % len(MARKERS)]
            ends = mean - mean / factor, mean * factor - mean
            look = {"fmt": marker, "color": colour, "elinewidth": 0.8, "markersize": 3}
            panel.errorbar(place, mean, yerr=ends, label=plain(label), **look)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value in (0.8, 0.9, 2, 3, 5) else "")
        panel.set_ylabel(f"{part}: error / {plain(reference)}'s")
        panel.set_xlim(-0.5, len(columns) - 0.5)
    axes[-1, 0].set_xticks(range(len(columns)), map(plain, columns))
    legend = axes[0, 0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6)
    no_formulas([*legend.get_texts(), *axes[-1, 0].get_xticklabels(), *(panel.yaxis.label for panel in axes[:, 0])])
    return figure
