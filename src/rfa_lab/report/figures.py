"""The figures of a record: curves over length and training, differences, heads, maps of attention.

A panel has at most six lines. A model that fails does not set the scale: its line leaves the panel.
"""

from rfa.checks import needs

needs("matplotlib")

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FormatStrFormatter, MaxNLocator, NullFormatter, NullLocator

from rfa.checks import require
from rfa.forecasting.figure import COLOURS, COLUMN, MUTED, PAGE, styled
from rfa_lab.evaluation import MAP_LENGTHS
from rfa_lab.record import Record

from .statistics import differences, over_seeds, seed_noise
from .tables import BASELINES

_MAX_LINES = 6
_MAIN_LABELS = ("rfa", *BASELINES, "m2-sc-rfa")
_WITH_HEADS = ("rfa", "m1-rfa", "m2-sc-rfa", "m3-sc-rfa")  # labels whose heads have figures
_MAX_OVER_MEDIAN = 1.4  # a perplexity so many times the median of its panel does not set the scale
_MIN_SHOWN_WEIGHT = 1e-5  # lowest weight of the colour scale; weights spread evenly over 128 blocks are 8e-3


class Drawing(NamedTuple):
    """A figure, not drawn yet: the name of its files, its caption, and what draws it."""

    name: str
    caption: str
    draw: Callable[[], Figure]


def record_figures(record: Record, maps: Mapping[str, Path]) -> list[Drawing]:
    """All figures for which the record has data, in their order on the page.

    Args:
        record: of the runs.
        maps: files of attention maps by the run's name.
    """
    drawings = list[Drawing]()

    def add(name: str, caption: str, draw: Callable[..., Figure], *arguments: Any) -> None:
        drawings.append(Drawing(name, caption, partial(draw, *arguments)))

    labels = record.labels()
    main = record.only(main_labels(record))
    count = len(main.labels())
    shown = f" Of {len(labels)} models {count} are drawn; the tables have all." * (count < len(labels))
    band = "Mean over seeds; band: 95 % t interval."
    for protocol in record.protocols():
        words = f"Test perplexity over context length, protocol {protocol}. {band}{shown}"
        add(f"length-{protocol}", words, length_figure, main, protocol)
        words = (
            f"Differences of log perplexity to {BASELINES[0]}, protocol {protocol}, at the training length and at the "
            "longest. Dark: 95 % t interval over seeds. Light: bootstrap over books. Open points have one seed. Grey "
            "band: the noise of a single seed."
        )
        if BASELINES[0] in labels and len(labels) > 1:
            add(f"differences-{protocol}", words, difference_figure, record, protocol)
    add("training", f"Validation perplexity over training. {band}{shown}", training_figure, main)
    for label in labels:
        if label in _WITH_HEADS and not head_parameter(record, label, "key_noise").empty:
            words = f"Parameters of each head over training: {label}, its first seed."
            add(f"heads-{label}", words, heads_figure, record, label)
    if maps:
        words = (
            f"Where each head of the last layer looks, over {MAP_LENGTHS} training lengths: what reaches the estimate, "
            "and before decay, as the paper's figures show it. Left of the dotted line: farther off than in training."
        )
        add("attention", words, maps_figure, record, maps)
    return drawings


def main_labels(record: Record, most: int = _MAX_LINES) -> list[str]:
    """The labels of figures of lines: the default, the baselines and m2, then those with most seeds and the lowest
    validation perplexity. The test split has no part in the choice.
    """

    def rank(label: str) -> tuple[bool, int, float]:
        runs = record.of(label)
        return (
            label not in _MAIN_LABELS,
            -len(runs),
            float(np.mean([run["training"]["valid_perplexity"] for run in runs])),
        )

    chosen = sorted(record.labels(), key=rank)[:most]
    return [label for label in record.labels() if label in chosen]


