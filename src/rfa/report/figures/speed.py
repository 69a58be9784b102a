"""Speed and memory over length, from the lines of `rfa bench`."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ..speed import Line, operator_curves, share_of_bound
from .style import MUTED, PAGE, draw_lines, lengths_axis, looks, styled


@styled
def speed_over_length(lines: Sequence[Line]) -> Figure:
    """The operator's time over its peer's, and how near both are to their bounds, by length.

    Args:
        lines: of `rfa bench`, the operator's among them.
    """
    figure, (ratios, shares) = plt.subplots(1, 2, figsize=(PAGE, 2.7))
    curves = operator_curves(lines)
    lengths = {name: [line["length"] for line in curve] for name, curve in curves.items()}
    draw_lines(ratios, {name: (lengths[name], [line["ratio"]["median"] for line in of]) for name, of in curves.items()})
    look = looks(list(curves))
    for name, curve in curves.items():
        ends = ([line["ratio"][end] for line in curve] for end in ("q1", "q3"))
        ratios.fill_between(lengths[name], *ends, color=look[name]["color"], alpha=0.2, linewidth=0)
        for contestant, style in (("rfa", "-"), ("peer", ":")):
            points = [share_of_bound(line, contestant) for line in curve]
            percents = [100 * share if share is not None else float("nan") for share in points]
            shares.plot(lengths[name], percents, **{**look[name], "linestyle": style})
    ratios.axhline(1, color=MUTED, linestyle=":", linewidth=1)
    ratios.set(ylabel="time / peer's time (band: quartiles)", ylim=(0, None))
    shares.axhline(100, color=MUTED, linestyle=":", linewidth=1)  # a point above it tells of a peak measured too low
    shares.set(ylabel="percent of the bound (dotted: peer)", ylim=(0, None))
    ticks = sorted({length for each in lengths.values() for length in each})
    for axes in (ratios, shares):
        lengths_axis(axes, ticks)
        axes.set_xlabel("length (tokens)")
    ratios.legend()
    return figure
