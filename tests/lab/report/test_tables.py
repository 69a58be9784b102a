"""The paper's tables: published figures beside ours, what is missing named."""

import math

import numpy as np
import pytest
import scipy.stats

from rfa_lab.report.difference_tables import difference_table
from rfa_lab.report.layout import comma_separated, latex, markdown
from rfa_lab.report.tables import published_results, published_table, table1, table2

from .results import LENGTHS, near, result, whole_result
from .test_layout import check_latex

PUBLISHED = {
    "lengths": [512, 1024, 2048, 4096],
    "wikitext-103": {"b1-rope": [28.48, 30.94, 44.21, 72.69], "b2-alibi": [28.59, 27.3, 26.54, 26.3]},
    "wikitext-103-damping": {"0.05": [27.54, 26.73, 29.46, 37.19], "5.0": [27.91, 26.68, 26.37, 28.16]},
    "babylm-2025-strict": {"b1-rope": [17.7, 18.78, 23.33, 33.29], "m1-rfa": [17.51, 17.71, 20.61, 31.04]},
}
RUNS = [result("b1-rope", seed, 4.0 + 0.1 * seed) for seed in range(3)] + [result("x2", 1, 3.5, -0.1)]


def row(table, label):
    return dict(zip(table.columns, next(row for row in table.rows if row[0] == label), strict=True))


def test_ours_in_the_papers_order():
    table = table1(RUNS, PUBLISHED)
    assert table.columns == ("model", "seeds", *(f"L = {n}" for n in LENGTHS))
    assert [each[0] for each in table.rows] == ["b1-rope", "b2-alibi", "x2"]  # the paper's order, then our own
    rope = row(table, "b1-rope")
    perplexities = [math.exp(4.3 + 0.1 * seed) for seed in range(3)]
    assert rope["seeds"] == "3"
    assert (rope["L = 128"].value, rope["L = 128"].error) == near(
        sum(perplexities) / 3, float(scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(perplexities))
    )
    assert rope["L = 128"].best is False
    own = row(table, "x2")
    assert (own["L = 128"].value, own["L = 128"].error) == (pytest.approx(math.exp(3.2)), None)
    assert own["L = 128"].best


def test_the_published_numbers_have_a_table_of_their_own():
    """At the paper's lengths, which are not ours."""
    tables = {name: published_table(name, PUBLISHED) for name in ("table1", "table2", "table3")}
    for table in tables.values():
        assert table.columns == ("model", "L = 512", "L = 1024", "L = 2048", "L = 4096")
    assert row(tables["table1"], "b1-rope")["L = 4096"].value == 72.69
    assert [each[0] for each in tables["table2"].rows] == ["b1-rope", "b2-alibi", "b = 0.05", "b = 5"]
    assert row(tables["table2"], "b = 5")["L = 512"].value == 27.91
    assert row(tables["table3"], "m1-rfa")["L = 512"].best


def test_the_trigram_and_the_repeated_passage_stand_in_the_table():
    trigram = {
        "tokens": 192,
        "seed": 0,
        "evaluations": {"blocks": {"rows": [{"length": n, "perplexity": 50.0 + n} for n in LENGTHS]}},
        "passkey": {"repeat": {"rows": [{"distance": 8, "loss_by_token": [9.0, 1.0, 2.0]}]}},
    }
    runs = [{**whole_result(label), "trigram": trigram} for label in ("b1-rope", "x2")]
    table = table1(runs, PUBLISHED)
    assert table.columns[-1] == "repeat, D = 8"  # half of the training length of 16
    ours = row(table, "x2")["repeat, D = 8"]
    assert (ours.value, ours.error) == (0.25, pytest.approx(12.7062 * 0.125, rel=1e-5))  # of two trials, 0.125 away
    found = row(table, "trigram")
    assert [found[f"L = {n}"].value for n in LENGTHS] == [50.0 + n for n in LENGTHS]
    assert found["repeat, D = 8"].value == 0
    assert not found["L = 16"].best  # a reference is no model of the table
    assert row(table, "perfect copying")["repeat, D = 8"].value == pytest.approx(1.0)  # (1 + 2) / 3
    said = "Trigram: modified Kneser-Ney, on the 192 tokens of the text that the longest runs of seed 0 read."
    assert said in table.notes
    runs[1]["training"] = {**runs[1]["training"], "tokens": 48}
    assert f"{said} Shorter runs: x2." in table1(runs, PUBLISHED).notes
    assert "repeat" not in "".join(table1(RUNS, PUBLISHED).columns)
    assert "No trigram of the same tokens: rfa experiment makes it." in table1(RUNS, PUBLISHED).notes


