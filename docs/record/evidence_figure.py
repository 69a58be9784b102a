"""The figure of the evidence: each model beside RoPE, on code and novels, in recall and in series."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from evidence_answers import Difference, accuracies, cells_of, language, ratio, series
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rfa.forecasting.style import COLOURS, MUTED, PAGE, styled
from rfa_lab.report.measurements import seed_noise
from rfa_lab.report.runs import perplexity_by_length
from rfa_lab.report.statistics import mean_and_interval

_PARTS = ("filter", "forecast")
# A line of the figure: the label in the records of text and recall, and that of series.
DRAWN = {
    "ALiBi": ("b2-alibi", "ALiBi"),
    "RoPE and ALiBi (c7)": ("c7-rope-alibi-innovation no-innovation", "RoPE and ALiBi"),
    "forget gate and RoPE (c4)": ("c4-fox rope", "forget gate with RoPE"),
    "forget gate from a clock (c8)": ("c8-fox-clock", ""),
    "forget gate, values turned (x7)": ("x7-gated-roper", "c9"),
    "m1": ("m1-rfa", "m1"),
    "sc-rfa (m2)": ("m2-sc-rfa", "m2"),
    "sc-rfa as released": ("m2-sc-rfa as-released", ""),
    "m3": ("m3-sc-rfa", ""),
    "riccati (x2)": ("x2-riccati-alibi", "x2"),
    "riccati, no innovation step": ("x2-riccati-alibi no-innovation", "x2 no innovation"),
    "content gains (x4)": ("x4-content-riccati no-innovation", ""),
    "content clock (x5)": ("x5-content-clock no-innovation", ""),
    "content dynamics (x6)": ("x6-content-dynamics no-innovation", ""),
}
_ENOUGH = 3  # seeds: two give intervals so wide that they hide the others
_WHITE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


class Panel(NamedTuple):
    """A panel: differences to RoPE by model, the place of no difference, and the noise of seeds around it."""

    unit: str
    found: dict[str, Difference]
    line: float = 0.0
    noise: float | None = None


def _text_panel(record: str, length: int, protocol: str) -> Panel:
    groups = language(record)
    found = _beside_rope(lambda label: _losses(groups.get(label, ()), length, protocol))
    runs = [run for of in groups.values() for run in of]
    return Panel("nats a token, less RoPE's", found, noise=seed_noise(runs, length, protocol))


def _losses(runs: Sequence[Any], length: int, protocol: str) -> dict[int, float]:
    """The loss of each seed."""
    scored = {run["seed"]: perplexity_by_length(run, protocol) for run in runs}
    return {seed: math.log(found[length]) for seed, found in scored.items() if length in found}


def _series_panel(column: str) -> Panel:
    labels, cells = {one["label"] for one in series("oscillator")}, cells_of(series("oscillator"), _PARTS, (column,))
    found = {name: ratio("oscillator", of, "RoPE", cells) for name, (_, of) in DRAWN.items() if of in labels}
    return Panel("squared error / RoPE's", found, line=1.0)


def _recall_panel(length: int) -> Panel:
    def wrong(label: str) -> dict[int, float]:
        return {seed: 1 - right for seed, right in accuracies("recall", label, length).items()}

    return Panel("wrong answers, less RoPE's", _beside_rope(wrong))


def _beside_rope(of: Callable[[str], Mapping[int, float]]) -> dict[str, Difference]:
    """The difference to RoPE of each model that was run, of what a label's seeds have."""
    base = of("b1-rope")
    return {name: difference(own, base) for name, (label, _) in DRAWN.items() if base and (own := of(label))}


def difference(own: Mapping[int, float], base: Mapping[int, float]) -> Difference:
    """The mean difference by seed with its interval. With too few seeds: of the means over all seeds of each, without.

    One of RoPE's seeds may be far off, and a model of few seeds would be compared with that one.
    """
    shared = sorted(own.keys() & base.keys())
    if len(shared) < _ENOUGH:
        return Difference(mean_and_interval([*own.values()]).value - mean_and_interval([*base.values()]).value)
    value, half = mean_and_interval([own[seed] - base[seed] for seed in shared])
    assert half is not None  # several seeds have one
    return Difference(value, value - half, value + half)


@styled
def drawing() -> Figure:
    """All models beside RoPE: on code and novels, in recall and in series. Left of the line: better than RoPE."""
    panels = {
        "code, in the window": _text_panel("context", 256, "matched"),
        "code, 8 windows": _text_panel("context", 2048, "matched"),
        "recall, 8 times as long": _recall_panel(512),
        "novels, in the window": _text_panel("novels-small", 128, "blocks"),
        "series, as trained": _series_panel("trained"),
        "series, 4 times as long": _series_panel("256 readings"),
    }
    figure, grid = plt.subplots(2, 3, figsize=(PAGE, 6.2), sharey=True)
    for (title, panel), axes in zip(panels.items(), grid.flat, strict=True):
        axes.axvline(panel.line, color="black", linewidth=0.8)
        axes.set(title=title, xlabel=panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        _draw(axes, panel)
    grid[0, 0].set_yticks(range(len(DRAWN)), list(DRAWN))
    grid[0, 0].set_ylim(len(DRAWN) - 0.4, -0.6)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for place, name in enumerate(DRAWN):
        found = panel.found.get(name)
        if found is None:
            continue
        if found.low is None or found.high is None:
            axes.plot(found.value, place, marker="o", color=COLOURS[0], markerfacecolor="white", linestyle="")
        else:
            axes.plot([found.low, found.high], [place, place], color=COLOURS[0])
            axes.plot(found.value, place, marker="o", color=COLOURS[0])
    low, high = axes.get_xlim()
    if panel.noise is not None:
        ends = (max(low, panel.line - panel.noise), min(high, panel.line + panel.noise))
        axes.axvspan(*ends, color=MUTED, alpha=0.15, linewidth=0)
        axes.set_xlim(low, high)
    right = panel.line < (low + high) / 2  # the words stand away from the line
    for place in (place for place, name in enumerate(DRAWN) if name not in panel.found):
        at = (0.97 if right else 0.03, place)
        axes.annotate(
            "not run",
            at,
            xycoords=("axes fraction", "data"),
            color=MUTED,
            ha="right" if right else "left",
            va="center",
            bbox=_WHITE,
        )
