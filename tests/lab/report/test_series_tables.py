"""Tables of a record of series against means and t intervals computed by hand."""

import json
import math
import statistics

import pytest

from rfa_lab.report.layout import markdown
from rfa_lab.report.records import record_kind
from rfa_lab.report.series_tables import (
    ratio_figure,
    read_series_results,
    series_ratio_table,
    series_table,
    write_series_report,
)
from rfa_lab.results import Planned, unfinished_runs, write_planned


def result(label, seed, *errors):
    scores = {"mse": 0.0, "nll": 0.0, "crps": 0.0, "coverage": 0.9, "targets": 5}
    parts = [{part: {**scores, "mse": error} for part in ("filter", "forecast")} for error in errors]
    return {"recipe": "r", "label": label, "seed": seed, "scores": dict(zip("ab", parts, strict=True))}


RESULTS = [
    result("kalman", 0, 0.5, 0.2),
    result("x2", 0, 0.1, 0.3),
    result("x2", 1, 0.2, 0.3),
    result("x2", 2, 0.3, 0.3),
]


def test_means_intervals_and_the_best_of_a_column():
    table = series_table(RESULTS, "filter", "mse")
    assert table.columns == ("model", "seeds", "a", "b")
    assert [row[0] for row in table.rows] == ["x2", "kalman"]  # by the first column
    first = table.rows[0][2]
    half = 4.302653 * 0.1 / 3**0.5  # t of 2 degrees of freedom at 97.5 %
    assert (first.value, first.best) == (pytest.approx(0.2), True)
    assert first.error == pytest.approx(half, rel=1e-6)
    assert table.rows[1][2].error is None  # one seed
    assert table.rows[1][3].best
    assert "**0.200" in markdown(table)


def test_ratios_are_paired_by_seed():
    results = [*RESULTS, *(result("c9", seed, error, 0.3) for seed, error in enumerate((0.2, 0.2, 0.3)))]
    table = series_ratio_table(results, "c9", "filter", "mse")
    rows = {row[0]: row[1] for row in table.rows}
    logs = [math.log(0.1 / 0.2), 0.0, 0.0]
    half = math.exp(4.302653 * statistics.stdev(logs) / 3**0.5)
    assert rows["x2"].value == pytest.approx(0.5 ** (1 / 3))
    assert rows["x2"].interval == pytest.approx((0.5 ** (1 / 3) / half, 0.5 ** (1 / 3) * half))
    assert rows["kalman"].value == pytest.approx(0.5 / 0.2)  # one result, the seed that both have
    assert rows["kalman"].interval is None
    of_filter = {row[0]: row[1] for row in series_ratio_table(results, "kalman", "filter", "mse").rows}
    assert of_filter["x2"].value == pytest.approx((0.2 * 0.4 * 0.6) ** (1 / 3))  # its one result serves every seed
    unfinished = [*RESULTS, {**result("c9", 0, 0.2, 0.3), "parameters": 9}]  # a network with one seed so far
    alone = {row[0]: row[1] for row in series_ratio_table(unfinished, "c9", "filter", "mse").rows}
    assert (alone["x2"].value, alone["x2"].interval) == (pytest.approx(0.5), None)
    assert table.rows[-1][1] is None  # itself


def test_the_report_command_draws_ratios(rfa, tmp_path):
    folder = tmp_path / "record" / "results"
    folder.mkdir(parents=True)
    for one in (*RESULTS, result("c9", 0, 0.1, 0.2), result("c9", 1, 0.1, 0.2)):
        one = {**one, "recipe": "*r*"}
        (folder / f"{one['label']}-{one['seed']}.json").write_text(json.dumps(one))
    status, said, _ = rfa("report", folder.parent)
    assert (status, "series.md" in said) == (0, True)
    page = (folder.parent / "report" / "series.md").read_text()
    assert page.startswith("# \\*r\\*")  # text of a result acts as no markup
    assert "divided by that of c9" in page
    assert (folder.parent / "report" / "series.png").read_bytes().startswith(b"\x89PNG")
    assert "missing" not in said + page