def test_missing_runs_and_seeds_are_named():
    partial = result("m1-rfa", 0)
    partial["evaluations"]["blocks"]["rows"].pop()
    unfinished = {**result("m1-rfa", 1), "evaluations": {}}
    table = table1([*RUNS, partial, unfinished], PUBLISHED)
    notes = "\n".join(table.notes)
    assert "Not run here: b2-alibi." in notes
    assert "x2: no run of seed 0, 2." in notes
    assert "m1-rfa, seed 0: not evaluated at L = 128." in notes
    assert "m1-rfa, seed 1: not evaluated by blocks." in notes
    assert row(table, "m1-rfa")["L = 128"] is None
    assert row(table, "m1-rfa")["seeds"] == "1"
    assert all(cell is None for name, cell in row(table, "b2-alibi").items() if name.startswith("L ="))


def test_damping():
    runs = [result("b1-rope"), result("sweep", loss=3.9), result("other")]
    table = table2(runs, PUBLISHED, {"sweep": 0.05, "more": 0.1})
    assert [each[0] for each in table.rows] == ["b1-rope", "b2-alibi", "b = 0.05", "b = 0.1", "b = 5"]
    assert row(table, "b = 0.05")["L = 16"].value == pytest.approx(math.exp(3.9))
    assert row(table, "b = 5")["L = 16"] is None


def test_differences():
    table = difference_table(RUNS, resamples=200)
    assert table.columns == ("model", "against", "seeds", *(f"L = {n}" for n in LENGTHS))
    assert [each[:3] for each in table.rows] == [("x2", "b1-rope", "1")]
    for place, cell in enumerate(table.rows[0][3:]):
        expected = 3.5 - 0.1 * place - (4.1 + 0.1 * place)  # seed 1 of both
        assert (cell.value, *cell.interval) == near(expected, expected, expected)  # the same in every book
        assert (cell.error, cell.remark) == (None, "one seed")  # no two models have three seeds
    uneven = result("x3", 1, loss=3.5)
    uneven["evaluations"]["blocks"]["books"]["emma"]["16"] = [40 * 9.0, 40]
    (cell,) = [each[3] for each in difference_table([*RUNS, uneven], resamples=200).rows if each[0] == "x3"]
    assert cell.interval[0] < cell.value - 0.5 < cell.value + 0.5 < cell.interval[1]  # Emma is drawn or is not
    assert "No run of b2-alibi" in "\n".join(table.notes)


def test_differences_that_decide_nothing_are_said():
    """Of b1 three seeds 0.1 apart; one model lies always 0.3 below, one 0.3 below or level, one has a single seed."""
    always = [result("always", seed, 3.7 + 0.11 * seed) for seed in range(3)]
    level = [result("level", seed, 4.0 - 0.15 * seed) for seed in range(3)]
    table = difference_table([*RUNS, *always, *level, result("once", 0, 3.99)], ("b1-rope",), resamples=50)
    cells = {each[0]: each[3] for each in table.rows}
    assert {label: cell.remark for label, cell in cells.items()} == {
        "always": "",
        "level": "open",
        "once": "within a seed",
        "x2": "",
    }
    apart = np.array([0.0, -0.25, -0.5])
    interval = scipy.stats.ttest_1samp(apart, 0).confidence_interval(0.95)
    assert cells["level"].value + cells["level"].error == pytest.approx(interval.high)
    assert "open" in markdown(table)
    assert ",open," in comma_separated(table)


