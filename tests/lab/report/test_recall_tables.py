"""Tables of a record of recall against means and t intervals computed by hand."""

import csv
import json
import math

import pytest

from rfa_lab.report.layout import markdown
from rfa_lab.report.recall_tables import (
    accuracy_figure,
    accuracy_table,
    learning_table,
    overview_table,
    read_recall_results,
    tasks_of,
    tokens_until,
    write_recall_report,
)
from rfa_lab.report.records import record_kind

T2 = 4.302653 / 3**0.5  # half an interval of three seeds, over the deviation: t of 2 degrees of freedom at 97.5 %


def result(label, seed, accuracies, reached, task="recall", loss=0.5):
    """A run with a curve of steps of a hundred tokens; `reached` is the step of 99 %."""
    curve = [
        {"step": step, "tokens": 100 * step, "loss": loss, "accuracy": 0.99 if step == reached else 0.4}
        for step in (150, 300, 450)
    ]
    tests = {str(length): {"accuracy": one, "loss": 0.1} for length, one in zip((64, 512), accuracies, strict=True)}
    names = {"kind": "recall", "recipe": "r", "title": "*T*", "task": task, "label": label, "seed": seed}
    return {**names, "chance": 1 / 64, "curve": curve, "tests": tests, "fault": None}


RESULTS = [
    result("m2", 0, (1.0, 0.1), 450),
    result("m2", 1, (1.0, 0.2), None),
    result("m2", 2, (1.0, 0.3), None),
    *(result("b1", seed, (0.9, 0.8), step, loss=seed) for seed, step in ((0, 150), (1, 300), (2, 450))),
    result("b1", 0, (0.5, 0.5), None, task="parity"),
]


def write(folder, results):
    for index, one in enumerate(results):
        (folder / f"{index}.json").write_text(json.dumps(one))


def test_accuracies_have_the_intervals_of_their_seeds():
    table = accuracy_table(RESULTS, "recall")
    assert table.columns == ("model", "seeds", "64 tokens", "512 tokens")
    assert [row[:2] for row in table.rows] == [("b1", "3"), ("m2", "3")]  # the best at the longest length first
    cell = table.rows[1][3]
    assert (cell.value, cell.error) == (pytest.approx(0.2), pytest.approx(T2 * 0.1, rel=1e-6))
    assert table.rows[1][2].error == 0
    assert "right in 0.0156" in table.notes[0]
    (row,) = accuracy_table(RESULTS, "parity").rows
    assert (row[2].value, row[2].error) == (0.5, None)  # one seed


def test_what_was_never_learnt_is_counted():
    rows = {row[0]: row[1:] for row in learning_table(RESULTS, "recall").rows}
    seeds, loss, tokens, missed = rows["b1"]
    assert (seeds, missed) == ("3", "0 of 3")
    assert (loss.value, loss.error) == (pytest.approx(1.0), pytest.approx(T2, rel=1e-6))
    assert (tokens.value, tokens.error) == (pytest.approx(30_000), pytest.approx(T2 * 15_000, rel=1e-6))
    _, loss, tokens, missed = rows["m2"]
    assert (loss.value, tokens.value, tokens.error, missed) == (0.5, 45_000, None, "2 of 3")
    (row,) = learning_table(RESULTS, "parity").rows
    assert row[3:] == (None, "1 of 1")
    assert "45,000" in markdown(learning_table(RESULTS, "recall"))


def test_a_loss_that_is_not_finite_is_left_out():
    broken = result("b1", 3, (0.9, 0.8), 150)
    broken["curve"][1]["loss"] = None
    rows = {row[0]: row for row in learning_table([*RESULTS, broken], "recall").rows}
    assert rows["b1"][2].value == pytest.approx(1.0)  # of the other three seeds


def test_the_first_time_counts():
    curve = [{"tokens": 10 * k, "accuracy": one} for k, one in enumerate((0.5, 0.99, 0.4, 1.0))]
    assert tokens_until({"curve": curve}) == 10
    assert tokens_until({"curve": curve}, 0.995) == 30


