"""The figure of a record of recall: the share of right answers of each model in each task."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .style import PAGE, styled

_DARK = 0.6  # shares below it are drawn in a dark colour, with a white number


@styled
def accuracy_maps(panels: Mapping[str, Mapping[str, Sequence[float | None]]], columns: Sequence[str]) -> Figure:
    """One panel for each length: a row for each model, a column for each task, bright where answers are right.

    Args:
        panels: for each title and model, the share of right answers in each task; None where it is missing.
            All panels have the same models.
        columns: the tasks.
    """
    models = list(next(iter(panels.values())))
    size = (PAGE, 0.17 * len(models) + 0.9)
    figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for axes, (title, shares) in zip(grid[0], panels.items(), strict=True):
        found = np.array([[np.nan if one is None else one for one in shares[model]] for model in models])
        axes.imshow(found, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.grid(False)
        axes.set_title(title)
        axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
        for (row, column), share in np.ndenumerate(found):
            if not np.isnan(share):
                colour = "white" if share < _DARK else "black"
                axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=colour)
    grid[0, 0].set_yticks(range(len(models)), models)
    for text in (*(label for axes in grid[0] for label in axes.get_xticklabels()), *grid[0, 0].get_yticklabels()):
        text.set_parse_math(False)  # text of a result file is no formula
    return figure
