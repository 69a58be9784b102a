"""How states move in time: a simulated trajectory (the paper's figure 1), and the operator's order of rotations."""

from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from rfa.estimation import LinearSDE

from .style import COLOURS, COLUMN, MARKERS, PAGE, letter, styled

_FINER = 8  # steps of the path between two measurements


@styled
def transported_measurements(
    decay: float = 0.06,
    frequency: float = 0.6,
    process_noise: float = 0.05,
    key_noise: float = 0.3,
    length: int = 60,
    duration: float = 16.0,
    targets: int = 5,
    seed: int = 0,
) -> Figure:
    """A damped rotation in the plane: its path and measurements, and every measurement transported to five times.

    Filled points come from the target's past and are what a causal estimate uses, faint ones from its future.

    Args:
        decay: mu, per unit of time.
        frequency: omega, radians per unit of time.
        process_noise: sigma^2, variance per unit of time.
        key_noise: eta^2, variance.
        length: number of measurements.
        duration: units of time that they span.
        targets: number of target times, evenly spread.
        seed: of the random numbers.
    """
    eye = torch.eye(2, dtype=torch.float64)
    turning = torch.tensor([[0.0, -frequency], [frequency, 0.0]], dtype=torch.float64)
    sde = LinearSDE(turning - decay * eye, process_noise / 2 * eye, eye, key_noise / 2 * eye)
    fine = torch.linspace(0, duration, (length - 1) * _FINER + 1, dtype=torch.float64)
    start = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.zeros_like(eye)
    path_states, path_measured = sde.simulate(fine, torch.Generator().manual_seed(seed), initial=start)
    times, states, measured = fine[::_FINER], path_states[::_FINER], path_measured[::_FINER]

    figure, (path, transported) = plt.subplots(1, 2, figsize=(PAGE, 3.2), sharex=True, sharey=True, layout="compressed")
    path.plot(*path_states.T, color="black", linewidth=1, label="state $x(t)$")
    path.plot(*measured.T, "o", color=COLOURS[0], markersize=2.5, label="measurements $z_i$")
    path.set(title="trajectory and measurements", ylabel="second component")

    transported.plot(*path_states.T, color="0.6", linewidth=0.8, zorder=1)
    chosen = torch.linspace(length / targets - 1, length - 1, targets).round().long()
    for place, target in enumerate(chosen.tolist()):
        at = (sde.transition(times[target] - times) @ measured[..., None])[..., 0]
        past = times <= times[target]
        look: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": ""}
        transported.plot(*at[~past].T, **look, markersize=2.2, alpha=0.25, markeredgewidth=0, zorder=2)
        transported.plot(*at[past].T, **look, markersize=2.2, markeredgewidth=0, zorder=3, alpha=0.8)
        label = f"$t_i$ = {times[target].item():.1f}"
        look |= {"markeredgecolor": "black", "markeredgewidth": 0.8}
        transported.plot(*states[target], **look, markersize=6, zorder=4, label=label)
    transported.set_title("transported to $t_i$ (faint: from later times)")
    for axes in (path, transported):
        axes.set_xlabel("first component")
        axes.set_aspect("equal", adjustable="box")
    handles = [*path.get_legend_handles_labels()[0], *transported.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.0)
    letter((path, transported))
    return figure


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
