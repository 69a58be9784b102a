"""Results of training and evaluation: curves over tokens, perplexity over context length, the damping sweep."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ..runs import (
    BASELINE,
    Run,
    SeedBand,
    by_group,
    by_label,
    damping_by_label,
    perplexity_series,
    position_series,
    shared_train_length,
    training_series,
)
from ..tables import BASELINES
from .style import COLUMN, MARKERS, MUTED, PAGE, draw_lines, lengths_axis, looks, plain_numbers, shades, styled

_MAX_LABELS = 9  # in one panel
_LINE = 0.13  # inches, height of a line in a legend


@styled
def training_and_extrapolation(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    train_length: int,
) -> Figure:
    """Validation perplexity over training, and perplexity over context length (the paper's training figure).

    Args:
        curves: for each model, `(tokens seen, validation perplexity)`.
        rows: for each model, the rows of `rfa.evaluation.perplexities`.
        train_length: in tokens, marked on the length axis.
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
def training_curves(runs: Sequence[Run]) -> Figure:
    """Validation perplexity over training: the mean over seeds, and the band from the lowest to the highest seed.

    Args:
        runs: result files, any number of seeds a label. A label of which nothing was measured is named in the legend.
            More than nine labels have a panel a group, each with b1-rope in grey.
    """
    series = {label: training_series(seeds) for label, seeds in by_label(runs).items()}
    figure, panels = _draw_panels(runs, series, marker="")
    for axes in panels:
        _training_axes(axes)
    return figure


@styled
def perplexity_over_length(runs: Sequence[Run], protocol: str = "blocks") -> Figure:
    """Test perplexity over context length: the mean over seeds, and the band from the lowest to the highest seed.

    Args:
        runs: result files, any number of seeds a label. A label that was not evaluated is named in the legend.
            More than nine labels have a panel a group, each with b1-rope in grey.
        protocol: which evaluation.
    """
    series = {label: perplexity_series(seeds, protocol) for label, seeds in by_label(runs).items()}
    figure, panels = _draw_panels(runs, series)
    for axes in panels:
        _length_axes(axes, series, runs, protocol)
    return figure


@styled
def loss_over_position(runs: Sequence[Run]) -> Figure:
    """Loss over the position in the longest window, smoothed in bins of equal factors: mean over seeds and their band.

    Args:
        runs: result files, any number of seeds a label. A label without losses by position is named in the legend.
            More than nine labels have a panel a group, each with b1-rope in grey.
    """
    series = {label: position_series(seeds) for label, seeds in by_label(runs).items()}
    figure, panels = _draw_panels(runs, series, marker="")
    last = max((each.x[-1] for each in series.values() if each.x), default=1.0)
    for axes in panels:
        lengths_axis(axes, [2**power for power in range(0, round(math.log2(last)) + 1, 2)], shared_train_length(runs))
        axes.set(xlabel="position (tokens); dotted: training length", ylabel="loss (nats)")
    return figure


@styled
def damping_sweep(runs: Sequence[Run], damping: Mapping[str, float] | None = None, protocol: str = "blocks") -> Figure:
    """Perplexity over context length by damping coefficient (the paper's table 2 as a figure). Dark is small.

    Args:
        runs: result files. The two baselines are drawn in grey; other labels that are not in `damping` are left out.
        damping: the coefficient b of each label of the sweep, by default from `damping_by_label`.
        protocol: which evaluation.
    """
    damping = damping_by_label(runs) if damping is None else damping
    figure, axes = plt.subplots(figsize=(COLUMN, 2.8))
    grouped = by_label(runs)
    series: dict[str, SeedBand] = {}
    for label, marker in zip((name for name in BASELINES if name in grouped), MARKERS, strict=False):
        series[label] = perplexity_series(grouped[label], protocol)
        _draw_series(axes, label, series[label], color=MUTED, marker=marker, linestyle="--")
    swept = sorted(damping, key=damping.__getitem__)
    for label, colour in zip(swept, shades(len(swept)), strict=True):
        name = f"$b$ = {damping[label]:g}"
        series[name] = perplexity_series(grouped.get(label, []), protocol)
        _draw_series(axes, name, series[name], color=colour, marker="o")
    _length_axes(axes, series, runs, protocol)
    _legend_below(axes)
    return figure


def _draw_panels(runs: Sequence[Run], series: Mapping[str, SeedBand], **look: Any) -> tuple[Figure, list[Axes]]:
    """Draw at most nine labels in one panel, otherwise each group in its own panel. Legends are below the panels."""
    groups = by_group(runs) if len(series) > _MAX_LABELS else {"": list(series)}
    columns = min(len(groups), 2)
    rows = -(-len(groups) // columns)
    size = (PAGE, 2.2 * rows) if columns > 1 else (COLUMN, 2.7)
    lines = [0] * rows  # number of lines of the longest legend in each row
    figure, panels = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False)
    used = list(zip(panels.flat, groups.items(), strict=False))
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for index, (axes, (group, labels)) in enumerate(used):
        axes.set_title(group)
        axes.tick_params(labelbottom=True)
        coloured = looks([label for label in labels if len(groups) == 1 or label != BASELINE])
        if len(groups) > 1 and BASELINE in series:
            _draw_series(axes, BASELINE, series[BASELINE], **{"color": MUTED, "linestyle": "--", "marker": "", **look})
        for label, own in coloured.items():
            _draw_series(axes, label, series[label], **{**own, **look})
        if len(groups) > 1:
            names = axes.get_legend_handles_labels()[1]
            tall, wide = _legend_size(names, PAGE / columns)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=wide)
            lines[index // columns] = max(lines[index // columns], tall)
    if len(groups) == 1:
        _legend_below(panels[0, 0])
    figure.set_figheight(figure.get_figheight() + _LINE * sum(lines))
    return figure, [axes for axes, _ in used]


def _draw_series(axes: Axes, label: str, series: SeedBand, **look: Any) -> None:
    """Draw a mean and its band. A label without results is named in the legend."""
    name = label if series.x else f"{label} (no results)"
    if series.x and series.missing:
        name += f" (without seed {', '.join(map(str, series.missing))})"
    axes.plot(series.x, series.mean, label=name, **look)
    if series.seeds > 1:
        axes.fill_between(series.x, series.low, series.high, color=look["color"], alpha=0.2, linewidth=0)


def _training_axes(axes: Axes) -> None:
    axes.set(xlabel="training tokens", ylabel="validation perplexity")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    plain_numbers(axes)


def _length_axes(axes: Axes, series: Mapping[str, SeedBand], runs: Sequence[Run], protocol: str) -> None:
    lengths = sorted({int(length) for each in series.values() for length in each.x})
    lengths_axis(axes, lengths, shared_train_length(runs))
    axes.set_ylabel(f"test perplexity ({protocol})")
    plain_numbers(axes)


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
