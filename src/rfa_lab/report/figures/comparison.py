"""Comparisons of models: differences to a baseline, retrieval at a distance, right answers by task, and speed."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from rfa.forecasting.style import (
    COLOURS,
    MUTED,
    PAGE,
    SMALLEST,
    draw_lines,
    lengths_axis,
    looks,
    no_formulas,
    plain,
    styled,
)
from rfa_lab.report.measurements import MOST_LINES, retrieval_scores
from rfa_lab.report.runs import (
    BASELINE,
    MissingData,
    Run,
    by_group,
    by_label,
    perplexity_by_length,
    shared_train_length,
)
from rfa_lab.report.speed import Line, fraction_of_bound, operator_curves
from rfa_lab.report.statistics import RunPairs, compare, mean_and_interval, pairs_of, seed_noise

from .panels import panel_labels

_DARK = 0.43  # a share below it has a dark colour, and so a white number
_KINDS = {"passkey": "three words, asked for by name", "repeat": "a passage, seen again"}


@styled
def differences(runs: Sequence[Run], baseline: str = BASELINE, protocol: str = "blocks") -> Figure:
    """`log perplexity - log perplexity(baseline)` of each label, at the training length and at the longest context.

    A negative difference is better than the baseline. Full points are means over several seeds, open points have one
    seed. Dark bars are 95 % t intervals over seeds, broad light ones bootstrap intervals over books. The grey band is
    the noise of a single seed. A point far from the others is a number at the edge. Labels are grouped, and sorted by
    the difference at the longer context.

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
        noise = seed_noise(runs, length, protocol)
        if noise is not None:
            axes.axvspan(-noise, noise, color="0.92", linewidth=0, zorder=-1)
        low, high = _without_outliers([each.value for each in found.values() if each is not None])
        for label, each in found.items():
            row = rows.index(label)
            if each is None:
                axes.text(0.5, row, "no results", va="center", ha="center", transform=axes.get_yaxis_transform())
                continue
            if not low <= each.value <= high:  # at the edge, with its number
                right = each.value > high
                look = {"va": "center", "ha": "right" if right else "left", "fontsize": 7}
                axes.annotate(
                    f"{each.value:+.2f} " + ">" if right else f"< {each.value:+.2f}",
                    (high if right else low, row),
                    **look,
                )
                continue
            if each.low is not None and each.high is not None:
                axes.plot((each.low, each.high), (row, row), color=COLOURS[5], linewidth=3.5, alpha=0.6)
            if each.half is not None:
                axes.errorbar(each.value, row, xerr=each.half, color=COLOURS[0], linewidth=1, capsize=2)
            fill = COLOURS[0] if each.half is not None else "white"
            axes.plot(each.value, row, "o", color=COLOURS[0], markerfacecolor=fill, label=label)
        axes.set_xlim(low, high)
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


def _without_outliers(values: Sequence[float]) -> tuple[float, float]:
    """Limits around 0 and all values but outliers, by more than 1.5 ranges beyond the middle 80 %."""
    if not values:
        return -1.0, 1.0
    first, last = np.quantile([0.0, *values], (0.1, 0.9))
    room = 1.5 * (last - first) or 1.0
    near = [0.0, *(value for value in values if first - room <= value <= last + room)]
    margin = 0.15 * (max(near) - min(near)) or 0.1
    return min(near) - margin, max(near) + margin