def test_differences_of_partial_results():
    one = result("m1-rfa", 1)
    del one["evaluations"]["blocks"]["books"]["emma"]
    two = result("m2", 1, books={"emma": 41, "persuasion": 10, "ulysses": 25})
    three = {**result("m3", 1), "evaluations": {"blocks": {"rows": []}}}
    table = difference_table([*RUNS, one, two, three, result("m4", 7)], ("b1-rope",), resamples=200)
    notes = "\n".join(table.notes)
    assert "m1-rfa against b1-rope at L = 16: without emma, not in every run." in notes
    assert "m2 against b1-rope at L = 16: books: got different numbers of targets" in notes
    assert "m3 against b1-rope at L = 16: no book in common." in notes
    assert "m4 and b1-rope have no seed in common." in notes
    assert row(table, "m1-rfa")["L = 16"].value == pytest.approx(-0.1)
    for label in ("m2", "m3", "m4"):
        assert all(cell is None for name, cell in row(table, label).items() if name.startswith("L ="))


@pytest.mark.parametrize("table", [table1(RUNS, PUBLISHED), difference_table(RUNS, resamples=50)], ids=["1", "d"])
def test_all_forms(table):
    check_latex(latex(table))
    assert markdown(table).count("\n| ") == len(table.rows) + 2
    assert len(comma_separated(table).splitlines()) == len(table.rows) + 1


def test_two_runs_of_one_seed_are_refused():
    with pytest.raises(ValueError, match="b1-rope-seed0, b1-rope-seed0 both of label b1-rope and seed 0"):
        table1([*RUNS, RUNS[0]], PUBLISHED)


# as printed in the paper: M1 to M2.6 and the baselines at 512, 1,024, 2,048 and 4,096 tokens
TABLE_1 = {
    "b1-rope": [28.48, 30.94, 44.21, 72.69],
    "b2-alibi": [28.59, 27.3, 26.54, 26.3],
    "b3-decayed-rope": [28.45, 30.45, 40.03, 64.54],
    "b4-sc-rope": [28.44, 30.49, 41.06, 60.08],
    "m1-rfa": [28.01, 27.58, 29.99, 38.46],
    "m2-sc-rfa": [27.54, 26.73, 29.46, 37.19],
    "m3-sc-rfa": [27.91, 26.68, 26.37, 28.16],
    "m2.1-exponential": [27.98, 27.16, 28.95, 33.51],
    "m2.2-flat-prior": [27.69, 28.71, 38.11, 62.83],
    "m2.3-no-gate": [27.65, 29.01, 39.18, 57.3],
    "m2.4-no-value-rotation": [30.24, 92.08, 187.29, 463.29],
    "m2.5-no-rotation": [28.58, 27.25, 26.61, 26.83],
    "m2.6-pure-rotation": [27.97, 35.59, 69.39, 131.29],
}
TABLE_2 = {  # by the damping b
    "0.0005": [27.6, 28.88, 37.34, 51.48],
    "0.005": [27.6, 28.71, 35.35, 43.9],
    "0.05": [27.54, 26.73, 29.46, 37.19],
    "0.5": [27.61, 26.38, 26.37, 29.72],
    "5.0": [27.91, 26.68, 26.37, 28.16],
}
TABLE_3 = {
    "b1-rope": [17.7, 18.78, 23.33, 33.29],
    "b2-alibi": [17.7, 17.2, 17.06, 17.51],
    "m1-rfa": [17.51, 17.71, 20.61, 31.04],
    "m2-sc-rfa": [17.36, 16.99, 18.33, 22.25],
    "m3-sc-rfa": [17.51, 17.07, 17.26, 18.74],
}


def test_the_figures_are_those_of_the_papers_tables():
    published = published_results()
    assert published["wikitext-103"] == TABLE_1
    assert published["wikitext-103-damping"] == TABLE_2
    assert published["babylm-2025-strict"] == TABLE_3
