"""The figure of docs/evidence.md: each model beside RoPE, on code and novels, in recall and in series."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from evidence_answers import Difference, accuracies, cells_of, language, ratio, recall, series
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rfa.report.figures import COLOURS, PAGE
from rfa.report.figures.style import MUTED, styled
from rfa.report.statistics import compare, mean_and_interval, pairs_of

_PARTS = ("filter", "forecast")
DRAWN = {  # a line of the figure: the label in the records of text and recall, and that of series
    "ALiBi": ("b2-alibi", "ALiBi"),
    "RoPE and ALiBi (c7, no innovation step)": ("c7-rope-alibi-innovation no-innovation", "RoPE and ALiBi"),
    "forget gate and RoPE (c4)": ("c4-fox rope", "forget gate with RoPE"),
    "forget gate from a clock (c8)": ("c8-fox-clock", ""),
    "forget gate, values turned (x7)": ("x7-gated-roper", "c9"),
    "m1": ("m1-rfa", "m1"),
    "m2": ("m2-sc-rfa", "m2"),
    "m2 as released": ("m2-sc-rfa as-released", ""),
    "m3": ("m3-sc-rfa", ""),
    "x2": ("x2-riccati-alibi", "x2"),
    "x2, no innovation step": ("x2-riccati-alibi no-innovation", "x2 no innovation"),
    "x4, no innovation step": ("x4-content-riccati no-innovation", ""),
    "x5, no innovation step": ("x5-content-clock no-innovation", ""),
    "x6, no innovation step": ("x6-content-dynamics no-innovation", ""),
}
_ENOUGH = 3  # seeds: two give intervals so wide that they hide the others
Column = dict[str, Difference]
_WHITE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def _text_column(record: str, length: int, protocol: str) -> Column:
    groups, found = language(record), {}
    for name, (label, _) in DRAWN.items():
        pairs = pairs_of(groups.get(label, ()), groups.get("b1-rope", ()))
        mean = compare(pairs, length, protocol).difference if pairs else None
        if mean is not None:
            found[name] = Difference(mean.value, *_ends(mean.value, mean.half if len(pairs) >= _ENOUGH else None))
    return found


def _series_column(column: str) -> Column:
    labels, cells = {one["label"] for one in series("oscillator")}, cells_of(series("oscillator"), _PARTS, (column,))
    return {name: ratio("oscillator", of, "RoPE", cells) for name, (_, of) in DRAWN.items() if of in labels}


def _recall_column(length: int) -> Column:
    base, found = accuracies("recall", "b1-rope", length), {}
    for name, (label, _) in DRAWN.items():
        own = accuracies("recall", label, length)
        wrong = [base[seed] - own[seed] for seed in own if seed in base]
        if wrong:
            found[name] = _of(wrong)
    return found


def _recall_panel() -> dict[tuple[str, str], tuple[Column, float]]:
    """The panel of recall, where there is a record."""
    if not recall():
        return {}
    return {("recall, 8 times as long", "wrong answers, less RoPE's"): (_recall_column(512), 0.0)}


def _of(values: Sequence[float]) -> Difference:
    """The mean over seeds, with an interval where there are enough."""
    mean = mean_and_interval(values)
    return Difference(mean.value, *_ends(mean.value, mean.half if len(values) >= _ENOUGH else None))


def _ends(value: float, half: float | None) -> tuple[float, ...]:
    return () if half is None else (value - half, value + half)


@styled
def drawing() -> Figure:
    """All models beside RoPE: on code and novels, in recall and in series. Left of the line: better than RoPE."""
    columns = {
        ("code, in the window", "nats a token, less RoPE's"): (_text_column("context", 256, "matched"), 0.0),
        ("code, 8 windows", "nats a token, less RoPE's"): (_text_column("context", 2048, "matched"), 0.0),
        **_recall_panel(),
        ("novels, in the window", "nats a token, less RoPE's"): (_text_column("novels-small", 128, "blocks"), 0.0),
        ("series, as trained", "squared error / RoPE's"): (_series_column("trained"), 1.0),
        ("series, 4 times as long", "squared error / RoPE's"): (_series_column("256 readings"), 1.0),
    }
    wide = -(-len(columns) // 2)
    figure, grid = plt.subplots(2, wide, figsize=(PAGE, 6.2), sharey=True)
    for panel in grid.flat[len(columns) :]:
        panel.set_visible(False)
    for ((title, unit), (column, line)), panel in zip(columns.items(), grid.flat, strict=False):
        panel.axvline(line, color="black", linewidth=0.8)
        panel.set(title=title, xlabel=unit)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        _draw(panel, column)
    grid[0, 0].set_yticks(range(len(DRAWN)), list(DRAWN))
    grid[0, 0].set_ylim(len(DRAWN) - 0.4, -0.6)
    return figure


def _draw(panel: Axes, column: Column) -> None:
    for place, name in enumerate(DRAWN):
        if name not in column:
            at = (0.97, place)
            panel.annotate(
                "not run", at, xycoords=("axes fraction", "data"), color=MUTED, ha="right", va="center", bbox=_WHITE
            )
            continue
        found = column[name]
        if found.low is None or found.high is None:
            panel.plot(found.value, place, marker="o", color=COLOURS[0], markerfacecolor="white", linestyle="")
        else:
            panel.plot([found.low, found.high], [place, place], color=COLOURS[0])
            panel.plot(found.value, place, marker="o", color=COLOURS[0])