def _band_figure(record: Record, values: pd.DataFrame, styles: Mapping[str, Any] | None = None) -> tuple[Figure, Axes]:
    """A line and a band for each label that has values, as of `Record.values`; without `styles` no line has markers."""
    if styles is None:
        labels = [label for label in record.labels() if label in values.index.unique("label")]
        styles = {label: {**look, "marker": ""} for label, look in looks(labels).items()}
    figure, axes = plt.subplots(figsize=(COLUMN, 2.4))
    means, halves = over_seeds(values)
    for label, look in styles.items():
        mean, half = means.loc[label].dropna(), halves.loc[label]
        axes.plot(mean.index, mean, label=label, **look)
        half = half.reindex(mean.index).fillna(0.0)
        axes.fill_between(mean.index, mean - half, mean + half, color=look["color"], alpha=0.15, linewidth=0)
    means = means.loc[list(styles)]
    last = means.ffill(axis=1).iloc[:, -1]
    high = min(float(means.max(axis=None)), _MAX_OVER_MEDIAN * float(last.median()))
    low = float(means.min(axis=None))
    if low < high:
        axes.set_ylim(low / 1.02, high * 1.02)
    return figure, axes


def _legend_below(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + 0.15 * math.ceil(len(labels) / 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _train_length(record: Record) -> int | None:
    lengths = {settings["train_length"] for settings in record.settings.values()}
    return lengths.pop() if len(lengths) == 1 else None


@styled
def length_figure(record: Record, protocol: str) -> Figure:
    """Test perplexity over context length."""
    values = np.exp(record.values(f"loss {protocol}"))
    styles = looks([label for label in record.labels() if label in values.index.unique("label")])
    figure, axes = _band_figure(record, values, styles)
    lengths_axis(axes, [int(length) for length in values], _train_length(record))
    axes.set_ylabel(f"test perplexity ({protocol})")
    plain_numbers(axes)
    return _legend_below(figure, axes)


@styled
def training_figure(record: Record) -> Figure:
    """Validation perplexity over training tokens. The first half does not set the scale."""
    values = np.exp(record.values("validation"))
    figure, axes = _band_figure(record, values)
    late = over_seeds(values.loc[:, [x for x in values if x >= max(values) / 2]])[0]
    highest = min(float(late.max(axis=None)) * 1.02, _MAX_OVER_MEDIAN * float(late.median(axis=None)))
    axes.set_ylim(float(late.min(axis=None)) / 1.02, highest)
    _tokens_axis(axes)
    axes.set_ylabel("validation perplexity")
    plain_numbers(axes)
    return _legend_below(figure, axes)


@styled
def difference_figure(record: Record, protocol: str) -> Figure:
    """Differences of log perplexity to the baseline, at the training length and at the longest context."""
    found = differences(record, BASELINES[0], protocol)
    longest = max(record.values(f"loss {protocol}"))
    lengths = sorted({float(_train_length(record) or longest), longest})
    labels = sorted(found, key=lambda label: found[label][longest].value if longest in found[label] else math.inf)
    figure, panels = plt.subplots(1, len(lengths), figsize=(PAGE, 0.15 * len(labels) + 1.0), sharey=True, squeeze=False)
    for axes, length in zip(panels[0], lengths, strict=True):
        noise = seed_noise(record.values(f"loss {protocol}")[length])
        if not math.isnan(noise):
            axes.axvspan(-noise, noise, color="0.92", linewidth=0, zorder=-1)
        axes.axvline(0, color=MUTED, linewidth=0.8, zorder=0)
        here = {row: found[label][length] for row, label in enumerate(labels) if length in found[label]}
        values = np.array([each.value for each in here.values()])
        room = 3 * (np.quantile(values, 0.9) - np.quantile(values, 0.1)) or 1.0
        low, high = max(values.min(), np.median(values) - room), min(values.max(), np.median(values) + room)
        for row, each in here.items():
            if not low <= each.value <= high:  # a number at the edge
                at, side = (high, "right") if each.value > high else (low, "left")
                axes.annotate(f"{each.value:+.2f}", (at, row), va="center", ha=side, fontsize=7)
                continue
            axes.plot((each.low, each.high), (row, row), color=COLOURS[5], linewidth=3.5, alpha=0.6)
            axes.plot((each.value - each.half, each.value + each.half), (row, row), color=COLOURS[0], linewidth=1)
            fill = "white" if each.seeds == 1 else COLOURS[0]
            axes.plot(each.value, row, "o", color=COLOURS[0], markerfacecolor=fill)
        margin = 0.1 * (max(high, 0) - min(low, 0)) or 0.1
        axes.set_xlim(min(low, 0) - margin, max(high, 0) + margin)
        axes.set(title=f"L = {length:g}", xlabel="difference (nats / token)")
        axes.grid(visible=False, axis="y")
    panels[0, 0].set_yticks(range(len(labels)), labels)
    panels[0, 0].set_ylim(len(labels) - 0.4, -0.6)
    figure.suptitle(f"log perplexity minus that of {BASELINES[0]} ({protocol}; negative: better)")
    return figure


_HEADS = {
    "key_noise": r"$\eta^2$",
    "query_noise": r"$\gamma^2$",
    "process_noise": r"$\sigma^2$ / token",
    "robustness": r"$\nu_s$",
    "inverse_temperature": r"$\beta_s$",
    "alpha": r"$\alpha = \eta^2 - \tilde\sigma^2$",
}


def head_parameter(record: Record, label: str, name: str) -> pd.DataFrame:
    """A parameter over training steps, of a label's first seed: columns (layer, head)."""
    rows = record.rows[(record.rows["label"] == label) & record.rows["measure"].str.startswith(f"{name} layer ")]
    rows = rows[rows["seed"] == rows["seed"].min()]
    place = rows["measure"].str.extract(r" layer (\d+) head (\d+)$").astype(float)
    return rows.assign(layer=place[0], head=place[1]).pivot(index="x", columns=["layer", "head"], values="value")


@styled
def heads_figure(record: Record, label: str) -> Figure:
    """Noises, robustness, inverse temperature and the regime's alpha of each head: a row each, a column a layer.

    Alpha is negative in the diffusive regime and positive in the integrative one (appendix C.2). Heads without decay
    have none.
    """
    found = {name: table for name in _HEADS if not (table := head_parameter(record, label, name)).empty}
    layers = next(iter(found.values())).columns.unique("layer")
    look: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, panels = plt.subplots(len(found), len(layers), figsize=(PAGE, 1.05 * len(found) + 0.6), **look)
    for row, (name, table) in zip(panels, found.items(), strict=True):
        row[0].set_ylabel(_HEADS[name])
        for axes, layer in zip(row, layers, strict=True):
            heads = table.columns.unique("head")
            for head, colour in zip(heads, shades(len(heads)), strict=True):
                if (layer, head) in table:
                    axes.plot(table.index, table[layer, head], color=colour, linewidth=1, label=f"head {head:g}")
        if name == "process_noise":
            row[0].set_yscale("log")
        if name == "alpha":
            for axes in row:
                axes.axhline(0, color=MUTED, linewidth=0.8)
    for axes, layer in zip(panels[0], layers, strict=True):
        axes.set_title(f"layer {layer:g}")
    for axes in panels[-1]:
        _tokens_axis(axes)
        axes.set_xlabel("training step")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=8, columnspacing=1.2)
    return figure


def _tokens_axis(axes: Axes) -> None:
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))