def test_the_page_and_the_files_hold_all_tables(tmp_path):
    write(tmp_path, RESULTS)
    assert record_kind(tmp_path) == "recall"
    assert sorted(tasks_of(read_recall_results(tmp_path))) == ["parity", "recall"]
    page = write_recall_report(tmp_path, tmp_path / "out").page.read_text()
    assert (tmp_path / "out" / "recall.png").stat().st_size > 1000
    assert "](recall.png)" in page
    assert page.startswith("# \\*T\\*")  # text of a result acts as no markup
    assert page.count("| b1 |") == 6  # two overviews, and two tables of two tasks
    with (tmp_path / "out" / "tables" / "recall-accuracy.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    row, half = rows["m2"], T2 * 0.1
    assert [float(row[f"512 tokens{part}"]) for part in ("", " half-width")] == pytest.approx([0.2, half], rel=1e-6)
    assert "512 tokens standard error" not in row


def drawn(figure):
    """The models of the last panel by row, and its numbers by column and row."""
    *_, longest = figure.axes
    models = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return models, {text.get_position(): text.get_text() for text in longest.texts}


def test_the_figure_has_a_number_for_each_model_and_task():
    figure = accuracy_figure(RESULTS)
    assert [axes.get_title() for axes in figure.axes] == ["64 tokens", "512 tokens"]
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["recall", "parity"]
    # columns, then rows; m2 lacks a task and comes last
    assert drawn(figure) == (["b1", "m2"], {(0, 0): "0.80", (1, 0): "0.50", (0, 1): "0.20"})
    assert drawn(accuracy_figure(RESULTS, complete=True))[0] == ["b1"]


def test_the_figure_begins_with_the_model_with_the_most_right_answers():
    better = [result("x2", 0, (0.1, 0.7), None), result("x2", 0, (0.1, 0.61), None, task="parity")]
    stopped = [result("c1", 0, (1.0, 1.0), None), {**result("c1", 0, (1.0, 1.0), None, task="parity"), "tests": {}}]
    models, numbers = drawn(accuracy_figure([*RESULTS, *better, *stopped]))
    assert models == ["x2", "b1", "c1", "m2"]
    assert (1, 2) not in numbers  # a run that stopped has no share
    assert drawn(accuracy_figure([*RESULTS, *better, *stopped], complete=True))[0] == ["x2", "b1"]
    with pytest.raises(ValueError, match=r"^results: got no model that was tested in all tasks$"):
        accuracy_figure([*RESULTS[:3], RESULTS[-1]], complete=True)


@pytest.mark.filterwarnings("error")
def test_the_figure_holds_any_label(tmp_path):
    """Letters that no font has, a formula that is none, and names too long for a page."""
    write(tmp_path, [result("\ud800$\\x^", 0, (1.0, 1.0), 150, task="t" * 100), result("n" * 500, 0, (1.0, 1.0), 150)])
    page = write_recall_report(tmp_path, tmp_path / "out").page.read_text()
    assert "](recall.png)" in page


def test_a_record_whose_runs_all_stopped_has_a_page(tmp_path):
    write(tmp_path, [{**RESULTS[0], "tests": {}, "fault": "diverged"}])
    assert "recall.png" not in write_recall_report(tmp_path, tmp_path / "out").page.read_text()


def test_damaged_results_are_refused(tmp_path):
    good = RESULTS[0]
    score = good["tests"]["64"]
    wrong = [
        5, {}, {**good, "task": 1}, {**good, "task": "../x"}, {**good, "title": None},
        {**good, "tests": []}, {**good, "curve": {}},
        {**good, "tests": {"long": score}}, {**good, "tests": {"64": 1.0}}, {**good, "chance": 2},
        {**good, "tests": {"64": {**score, "accuracy": 1.5}}}, {**good, "tests": {"64": {**score, "loss": "low"}}},
        {**good, "tests": {"64": {**score, "accuracy": math.nan}}}, {**good, "curve": [{}]}, {**good, "curve": [[]]},
        {**good, "curve": [{**good["curve"][0], "tokens": None}]}, {**good, "curve": [{**good["curve"][0], "step": 0}]},
    ]  # fmt: skip
    for content in [*map(json.dumps, wrong), "{"]:
        (tmp_path / "0.json").write_text(content)
        with pytest.raises(ValueError, match=r"^result: .*0\.json is damaged, expected that of a recipe of recall"):
            read_recall_results(tmp_path)
    write(tmp_path, [good, good])
    with pytest.raises(ValueError, match=r"1\.json is a second one of recall, m2 with seed 0"):
        read_recall_results(tmp_path)


def test_the_overview_has_every_task_at_one_length():
    table = overview_table(RESULTS, 512)
    assert table.columns == ("model", "recall", "parity")
    rows = {row[0]: row[1:] for row in table.rows}
    assert (rows["b1"][0].value, rows["b1"][1].value, rows["b1"][1].error) == (pytest.approx(0.8), 0.5, None)
    assert (rows["m2"][0].error, rows["m2"][1]) == (pytest.approx(T2 * 0.1, rel=1e-6), None)
