"""The figure of a panel: the twelve series of which a reader wants to know most. It alone imports matplotlib."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .figure import COLOURS, MUTED, PAGE, save, styled

__all__ = ["panel_figure", "save"]

_DRAWN = 12  # series
_PAST = 60  # readings of each before its forecast


def chosen_series(forecast: pd.DataFrame, history: pd.DataFrame, id_col: str) -> list[object]:
    """A third each of the series with most refused readings, the widest bands beside their size, the largest."""
    refused = history.groupby(id_col)["outlier"].sum()
    size = history.assign(size=history["cleaned"].abs()).groupby(id_col)["size"].mean()
    width = (forecast["rfa-hi-90"] - forecast["rfa-lo-90"]).groupby(forecast[id_col]).mean() / size.clip(lower=1e-300)
    found: list[object] = []
    for measure in (refused[refused > 0], width, size):
        ordered = measure.sort_values(ascending=False, kind="stable").index
        found += [each for each in ordered if each not in found][: _DRAWN // 3]
    rest = [each for each in size.index if each not in found]
    return (found + rest)[:_DRAWN]


@styled
def panel_figure(forecast: pd.DataFrame, history: pd.DataFrame, id_col: str, time_col: str, target_col: str) -> Figure:
    """Readings, refused ones as crosses, and the forecast with its 50 and 90 % bands, of `chosen_series`."""
    names = chosen_series(forecast, history, id_col)
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(PAGE, 1.5 * lines + 0.4), squeeze=False, layout="constrained")
    for place, each in enumerate(axes.flat):
        if place >= len(names):
            each.set_axis_off()
            continue
        past = history[history[id_col] == names[place]].tail(_PAST)
        ahead = forecast[forecast[id_col] == names[place]]
        good = past[~past["outlier"]]
        each.plot(good[time_col], good[target_col], color=MUTED, linewidth=0.8)
        for level, alpha in ((90, 0.2), (50, 0.35)):
            low, high = ahead[f"rfa-lo-{level}"], ahead[f"rfa-hi-{level}"]
            each.fill_between(ahead[time_col], low, high, color=COLOURS[0], alpha=alpha, linewidth=0)
        each.plot(ahead[time_col], ahead["rfa"], color=COLOURS[0], linewidth=1)
        low, high = each.get_ylim()
        wrong = past[past["outlier"]]
        each.plot(wrong[time_col], np.clip(wrong[target_col], low, high), "x", color=COLOURS[3], markersize=4)
        each.set_title(str(names[place])[:40], fontsize=7, parse_math=False)
        each.tick_params(axis="x", rotation=30)
    return figure