def maps_figure(record: Record, maps: Mapping[str, Path]) -> Figure:
    """The maps of the first seed of each label: after decay, and before it where the file has them."""
    rows: dict[str, np.ndarray] = {}
    trained = _train_length(record)
    for run in record.runs().itertuples():
        if run.run in maps and run.label not in rows:
            read = read_maps(maps[run.run])
            rows[run.label] = read["weights"]
            if "undecayed" in read:
                rows[f"{run.label}\nbefore decay"] = read["undecayed"]
    return attention_figure(rows, MAP_LENGTHS * trained if trained else None, trained)


def read_maps(path: Path) -> dict[str, np.ndarray]:
    """Maps of attention, `(heads, blocks, blocks)`, as `rfa_lab.evaluation.attention_maps` made them.

    Raises:
        ValueError: if the file is damaged, or holds no shares from 0 to 1.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name].astype(np.float32) for name in arrays.files}
        weights = found["weights"]
        square = weights.ndim == 3 and weights.shape[1] == weights.shape[2]
        expected = "(heads, blocks, blocks), shares from 0 to 1"
        require(square and -0.01 <= weights.min() <= weights.max() <= 1.01, "weights", weights.shape, expected)
    except Exception as error:  # zipfile and NumPy have several
        raise ValueError(f"maps: {path} is damaged ({error}), expected maps of attention") from error
    return found


@styled
def attention_figure(
    rows: Mapping[str, np.ndarray], length: int | None = None, train_length: int | None = None
) -> Figure:
    """The weight of each block of keys for each block of queries, by head, on one logarithmic colour scale.

    Queries go down, keys to the right. Keys after the query stay white.
    """
    heads = max(map(len, rows.values()))
    size = (PAGE, len(rows) * (PAGE - 0.6) / heads + 0.9)
    figure, panels = plt.subplots(
        len(rows), heads, figsize=size, sharex=True, sharey=True, squeeze=False, layout="compressed"
    )
    scale = matplotlib.colormaps["viridis"].with_extremes(bad="white")
    for row, (label, maps) in zip(panels, rows.items(), strict=True):
        row[0].set_ylabel(label)
        blocks = maps.shape[1]
        end = length or blocks
        after = np.triu(np.ones((blocks, blocks), dtype=bool), 1)
        for axes in row[len(maps) :]:
            axes.set_visible(False)
        for head, (axes, weights) in enumerate(zip(row, maps, strict=False)):
            drawn = np.ma.array(np.clip(weights, _MIN_SHOWN_WEIGHT, None), mask=after)
            image = axes.imshow(
                drawn, cmap=scale, norm=LogNorm(_MIN_SHOWN_WEIGHT, 1), extent=(0, end, end, 0), interpolation="nearest"
            )
            if train_length is not None:
                axes.plot((0, end - train_length), (train_length, end), color="white", linestyle=":", linewidth=0.9)
            axes.set(xlim=(0, end), ylim=(end, 0), xticks=(0, end), yticks=(0, end))
            axes.grid(visible=False)
            if row is panels[0] or axes.get_subplotspec().is_first_row():
                axes.set_title(f"head {head}", fontsize=7.5, pad=2)
    figure.supxlabel("key (tokens); dotted: one training length before the query", fontsize=7.5)
    figure.supylabel("query (tokens)", fontsize=7.5)
    words = "weight of a query on neighbouring keys"
    figure.colorbar(image, ax=panels, label=words, location="top", extend="min", aspect=50, fraction=0.05, shrink=0.7)
    return figure


@styled
def demo_figure(record: Record) -> Figure:
    """Validation perplexity over training, and perplexity over context length (the paper's training figure)."""
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, 2.6))
    for axes, measure in zip(panels, ("validation", "loss blocks"), strict=True):
        values = np.exp(record.values(measure)).droplevel("seed")
        for label, look in looks(record.labels()).items():
            axes.plot(values.loc[label].dropna(), label=label, **look)
        plain_numbers(axes)
    _tokens_axis(panels[0])
    panels[0].set_ylabel("validation perplexity")
    lengths_axis(panels[1], [int(length) for length in values], _train_length(record))
    panels[1].set_ylabel("test perplexity")
    panels[1].legend()
    return figure


# Looks of lines, and axes

MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")  # each for eight colours
_ROUND_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))


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
    for steps in _ROUND_STEPS:
        ticks = np.outer(decades, steps).ravel()
        ticks = ticks[(low <= ticks) & (ticks <= high)]
        if len(ticks) >= 4:
            axes.yaxis.set_major_locator(FixedLocator(ticks.tolist()))
            return
    axes.yaxis.set_major_locator(MaxNLocator(6))  # in so short a range a logarithmic axis is nearly linear
    axes.yaxis.set_minor_locator(NullLocator())
