"""Where the heads of the last layer look: attention maps on one window, a row a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from rfa.results import check_maps, read_maps

from .style import PAGE, styled

_FAINTEST = 1e-5  # of a row's weight in a block of keys; an even spread over 128 blocks is 8e-3
_ALONE = 4  # heads in a row where there is one model


@styled
def attention_maps(maps: Mapping[str, np.ndarray | str | Path], train_length: int, length: int | None = None) -> Figure:
    """The share of each query's weight that lies on each block of keys, by head, on one logarithmic colour scale.

    The weights are those that reach the estimate, `A_ij exp(-mu tau)`, summed over the block's keys and averaged over
    a block of queries. What lies left of the dotted line is more than the training length back, farther than any key
    in training; what is fainter than the scale has its faintest colour, keys after the query have none.

    Args:
        maps: by label, as `rfa.evaluation.attention_maps` returns them, or the `.npz` file that holds them. Of one
            model heads stand in rows of four, of several each has its row.
        train_length: in tokens.
        length: of the mapped window, in tokens; 8 times the training length.

    Raises:
        ValueError: for no maps, or a file or array that holds none.
    """
    if not maps:
        raise ValueError("maps: got none, expected those of at least one model")
    shown = {label: _array(of, label) for label, of in maps.items()}
    length = 8 * train_length if length is None else length
    most = max(len(of) for of in shown.values())
    alone = len(shown) == 1
    columns = min(most, _ALONE) if alone else most
    rows = -(-most // columns) if alone else len(shown)
    size = (PAGE - 0.6) / columns
    look: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "layout": "compressed"}
    figure, panels = plt.subplots(rows, columns, figsize=(PAGE, rows * size + 0.95), **look)
    norm = LogNorm(_FAINTEST, 1)
    for axes in panels.flat:
        axes.set_visible(False)
    for row, (label, of) in enumerate(shown.items()):
        places = panels.ravel() if alone else panels[row]
        blocks = of.shape[1]
        after = np.triu(np.ones((blocks, blocks), dtype=bool), 1)
        end = blocks * -(-length // blocks)  # the last block may be short
        for head, (weights, axes) in enumerate(zip(of, places, strict=False)):
            axes.set_visible(True)
            image = _draw(axes, weights, after, norm, extent=(0, end, end, 0))
            _frame(axes, (0, length), (0, length), since=((0, length - train_length), (train_length, length)))
            if alone or row == 0:
                axes.set_title(f"head {head}", fontsize=7.5, pad=2)
        places[0].set_ylabel(label)
    _explain(figure, panels, image, "tokens", "tokens", f"{-(-length // blocks)} neighbouring keys")
    return figure


@styled
def near_attention(maps: Mapping[str, np.ndarray], train_length: int) -> Figure:
    """The same for the window's last queries and the keys nearest to them, one by one: what short periods there are.

    Args:
        maps: `near` by label, as `rfa.evaluation.attention_maps` returns it; a row a model.
        train_length: in tokens.

    Raises:
        ValueError: for no maps, or an array that holds none.
    """
    if not maps:
        raise ValueError("maps: got none, expected those of at least one model")
    for label, of in maps.items():
        check_maps(of, label, square=False)
    heads = max(len(of) for of in maps.values())
    _, queries, keys = next(iter(maps.values())).shape
    look: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    figure, panels = plt.subplots(len(maps), heads, figsize=(PAGE, len(maps) + 0.95), **look)
    norm, first = LogNorm(_FAINTEST, 1), -queries - train_length
    after = np.triu(np.ones((queries, keys), dtype=bool), keys - queries + 1)
    for row, (places, (label, of)) in enumerate(zip(panels, maps.items(), strict=True)):
        for axes in places[len(of) :]:
            axes.set_visible(False)
        for head, (weights, axes) in enumerate(zip(of, places, strict=False)):
            image = _draw(axes, weights, after, norm, extent=(-keys, 0, queries, 0), aspect="auto")
            _frame(axes, (-keys, 0), (0, queries), since=((first, first + queries), (0, queries)))
            if row == 0:
                axes.set_title(f"head {head}", fontsize=7.5, pad=2)
        places[0].set_ylabel(label)
    marked = train_length < keys  # or the line lies before the first key
    _explain(figure, panels, image, "tokens before the end", f"of the last {queries}", "a key", marked)
    return figure


def _draw(axes: Axes, weights: np.ndarray, after: np.ndarray, norm: LogNorm, **look: Any) -> AxesImage:
    """One head's weights, nothing for keys after the query."""
    drawn = np.ma.array(np.clip(weights.astype(np.float32), _FAINTEST, None), mask=after)
    scale = matplotlib.colormaps["viridis"].with_extremes(bad="white")
    return axes.imshow(drawn, cmap=scale, norm=norm, interpolation="nearest", **look)


def _frame(axes: Axes, keys: tuple[int, int], queries: tuple[int, int], since: Sequence[tuple[int, int]]) -> None:
    """The ends of both axes, queries downwards, and a dotted line one training length before the query."""
    axes.plot(*since, color="white", linestyle=":", linewidth=0.9)
    axes.set(xlim=keys, ylim=queries[::-1], xticks=keys, yticks=queries)
    axes.grid(visible=False)


def _explain(
    figure: Figure, panels: np.ndarray, image: AxesImage, keys: str, queries: str, share: str, marked: bool = True
) -> None:
    """What both axes and the colours of all panels are."""
    dotted = "; dotted: one training length before the query" if marked else ""
    figure.supxlabel(f"key ({keys}){dotted}", fontsize=7.5)
    figure.supylabel(f"query ({queries})", fontsize=7.5)
    words = f"weight of a query on {share}, after decay"
    figure.colorbar(image, ax=panels, label=words, location="top", extend="min", aspect=50, fraction=0.05, shrink=0.7)


def _array(of: np.ndarray | str | Path, label: str) -> np.ndarray:
    if not isinstance(of, np.ndarray):
        return read_maps(of)
    check_maps(of, label)
    return of.astype(np.float32)
