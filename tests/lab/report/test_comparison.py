"""Differences to a baseline and retrieval at a distance, as drawn; and a panel a group where labels are many."""

import numpy as np
import pytest
import scipy.stats

from rfa.models import PRESETS
from rfa_lab.report.figures.comparison import differences, retrieval
from rfa_lab.report.runs import by_group
from rfa_lab.report.statistics import paired_difference

from .results import BOOKS, result


def uneven(label, seed, loss):
    """Its losses by book are not a constant away from the others'."""
    run = result(label, seed, loss)
    for place, book in enumerate(BOOKS):
        for sums in run["evaluations"]["blocks"]["books"][book].values():
            sums[0] += 0.3 * place * sums[1]
    return run


def books(run, length):
    return {book: tuple(of[str(length)]) for book, of in run["evaluations"]["blocks"]["books"].items()}


BASE = [result("b1-rope", seed, 4.0 + 0.1 * seed) for seed in range(2)]
RUNS = [
    *BASE,
    uneven("m2-sc-rfa", 0, 3.7),
    uneven("m2-sc-rfa", 1, 3.9),
    uneven("c1-nope", 0, 3.0),
    result("b2-alibi", 5),
]


def rows(figure):
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def test_differences_are_those_of_the_statistics():
    figure = differences(RUNS)
    assert rows(figure) == [
        *("the paper's models", "m2-sc-rfa (2 seeds)", "b2-alibi"),
        *("controls", "c1-nope"),
    ]
    for axes, length in zip(figure.axes, (16, 128), strict=True):
        assert axes.get_title().startswith(f"L = {length}")
        assert axes.get_xlabel() == "difference (nats / token)"
        points = {line.get_label(): line for line in axes.lines if line.get_marker() == "o"}
        assert list(points) == ["m2-sc-rfa", "c1-nope"]
        bars = {line.get_ydata()[0]: list(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 3.5}
        halves = {each.lines[0].get_ydata()[0]: each.lines[2][0].get_segments()[0][:, 0] for each in axes.containers}
        for label, seeds, place in (("m2-sc-rfa", 2, 1), ("c1-nope", 1, 4)):
            sides = [
                [books(run, length) for run in RUNS if run["label"] == each][:seeds] for each in (label, "b1-rope")
            ]
            found = paired_difference(*sides)
            assert points[label].get_xdata() == [found.value]
            assert points[label].get_ydata() == [place]
            low, high = found.over_books
            assert bars[place] == [low, high]
            assert low < found.value < high
            assert (place in halves) == (seeds == 2)
        apart = [np.average((0, 0.3, 0.6), weights=list(BOOKS.values())) - gap for gap in (0.3, 0.2)]  # by seed
        interval = scipy.stats.ttest_1samp(apart, 0).confidence_interval(0.95)
        assert list(halves[1]) == pytest.approx(interval, rel=1e-9)
        faces = {line.get_label(): line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"}
        assert faces["c1-nope"] == "white"
        assert faces["m2-sc-rfa"] != "white"
        assert [text.get_text().strip() for text in axes.texts] == ["no results"]  # b2-alibi has no seed in common


def test_an_outlier_is_a_number_at_the_edge_and_the_noise_of_seeds_a_band():
    runs = [result("b1-rope", seed, 4.0) for seed in range(3)]
    runs += [result("m2-sc-rfa", seed, 3.9 + 0.01 * seed) for seed in range(3)]
    runs += [result(f"c{k}", 0, 3.9 + 0.02 * k) for k in range(8)] + [result("c9", 0, 6.0), result("c8", 0, 1.5)]
    axes = differences(runs).axes[0]
    assert {text.get_text() for text in axes.texts} == {"+2.00 >", "< -2.50"}
    assert max(np.abs(axes.get_xlim())) < 0.5
    (grey,) = axes.patches
    assert grey.get_x() + grey.get_width() == pytest.approx(1.959964 * 0.01)  # of the one pair, over seeds


@pytest.mark.parametrize("runs", [[], BASE, [result("m2-sc-rfa")]])
def test_nothing_to_compare(runs):
    with pytest.raises(ValueError, match=r"runs: got .*, expected b1-rope and one to compare with it"):
        differences(runs)


def probed(label, seed=0, distances=(8, 16, 32), kinds=("passkey", "repeat"), trials=12):
    random = np.random.default_rng([seed, *label.encode()])
    probes = {
        kind: {
            "kind": kind,
            "rows": [{"distance": n, "scores": random.normal(size=trials).tolist()} for n in distances],
        }
        for kind in kinds
    }
    return {**result(label, seed), "passkey": probes}


def drawn(axes):
    return {bar.get_label(): bar for bar in axes.containers}


def test_retrieval():
    runs = [probed("b1-rope"), probed("m2-sc-rfa", 0), probed("m2-sc-rfa", 1), probed("c1-nope"), result("m1-rfa")]
    figure = retrieval(runs)
    panels = np.array(figure.axes).reshape(1, 2)  # kinds
    assert [axes.get_title().split(":")[0] for axes in panels[0]] == ["passkey", "repeat"]
    for column, kind in enumerate(("passkey", "repeat")):
        both = [[row["scores"] for row in run["passkey"][kind]["rows"]] for run in runs[1:3]]
        averaged = np.mean(both, axis=0)
        line, _, (bars,) = drawn(panels[0, column])["m2-sc-rfa"]
        np.testing.assert_allclose(line.get_xydata(), np.stack([(8, 16, 32), averaged.mean(1)], axis=1))
        error = scipy.stats.t.ppf(0.975, 11) * scipy.stats.sem(averaged, axis=1)
        for place, bar in enumerate(bars.get_segments()):
            np.testing.assert_allclose(bar[:, 1], averaged[place].mean() + np.array((-1, 1)) * error[place])
    everything = {"b1-rope", "m2-sc-rfa", "m1-rfa (no results)", "c1-nope"}
    groups = ({"b1-rope", "m2-sc-rfa", "m1-rfa (no results)"}, {"c1-nope", "b1-rope"})
    appendix = np.array(retrieval(runs, appendix=True).axes).reshape(2, 2)  # groups, kinds
    for row, labels in zip([*panels, *appendix], (everything, *groups), strict=True):
        assert set(drawn(row[0])) == set(drawn(row[1])) == labels
        assert {text.get_text() for text in row[1].get_legend().get_texts()} == labels
        assert row[0].get_ylabel() == "score (nats / token)"
    assert panels[0, 0].get_xlabel() == "distance (tokens)\ndotted: training length"


@pytest.mark.parametrize("own", [False, True])
def test_retrieval_is_a_share_of_perfect_copying(own):
    """Of a repeated passage all tokens but the first can be copied; what the file does not say is the trigram's."""
    losses = {"passkey": [9.0, 3.0], "repeat": [9.0, 3.0, 6.0]}
    possible = {"passkey": 6.0, "repeat": 3.0}
    run = probed("m2-sc-rfa")
    rows = {kind: [{"distance": n, "loss_by_token": of} for n in (8, 16, 32)] for kind, of in losses.items()}
    if own:
        for kind, of in rows.items():
            for row, added in zip(run["passkey"][kind]["rows"], of, strict=True):
                row |= added
        rows = {}
    run["trigram"] = {"passkey": {kind: {"rows": of} for kind, of in rows.items()}}
    figure = retrieval([run])
    for axes, kind in zip(figure.axes, losses, strict=True):
        scores = np.array([row["scores"] for row in run["passkey"][kind]["rows"]])
        line, *_ = drawn(axes)["m2-sc-rfa"]
        np.testing.assert_allclose(line.get_xydata()[:, 1], 100 * scores.mean(1) / possible[kind])
        assert figure.axes[0].get_ylabel() == "% of perfect copying"


def test_retrieval_of_partial_results():
    short = probed("m2-sc-rfa", 1, distances=(8, 16), kinds=("repeat",))
    figure = retrieval([probed("m2-sc-rfa"), short])
    lengths = [len(next(iter(drawn(axes).values())).lines[0].get_xdata()) for axes in figure.axes]
    assert lengths == [3, 2]  # where every probed seed has a score
    with pytest.raises(ValueError, match=r"got \[12, 5\] trials at 8"):
        retrieval([probed("m2-sc-rfa"), probed("m2-sc-rfa", 1, trials=5)])


def test_groups_hold_every_preset_once():
    groups = by_group(result(label) for label in PRESETS)
    assert sorted(label for labels in groups.values() for label in labels) == sorted(PRESETS)
    assert groups["the paper's models"] == [
        "sc-rfa",
        "rope",
        "alibi",
        *[name for name in PRESETS if name[0] in "bm"][:7],
    ]
    assert "others" not in groups
    assert {"c4-fox", "c8-fox-clock", "x7-gated-roper"} <= {*groups["controls"]}  # forget gates
    assert by_group([{**result("mine"), "preset": "new"}, {**result("b=0.5"), "preset": "m2-sc-rfa"}]) == {
        "the paper's models": ["b=0.5"],
        "others": ["mine"],
    }
