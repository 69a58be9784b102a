"""Two diagrams of how the operator moves states: through a common frame, and the layer's order of rotations."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from .style import COLOURS, COLUMN, PAGE, letter, styled

_THERE, _BACK, _FRAME = COLOURS[0], COLOURS[3], COLOURS[2]


@styled
def transport_factorization(times: int = 4) -> Figure:
    """Direct transport between every pair of times, and the same through a common frame at t = 0 (appendix B.2).

    Args:
        times: number of source times, and of target times.
    """
    figure, (direct, factored) = plt.subplots(1, 2, figsize=(PAGE, 2.6))
    heights = [1 - place / (times - 1) for place in range(times)]
    for axes in (direct, factored):
        for place, height in enumerate(heights, start=1):
            _node(axes, 0, height, rf"$x(t_{place})$", "0.93")
            _node(axes, 2, height, rf"$\hat x(t_{place})$", "0.93")
        axes.set(xlim=(-0.35, 2.35), ylim=(-0.32, 1.2))
        axes.axis("off")
    for i, target in enumerate(heights):
        for source in heights[: i + 1]:  # causal
            _arrow(direct, (0.24, source), (1.76, target), "0.45")
    _node(factored, 1, 0.5, "frame of\n$t = 0$", "#d9f0e8")
    for height in heights:
        _arrow(factored, (0.24, height), (0.75, 0.5 + 0.12 * (height - 0.5)), _THERE)
        _arrow(factored, (1.25, 0.5 + 0.12 * (height - 0.5)), (1.76, height), _BACK)
    factored.text(0.45, 1.06, r"$e^{-\Lambda t_j}$", color=_THERE, ha="center", fontsize=9)
    factored.text(1.55, 1.06, r"$e^{\Lambda t_i}$", color=_BACK, ha="center", fontsize=9)
    direct.text(1, 1.06, r"$e^{\Lambda (t_i - t_j)}$", ha="center", fontsize=9)
    direct.text(1, -0.26, "one transport a pair: $O(N^2)$", ha="center")
    factored.text(1, -0.26, "one there and one back a time: $O(N)$", ha="center")
    direct.set_title("direct")
    factored.set_title("through a common frame")
    letter((direct, factored))
    return figure


@styled
def rotate_aggregate_counter_rotate() -> Figure:
    """What the operator does with queries, keys and values, from top to bottom (section 3.2)."""
    figure, axes = plt.subplots(figsize=(COLUMN, 3.6))
    axes.set(xlim=(0.1, 3.8), ylim=(-0.35, 5.3))
    axes.axis("off")
    for place, name in enumerate(("q", "k", "v")):
        x = 0.5 + place
        _node(axes, x, 5, rf"${name}_{'i' if name == 'q' else 'j'}$", "0.93")
        _node(axes, x, 4, rf"$e^{{-i\omega t_{'i' if name == 'q' else 'j'}}}$", "#d6e8f5")
        _arrow(axes, (x, 4.8), (x, 4.2), "0.3")
    _node(axes, 1, 2.9, r"residuals $\to$ weights $A_{ij}$", "#d9f0e8")
    _node(axes, 1.5, 1.8, r"$\sum_j A_{ij}\,e^{-\mu(t_i - t_j)}\,\tilde v_j$", "#d9f0e8")
    _node(axes, 1.5, 0.8, r"$e^{+i\omega t_i}$", "#f9e0d0")
    _node(axes, 1.5, -0.1, r"$\bar v_i$", "0.93")
    for start, end in (
        ((0.5, 3.8), (0.8, 3.1)),
        ((1.5, 3.8), (1.2, 3.1)),
        ((1, 2.72), (1.3, 2.08)),
        ((2.5, 3.8), (1.8, 2.08)),
        ((1.5, 1.52), (1.5, 1.0)),
        ((1.5, 0.6), (1.5, 0.1)),
    ):
        _arrow(axes, start, end, "0.3")
    for y, words, colour in ((4, "rotate", _THERE), (1.8, "aggregate", _FRAME), (0.8, "counter-rotate", _BACK)):
        axes.text(3.75, y, words, color=colour, ha="right", va="center")
    return figure


def _node(axes: Axes, x: float, y: float, text: str, fill: str) -> None:
    axes.text(
        x, y, text, ha="center", va="center", zorder=3, bbox={"boxstyle": "round,pad=0.35", "fc": fill, "lw": 0.6}
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 6, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, zorder=1, **look))
