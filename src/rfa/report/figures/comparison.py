"""Comparisons of models: differences to a baseline, retrieval at a distance, and speed."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from ..runs import (
    BASELINE,
    MissingData,
    Run,
    by_group,
    by_label,
    perplexity_by_length,
    retrieval_scores,
    shared_train_length,
)
from ..speed import Line, fraction_of_bound, operator_curves
from ..statistics import RunPairs, compare, pairs_of
from .style import COLOURS, MUTED, PAGE, draw_lines, lengths_axis, looks, styled

_KINDS = {"passkey": "three words, asked for by name", "repeat": "a passage, seen again"}


@styled
def differences(runs: Sequence[Run], baseline: str = BASELINE, protocol: str = "blocks") -> Figure:
    """`log perplexity - log perplexity(baseline)` of each label, at the training length and at the longest context.

    A negative difference is better than the baseline. Points are means over the seeds that both have. Bars are nominal
    95 % bootstrap intervals over books. Grey ticks are single seeds, if there are several. Labels are grouped, and
    sorted by the difference at the longer context.

    Args:
        runs: result files with losses by book.
        baseline: a label.
        protocol: which evaluation.

    Raises:
        MissingData: if there is no run of the baseline, or no other run.
    """
    grouped = by_label(runs)
    if baseline not in grouped or len(grouped) == 1:
        raise MissingData(f"runs: got {', '.join(grouped) or 'none'}, expected {baseline} and one to compare with it")
    trained = grouped[baseline][0]["train_length"]
    longest = max((length for run in grouped[baseline] for length in perplexity_by_length(run, protocol)), default=0)
    if longest <= trained:
        raise MissingData(f"runs: got {baseline} at up to {longest} tokens by {protocol}, expected more than {trained}")
    pairs = {label: pairs_of(of, grouped[baseline]) for label, of in grouped.items() if label != baseline}
    values = {
        length: {label: compare(of, length, protocol).difference if of else None for label, of in pairs.items()}
        for length in (trained, longest)
    }
    long = {label: found.value if found else np.inf for label, found in values[longest].items()}
    groups = {name: sorted(filter(pairs.__contains__, of), key=long.__getitem__) for name, of in by_group(runs).items()}
    rows = [row for name, labels in groups.items() if labels for row in (name, *labels)]
    height = 0.15 * len(rows) + 1.0
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, height), sharey=True, squeeze=False)
    for axes, (length, found) in zip(panels[0], values.items(), strict=True):
        axes.axvline(0, color=MUTED, linewidth=0.8, zorder=0)
        for label, each in found.items():
            row = rows.index(label)
            if each is None:
                axes.text(0, row, " no results", va="center")
                continue
            if len(pairs[label]) > 1:
                for pair in pairs[label]:
                    alone = compare([pair], length, protocol, resamples=1).difference
                    if alone is not None:
                        axes.plot(alone.value, row, "|", color=MUTED, markersize=6)
            if each.low is not None and each.high is not None:
                axes.plot((each.low, each.high), (row, row), color=COLOURS[0], linewidth=1.2)
            axes.plot(each.value, row, "o", color=COLOURS[0], label=label)
        axes.set_title(f"L = {length}" + (" (training length)" if length == trained else ""))
        axes.set_xlabel("difference (nats / token)")
        axes.grid(visible=False, axis="y")
    figure.suptitle(f"log perplexity minus that of {baseline} ({protocol}; negative: better)")
    panels[0, 0].tick_params(axis="y", length=0)
    panels[0, 0].set_yticks(range(len(rows)), [_name(name, pairs) for name in rows])
    panels[0, 0].set_ylim(len(rows) - 0.4, -0.6)
    for name, text in zip(rows, panels[0, 0].get_yticklabels(), strict=True):
        text.set_fontweight("normal" if name in pairs else "bold")
    return figure


@styled
def retrieval(runs: Sequence[Run]) -> Figure:
    """The score of the retrieval probes over the distance of the key (see `rfa.evaluation.probe`).

    The score is the gain in log likelihood, in nats per token. It is 0 if the model does not use tokens at this
    distance. Bars are one standard error over trials, with seeds averaged. Each group of models has a row, with the
    baseline in grey.

    Args:
        runs: result files. A label without probes is named in the legend.

    Raises:
        MissingData: if no run has probes.
    """
    grouped = by_label(runs)
    if not any(run.get("passkey") for run in runs):
        raise MissingData("runs: got none with retrieval probes, expected at least one")
    groups = by_group(runs)
    size = (PAGE, 1.5 * len(groups) + 0.5)
    figure, panels = plt.subplots(len(groups), 2, figsize=size, sharex=True, sharey="col", squeeze=False)
    length = shared_train_length(runs)
    distances: set[float] = set()
    for axes, (kind, words) in zip(panels[0], _KINDS.items(), strict=True):
        axes.set_title(f"{kind}: {words}")
    for row, (group, labels) in zip(panels, groups.items(), strict=True):
        look = looks([label for label in labels if label != BASELINE])
        for axes, kind in zip(row, _KINDS, strict=True):
            axes.axhline(0, color="0.3", linewidth=0.6, zorder=0)
            for label in dict.fromkeys([*labels, *([BASELINE] if BASELINE in grouped else [])]):
                scores = retrieval_scores(grouped[label], kind)
                distances |= set(scores.distances)
                style = look.get(label, {"color": MUTED, "linestyle": "--"})
                name = label if scores.distances else f"{label} (no results)"
                axes.errorbar(
                    scores.distances, scores.mean, scores.error, label=name, linewidth=1, capsize=1.5, **style
                )
        row[0].set_ylabel("score (nats / token)")
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "alignment": "left"}
        row[1].legend(title=group, title_fontproperties={"weight": "bold", "size": 7}, **beside)
    for axes in panels.flat:
        lengths_axis(axes, sorted(map(int, distances)), length)
        axes.set_xlabel("")
    for axes in panels[-1]:
        axes.set_xlabel("distance (tokens)" + ("\ndotted: training length" if length else ""))
    return figure


def _name(row: str, pairs: Mapping[str, RunPairs]) -> str:
    if row not in pairs:
        return row
    seeds = len(pairs[row])
    return f"{row} ({seeds} seeds)" if seeds > 1 else row


@styled
def speed_over_length(lines: Sequence[Line]) -> Figure:
    """The operator's time over its peer's time, and the percentages of their bounds that both reach, by length.

    Args:
        lines: of `rfa bench`, with lines of the operator.
    """
    figure, (ratios, percents) = plt.subplots(1, 2, figsize=(PAGE, 2.7))
    curves = operator_curves(lines)
    lengths = {name: [line["length"] for line in curve] for name, curve in curves.items()}
    draw_lines(ratios, {name: (lengths[name], [line["ratio"]["median"] for line in of]) for name, of in curves.items()})
    look = looks(list(curves))
    for name, curve in curves.items():
        ends = ([line["ratio"][end] for line in curve] for end in ("q1", "q3"))
        ratios.fill_between(lengths[name], *ends, color=look[name]["color"], alpha=0.2, linewidth=0)
        for contestant, style in (("rfa", "-"), ("peer", ":")):
            fractions = [fraction_of_bound(line, contestant) for line in curve]
            values = [float("nan") if fraction is None else 100 * fraction for fraction in fractions]
            percents.plot(lengths[name], values, **{**look[name], "linestyle": style})
    ratios.axhline(1, color=MUTED, linestyle=":", linewidth=1)
    ratios.set(ylabel="time / peer's time (band: quartiles)", ylim=(0, None))
    percents.axhline(
        100, color=MUTED, linestyle=":", linewidth=1
    )  # a point above means that a peak was measured too low
    percents.set(ylabel="percent of the bound (dotted: peer)", ylim=(0, None))
    ticks = sorted({length for each in lengths.values() for length in each})
    for axes in (ratios, percents):
        lengths_axis(axes, ticks)
        axes.set_xlabel("length (tokens)")
    ratios.legend()
    return figure
