"""Where the heads of the last layer look: attention maps on one window, a row a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..maps import check_maps, read_maps
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
    scale, norm = matplotlib.colormaps["viridis"].with_extremes(bad="white"), LogNorm(_FAINTEST, 1)
    for axes in panels.flat:
        axes.set_visible(False)
    for row, (label, of) in enumerate(shown.items()):
        places = panels.ravel() if alone else panels[row]
        blocks = of.shape[1]
        after = np.triu(np.ones((blocks, blocks), dtype=bool), 1)
        end = blocks * -(-length // blocks)  # the last block may be short
        for head, (weights, axes) in enumerate(zip(of, places, strict=False)):
            axes.set_visible(True)
            drawn = np.ma.array(np.clip(weights, _FAINTEST, None), mask=after)
            image = axes.imshow(drawn, cmap=scale, norm=norm, extent=(0, end, end, 0), interpolation="nearest")
            axes.plot((0, length - train_length), (train_length, length), color="white", linestyle=":", linewidth=0.9)
            axes.set(xlim=(0, length), ylim=(length, 0), xticks=(0, length), yticks=(0, length))
            axes.grid(visible=False)
            if alone or row == 0:
                axes.set_title(f"head {head}", fontsize=7.5, pad=2)
        places[0].set_ylabel(label)
    figure.supxlabel("key (tokens); dotted: one training length before the query", fontsize=7.5)
    figure.supylabel("query (tokens)", fontsize=7.5)
    words = f"share of a query's weight on {-(-length // blocks)} neighbouring keys"
    figure.colorbar(image, ax=panels, label=words, location="top", extend="min", aspect=50, fraction=0.05, shrink=0.7)
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
    scale, norm = matplotlib.colormaps["viridis"].with_extremes(bad="white"), LogNorm(_FAINTEST, 1)
    after = np.triu(np.ones((queries, keys), dtype=bool), keys - queries + 1)
    for row, (places, (label, of)) in enumerate(zip(panels, maps.items(), strict=True)):
        for axes in places[len(of) :]:
            axes.set_visible(False)
        for head, (weights, axes) in enumerate(zip(of, places, strict=False)):
            drawn = np.ma.array(np.clip(weights.astype(np.float32), _FAINTEST, None), mask=after)
            extent = (-keys, 0, 0, queries)
            look = {"extent": extent, "aspect": "auto", "interpolation": "nearest", "origin": "lower"}
            image = axes.imshow(drawn, cmap=scale, norm=norm, **look)
            first = -queries - train_length
            axes.plot((first, first + queries), (0, queries), color="white", linestyle=":", linewidth=0.9)
            axes.set(xlim=(-keys, 0), ylim=(queries, 0), xticks=(-keys, 0), yticks=(0, queries))
            axes.grid(visible=False)
            if row == 0:
                axes.set_title(f"head {head}", fontsize=7.5, pad=2)
        places[0].set_ylabel(label)
    figure.supxlabel("key (tokens before the end); dotted: one training length before the query", fontsize=7.5)
    figure.supylabel(f"query (of the last {queries})", fontsize=7.5)
    words = "share of a query's weight on a key"
    figure.colorbar(image, ax=panels, label=words, location="top", extend="min", aspect=50, fraction=0.05, shrink=0.7)
    return figure


def _array(of: np.ndarray | str | Path, label: str) -> np.ndarray:
    if not isinstance(of, np.ndarray):
        return read_maps(of)
    check_maps(of, label)
    return of.astype(np.float32)
