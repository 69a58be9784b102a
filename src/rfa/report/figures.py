"""Figures from result files, in one style: colour-blind-safe, axes with units."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, ScalarFormatter

from rfa.files import write_whole

from .speed import Line, operator_curves, share_of_bound

# Okabe and Ito's palette
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vPX*"


def training_and_extrapolation(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    train_length: int,
) -> Figure:
    """Validation perplexity over training, and perplexity over context length (the paper's training figure).

    Args:
        curves: for each model, `(tokens seen, validation perplexity)`.
        rows: for each model, the rows of `rfa.evaluation.perplexities`.
        train_length: marked on the length axis.
    """
    figure, (over_training, over_length) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    _lines(over_training, {name: list(zip(*points, strict=True)) for name, points in curves.items()})
    over_training.set(xlabel="training tokens", ylabel="validation perplexity", yscale="log")
    over_training.xaxis.set_major_formatter(EngFormatter(sep=""))
    for formatted in (over_training.yaxis.set_major_formatter, over_training.yaxis.set_minor_formatter):
        formatted(ScalarFormatter())  # perplexities as numbers, not as powers of ten

    _lines(
        over_length,
        {name: ([row["length"] for row in each], [row["perplexity"] for row in each]) for name, each in rows.items()},
    )
    lengths = sorted({row["length"] for each in rows.values() for row in each})
    over_length.axvline(train_length, color="0.6", linestyle=":", linewidth=1)
    over_length.set_xscale("log", base=2)
    over_length.set_xticks(lengths, [str(length) for length in lengths])
    over_length.set(xlabel="context length (tokens); dotted: training length", ylabel="test perplexity")
    over_length.legend(frameon=False, fontsize=8)
    return figure


def speed_over_length(lines: Sequence[Line]) -> Figure:
    """The operator's time over its peer's, and how near both are to their bounds, by length.

    Args:
        lines: of `rfa bench`, the operator's among them.
    """
    figure, (ratios, shares) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    curves = operator_curves(lines)
    lengths = {name: [line["length"] for line in curve] for name, curve in curves.items()}
    _lines(ratios, {name: (lengths[name], [line["ratio"]["median"] for line in of]) for name, of in curves.items()})
    for index, (name, curve) in enumerate(curves.items()):
        ends = ([line["ratio"][end] for line in curve] for end in ("q1", "q3"))
        ratios.fill_between(lengths[name], *ends, color=COLOURS[index % 8], alpha=0.2, linewidth=0)
        for contestant, style in (("rfa", "-"), ("peer", ":")):
            points = [share_of_bound(line, contestant) for line in curve]
            shares.plot(
                lengths[name],
                [100 * share if share is not None else float("nan") for share in points],
                style,
                color=COLOURS[index % 8],
                marker=MARKERS[index % 8],
                markersize=4,
                linewidth=1.4,
            )
    ratios.axhline(1, color="0.6", linestyle=":", linewidth=1)
    ratios.set(ylabel="time / peer's time (band: quartiles)", ylim=(0, None))
    shares.set(ylabel="percent of the bound (dotted: peer)", ylim=(0, 100))
    ticks = sorted({length for each in lengths.values() for length in each})
    for axes in (ratios, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(length) for length in ticks], fontsize=8)
        axes.set_xlabel("length (tokens)")
    shares.spines[["top", "right"]].set_visible(False)
    shares.grid(alpha=0.25, linewidth=0.5)
    ratios.legend(frameon=False, fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole, in the format that its name says."""
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=160, format=path.suffix[1:]))
    plt.close(figure)


def _lines(axes: Axes, lines: Mapping[str, Sequence[Sequence[float]]]) -> None:
    for index, (name, line) in enumerate(lines.items()):
        if line:
            axes.plot(
                *line, color=COLOURS[index % 8], marker=MARKERS[index % 8], markersize=4, linewidth=1.4, label=name
            )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
