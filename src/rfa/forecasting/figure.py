"""The figure of a forecast, and the style of every figure: sized for print, safe for colour-blind readers.

It alone imports matplotlib, so it is imported when a figure is drawn.
"""

import functools
import os
import sys
from collections.abc import Callable
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

COLUMN, PAGE = 3.3, 6.8  # inches: the width of one column of text, and of a page with two columns
# Okabe and Ito's palette; yellow comes late, because it is the hardest to see on white
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MUTED = "0.55"  # grey, for baselines
SMALLEST = 7  # points
_PRINT = 300  # dots per inch
_STYLE = Path(__file__).with_name("figure.mplstyle")
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


DRAWN_SERIES = 12
_DRAWN_READINGS, _DRAWN_HORIZONS = 60, 6.0  # of each series before its forecast, at least


def chosen_series(forecast: pd.DataFrame, history: pd.DataFrame, id_col: str, each: int = 4) -> list[Any]:
    """The first `each` series by refused readings, by the width of bands beside their size, and by size; then others.

    Args:
        forecast, history: tables of a `Forecaster` with a 90 % band.
        id_col: their column of ids.
        each: a third of the number that is wanted.
    """
    refused = history.groupby(id_col)["outlier"].sum()
    size = history.assign(size=history["cleaned"].abs()).groupby(id_col)["size"].mean()
    width = (forecast["rfa-hi-90"] - forecast["rfa-lo-90"]).groupby(forecast[id_col]).mean() / size.clip(lower=1e-300)
    found: list[Any] = []
    for measure in (refused[refused > 0], width, size):
        ordered = measure.sort_values(ascending=False, kind="stable").index
        found += [name for name in ordered if name not in found][:each]
    return (found + [name for name in size.index if name not in found])[: 3 * each]


@styled
def forecast_figure(forecast: pd.DataFrame, history: pd.DataFrame, names: tuple[str, str, str]) -> Figure:
    """The last readings, refused ones as crosses, and the forecast with its bands, of `chosen_series`.

    Args:
        forecast, history: tables of a `Forecaster`, one of levels 50 and 90.
        names: the columns of ids, which one series may lack, times and readings.
    """
    id_col, time_col, target_col = names
    if id_col not in history:
        forecast, history = (table.assign(**{id_col: ""}) for table in (forecast, history))
    chosen = chosen_series(forecast, history, id_col)
    columns = 1 if len(chosen) <= 3 else 3
    lines = -(-len(chosen) // columns)
    size = PAGE, 0.4 + (2.0 if columns == 1 else 1.5) * lines
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for one, name in zip(axes.flat, chosen, strict=False):
        past, ahead = (table[table[id_col] == name] for table in (history, forecast))
        past = past.tail(max(_DRAWN_READINGS, int(_DRAWN_HORIZONS * len(ahead))))
        _draw_series(one, past, ahead, time_col, target_col)
        title = "".join(letter if letter.isprintable() else " " for letter in str(name))  # no font has the others
        one.set_title(title[:40] if columns > 1 else title[:200], loc="left", parse_math=False)
    for one in axes.flat[len(chosen) :]:
        one.set_axis_off()
    if columns == 1:
        axes[0, 0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _draw_series(axes: Axes, past: pd.DataFrame, ahead: pd.DataFrame, time_col: str, target_col: str) -> None:
    """One series. Refused readings beyond the axes stand at their edge."""
    wrong = past["outlier"].to_numpy(dtype=bool)
    times, values = past[time_col].to_numpy(), past[target_col].to_numpy(dtype=float)
    if dated := isinstance(past[time_col].dtype, pd.DatetimeTZDtype) or past[time_col].dtype.kind == "M":
        times, later = (pd.DatetimeIndex(table[time_col]).tz_localize(None).to_numpy() for table in (past, ahead))
    else:
        later = ahead[time_col].to_numpy()
    axes.fill_between(times, past["rfa-lo-90"], past["rfa-hi-90"], color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.plot(times, past["rfa"], color=COLOURS[0], linewidth=0.9, label="estimate")
    axes.plot(times[~wrong], values[~wrong], ".", color=MUTED, markersize=2.5, label="reading")
    for level in (90, 50):
        look: dict[str, Any] = {"color": COLOURS[1], "alpha": 0.2 + 0.004 * (100 - level), "linewidth": 0}
        axes.fill_between(later, ahead[f"rfa-lo-{level}"], ahead[f"rfa-hi-{level}"], label=f"{level} % band", **look)
    marker: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(ahead) == 1 else {}
    axes.plot(later, ahead["rfa"], color=COLOURS[3], label="forecast", **marker)
    bands = [ahead[f"rfa-{side}-90"].to_numpy() for side in ("lo", "hi")]
    drawn = np.concatenate([values[~wrong], past["rfa"].to_numpy(), ahead["rfa"].to_numpy(), *bands])
    low, high = np.nanmin(drawn), np.nanmax(drawn)
    margin = 0.05 * (high - low) or 1.0
    low, high = axes.set_ylim(low - margin, high + margin)
    if wrong.any():
        label = "refused"
        axes.plot(times[wrong], values[wrong].clip(low, high), "x", color=COLOURS[3], clip_on=False, label=label)
    axes.axvline(times[-1], color=MUTED, linestyle=":", linewidth=1)
    if dated:
        locator = mdates.AutoDateLocator()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
