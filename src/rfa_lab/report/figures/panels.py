"""Panels of at most six lines: the main models in one panel, or all models in an appendix of many panels.

The scale of a panel is set by the models that do not fail. A line that fails is cut off, and the legend says how far it
goes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rfa.forecasting.style import COLUMN, MUTED, PAGE, looks
from rfa_lab.report.measurements import MOST_LINES, TRIGRAM_LABEL, SeedBand, main_labels
from rfa_lab.report.runs import BASELINE, Run, by_group

_FAILS = 1.4  # a perplexity so many times the median of its panel is cut off
_LINE = 0.13  # inches, height of a line in a legend
Curve = tuple[Sequence[float], Sequence[float]]


def panel_labels(runs: Sequence[Run], labels: Sequence[str], appendix: bool, most: int) -> dict[str, list[str]]:
    """The labels of each panel by its title, at most `most` with the baseline, which stands in each panel.

    Args:
        runs: result files.
        labels: to be drawn.
        appendix: all labels in panels of their groups, instead of `main_labels` in one panel.
        most: number of labels in a panel.
    """
    if not appendix:
        chosen = main_labels(runs, most)
        return {"": [label for label in labels if label in chosen]}
    panels: dict[str, list[str]] = {}
    for group, of in by_group(runs).items():
        own = [label for label in of if label in labels and label != BASELINE]
        size = most - (BASELINE in labels)
        parts = [own[start : start + size] for start in range(0, len(own), size)]
        for number, part in enumerate(parts, 1):
            name = f"{group} ({number} of {len(parts)})" if len(parts) > 1 else group
            panels[name] = [*([BASELINE] if BASELINE in labels else []), *part]
    return panels


def draw_panels(
    runs: Sequence[Run],
    series: Mapping[str, SeedBand],
    *,
    appendix: bool = False,
    reference: Curve | None = None,
    since: float = 0.0,
    logarithmic: bool = True,
    **look: Any,
) -> tuple[Figure, list[Axes]]:
    """Draw lines with their bands. Legends are below the panels.

    Args:
        runs: result files.
        series: by label.
        appendix: as for `panel_labels`.
        reference: x and y of the trigram's line.
        since: smaller x do not set the scale.
        logarithmic: whether the values are perplexities; otherwise they are losses.
        look: of all lines.
    """
    most = MOST_LINES - (reference is not None)
    groups = panel_labels(runs, list(series), appendix, most)
    columns = min(len(groups), 2)
    rows = -(-len(groups) // columns)
    size = (PAGE, 2.2 * rows) if columns > 1 else (COLUMN, 2.7)
    lines = [0] * rows  # number of lines of the longest legend in each row
    figure, panels = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False)
    used = list(zip(panels.flat, groups.items(), strict=False))
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for index, (axes, (title, labels)) in enumerate(used):
        axes.set_title(title)
        axes.tick_params(labelbottom=True)
        shown = {label: series[label] for label in labels}
        low, high = limits(shown, reference, since, logarithmic)
        drawn = looks([label for label in labels if not (appendix and label == BASELINE)])
        grey = {"color": MUTED, "linestyle": "--", "marker": ""}
        for label, each in shown.items():
            draw_series(axes, label, each, high, **{**drawn.get(label, grey), **look})
        if reference is not None:
            draw_reference(axes, reference)
        if low < high < math.inf:
            axes.set_ylim(low, high)
        if columns > 1:
            tall, wide = legend_size(axes.get_legend_handles_labels()[1], PAGE / columns)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=wide)
            lines[index // columns] = max(lines[index // columns], tall)
    if columns == 1:
        legend_below(panels[0, 0])
    figure.set_figheight(figure.get_figheight() + _LINE * sum(lines))
    return figure, [axes for axes, _ in used]


def limits(
    shown: Mapping[str, SeedBand], reference: Curve | None, since: float, logarithmic: bool
) -> tuple[float, float]:
    """The lower and upper end of a panel: all means, but no higher than what `_FAILS` allows over their median."""
    curves = [(each.x, each.mean) for each in shown.values() if each.x]
    values = [[y for x, y in zip(*curve, strict=True) if x >= since] for curve in curves]
    values = [of for of in values if of]
    if not values:
        return math.inf, math.inf
    marks = [y for x, y in zip(*reference, strict=True) if x >= since] if reference else []
    lowest, tops = min(map(min, [*values, *([marks] if marks else [])])), [max(of) for of in values]
    if logarithmic:
        high = min(max([*tops, *marks]) * 1.02, _FAILS * float(np.median(tops)))
        return lowest / 1.02, max(high, max(marks, default=0) * 1.01)
    high = min(max([*tops, *marks]), float(np.median(tops)) + math.log(_FAILS))
    margin = 0.05 * (high - lowest) or 0.05
    return lowest - margin, high + margin


def draw_series(axes: Axes, label: str, series: SeedBand, high: float = math.inf, **look: Any) -> None:
    """Draw a mean and its band. A label without results is named in the legend, and a line that is cut off too.

    Args:
        axes: of the panel.
        label: of the line.
        series: its points.
        high: the upper end of the panel.
        look: of the line.
    """
    name = label if series.x else f"{label} (no results)"
    if series.x and series.missing:
        name += f" (without seed {', '.join(map(str, series.missing))})"
    if series.x and series.mean[-1] > high:
        name += f" (cut off: {series.mean[-1]:.3g} at {series.x[-1]:.0f})"
    axes.plot(series.x, series.mean, label=name, **look)
    if np.isfinite(series.low).any():
        axes.fill_between(series.x, series.low, series.high, color=look["color"], alpha=0.15, linewidth=0)


def draw_reference(axes: Axes, line: Curve) -> None:
    """The trigram's line."""
    axes.plot(*line, color="black", linestyle=":", linewidth=1, label=TRIGRAM_LABEL)


def legend_below(axes: Axes) -> None:
    """Put the legend below the axes, in as many columns as fit."""
    figure = axes.get_figure(root=True)
    handles, labels = axes.get_legend_handles_labels()
    if not handles or figure is None:
        return
    lines, columns = legend_size(labels, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + _LINE * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def legend_size(labels: Sequence[str], width: float) -> tuple[int, int]:
    """Number of lines and columns of a legend: at most four columns that fit a width in inches.

    The sample of a line takes half an inch, a letter 0.055 inches.
    """
    for columns in (4, 3, 2):
        lines = -(-len(labels) // columns)
        letters = sum(max(map(len, labels[start : start + lines])) for start in range(0, len(labels), lines))
        if 0.5 * columns + 0.055 * letters < width:
            return lines, columns
    return len(labels), 1
