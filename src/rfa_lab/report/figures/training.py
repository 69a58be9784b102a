"""Results of training and evaluation: curves over tokens, perplexity over context length, the damping sweep."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rfa.forecasting.style import COLUMN, MARKERS, MUTED, PAGE, draw_lines, lengths_axis, plain_numbers, shades, styled
from rfa_lab.report.measurements import (
    MOST_LINES,
    SeedBand,
    perplexity_series,
    position_series,
    training_series,
    trigram_of,
    trigram_positions,
)
from rfa_lab.report.runs import Run, by_label, damping_by_label, perplexity_by_length, shared_train_length
from rfa_lab.report.statistics import seed_noise
from rfa_lab.report.tables import BASELINES

from .panels import draw_panels, draw_series, legend_below

_FIRST = 8  # earlier positions have few tokens each, and are left out


@styled
def training_and_extrapolation(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    train_length: int,
) -> Figure:
    """Validation perplexity over training, and perplexity over context length (the paper's training figure).

    Args:
        curves: for each model, `(tokens seen, validation perplexity)`.
        rows: for each model, the rows of `rfa_lab.evaluation.perplexities`.
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
def training_curves(runs: Sequence[Run], appendix: bool = False) -> Figure:
    """Validation perplexity over training: the mean over seeds and its t interval, and the trigram's.

    The first half of training does not set the scale.

    Args:
        runs: result files, any number of seeds a label. A label of which nothing was measured is named in the legend.
        appendix: all labels, in panels of at most six lines, instead of `main_labels` in one panel.
    """
    series = {label: training_series(seeds) for label, seeds in by_label(runs).items()}
    last = max((each.x[-1] for each in series.values() if each.x), default=0.0)
    trigram = trigram_of(runs)
    level = None if trigram is None else ((0, last), 2 * [trigram["valid_perplexity"]])
    figure, panels = draw_panels(runs, series, appendix=appendix, reference=level, since=last / 2, marker="")
    for axes in panels:
        _training_axes(axes)
    return figure


@styled
def perplexity_over_length(runs: Sequence[Run], protocol: str = "blocks", appendix: bool = False) -> Figure:
    """Test perplexity over context length: the mean over seeds and its t interval, and the trigram's.

    A model of one seed has the noise of seeds as its band. A line that fails is cut off and named in the legend.

    Args:
        runs: result files, any number of seeds a label. A label that was not evaluated is named in the legend.
        protocol: which evaluation.
        appendix: as for `training_curves`.
    """
    groups = by_label(runs)
    lengths = {length for run in runs for length in perplexity_by_length(run, protocol)}
    noise = {length: seed_noise(runs, length, protocol) for length in lengths}
    series = {label: perplexity_series(seeds, protocol, noise) for label, seeds in groups.items()}
    trigram = trigram_of(runs)
    found = perplexity_by_length(trigram, protocol) if trigram else {}
    reference = (sorted(found), [found[length] for length in sorted(found)]) if found else None
    figure, panels = draw_panels(runs, series, appendix=appendix, reference=reference)
    for axes in panels:
        _length_axes(axes, series, runs, protocol)
    return figure


@styled
def loss_over_position(runs: Sequence[Run], appendix: bool = False) -> Figure:
    """Loss over the position in the longest window, in bins of equal factors: mean over seeds and its t interval.

    With a trigram the loss less the trigram's on the same tokens, which leaves out what single tokens cost all models.
    The first seven positions are left out.

    Args:
        runs: result files, any number of seeds a label. A label without losses by position is named in the legend.
        appendix: as for `training_curves`.
    """
    less = trigram_positions(runs)
    series = {label: position_series(seeds, less) for label, seeds in by_label(runs).items()}
    last = max((each.x[-1] for each in series.values() if each.x), default=1.0)
    level = ((1, last), (0, 0)) if less else None
    figure, panels = draw_panels(
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
def damping_sweep(runs: Sequence[Run], damping: Mapping[str, float] | None = None, protocol: str = "blocks") -> Figure:
    """Perplexity over context length by damping coefficient (the paper's table 2 as a figure). Dark is small.

    Args:
        runs: result files. The baselines are drawn in grey if six lines leave room for them. Other labels that are not
            in `damping` are left out.
        damping: the coefficient b of each label of the sweep, by default from `damping_by_label`.
        protocol: which evaluation.
    """
    damping = damping_by_label(runs) if damping is None else damping
    figure, axes = plt.subplots(figsize=(COLUMN, 2.8))
    grouped = by_label(runs)
    lengths = {length for run in runs for length in perplexity_by_length(run, protocol)}
    noise = {length: seed_noise(runs, length, protocol) for length in lengths}
    series: dict[str, SeedBand] = {}
    swept = sorted(damping, key=damping.__getitem__)
    there = [name for name in reversed(BASELINES) if name in grouped][: max(MOST_LINES - len(swept), 0)]
    for label, marker in zip(there, MARKERS, strict=False):
        series[label] = perplexity_series(grouped[label], protocol, noise)
        draw_series(axes, label, series[label], color=MUTED, marker=marker, linestyle="--")
    for label, colour in zip(swept, shades(len(swept)), strict=True):
        name = f"$b$ = {damping[label]:g}"
        series[name] = perplexity_series(grouped.get(label, []), protocol, noise)
        draw_series(axes, name, series[name], color=colour, marker="o")
    _length_axes(axes, series, runs, protocol)
    legend_below(axes)
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