def test_missing_runs_are_named(rfa, tmp_path, monkeypatch):
    """In a record and in its folder of results, in a folder that holds both, and where there is no result yet."""
    (tmp_path / "results").mkdir()
    names = [f"x2-seed{seed}" for seed in range(30)]
    write_planned(tmp_path, Planned(name="r", title="t", runs=names, kind="series"))
    assert record_kind(tmp_path) == "series"
    for given in (tmp_path, tmp_path / "results"):
        status, _, fault = rfa("report", given)
        assert (status, "has no results" in fault) == (2, True)
    for folder in (tmp_path / "results", tmp_path):
        (folder / "x2-seed3.json").write_text(json.dumps(RESULTS[0]))
        for given in {folder, tmp_path}:
            status, said, _ = rfa("report", given, "--out", tmp_path / "out")
            page = (tmp_path / "out" / "series.md").read_text().partition("## What is missing")[2]
            assert status == 0
            assert "missing: 29 runs: not begun: x2-seed0, x2-seed1, x2-seed2, x2-seed4" in said
            assert "29 runs: not begun: x2-seed0, " in page
            assert "x2-seed29" in page
        monkeypatch.chdir(folder)
        assert list(unfinished_runs(".")) == ["29 runs"]
        (folder / "x2-seed3.json").unlink()
        if folder.name == "results":
            folder.rmdir()


def test_a_page_of_all_tables(tmp_path):
    for one in RESULTS:
        (tmp_path / f"{one['label']}-{one['seed']}.json").write_text(json.dumps(one))
    page = write_series_report(tmp_path, tmp_path / "out").page.read_text()
    assert page.count("| x2 |") == 8  # four scores of two parts
    assert len(read_series_results(tmp_path)) == 4


def test_results_of_two_recipes_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps({**RESULTS[0], "recipe": name, "label": name}))
    with pytest.raises(ValueError, match=r"^folder: .* has results of a, b, expected one recipe"):
        read_series_results(tmp_path)


def test_damaged_and_missing_results(tmp_path):
    with pytest.raises(ValueError, match=r"^folder: .* has no results"):
        read_series_results(tmp_path)
    good = RESULTS[0]
    part = good["scores"]["a"]["filter"]
    wrong = [
        5, None, [], {}, {**good, "label": ["x"]}, {**good, "seed": "0"}, {**good, "seed": True},
        {**good, "scores": {}},
        {**good, "scores": {"a": {}}}, {**good, "scores": {"a": {"other": part}}},
        {**good, "scores": {"a": {"filter": {**part, "mse": "low"}}}},
        {**good, "scores": {"a": {"filter": {"mse": 1.0}}}},
        {**good, "scores": {"a": {"filter": {**part, "mse": math.nan}}}},
        {**good, "scores": {"a": {"filter": {**part, "mse": 10**400}}}},
    ]  # fmt: skip
    for content in [*map(json.dumps, wrong), "{", "[" * 100_000]:
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match=r"^result: .*x\.json is damaged"):
            read_series_results(tmp_path)
    for name in "xy":
        (tmp_path / f"{name}.json").write_text(json.dumps(good))
    with pytest.raises(ValueError, match=r"y\.json is a second one of kalman with seed 0"):
        read_series_results(tmp_path)


def test_scores_that_are_not_finite_are_left_out():
    broken = result("x2", 3, 0.4, 0.4)
    broken["scores"]["a"]["filter"]["mse"] = None
    table = series_table([*RESULTS, broken], "filter", "mse")
    assert table.rows[0][2].value == pytest.approx(0.2)  # of the other three seeds


def test_points_stand_at_their_settings():
    """Settings that only one part has: each panel keeps the common order. Labels are no formulas."""
    few = [
        {**each, "scores": {**each["scores"], "$\\foo$": {"forecast": each["scores"]["a"]["forecast"]}}}
        for each in RESULTS
    ]
    figure = ratio_figure(few, "kalman")
    above, below = figure.axes
    assert [text.get_text() for text in below.get_xticklabels()] == ["a", "b", "$\\foo$"]
    drawn = [len(axes.containers[0].lines[0].get_xdata()) for axes in (above, below)]
    assert drawn == [2, 3]
    figure.canvas.draw()
