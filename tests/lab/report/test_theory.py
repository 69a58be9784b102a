"""What the artists of the theory's figures hold, against the paper's closed forms and scipy; and print's demands."""

import itertools
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
from cover import slow
from matplotlib.text import Text
from scripts import script

from rfa.forecasting.style import COLUMN, PAGE
from rfa.models import PRESETS
from rfa_lab.report.contents import APPENDIX, listed_figures

from .results import whole_result
from .test_heads import learned, maps

MANY = [whole_result(label, seed) for label in PRESETS for seed in range(2)]
LONG = ("x2-riccati-alibi rope-no-innovation", "c7-rope-alibi-innovation no-innovation")
MANY += [whole_result(label, seed) for label in LONG for seed in range(3)]  # the most seeds: they are drawn
MAPPED = [{**whole_result(label), "maps": maps(8, 16)} for label in ("b1-rope", "b2-alibi", "m1-rfa", "m2-sc-rfa")]
MAPPED[-1]["dynamics"] = learned()["dynamics"]
theory = script("docs/theory_figures.py")
PRINTED = dict(theory.FIGURES)
PRINTED |= {
    each.name: partial(each.draw, runs)
    for runs in (MAPPED, MANY)
    for each in listed_figures(runs)
    if not each.name.endswith(APPENDIX)
}


def curves(axes):
    return [np.array(line.get_xydata(), dtype=float) for line in axes.lines]


@slow
@pytest.mark.parametrize(("name", "draw"), PRINTED.items())
def test_fit_for_print(name, draw):
    with plt.rc_context({"font.size": 3, "xtick.labelsize": 3, "axes.labelsize": 3}):  # the caller's style is not ours
        figure = draw()
        figure.draw_without_rendering()
        figure.draw_without_rendering()  # two passes, as `save` makes
    width, height = figure.get_size_inches()
    assert width in (COLUMN, PAGE)
    assert height <= 9.0  # of a page
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 7
    box = figure.get_tightbbox()
    assert box.x0 >= -0.01  # of an inch: half a line's width
    assert box.y0 >= -0.01
    assert box.x1 <= width + 0.01
    assert box.y1 <= height + 0.01
    legends = [each.get_window_extent() for axes in figure.axes if (each := axes.get_legend()) is not None]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(legends, 2))
    for axes in figure.axes:
        place = axes.get_subplotspec()
        if axes.axison and place is not None:  # a colour bar has none
            assert axes.get_xlabel() or figure.get_supxlabel() or not place.is_last_row()
            assert (
                axes.get_ylabel()
                or figure.get_supylabel()
                or name.startswith("differences")
                or not place.is_first_col()
            )


def test_spectra():
    rfa, coupled = (curves(axes)[:8] for axes in theory.eigenvalue_spectra().axes)
    bands = np.sort(10000.0 ** -(np.arange(128) / 128)).reshape(8, 16)
    bank = 10000.0 ** -(np.arange(16) / 16)
    for head in range(8):
        for drawn, positive in ((rfa[head], bank), (coupled[head], bands[head])):
            np.testing.assert_allclose(drawn[:, 0], -bands[head].max(), rtol=1e-6)  # frequencies are float32
            np.testing.assert_allclose(np.sort(drawn[:, 1]), np.sort([*positive, *-positive]), rtol=1e-6)
