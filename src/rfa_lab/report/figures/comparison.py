"""Comparisons of models: differences to a baseline, retrieval at a distance, recall by task, and series."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rfa.forecasting.style import (
    COLOURS,
    MARKERS,
    MUTED,
    PAGE,
    SMALLEST,
    lengths_axis,
    no_formulas,
    plain,
    styled,
)
from rfa_lab.report.measurements import compare, lengths_of, pairs_of, retrieval_scores, seed_noise
from rfa_lab.report.runs import BASELINE, MOST_LINES, MissingData, Run, by_group, by_label, shared_train_length
from rfa_lab.report.statistics import Difference, mean_and_interval

from .curves import panel_labels, panel_looks

_DARK = 0.43  # a share below it has a dark colour, and so a white number
_KINDS = {"passkey": "three words, asked for by name", "repeat": "a passage, seen again"}


@styled
def differences(runs: Sequence[Run], protocol: str = "blocks") -> Figure:
    """`log perplexity - log perplexity(baseline)` of each label, at the training length and at the longest context.

    Open points have one seed. Dark bars are intervals over seeds, light ones over books, the grey band is the noise of
    a single seed. Labels are grouped, and sorted by the difference at the longer context. Raises `MissingData` without
    a run of the baseline, another run, or a length beyond that of training.
    """
    grouped = by_label(runs)
    if BASELINE not in grouped or len(grouped) == 1:
        raise MissingData(f"runs: got {', '.join(grouped) or 'none'}, expected {BASELINE} and one to compare with it")
    trained = grouped[BASELINE][0]["train_length"]
    longest = max(lengths_of(grouped[BASELINE], protocol), default=0)
    if longest <= trained:
        raise MissingData(f"runs: got {BASELINE} at up to {longest} tokens by {protocol}, expected more than {trained}")
    pairs = {label: pairs_of(of, grouped[BASELINE]) for label, of in grouped.items() if label != BASELINE}
    values = {
        length: {label: compare(of, length, protocol)[0] if of else None for label, of in pairs.items()}
        for length in (trained, longest)
    }
    long = {label: found.value if found else np.inf for label, found in values[longest].items()}
    groups = {name: sorted(filter(pairs.__contains__, of), key=long.__getitem__) for name, of in by_group(runs).items()}
    rows = [row for name, labels in groups.items() if labels for row in (name, *labels)]
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, 0.15 * len(rows) + 1.0), sharey=True)
    for axes, (length, found) in zip(panels, values.items(), strict=True):
        axes.axvline(0, color=MUTED, linewidth=0.8, zorder=0)
        noise = seed_noise(runs, length, protocol)
        if noise is not None:
            axes.axvspan(-noise, noise, color="0.92", linewidth=0, zorder=-1)
        low, high = _without_outliers([each.value for each in found.values() if each is not None])
        for label, each in found.items():
            _draw_difference(axes, label, each, rows.index(label), low, high)
        axes.set_xlim(low, high)
        axes.set_title(f"L = {length}" + (" (training length)" if length == trained else ""))
        axes.set_xlabel("difference (nats / token)")
        axes.grid(visible=False, axis="y")
    figure.suptitle(f"log perplexity minus that of {BASELINE} ({protocol}; negative: better)")
    seeds = {label: f" ({len(of)} seeds)" if len(of) > 1 else "" for label, of in pairs.items()}
    panels[0].tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(rows)), [f"{row}{seeds.get(row, '')}" for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    for name, text in zip(rows, panels[0].get_yticklabels(), strict=True):
        text.set_fontweight("normal" if name in pairs else "bold")
    return figure


def _draw_difference(axes: Axes, label: str, found: Difference | None, row: int, low: float, high: float) -> None:
    """Draw a difference with its intervals in its row; one beyond the limits as a number at the edge."""
    if found is None:
        axes.text(0.5, row, "no results", va="center", ha="center", transform=axes.get_yaxis_transform())
    elif found.value > high:
        axes.annotate(f"{found.value:+.2f} >", (high, row), va="center", ha="right", fontsize=7)
    elif found.value < low:
        axes.annotate(f"< {found.value:+.2f}", (low, row), va="center", ha="left", fontsize=7)
    else:
        if found.over_books is not None:
            axes.plot(found.over_books, (row, row), color=COLOURS[5], linewidth=3.5, alpha=0.6)
        if found.half is not None:
            axes.errorbar(found.value, row, xerr=found.half, color=COLOURS[0], linewidth=1, capsize=2)
        fill = COLOURS[0] if found.half is not None else "white"
        axes.plot(found.value, row, "o", color=COLOURS[0], markerfacecolor=fill, label=label)


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

    Bars are 95 % t intervals over trials, with seeds averaged. Results that do not say what perfect copying gains are
    drawn in nats per token. An appendix has all labels, in rows of at most six lines, instead of `main_labels` in one.
    """
    grouped = by_label(runs)
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
        styles = panel_looks(labels, appendix)
        for axes, kind in zip(row, _KINDS, strict=True):
            axes.axhline(0, color="0.3", linewidth=0.6, zorder=0)
            for label in labels:
                found = scores[kind][label]
                name = label if found.distances else f"{label} (no results)"
                units = [possible / 100 if shares and possible else 1.0 for possible in found.possible]
                parts = [np.array(trials) / unit for trials, unit in zip(found.trials, units, strict=True)]
                means = [mean_and_interval(part.tolist()) for part in parts]
                values, halves = [each.value for each in means], [each.half or 0.0 for each in means]
                axes.errorbar(found.distances, values, halves, label=name, linewidth=1, capsize=1.5, **styles[label])
        row[0].set_ylabel("% of perfect copying" if shares else "score (nats / token)")
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "alignment": "left"}
        row[1].legend(title=group, title_fontproperties={"weight": "bold", "size": 7}, **beside)
    for axes in panels.flat:
        lengths_axis(axes, distances, length)
        axes.set_xlabel("")
    for axes in panels[-1]:
        axes.set_xlabel("distance (tokens)" + ("\ndotted: training length" if length else ""))
    return figure


