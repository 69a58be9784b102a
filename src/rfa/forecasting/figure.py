"""The figure of a forecast, and the style of every figure: sized for print, safe for colour-blind readers.

It alone imports matplotlib, so it is imported when a figure is drawn.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib

if "MPLBACKEND" not in os.environ and "matplotlib.pyplot" not in sys.modules:  # a notebook's choice stays
    matplotlib.use("Agg")
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rfa.files import write_whole

from .request import ChannelForecast
from .table import SeriesTable

COLUMN, PAGE = 3.3, 6.8  # inches: the width of one column of text, and of a page with two columns
# Okabe and Ito's palette; yellow comes late, because it is the hardest to see on white
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MUTED = "0.55"  # grey, for baselines
SMALLEST = 7  # points
_PRINT = 300  # dots per inch
_STYLE = Path(__file__).with_name("figure.mplstyle")
_SHOWN_HORIZONS, _SHOWN_READINGS = 6.0, 60  # of the past in the figure, at least
_Arguments = ParamSpec("_Arguments")


def styled(draw: Callable[_Arguments, Figure]) -> Callable[_Arguments, Figure]:
    """A function that draws in this style, whatever the settings of the caller's matplotlib are."""

    @functools.wraps(draw)
    def drawing(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Figure:
        with plt.rc_context(fname=_STYLE):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:  # ticks are made later, when the caller's style is in force again
                axes.tick_params(which="both", labelsize=SMALLEST)
            return figure

    return drawing


def save(figure: Figure, *paths: Path, dots: int = _PRINT) -> None:
    """Write a figure, each file whole, in the format that the file's name ends with.

    The same figure gives the same files. It is laid out once, for print, so that all formats look the same. The layout
    needs two passes, because labels and legends beside the axes get their position in the second one.

    Args:
        figure: it is closed.
        paths: of the files.
        dots: per inch of an image.
    """
    figure.set_dpi(_PRINT)
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
        layout.execute(figure)
        figure.set_layout_engine("none")
    for path in paths:
        undated: dict[str, Any] = {"metadata": {"CreationDate": None}} if path.suffix == ".pdf" else {}
        options = {"dpi": dots, "format": path.suffix[1:], **undated}
        write_whole(path, functools.partial(figure.savefig, **options))
    plt.close(figure)


@styled
def forecast_figure(found: Sequence[ChannelForecast], table: SeriesTable, query_times: np.ndarray) -> Figure:
    """The forecast of each channel after its recent past. Outliers beyond the axes stand at their edge."""
    figure, rows = plt.subplots(len(found), figsize=(PAGE, 0.4 + 2.0 * len(found)), sharex=True, squeeze=False)
    for axes, one in zip(rows[:, 0], found, strict=True):
        _draw_channel(axes, one, table, query_times)
    bottom = rows[-1, 0]
    if table.dated:
        locator = mdates.AutoDateLocator()
        bottom.xaxis.set_major_locator(locator)
        bottom.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    bottom.set_xlabel("time; dotted: the last reading")
    return figure


def _draw_channel(axes: Axes, one: ChannelForecast, table: SeriesTable, query_times: np.ndarray) -> None:
    times, values = table.times, table.values[:, table.channels.index(one.name)]
    last, fewest = times[-1], times[max(0, len(times) - _SHOWN_READINGS)]
    shown = min(last - _SHOWN_HORIZONS * (query_times[-1] - last), fewest)
    times, values = times[times >= shown], values[times >= shown]
    past = one.past[one.past["time"] >= shown]
    at, wrong = past.loc[past["outlier"], ["time", "reading"]].to_numpy().T
    read_at, wrong_at, ahead = (table.axis(each) for each in (times, at, query_times))
    pairs = {*zip(wrong_at.tolist(), wrong.tolist(), strict=True)}  # another sensor's reading at that time is none
    usual = np.array([pair not in pairs for pair in zip(read_at.tolist(), values.tolist(), strict=True)])
    past_times, past_mean = table.axis(past["time"].to_numpy()), past["estimate"].to_numpy()
    axes.fill_between(past_times, past["lower_90"], past["upper_90"], color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.plot(past_times, past_mean, color=COLOURS[0], linewidth=0.9, label="estimate")
    axes.plot(read_at[usual], values[usual], ".", color=MUTED, markersize=2.5, label="reading")
    for level, ends in sorted(one.intervals.items(), reverse=True):
        look: dict[str, Any] = {"color": COLOURS[1], "alpha": 0.2 + 0.4 * (1 - level), "linewidth": 0}
        axes.fill_between(ahead, *ends, label=f"{level * 100:.0f} % interval", **look)
    marker: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(ahead) == 1 else {}
    axes.plot(ahead, one.mean, color=COLOURS[3], label="forecast", **marker)
    drawn = np.concatenate([values[usual], past_mean, one.mean, *chain(*one.intervals.values())])
    low, high = np.nanmin(drawn), np.nanmax(drawn)
    margin = 0.05 * (high - low) or 1.0
    low, high = axes.set_ylim(low - margin, high + margin)
    if len(at):
        axes.plot(wrong_at, wrong.clip(low, high), "x", color=COLOURS[3], clip_on=False, label="outlier")
    axes.axvline(read_at[-1], color=MUTED, linestyle=":", linewidth=1)
    title = "".join(letter if letter.isprintable() else " " for letter in one.name)  # no font has the others
    title = title if len(title) <= 200 else f"{title[:199]}…"
    axes.set_title(title, loc="left", parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


# A panel

_DRAWN_SERIES = 12
_DRAWN_READINGS = 60  # of each series before its forecast


def chosen_series(forecast: pd.DataFrame, history: pd.DataFrame, id_col: str) -> list[object]:
    """A third each of the series with most refused readings, the widest bands beside their size, the largest."""
    refused = history.groupby(id_col)["outlier"].sum()
    size = history.assign(size=history["cleaned"].abs()).groupby(id_col)["size"].mean()
    width = (forecast["rfa-hi-90"] - forecast["rfa-lo-90"]).groupby(forecast[id_col]).mean() / size.clip(lower=1e-300)
    found: list[object] = []
    for measure in (refused[refused > 0], width, size):
        ordered = measure.sort_values(ascending=False, kind="stable").index
        found += [each for each in ordered if each not in found][: _DRAWN_SERIES // 3]
    rest = [each for each in size.index if each not in found]
    return (found + rest)[:_DRAWN_SERIES]


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
        past = history[history[id_col] == names[place]].tail(_DRAWN_READINGS)
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
