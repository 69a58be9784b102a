"""Draw docs/figures/theory-*.png, how states move in time and the closed forms: `python docs/theory_figures.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from rfa.dynamics import decay_kernel, partitioned_frequencies, rope_frequencies, rotation, spectral_decay
from rfa.forecasting.figure import COLOURS, COLUMN, PAGE, save, styled
from rfa_lab.report.figures import shades

_TO_FRAME, _FROM_FRAME, _FRAME = COLOURS[0], COLOURS[3], COLOURS[2]


@styled
def transport_factorization() -> Figure:
    """Direct transport between every pair of four times, and the same through a frame at t = 0 (appendix B.2)."""
    figure, (direct, factored) = plt.subplots(1, 2, figsize=(PAGE, 2.6))
    heights = [1 - index / 3 for index in range(4)]
    for axes in (direct, factored):
        for number, height in enumerate(heights, start=1):
            _node(axes, 0, height, rf"$x(t_{number})$", "0.93")
            _node(axes, 2, height, rf"$\hat x(t_{number})$", "0.93")
        axes.set(xlim=(-0.35, 2.35), ylim=(-0.32, 1.2))
        axes.axis("off")
    for i, target in enumerate(heights):
        for source in heights[: i + 1]:  # causal
            _arrow(direct, (0.24, source), (1.76, target), "0.45")
    _node(factored, 1, 0.5, "frame of\n$t = 0$", "#d9f0e8")
    for height in heights:
        _arrow(factored, (0.24, height), (0.75, 0.5 + 0.12 * (height - 0.5)), _TO_FRAME)
        _arrow(factored, (1.25, 0.5 + 0.12 * (height - 0.5)), (1.76, height), _FROM_FRAME)
    factored.text(0.45, 1.06, r"$e^{-\Lambda t_j}$", color=_TO_FRAME, ha="center", fontsize=9)
    factored.text(1.55, 1.06, r"$e^{\Lambda t_i}$", color=_FROM_FRAME, ha="center", fontsize=9)
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
    for x, name in ((0.5, "q"), (1.5, "k"), (2.5, "v")):
        _node(axes, x, 5, rf"${name}_{'i' if name == 'q' else 'j'}$", "0.93")
        _node(axes, x, 4, rf"$e^{{-i\omega t_{'i' if name == 'q' else 'j'}}}$", "#d6e8f5")
        _arrow(axes, (x, 4.8), (x, 4.2), "0.3")
    _node(axes, 1, 2.9, r"residuals $\to$ weights $A_{ij}$", "#d9f0e8")
    _node(axes, 1.5, 1.8, r"$\sum_j A_{ij}\,e^{-\mu(t_i - t_j)}\,\tilde v_j$", "#d9f0e8")
    _node(axes, 1.5, 0.8, r"$e^{+i\omega t_i}$", "#f9e0d0")
    _node(axes, 1.5, -0.1, r"$\bar v_i$", "0.93")
    into_weights = ((0.5, 3.8), (0.8, 3.1)), ((1.5, 3.8), (1.2, 3.1))
    into_sum = ((1, 2.72), (1.3, 2.08)), ((2.5, 3.8), (1.8, 2.08))
    back = ((1.5, 1.52), (1.5, 1.0)), ((1.5, 0.6), (1.5, 0.1))
    for start, end in (*into_weights, *into_sum, *back):
        _arrow(axes, start, end, "0.3")
    named = (4, "rotate", _TO_FRAME), (1.8, "aggregate", _FRAME), (0.8, "counter-rotate", _FROM_FRAME)
    for y, words, colour in named:
        axes.text(3.75, y, words, color=colour, ha="right", va="center")
    return figure


def letter(axes: Sequence[Axes]) -> None:
    """Put (a), (b), ... before the titles of the panels."""
    for index, each in enumerate(axes):
        each.set_title(f"({chr(ord('a') + index)}) {each.get_title()}".strip(), loc="left")
        each.set_title("", loc="center")


def _node(axes: Axes, x: float, y: float, text: str, fill: str) -> None:
    axes.text(
        x, y, text, ha="center", va="center", zorder=3, bbox={"boxstyle": "round,pad=0.35", "fc": fill, "lw": 0.6}
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 6, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, zorder=1, **look))


HEADS, MODES = 8, 32


@styled
def eigenvalue_spectra() -> Figure:
    """Eigenvalues `-mu_h + i omega_hk`. In RFA every head has RoPE's bank; in SC-RFA each head has its own band.

    Both panels have the decays of SC-RFA. The axes are logarithmic except around zero.
    """
    figure, panels = plt.subplots(1, 2, figsize=(PAGE, 3.4), sharex=True, sharey=True)
    bands = partitioned_frequencies(HEADS, MODES)
    decay = spectral_decay(bands, 1.0)
    slowest = bands.abs().min().item()
    for axes, title, bank in (
        (panels[0], "RFA: one bank for all heads", rope_frequencies(HEADS, MODES)),
        (panels[1], r"SC-RFA: a band a head, $\mu_h = b\,\omega_{h,\max}$, $b$ = 1", bands),
    ):
        for head, colour in enumerate(shades(HEADS)):
            look = {"color": colour, "marker": "_", "markersize": 8, "markeredgewidth": 0.6, "linestyle": ""}
            axes.plot(-decay[head].expand(MODES), bank[head], label=f"head {head}", **look)
        axes.axhline(0, color="0.3", linewidth=0.6, zorder=0)
        axes.set_xscale("symlog", linthresh=decay.min().item())
        axes.set_yscale("symlog", linthresh=slowest)
        axes.set_yticks([sign * 10.0**power for sign in (-1, 1) for power in (-4, -2, 0)] + [0])
        axes.set(xlabel=r"real part $-\mu_h$ (1/time)", title=title)
    panels[0].set_ylabel(r"imaginary part $\omega_{hk}$ (radians/time)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    letter(panels)
    return figure


@styled
def temporal_scale_separation() -> Figure:
    """The fraction of a state that remains over the lag, by head, and the oscillation of its fastest mode (SC-RFA)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.7), width_ratios=(1, 1))
    bands = partitioned_frequencies(HEADS, MODES)
    decay, fastest = spectral_decay(bands, 0.05).double(), bands.amax(dim=-1, keepdim=True)
    longest = 5 / decay.min().item()
    lag = torch.logspace(-1, torch.tensor(longest).log10().item(), 4000, dtype=torch.float64)
    remaining = decay_kernel(decay[:, None], lag)
    cosine = rotation(fastest, lag)[0][..., 0]
    colours = shades(HEADS)
    for head in range(HEADS):
        left.plot(lag, remaining[head], color=colours[head], label=f"head {head}")
    rows = (0, 2, 5, 7)  # of 8 heads, from the slowest to the fastest
    for row, head in enumerate(rows):
        right.axhline(2.4 * row, color="0.8", linewidth=0.5, zorder=0)
        right.plot(lag, 2.4 * row + remaining[head] * cosine[head], color=colours[head], linewidth=0.8)
    right.set_yticks([2.4 * row for row in range(len(rows))], [f"head {head}" for head in rows])
    right.grid(visible=False, axis="y")
    right.set(title=r"fastest mode, $e^{-\mu_h\tau}\cos\,\omega_{h,\max}\tau$")
    left.set(ylabel=r"share left $e^{-\mu_h\tau}$", title="decay by head, $b$ = 0.05", ylim=(0, 1.02))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel(r"lag $\tau$ (tokens)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    letter((left, right))
    return figure


FIGURES = {
    "transport": transport_factorization,
    "rotate": rotate_aggregate_counter_rotate,
    "spectra": eigenvalue_spectra,
    "time-scales": temporal_scale_separation,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        save(draw(), Path(__file__).parent / "figures" / f"theory-{name}.png", dots=200)
