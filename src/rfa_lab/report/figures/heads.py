"""What the heads of a model learned over training, and the attention maps of its last layer."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from rfa.forecasting.style import MARKERS, MUTED, PAGE, letter, shades, styled
from rfa_lab.report.runs import MissingData, Run
from rfa_lab.results import check_maps

_PROCESS_NOISE = r"$\sigma^2$" + "\n(variance / token)"
_NOISES = {
    "key_noise": r"$\eta^2$ (variance)",
    "query_noise": r"$\gamma^2$ (variance)",
    "process_noise": _PROCESS_NOISE,
    "steady_state": r"$\tilde{\sigma}^2 = \sigma^2 / 2\mu$" + "\n(variance)",
}
_SHARPNESS = {
    "robustness": r"$\nu_s$ (degrees of" + "\nfreedom / mode)",
    "inverse_temperature": r"$\beta_s$ (inverse" + "\ntemperature)",
}


@styled
def noises_over_training(run: Run) -> Figure:
    """Variances of each head over training, with one column for each layer.

    The rows are `eta^2` (keys), `gamma^2` (queries), `sigma^2` per token (process, logarithmic), and the stationary
    variance `sigma~^2 = sigma^2 / (2 mu)`. Heads without decay have no stationary variance.
    """
    figure = _figure_by_layer(run, _NOISES, height=5.0)
    for axes in figure.axes:
        if axes.get_ylabel() == _PROCESS_NOISE:
            axes.set_yscale("log")  # the whole row shares this axis
    return figure


@styled
def robustness_over_training(run: Run) -> Figure:
    """Robustness `nu_s` and inverse temperature `beta_s` of each head over training, with one column for each layer."""
    return _figure_by_layer(run, _SHARPNESS, height=2.9)


@styled
def regimes_over_training(run: Run) -> Figure:
    """The phase parameter `alpha = eta^2 - sigma~^2` of each head (appendix C.2).

    The first panel shows all layers at the first logged step and at the last step, the second panel the last layer over
    training. Alpha is negative in the diffusive regime and positive in the integrative one. Heads without decay have no
    stationary variance: their alpha is minus infinity, which a text at their position says.
    """
    figure, (by_head, over_training) = plt.subplots(1, 2, figsize=(PAGE, 2.7), width_ratios=(1.3, 1), sharey=True)
    alphas = {name: _values(layer, "alpha") for name, layer in run["dynamics"]["layers"].items()}
    last, alpha = list(alphas.items())[-1]
    heads = alpha.shape[1]
    for head, colour in enumerate(shades(heads)):
        for index, (marker, values) in enumerate(zip(itertools.cycle(MARKERS), alphas.values(), strict=False)):
            x = head + 0.7 * (index + 0.5 - len(alphas) / 2) / len(alphas)
            by_head.plot(x, values[0, head], "_", color=MUTED, markersize=5)
            by_head.plot(x, values[-1, head], marker, color=colour)
        over_training.plot(run["dynamics"]["tokens"], alpha[:, head], color=colour, label=f"head {head}")
        if not any(np.isfinite(values[:, head]).any() for values in alphas.values()):
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
        **{f"layer {name}": (m, "0.3") for name, m in zip(alphas, itertools.cycle(MARKERS))},
    }
    points = [Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (m, c) in looks.items()]
    lines = over_training.get_legend_handles_labels()[0]
    figure.legend(handles=[*points, *lines], loc="outside right center")
    figure.suptitle(_title(run))
    letter((by_head, over_training))
    return figure


def _figure_by_layer(run: Run, rows: Mapping[str, str], height: float) -> Figure:
    """A figure with a row for each parameter, a column for each layer, and a line for each head."""
    layers = run["dynamics"]["layers"]
    look: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, panels = plt.subplots(len(rows), len(layers), figsize=(PAGE, height), **look)
    for column, (name, parameters) in zip(panels.T, layers.items(), strict=True):
        column[0].set_title(f"layer {name}")
        _tokens_axis(column[-1])
        for axes, parameter in zip(column, rows, strict=True):
            values = _values(parameters, parameter)
            for head, colour in enumerate(shades(values.shape[1])):
                axes.plot(run["dynamics"]["tokens"], values[:, head], color=colour, linewidth=1, label=f"head {head}")
    for axes, words in zip(panels[:, 0], rows.values(), strict=True):
        axes.set_ylabel(words)
    figure.align_ylabels(panels[:, 0])
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), columnspacing=1.2)
    figure.suptitle(_title(run))
    return figure


def _values(parameters: Mapping[str, Any], name: str) -> np.ndarray:
    """A parameter over training, `(steps, heads)`; NaN where a head without decay has none."""
    if absent := {"decay", "process_noise" if name == "steady_state" else name} - parameters.keys():
        raise MissingData(f"dynamics: got none of {', '.join(sorted(absent))}, expected it of each layer")
    decay = np.array(parameters["decay"], dtype=float)
    decay[decay == 0] = np.nan
    if name == "steady_state":
        return np.array(parameters["process_noise"], dtype=float) / (2 * decay)
    values = np.array(parameters[name], dtype=float)
    return np.where(np.isnan(decay), np.nan, values) if name == "alpha" else values


def _mark_regimes(*panels: Axes) -> None:
    """Write the names of the regimes on the two sides of zero, and leave room for them. The panels share the y-axis."""
    low = min(0.0, *(axes.dataLim.y0 for axes in panels))
    high = max(0.0, *(axes.dataLim.y1 for axes in panels))
    room = 0.13 * (high - low)
    panels[0].set_ylim(min(low - room / 3, -room), max(high + room / 3, room))
    for axes in panels:
        axes.axhline(0, color="0.3", linewidth=0.8, zorder=0)
        axes.axhspan(axes.get_ylim()[0], 0, color="0.93", linewidth=0, zorder=-1)
        for words, offset, side in (("integrative", 2, "bottom"), ("diffusive", -2, "top")):
            at: dict[str, Any] = {"textcoords": "offset points", "va": side, "ha": "left", "color": "0.3"}
            axes.annotate(words, (0.02, 0), (0, offset), xycoords=axes.get_yaxis_transform(), **at)


def _tokens_axis(axes: Axes) -> None:
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))


def _title(run: Run) -> str:
    return f"{run['label']}, seed {run['seed']}"


_FAINTEST = 1e-5  # lowest weight of the colour scale; weights spread evenly over 128 blocks are 8e-3
BEFORE_DECAY = "before decay"  # in the labels of maps of the softmax's weights
_HEADS_PER_ROW = 4  # if the figure shows one model
Maps = Mapping[str, np.ndarray]


@styled
def attention_maps(maps: Maps, train_length: int) -> Figure:
    """The weight of each block of keys for each block of queries, by head, on one logarithmic colour scale.

    The weights are those of the estimate, `A_ij exp(-mu tau)`, or A alone in rows whose label says `BEFORE_DECAY`. They
    are summed over a block's keys and averaged over a block of queries. Keys left of the dotted line are farther than
    any key in training.

    `maps` are those of `rfa_lab.evaluation.attention_maps` by label, of a window of 8 training lengths. The heads of a
    single model are in rows of four. Of several models each has its own row. Raises `ValueError` for what is no map.
    """
    _check(maps, square=True)
    length = 8 * train_length
    most, alone = max(map(len, maps.values())), len(maps) == 1
    columns = min(most, _HEADS_PER_ROW) if alone else most
    rows = -(-most // columns) if alone else len(maps)
    height = rows * (PAGE - 0.6) / columns + 0.95
    figure, panels = plt.subplots(rows, columns, figsize=(PAGE, height), layout="compressed", **_SHARED)
    norm = LogNorm(_FAINTEST, 1)
    for row, (label, of) in enumerate(maps.items()):
        panels_of_model = panels.ravel() if alone else panels[row]
        blocks = of.shape[1]
        end = blocks * -(-length // blocks)  # the last block may be short
        since = (0, length - train_length), (train_length, length)
        titled = alone or row == 0
        image = _draw(panels_of_model, of, label, (0, length), (0, length), since, titled=titled, end=end, norm=norm)
    _label_axes(figure, panels, image, "tokens", "tokens", f"{-(-length // blocks)} neighbouring keys", maps)
    return figure


@styled
def near_attention(maps: Maps, train_length: int) -> Figure:
    """The weights of single keys for the window's last queries, by head. This map shows short periods.

    `maps` are `near` of `rfa_lab.evaluation.attention_maps` by label. Each model has its own row.
    """
    _check(maps, square=False)
    _, queries, keys = next(iter(maps.values())).shape
    size = (PAGE, len(maps) + 0.95)
    figure, panels = plt.subplots(len(maps), max(map(len, maps.values())), figsize=size, **_SHARED)
    norm, first = LogNorm(_FAINTEST, 1), -queries - train_length
    since = (first, first + queries), (0, queries)
    for row, (label, of) in enumerate(maps.items()):
        look: dict[str, Any] = {"norm": norm, "aspect": "auto"}
        image = _draw(panels[row], of, label, (-keys, 0), (0, queries), since, titled=row == 0, **look)
    marked = train_length < keys  # otherwise the line lies before the first key
    _label_axes(figure, panels, image, "tokens before the end", f"of the last {queries}", "a key", maps, marked)
    return figure


_SHARED: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}


def _check(maps: Maps, square: bool) -> None:
    if not maps:
        raise ValueError("maps: got none, expected those of at least one model")
    for label, of in maps.items():
        check_maps(of, label, square)


def _draw(
    panels: np.ndarray,
    maps: np.ndarray,
    label: str,
    keys: tuple[int, int],
    queries: tuple[int, int],
    since: tuple[tuple[int, int], tuple[int, int]],
    *,
    titled: bool,
    end: int | None = None,
    **look: Any,
) -> AxesImage:
    """Draw the weights of a model's heads, queries downwards. Keys after the query stay white.

    A dotted line has the points `since`. The last block ends at `end`, if that is not the end of the axes.
    """
    _, rows, columns = maps.shape
    after = np.triu(np.ones((rows, columns), dtype=bool), columns - rows + 1)
    extent = (keys[0], end or keys[1], end or queries[1], queries[0])
    scale = matplotlib.colormaps["viridis"].with_extremes(bad="white")
    for axes in panels[len(maps) :]:
        axes.set_visible(False)
    for head, (weights, axes) in enumerate(zip(maps, panels, strict=False)):
        drawn = np.ma.array(np.clip(weights.astype(np.float32), _FAINTEST, None), mask=after)
        image = axes.imshow(drawn, cmap=scale, interpolation="nearest", extent=extent, **look)
        axes.plot(*since, color="white", linestyle=":", linewidth=0.9)
        axes.set(xlim=keys, ylim=queries[::-1], xticks=keys, yticks=queries)
        axes.grid(visible=False)
        if titled:
            axes.set_title(f"head {head}", fontsize=7.5, pad=2)
    panels[0].set_ylabel(label)
    return image


def _label_axes(
    figure: Figure,
    panels: np.ndarray,
    image: AxesImage,
    keys: str,
    queries: str,
    share: str,
    labels: Iterable[str],
    marked: bool = True,
) -> None:
    """Label both axes and the colours of all panels."""
    dotted = "; dotted: one training length before the query" if marked else ""
    figure.supxlabel(f"key ({keys}){dotted}", fontsize=7.5)
    figure.supylabel(f"query ({queries})", fontsize=7.5)
    before = " unless the row says before" if any(BEFORE_DECAY in label for label in labels) else ""
    words = f"weight of a query on {share}, after decay{before}"
    figure.colorbar(image, ax=panels, label=words, location="top", extend="min", aspect=50, fraction=0.05, shrink=0.7)
