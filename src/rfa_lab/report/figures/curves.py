"""Curves over training, context length and position: the mean over seeds with its band, and the trigram's.

A panel has at most six lines: the main models in one panel, or all models in an appendix of many panels. The scale of a
panel is set by the models that do not fail. A line that fails is cut off, and the legend says how far it goes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rfa.forecasting.style import (
    COLUMN,
    MARKERS,
    MUTED,
    PAGE,
    draw_lines,
    lengths_axis,
    looks,
    plain_numbers,
    shades,
    styled,
)
from rfa_lab.report.measurements import (
    TRIGRAM_LABEL,
    SeedBand,
    noise_by_length,
    perplexity_series,
    position_series,
    training_series,
    trigram_of,
    trigram_positions,
)
from rfa_lab.report.runs import (
    BASELINE,
    BASELINES,
    MOST_LINES,
    Run,
    by_group,
    by_label,
    damping_by_label,
    main_labels,
    perplexity_by_length,
    shared_train_length,
)

_FAILS = 1.4  # a perplexity so many times the median of its panel is cut off
_LINE = 0.13  # inches, height of a line in a legend
_FIRST = 8  # earlier positions have few tokens each, and are left out
Curve = tuple[Sequence[float], Sequence[float]]


@styled
def training_and_extrapolation(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    train_length: int,
) -> Figure:
    """Validation perplexity over training, and perplexity over context length (the paper's training figure).

    Each model has a curve of `(tokens seen, validation perplexity)` and the rows of `rfa_lab.evaluation.perplexities`.
    """
    figure, (over_training, over_length) = plt.subplots(1, 2, figsize=(PAGE, 2.6))
    draw_lines(over_training, {name: list(zip(*points, strict=True)) for name, points in curves.items()})
    _training_axes(over_training)
    draw_lines(
        over_length,
        {name: ([row["length"] for row in each], [row["perplexity"] for row in each]) for name, each in rows.items()},
    )
    lengths_axis(over_length, sorted({row["length"] for each in rows.values() for row in each}), train_length)
    over_length.set_ylabel("test perplexity")
    over_length.legend()
    return figure


@styled
def training_curves(runs: Sequence[Run], appendix: bool = False) -> Figure:
    """Validation perplexity over training. The first half of training does not set the scale.

    A label of which nothing was measured is named in the legend. An appendix has all labels, in panels of at most six
    lines, instead of `main_labels` in one panel.
    """
    series = {label: training_series(seeds) for label, seeds in by_label(runs).items()}
    last = max((each.x[-1] for each in series.values() if each.x), default=0.0)
    trigram = trigram_of(runs)
    level = None if trigram is None else ((0, last), 2 * [trigram["valid_perplexity"]])
    figure, panels = _draw_panels(runs, series, appendix=appendix, reference=level, since=last / 2, marker="")
    for axes in panels:
        _training_axes(axes)
    return figure


@styled
def perplexity_over_length(runs: Sequence[Run], protocol: str = "blocks", appendix: bool = False) -> Figure:
    """Test perplexity over context length by a protocol. A model of one seed has the noise of seeds as its band.

    Missing labels and `appendix` as for `training_curves`.
    """
    noise = noise_by_length(runs, protocol)
    series = {label: perplexity_series(seeds, protocol, noise) for label, seeds in by_label(runs).items()}
    found = perplexity_by_length(trigram_of(runs) or {}, protocol)
    reference = (sorted(found), [found[length] for length in sorted(found)]) if found else None
    figure, panels = _draw_panels(runs, series, appendix=appendix, reference=reference)
    for axes in panels:
        _length_axes(axes, series, runs, protocol)
    return figure


@styled
def loss_over_position(runs: Sequence[Run], appendix: bool = False) -> Figure:
    """Loss over the position in the longest window, in bins of equal factors, without the first seven positions.

    With a trigram it is the loss less the trigram's on the same tokens, which leaves out what single tokens cost all
    models. Missing labels and `appendix` as for `training_curves`.
    """
    less = trigram_positions(runs)
    series = {label: position_series(seeds, less) for label, seeds in by_label(runs).items()}
    last = max((each.x[-1] for each in series.values() if each.x), default=1.0)
    level = ((1, last), (0, 0)) if less else None
    figure, panels = _draw_panels(
        runs, series, appendix=appendix, reference=level, since=_FIRST, logarithmic=False, marker=""
    )
    ticks = [2**power for power in range(0, round(math.log2(last)) + 1, 2)]
    for axes in panels:
        lengths_axis(axes, ticks, shared_train_length(runs))
        axes.set_xlim(min(_FIRST, last / 2), 1.1 * last)
        words = "loss minus the trigram's (nats)" if less else "loss (nats)"
        axes.set(xlabel="position (tokens); dotted: training length", ylabel=words)
    return figure


@styled
def damping_sweep(runs: Sequence[Run], protocol: str = "blocks") -> Figure:
    """Perplexity over context length by damping coefficient b (the paper's table 2 as a figure). Dark is small.

    The baselines are drawn in grey if six lines leave room for them. Other labels are left out.
    """
    damping, grouped, noise = damping_by_label(runs), by_label(runs), noise_by_length(runs, protocol)
    figure, axes = plt.subplots(figsize=(COLUMN, 2.8))
    series: dict[str, SeedBand] = {}
    there = [name for name in reversed(BASELINES) if name in grouped][: max(MOST_LINES - len(damping), 0)]
    for label, marker in zip(there, MARKERS, strict=False):
        series[label] = perplexity_series(grouped[label], protocol, noise)
        draw_series(axes, label, series[label], color=MUTED, marker=marker, linestyle="--")
    for (label, b), colour in zip(damping.items(), shades(len(damping)), strict=True):
        name = f"$b$ = {b:g}"
        series[name] = perplexity_series(grouped[label], protocol, noise)
        draw_series(axes, name, series[name], color=colour, marker="o")
    _length_axes(axes, series, runs, protocol)
    _legend_below(axes)
    return figure


def _training_axes(axes: Axes) -> None:
    axes.set(xlabel="training tokens", ylabel="validation perplexity")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    plain_numbers(axes)


def _length_axes(axes: Axes, series: Mapping[str, SeedBand], runs: Sequence[Run], protocol: str) -> None:
    lengths = sorted({int(length) for each in series.values() for length in each.x})
    lengths_axis(axes, lengths, shared_train_length(runs))
    axes.set_ylabel(f"test perplexity ({protocol})")
    plain_numbers(axes)


def panel_labels(runs: Sequence[Run], labels: Sequence[str], appendix: bool, most: int) -> dict[str, list[str]]:
    """The labels of each panel by its title, at most `most` with the baseline, which stands in each panel.

    An appendix has all labels in panels of their groups, instead of `main_labels` in one panel.
    """
    if not appendix:
        chosen = main_labels(runs, most)
        return {"": [label for label in labels if label in chosen]}
    panels: dict[str, list[str]] = {}
    first = [BASELINE] if BASELINE in labels else []
    for group, of in by_group(runs).items():
        own = [label for label in of if label in labels and label != BASELINE]
        size = most - len(first)
        parts = [own[start : start + size] for start in range(0, len(own), size)]
        for number, part in enumerate(parts, 1):
            name = f"{group} ({number} of {len(parts)})" if len(parts) > 1 else group
            panels[name] = [*first, *part]
    return panels


def panel_looks(labels: Sequence[str], appendix: bool) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each label of a panel. The baseline of an appendix is grey."""
    grey = {"color": MUTED, "linestyle": "--"}
    return {BASELINE: grey, **looks([label for label in labels if not (appendix and label == BASELINE)])}


def _draw_panels(
    runs: Sequence[Run],
    series: Mapping[str, SeedBand],
    *,
    appendix: bool,
    reference: Curve | None,
    since: float = 0.0,
    logarithmic: bool = True,
    **look: Any,
) -> tuple[Figure, list[Axes]]:
    """Draw lines with their bands, and the trigram's as `reference`. Legends are below the panels.

    Values at x smaller than `since` do not set the scale. They are perplexities, or losses if it is not `logarithmic`.
    """
    groups = panel_labels(runs, list(series), appendix, MOST_LINES - (reference is not None))
    columns = min(len(groups), 2)
    rows = -(-len(groups) // columns)
    size = (PAGE, 2.2 * rows) if columns > 1 else (COLUMN, 2.7)
    lines = [0] * rows  # number of lines of the longest legend in each row
    figure, panels = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False)
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    used = panels.flat[: len(groups)]
    for index, (axes, (title, labels)) in enumerate(zip(used, groups.items(), strict=True)):
        axes.set_title(title)
        axes.tick_params(labelbottom=True)
        shown = {label: series[label] for label in labels}
        low, high = limits(shown, reference, since, logarithmic)
        styles = panel_looks(labels, appendix)
        for label, each in shown.items():
            draw_series(axes, label, each, high, **{"marker": "", **styles[label], **look})
        if reference is not None:
            draw_reference(axes, reference)
        if low < high < math.inf:
            axes.set_ylim(low, high)
        if columns > 1:
            tall, wide = _legend_size(axes.get_legend_handles_labels()[1], PAGE / columns)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=wide)
            lines[index // columns] = max(lines[index // columns], tall)
    if columns == 1:
        _legend_below(panels[0, 0])
    figure.set_figheight(figure.get_figheight() + _LINE * sum(lines))
    return figure, list(used)


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
    """Draw a mean and its band. A label without results is named in the legend, and a line that ends above `high`."""
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


def _legend_below(axes: Axes) -> None:
    """Put the legend below the axes, in as many columns as fit."""
    figure = axes.get_figure(root=True)
    handles, labels = axes.get_legend_handles_labels()
    if not handles or figure is None:
        return
    lines, columns = _legend_size(labels, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + _LINE * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _legend_size(labels: Sequence[str], width: float) -> tuple[int, int]:
    """Number of lines and columns of a legend: at most four columns that fit a width in inches.

    The sample of a line takes half an inch, a letter 0.055 inches.
    """
    for columns in (4, 3, 2):
        lines = -(-len(labels) // columns)
        letters = sum(max(map(len, labels[start : start + lines])) for start in range(0, len(labels), lines))
        if 0.5 * columns + 0.055 * letters < width:
            return lines, columns
    return len(labels), 1
