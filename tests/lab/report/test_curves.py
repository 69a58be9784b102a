"""Curves over training, length and position: means and bands over seeds; what is missing is named in the legend."""

import math

import numpy as np
import pytest
import scipy.stats

from rfa_lab.report.figures.curves import (
    damping_sweep,
    loss_over_position,
    perplexity_over_length,
    training_curves,
)
from rfa_lab.report.measurements import log_bins

from .results import LENGTHS, result, whole_result


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
    half = 4.30265 * scipy.stats.sem(perplexities)  # of three seeds
    assert band(figure)[:, 1].min() == pytest.approx((perplexities.mean(0) - half).min(), rel=1e-5)
    assert band(figure)[:, 1].max() == pytest.approx((perplexities.mean(0) + half).max(), rel=1e-5)
    assert any(set(each.get_xdata()) == {16} for each in figure.axes[0].lines)  # the training length
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list(map(str, LENGTHS))


@pytest.mark.parametrize("draw", [training_curves, perplexity_over_length])
def test_missing_results_are_named(draw):
    bare = [{**result("m", seed), "curve": [], "evaluations": {}} for seed in (1, 2)]
    none = {key: value for key, value in result("none").items() if key not in ("curve", "evaluations")}
    figure = draw([result("m", 0), *bare, none])
    assert legend(figure) == ["m (without seed 1, 2)", "none (no results)"]
    assert len(line(figure, "m (without seed 1, 2)"))


def drawn_labels(axes):
    return [each.get_label() for each in axes.lines if not each.get_label().startswith("_")]


def test_at_most_six_lines_stand_in_a_panel():
    """The baselines and m2, then the models with the most seeds, by their validation; the appendix has all."""
    valid = {"b1-rope": 99, "b2-alibi": 98, "m2-sc-rfa": 97, "c1": 50, "c2": 53, "c3": 52, "c4": 51, "c5": 60}
    runs = [{**result(label), "training": {"valid_perplexity": value}} for label, value in valid.items()]
    runs += [{**run, "seed": 1} for run in runs if run["label"] in ("c2", "c3", "c4", "c5")]
    figures = [draw(runs) for draw in (training_curves, perplexity_over_length)]
    for figure in figures:
        (axes,) = figure.axes
        assert drawn_labels(axes) == ["b1-rope", "b2-alibi", "m2-sc-rfa", "c2", "c3", "c4"]
        assert len({(each.get_color(), each.get_linestyle()) for each in axes.lines}) >= 6
    assert [line.get_color() for line in figures[0].axes[0].lines[:6]] == [
        line.get_color() for line in figures[1].axes[0].lines[:6]
    ]
    found = [drawn_labels(axes) for axes in perplexity_over_length(runs, appendix=True).axes if axes.lines]
    assert max(map(len, found)) <= 6
    assert all(labels[0] == "b1-rope" for labels in found)
    assert sorted({label for labels in found for label in labels}) == sorted(valid)
    six = [result(f"m{k}") for k in range(6)]
    assert drawn_labels(perplexity_over_length(six).axes[0]) == [f"m{k}" for k in range(6)]


TRIGRAM = {
    "valid_perplexity": 44.0,
    "evaluations": {"blocks": {"rows": [{"length": n, "perplexity": 80.0} for n in LENGTHS]}},
    "by_position": {"loss": [4.25] * 127},
}


def test_the_trigram_is_a_line_of_the_six():
    runs = [{**whole_result(f"m{k}"), "trigram": TRIGRAM} for k in range(6)]
    for draw, level in ((perplexity_over_length, 80.0), (training_curves, 44.0), (loss_over_position, 0.0)):
        figure = draw(runs)
        assert set(line(figure, "trigram")[:, 1]) == {level}
        assert len(drawn_labels(figure.axes[0])) == 6
    bins = log_bins([4 + 1 / place - 4.25 for place in range(1, 128)])
    np.testing.assert_allclose(line(figure, "m0")[:, 1], list(bins.values()), atol=1e-12)


def test_a_line_that_fails_is_cut_off_and_said():
    runs = [result("good"), result("fine", loss=4.05), result("fails", slope=1.0)]
    figure = perplexity_over_length(runs)
    (axes,) = figure.axes
    assert legend(figure) == ["good", "fine", f"fails (cut off: {math.exp(7):.3g} at 128)"]
    assert axes.get_ylim()[1] == pytest.approx(1.4 * math.exp(4.05 + 0.3))  # 1.4 times the median of the highest
    assert axes.get_ylim()[0] < math.exp(4.0)


def test_a_single_seed_has_the_noise_of_seeds():
    runs = [result(label, seed, 4 + 0.1 * seed * rate) for label, rate in (("a", 1), ("b", 2)) for seed in range(3)]
    figure = perplexity_over_length([*runs, result("c")])
    noise = 1.959964 * 0.1  # the difference of a and b is 0, -0.1, -0.2, whose standard deviation is 0.1
    assert band(figure, 2)[:, 1].min() == pytest.approx(math.exp(4 - noise), rel=1e-6)
    assert band(figure, 2)[:, 1].max() == pytest.approx(math.exp(4.3 + noise), rel=1e-6)


def test_damping_sweep():
    swept = [(0.5, 3.8), (0.0005, 3.9)]
    runs = [whole_result(f"b={b}", preset="m2-sc-rfa", loss=loss) for b, loss in swept]
    for run, (b, _) in zip(runs, swept, strict=True):
        run["config"] = {**run["config"], "damping": b}
    figure = damping_sweep([whole_result("b1-rope"), *runs])
    assert legend(figure) == ["b1-rope", "$b$ = 0.0005", "$b$ = 0.5"]
    assert line(figure, "$b$ = 0.5")[0, 1] == pytest.approx(math.exp(3.8))


@pytest.mark.parametrize("positions", [1, 2, 127])
def test_bins_of_equal_factors_cover_every_position_once(positions):
    """A loss that is the position: a bin's mean is the middle of its ends, and its place their geometric middle."""
    bins = log_bins([float(position) for position in range(1, positions + 1)])
    first = 1
    for place, mean in bins.items():
        last = round(2 * mean - first)
        assert place == pytest.approx(math.sqrt(first * last))
        assert last == first or last / first < 2**0.5 * 1.2  # half an octave, and the rounding of small ends
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
    half = 12.7062 * (6.0 - drawn[-1][1])  # t of one degree of freedom; the mean of two is half of their distance away
    assert band(figure)[:, 1].max() >= drawn[-1][1] + half
    assert legend(figure) == ["m", "none (no results)"]
    assert any(set(each.get_xdata()) == {16} for each in figure.axes[0].lines)  # the training length
