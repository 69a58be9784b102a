"""Figures from result files: means and bands over seeds; what is missing is named in the legend."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rfa.report.figures import damping_sweep, loss_over_position, perplexity_over_length, training_curves
from rfa.report.runs import log_bins

from .results import LENGTHS, result, whole_result


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line(figure, label):
    (found,) = [each for each in figure.axes[0].lines if each.get_label() == label]
    return np.array(found.get_xydata())


def band(figure, place=0):
    return figure.axes[0].collections[place].get_paths()[0].vertices


def test_mean_and_band_over_seeds():
    losses = [4.0, 4.2, 4.3]
    figure = perplexity_over_length([result("m", seed, loss) for seed, loss in enumerate(losses)])
    drawn = line(figure, "m")
    assert drawn[:, 0].tolist() == list(LENGTHS)
    perplexities = np.exp(np.array(losses)[:, None] + 0.1 * np.arange(4))
    np.testing.assert_allclose(drawn[:, 1], perplexities.mean(0))
    assert band(figure)[:, 1].min() == pytest.approx(perplexities.min())
    assert band(figure)[:, 1].max() == pytest.approx(perplexities.max())
    assert any(set(each.get_xdata()) == {16} for each in figure.axes[0].lines)  # the training length
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list(map(str, LENGTHS))


@pytest.mark.parametrize("draw", [training_curves, perplexity_over_length])
def test_missing_results_are_named(draw):
    bare = [{**result("m", seed), "curve": [], "evaluations": {}} for seed in (1, 2)]
    none = {key: value for key, value in result("none").items() if key not in ("curve", "evaluations")}
    figure = draw([result("m", 0), *bare, none])
    assert legend(figure) == ["m (without seed 1, 2)", "none (no results)"]
    assert len(line(figure, "m (without seed 1, 2)"))


def test_a_label_has_one_look_in_all_figures_and_nine_are_told_apart():
    runs = [result(f"m{k}") for k in range(9)]
    looks = [
        {each.get_label(): (each.get_color(), each.get_linestyle()) for each in draw(runs).axes[0].lines}
        for draw in (training_curves, perplexity_over_length)
    ]
    assert len({looks[0][f"m{k}"] for k in range(9)}) == 9
    assert all(looks[0][f"m{k}"] == looks[1][f"m{k}"] for k in range(9))


def test_damping_sweep():
    runs = [result("b1-rope"), result("slow", loss=3.9), result("fast", loss=3.8)]
    figure = damping_sweep(runs, {"fast": 5.0, "slow": 0.0005, "absent": 0.05})
    assert legend(figure) == ["b1-rope", "$b$ = 0.0005", "$b$ = 0.05 (no results)", "$b$ = 5"]
    assert line(figure, "$b$ = 5")[0, 1] == pytest.approx(math.exp(3.8))


@pytest.mark.parametrize("positions", [1, 2, 127])
def test_bins_of_equal_factors_cover_every_position_once(positions):
    """A loss that is the position: a bin's mean is the middle of its ends, and its place their geometric middle."""
    bins = log_bins([float(position) for position in range(1, positions + 1)])
    first = 1
    for place, mean in bins.items():
        last = round(2 * mean - first)
        assert place == pytest.approx(math.sqrt(first * last))
        assert last == first or last / first < 2**0.25 * 1.2  # a quarter of an octave, and the rounding of small ends
        first = last + 1
    assert first == positions + 1
    assert log_bins([]) == {}


def test_loss_over_position():
    runs = [whole_result("m", seed) for seed in range(2)]
    runs[1]["by_position"] = {**runs[1]["by_position"], "loss": [6.0] * 127}
    figure = loss_over_position([*runs, result("none")])
    drawn = line(figure, "m")
    assert drawn[0].tolist() == [1.0, (5.0 + 6.0) / 2]  # position 1 alone
    first = round(drawn[-1][0] ** 2 / 127)  # of the last bin
    assert drawn[-1][1] == pytest.approx((4 + np.mean([1 / place for place in range(first, 128)]) + 6) / 2)
    assert band(figure)[:, 1].max() == 6.0
    assert legend(figure) == ["m", "none (no results)"]
    assert any(set(each.get_xdata()) == {16} for each in figure.axes[0].lines)  # the training length
