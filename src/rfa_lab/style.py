"""What the lab's figures have beside the style of `rfa.forecasting.figure`: looks of lines, axes."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FormatStrFormatter, MaxNLocator, NullFormatter, NullLocator

from rfa.forecasting.figure import COLOURS, COLUMN, MUTED, PAGE, save, styled

__all__ = [
    "COLOURS",
    "COLUMN",
    "MUTED",
    "PAGE",
    "lengths_axis",
    "looks",
    "plain_numbers",
    "save",
    "shades",
    "styled",
]
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")  # each for eight colours
_ROUND = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))


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
