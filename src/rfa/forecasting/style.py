"""One style for every figure: sized for print, safe for colour-blind readers, no text below seven points."""

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib

if "MPLBACKEND" not in os.environ and "matplotlib.pyplot" not in sys.modules:  # a notebook's choice stays
    matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, MaxNLocator, NullFormatter, NullLocator

from rfa.files import write_whole

COLUMN, PAGE = 3.3, 6.8  # inches: the width of one column of text, and of a page with two columns
# Okabe and Ito's palette; yellow comes late, because it is the hardest to see on white
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")  # each for eight colours
_ROUND = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
MUTED = "0.55"  # grey, for baselines
SMALLEST = 7  # points
_PRINT = 300  # dots per inch
_STYLE: dict[Any, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": SMALLEST,
    "ytick.labelsize": SMALLEST,
    "legend.fontsize": SMALLEST,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.labelspacing": 0.3,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "figure.constrained_layout.use": True,
}

_Arguments = ParamSpec("_Arguments")


def styled(draw: Callable[_Arguments, Figure]) -> Callable[_Arguments, Figure]:
    """A function that draws in this style, whatever the settings of the caller's matplotlib are."""

    @functools.wraps(draw)
    def drawing(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Figure:
        with plt.rc_context(_STYLE):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:  # ticks are made later, when the caller's style is in force again
                axes.tick_params(which="both", labelsize=SMALLEST)
            return figure

    return drawing


def shades(count: int) -> list[tuple[float, ...]]:
    """Colours for ordered values, from dark to light. They also differ in grey and for colour-blind readers."""
    scale = matplotlib.colormaps["viridis"]
    return [scale(0.92 * index / max(count - 1, 1)) for index in range(count)]


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line style for values without an order. Only the position of a name decides."""
    return {
        name: {"color": COLOURS[k % 8], "marker": MARKERS[(k + k // 8) % 8], "linestyle": LINES[k // 8 % 4]}
        for k, name in enumerate(names)
    }


def lengths_axis(axes: Axes, lengths: Sequence[int], train_length: int | None = None) -> None:
    """A logarithmic x-axis with the given context lengths as ticks, and the training length as a dotted line."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    label = "context length (tokens)"
    if train_length is not None:
        axes.axvline(train_length, color=MUTED, linestyle=":", linewidth=1, zorder=0)
        label += "; dotted: training length"
    axes.set_xlabel(label)


def plain_numbers(axes: Axes) -> None:
    """A logarithmic y-axis with plain numbers, not powers of ten: at least four round ones within the limits."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _ROUND:
        ticks = np.outer(decades, steps).ravel()
        ticks = ticks[(low <= ticks) & (ticks <= high)]
        if len(ticks) >= 4:
            axes.yaxis.set_major_locator(FixedLocator(ticks.tolist()))
            return
    axes.yaxis.set_major_locator(MaxNLocator(6))  # in so short a range a logarithmic axis is nearly linear
    axes.yaxis.set_minor_locator(NullLocator())


def plain(text: str, longest: int = 60) -> str:
    """Text of a file as a figure can draw it: a space for letters that no font has, and cut where it is too long."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def letter(axes: Sequence[Axes]) -> None:
    """Put (a), (b), ... before the titles of the panels."""
    for index, each in enumerate(axes):
        each.set_title(f"({chr(ord('a') + index)}) {each.get_title()}".strip(), loc="left")
        each.set_title("", loc="center")


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
