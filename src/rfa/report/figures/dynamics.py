"""What the heads of a model learned: noises, robustness and temperature over training, and the regime they end in."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from ..runs import MissingData, Run, run_with_dynamics
from .style import MARKERS, MUTED, PAGE, letter, shades, styled

_NOISES = {
    "key_noise": r"$\eta^2$ (variance)",
    "query_noise": r"$\gamma^2$ (variance)",
    "process_noise": r"$\sigma^2$" + "\n(variance / token)",
    "steady_state": r"$\tilde{\sigma}^2 = \sigma^2 / 2\mu$" + "\n(variance)",
}
_SHARPNESS = {
    "robustness": r"$\nu_s$ (degrees of" + "\nfreedom / mode)",
    "inverse_temperature": r"$\beta_s$ (inverse" + "\ntemperature)",
}


@styled
def noises_over_training(runs: Sequence[Run], label: str = "m2-sc-rfa") -> Figure:
    """Variances of each head over training, a column a layer: of keys, queries, the process, and its steady state.

    These are `eta^2`, `gamma^2`, `sigma^2` per token (logarithmic) and `sigma~^2 = sigma^2 / (2 mu)`, which heads
    without decay do not have.

    Args:
        runs: result files.
        label: whose; the first seed that has its parameters over training is drawn.

    Raises:
        MissingData: where there is none.
    """
    figure = _by_layer(runs, label, _NOISES, height=5.0)
    for axes in figure.axes:
        if axes.get_ylabel() == _NOISES["process_noise"]:
            axes.set_yscale("log")  # the row shares it
    return figure


@styled
def robustness_over_training(runs: Sequence[Run], label: str = "m2-sc-rfa") -> Figure:
    """Robustness `nu_s` and inverse temperature `beta_s` of each head over training, a column a layer.

    Args and raises as `noises_over_training`.
    """
    return _by_layer(runs, label, _SHARPNESS, height=2.9)


@styled
def regimes_over_training(runs: Sequence[Run], label: str = "m2-sc-rfa") -> Figure:
    """The phase parameter `alpha = eta^2 - sigma~^2`: of all heads at the first step that was logged and the
    last, and over training (appendix C.2).

    Negative is the diffusive regime, positive the integrative one. Heads without decay never settle: their alpha is
    minus infinity, and they are named where their points would be. The second panel is of the last layer.

    Args and raises as `noises_over_training`.
    """
    run = run_with_dynamics(runs, label)
    figure, (by_head, over_training) = plt.subplots(1, 2, figsize=(PAGE, 2.7), width_ratios=(1.3, 1), sharey=True)
    courses = {name: _course(layer, "alpha") for name, layer in run["dynamics"]["layers"].items()}
    last, alpha = list(courses.items())[-1]
    heads = alpha.shape[1]
    for head, colour in enumerate(shades(heads)):
        for place, (marker, course) in enumerate(zip(itertools.cycle(MARKERS), courses.values(), strict=False)):
            x = head + 0.7 * (place + 0.5 - len(courses) / 2) / len(courses)
            by_head.plot(x, course[0, head], "_", color=MUTED, markersize=5)
            by_head.plot(x, course[-1, head], marker, color=colour)
        over_training.plot(run["dynamics"]["tokens"], alpha[:, head], color=colour, label=f"head {head}")
        if not any(np.isfinite(course[:, head]).any() for course in courses.values()):
            words = r"$\leftarrow$ $\alpha = -\infty$ ($\mu$ = 0)"
            at: dict[str, Any] = {"transform": by_head.get_xaxis_transform(), "ha": "center", "va": "center"}
            by_head.text(head, 0.55, words, rotation=90, **at)
    _mark_regimes(by_head, over_training)
    by_head.set(xlabel="head", xlim=(-0.6, heads - 0.4), title="all layers, side by side")
    by_head.set(xticks=range(heads), ylabel=r"$\alpha = \eta^2 - \tilde{\sigma}^2$ (variance)")
    over_training.set(title=f"layer {last} over training")
    _tokens_axis(over_training)
    looks = {
        f"step {run['dynamics']['steps'][0]:,}": ("_", MUTED),
        **{f"layer {name}": (m, "0.3") for name, m in zip(courses, itertools.cycle(MARKERS))},
    }
    points = [Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (m, c) in looks.items()]
    lines = over_training.get_legend_handles_labels()[0]
    figure.legend(handles=[*points, *lines], loc="outside right center")
    figure.suptitle(_title(run))
    letter((by_head, over_training))
    return figure


def _by_layer(runs: Sequence[Run], label: str, rows: Mapping[str, str], height: float) -> Figure:
    """A row a parameter, a column a layer, a line a head."""
    run = run_with_dynamics(runs, label)
    layers = run["dynamics"]["layers"]
    look: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, panels = plt.subplots(len(rows), len(layers), figsize=(PAGE, height), **look)
    for column, (name, parameters) in zip(panels.T, layers.items(), strict=True):
        column[0].set_title(f"layer {name}")
        _tokens_axis(column[-1])
        for axes, parameter in zip(column, rows, strict=True):
            course = _course(parameters, parameter)
            for head, colour in enumerate(shades(course.shape[1])):
                axes.plot(run["dynamics"]["tokens"], course[:, head], color=colour, linewidth=1, label=f"head {head}")
    for axes, words in zip(panels[:, 0], rows.values(), strict=True):
        axes.set_ylabel(words)
    figure.align_ylabels(panels[:, 0])
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), columnspacing=1.2)
    figure.suptitle(_title(run))
    return figure


def _course(parameters: Mapping[str, Any], name: str) -> np.ndarray:
    """A parameter over `(steps, heads)`; NaN where a head without decay has none."""
    if absent := {"decay", "process_noise" if name == "steady_state" else name} - parameters.keys():
        raise MissingData(f"dynamics: got none of {', '.join(sorted(absent))}, expected it of each layer")
    decay = np.array(parameters["decay"], dtype=float)
    decay[decay == 0] = np.nan
    if name == "steady_state":
        return np.array(parameters["process_noise"], dtype=float) / (2 * decay)
    values = np.array(parameters[name], dtype=float)
    return np.where(np.isnan(decay), np.nan, values) if name == "alpha" else values


def _mark_regimes(*panels: Axes) -> None:
    """Name the two sides of zero, and leave room for the names on both; panels share the axis."""
    low = min(0.0, *(axes.dataLim.y0 for axes in panels))
    high = max(0.0, *(axes.dataLim.y1 for axes in panels))
    room = 0.13 * (high - low)
    panels[0].set_ylim(min(low - room / 3, -room), max(high + room / 3, room))
    for axes in panels:
        axes.axhline(0, color="0.3", linewidth=0.8, zorder=0)
        axes.axhspan(axes.get_ylim()[0], 0, color="0.93", linewidth=0, zorder=-1)
        for words, place, side in (("integrative", 2, "bottom"), ("diffusive", -2, "top")):
            at: dict[str, Any] = {"textcoords": "offset points", "va": side, "ha": "left", "color": "0.3"}
            axes.annotate(words, (0.02, 0), (0, place), xycoords=axes.get_yaxis_transform(), **at)


def _tokens_axis(axes: Axes) -> None:
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))


def _title(run: Run) -> str:
    return f"{run['label']}, seed {run['seed']}"