@styled
def accuracy_maps(panels: Mapping[str, Mapping[str, Sequence[float | None]]], columns: Sequence[str]) -> Figure:
    """One panel for each length: a row for each model, a column for each task, bright where answers are right.

    `panels` has, for each title and model, the share in each task; None where it is missing. All have the same models.
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


Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@styled
def filtered_series(
    readings: tuple[np.ndarray, np.ndarray, np.ndarray],
    truth: tuple[np.ndarray, np.ndarray],
    bands: Mapping[str, Band],
    now: float,
) -> Figure:
    """One panel for each model: its estimates with their 90 % intervals, over the readings and the true signal.

    `readings` are times, values, and which of them are wrong; `truth` is times and the signal; `bands` are times, means
    and both ends of the interval. After `now`, the time of the last reading, all is forecast.
    """
    times, values, wrong = readings
    size = (PAGE, 1.5 * len(bands))
    figure, panels = plt.subplots(len(bands), 1, figsize=size, sharex=True, sharey=True, squeeze=False)
    low, high = np.min(truth[1]), np.max(truth[1])
    margin = 0.8 * (high - low)
    for axes, (name, (at, mean, lower, upper)), colour in zip(panels[:, 0], bands.items(), COLOURS, strict=False):
        axes.fill_between(at, lower, upper, color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, mean, color=colour, label=name)
        axes.plot(*truth, color="black", linewidth=0.7, label="signal")
        axes.plot(times[~wrong], values[~wrong], ".", color=MUTED, markersize=2.5, label="reading")
        shown = values[wrong].clip(low - margin, high + margin)  # points beyond the axes stand at their edge
        axes.plot(times[wrong], shown, "^", color=COLOURS[3], label="wrong")
        axes.axvline(now, color=MUTED, linestyle=":", linewidth=1)
        axes.set_ylim(low - margin, high + margin)
        axes.legend(loc="upper left", ncols=4)
    panels[-1, 0].set_xlabel("time; dotted: the last reading")
    return figure


@styled
def series_ratios(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float | None] | None]]],
    columns: Sequence[str],
    reference: str,
) -> Figure:
    """One panel for each part: the ratio of each model's error to the reference's in each setting, with its interval.

    `panels` has, for each part and model, the ratio and its relative half width by setting; None where it is missing.
    """
    labels = list(dict.fromkeys(label for models in panels.values() for label in models))
    size = (PAGE, 2.6 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False)
    for panel, (part, models) in zip(axes[:, 0], panels.items(), strict=True):
        panel.axhline(1.0, color=MUTED, linewidth=1)
        for index, label in enumerate(labels):
            known = [(k, *found) for k, found in enumerate(models.get(label, ())) if found is not None]
            if not known:
                continue
            shift = 0.7 * ((index + 0.5) / len(labels) - 0.5)
            place = [k + shift for k, _, _ in known]
            mean = np.array([value for _, value, _ in known])
            factor = np.array([1 + (half or 0.0) for _, _, half in known])
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index // len(COLOURS) % len(MARKERS)]
            ends = mean - mean / factor, mean * factor - mean
            look = {"fmt": marker, "color": colour, "elinewidth": 0.8, "markersize": 3}
            panel.errorbar(place, mean, yerr=ends, label=plain(label), **look)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value in (0.8, 0.9, 2, 3, 5) else "")
        panel.set_ylabel(f"{part}: error / {plain(reference)}'s")
        panel.set_xlim(-0.5, len(columns) - 0.5)
    axes[-1, 0].set_xticks(range(len(columns)), map(plain, columns))
    legend = axes[0, 0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6)
    no_formulas([*legend.get_texts(), *axes[-1, 0].get_xticklabels(), *(panel.yaxis.label for panel in axes[:, 0])])
    return figure