@styled
def retrieval(runs: Sequence[Run], appendix: bool = False) -> Figure:
    """The score of the retrieval probes over the distance of the key, as a share of what perfect copying would gain.

    The share is 0 for a model that does not use tokens at this distance, and 1 for one that copies all that can be
    copied (see `rfa_lab.evaluation.probe`). Bars are 95 % t intervals over trials, with seeds averaged. Results that
    do not say what perfect copying gains are drawn in nats per token.

    Args:
        runs: result files. A label without probes is named in the legend.
        appendix: all labels, in rows of at most six lines, instead of `main_labels` in one row.

    Raises:
        MissingData: if no run has probes.
    """
    grouped = by_label(runs)
    if not any(run.get("passkey") for run in runs):
        raise MissingData("runs: got none with retrieval probes, expected at least one")
    groups = panel_labels(runs, list(grouped), appendix, MOST_LINES)
    size = (PAGE, (1.7 if appendix else 2.2) * len(groups) + 0.5)
    figure, panels = plt.subplots(len(groups), 2, figsize=size, sharex=True, sharey="col", squeeze=False)
    length = shared_train_length(runs)
    scores = {kind: {label: retrieval_scores(of, kind) for label, of in grouped.items()} for kind in _KINDS}
    distances = sorted({distance for of in scores.values() for each in of.values() for distance in each.distances})
    shares = all(None not in each.possible for of in scores.values() for each in of.values())
    for axes, (kind, words) in zip(panels[0], _KINDS.items(), strict=True):
        axes.set_title(f"{kind}: {words}")
    for row, (group, labels) in zip(panels, groups.items(), strict=True):
        look = looks([label for label in labels if not (appendix and label == BASELINE)])
        for axes, kind in zip(row, _KINDS, strict=True):
            axes.axhline(0, color="0.3", linewidth=0.6, zorder=0)
            for label in labels:
                found = scores[kind][label]
                style = look.get(label, {"color": MUTED, "linestyle": "--"})
                name = label if found.distances else f"{label} (no results)"
                units = [possible / 100 if shares and possible else 1.0 for possible in found.possible]
                parts = [np.array(trials) / unit for trials, unit in zip(found.trials, units, strict=True)]
                means = [mean_and_interval(part.tolist()) for part in parts]
                values, halves = [each.value for each in means], [each.half or 0.0 for each in means]
                axes.errorbar(found.distances, values, halves, label=name, linewidth=1, capsize=1.5, **style)
        row[0].set_ylabel("% of perfect copying" if shares else "score (nats / token)")
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "alignment": "left"}
        row[1].legend(title=group, title_fontproperties={"weight": "bold", "size": 7}, **beside)
    for axes in panels.flat:
        lengths_axis(axes, distances, length)
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
def accuracy_maps(panels: Mapping[str, Mapping[str, Sequence[float | None]]], columns: Sequence[str]) -> Figure:
    """One panel for each length: a row for each model, a column for each task, bright where answers are right.

    Args:
        panels: for each title and model, the share of right answers in each task; None where it is missing.
            All panels have the same models.
        columns: the tasks.
    """
    models = list(next(iter(panels.values())))
    tasks, labels = [plain(task) for task in columns], [plain(model) for model in models]
    width = 0.06 * max(map(len, labels)) + 0.3 * len(panels) * len(tasks)  # inches: of labels, and of numbers
    height = 0.17 * len(models) + 0.04 * max(map(len, tasks)) + 0.4
    figure, grid = plt.subplots(1, len(panels), figsize=(max(PAGE, width), height), sharey=True, squeeze=False)
    for axes, (title, shares) in zip(grid[0], panels.items(), strict=True):
        found = np.array([[np.nan if one is None else one for one in shares[model]] for model in models])
        axes.imshow(found, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.grid(False)
        axes.set_title(title)
        axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", rotation_mode="anchor")
        for (row, column), share in np.ndenumerate(found):
            if not np.isnan(share):
                colour = "white" if share < _DARK else "black"
                axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=SMALLEST, color=colour)
        no_formulas(axes.get_xticklabels())
    grid[0, 0].set_yticks(range(len(models)), labels)
    no_formulas(grid[0, 0].get_yticklabels())
    return figure


@styled
def speed_over_length(lines: Sequence[Line]) -> Figure:
    """The operator's time over its peer's time, and the percentages of their bounds that both reach, by length.

    Args:
        lines: of `rfa bench`, with lines of the operator.
    """
    figure, (ratios, percents) = plt.subplots(1, 2, figsize=(PAGE, 3.3))
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
    named = ratios.get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=2, columnspacing=1.0, fontsize="small")
    return figure
