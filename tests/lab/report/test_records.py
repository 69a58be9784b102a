"""Records of series and of recall: tables against means and t intervals computed by hand, pages, damaged files."""

import csv
import json
import math
import statistics

import pytest

from rfa_lab.report.layout import markdown
from rfa_lab.report.records import (
    accuracy_figure,
    accuracy_table,
    learning_table,
    overview_table,
    series_ratio_table,
    series_table,
    tokens_until,
    write_recall_report,
)
from rfa_lab.results import Planned, read_record, record_kind, unfinished_runs, write_planned

T2 = 4.302653 / 3**0.5  # half an interval of three seeds, over the deviation: t of 2 degrees of freedom at 97.5 %


def errors(label, seed, *of_settings):
    """A result of series with squared errors in the settings a and b."""
    scores = {"mse": 0.0, "nll": 0.0, "crps": 0.0, "coverage": 0.9, "targets": 5}
    parts = [{part: {**scores, "mse": error} for part in ("filter", "forecast")} for error in of_settings]
    return {"recipe": "r", "label": label, "seed": seed, "scores": dict(zip("ab", parts, strict=True))}


SERIES = [
    errors("kalman", 0, 0.5, 0.2),
    *(errors("x2", seed, error, 0.3) for seed, error in enumerate((0.1, 0.2, 0.3))),
]


def test_means_intervals_and_the_best_of_a_column():
    table = series_table(SERIES, "filter", "mse")
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
    results = [*SERIES, *(errors("c9", seed, error, 0.3) for seed, error in enumerate((0.2, 0.2, 0.3)))]
    table = series_ratio_table(results, "c9", "filter")
    rows = {row[0]: row[1] for row in table.rows}
    logs = [math.log(0.1 / 0.2), 0.0, 0.0]
    half = math.exp(4.302653 * statistics.stdev(logs) / 3**0.5)
    assert rows["x2"].value == pytest.approx(0.5 ** (1 / 3))
    assert rows["x2"].interval == pytest.approx((0.5 ** (1 / 3) / half, 0.5 ** (1 / 3) * half))
    assert rows["kalman"].value == pytest.approx(0.5 / 0.2)  # one result, the seed that both have
    assert rows["kalman"].interval is None
    of_filter = {row[0]: row[1] for row in series_ratio_table(results, "kalman", "filter").rows}
    assert of_filter["x2"].value == pytest.approx((0.2 * 0.4 * 0.6) ** (1 / 3))  # its one result serves every seed
    unfinished = [*SERIES, {**errors("c9", 0, 0.2, 0.3), "parameters": 9}]  # a network with one seed so far
    alone = {row[0]: row[1] for row in series_ratio_table(unfinished, "c9", "filter").rows}
    assert (alone["x2"].value, alone["x2"].interval) == (pytest.approx(0.5), None)
    assert table.rows[-1][1] is None  # itself


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
        (folder / "x2-seed3.json").write_text(json.dumps(SERIES[0]))
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


def answers(label, seed, accuracies, reached, task="recall", loss=0.5):
    """A run with a curve of steps of a hundred tokens; `reached` is the step of 99 %."""
    curve = [
        {"step": step, "tokens": 100 * step, "loss": loss, "accuracy": 0.99 if step == reached else 0.4}
        for step in (150, 300, 450)
    ]
    tests = {str(length): {"accuracy": one, "loss": 0.1} for length, one in zip((64, 512), accuracies, strict=True)}
    names = {"kind": "recall", "recipe": "r", "title": "*T*", "task": task, "label": label, "seed": seed}
    return {**names, "chance": 1 / 64, "curve": curve, "tests": tests, "fault": None}


RECALL = [
    answers("m2", 0, (1.0, 0.1), 450),
    answers("m2", 1, (1.0, 0.2), None),
    answers("m2", 2, (1.0, 0.3), None),
    *(answers("b1", seed, (0.9, 0.8), step, loss=seed) for seed, step in ((0, 150), (1, 300), (2, 450))),
    answers("b1", 0, (0.5, 0.5), None, task="parity"),
]


def write(folder, results):
    for index, one in enumerate(results):
        (folder / f"{index}.json").write_text(json.dumps(one))


def test_accuracies_have_the_intervals_of_their_seeds():
    table = accuracy_table(RECALL, "recall")
    assert table.columns == ("model", "seeds", "64 tokens", "512 tokens")
    assert [row[:2] for row in table.rows] == [("b1", "3"), ("m2", "3")]  # the best at the longest length first
    cell = table.rows[1][3]
    assert (cell.value, cell.error) == (pytest.approx(0.2), pytest.approx(T2 * 0.1, rel=1e-6))
    assert table.rows[1][2].error == 0
    assert "right in 0.0156" in table.notes[0]
    (row,) = accuracy_table(RECALL, "parity").rows
    assert (row[2].value, row[2].error) == (0.5, None)  # one seed


def test_what_was_never_learnt_is_counted():
    rows = {row[0]: row[1:] for row in learning_table(RECALL, "recall").rows}
    seeds, loss, tokens, missed = rows["b1"]
    assert (seeds, missed) == ("3", "0 of 3")
    assert (loss.value, loss.error) == (pytest.approx(1.0), pytest.approx(T2, rel=1e-6))
    assert (tokens.value, tokens.error) == (pytest.approx(30_000), pytest.approx(T2 * 15_000, rel=1e-6))
    _, loss, tokens, missed = rows["m2"]
    assert (loss.value, tokens.value, tokens.error, missed) == (0.5, 45_000, None, "2 of 3")
    (row,) = learning_table(RECALL, "parity").rows
    assert row[3:] == (None, "1 of 1")
    assert "45,000" in markdown(learning_table(RECALL, "recall"))


def test_the_first_time_counts():
    curve = [{"tokens": 10 * k, "accuracy": one} for k, one in enumerate((0.5, 0.99, 0.4, 1.0))]
    assert tokens_until({"curve": curve}) == 10
    assert tokens_until({"curve": curve}, 0.995) == 30


def test_the_page_and_the_files_hold_all_tables(tmp_path):
    write(tmp_path, RECALL)
    assert record_kind(tmp_path) == "recall"
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


def test_the_overview_has_every_task_at_one_length():
    table = overview_table(RECALL, 512)
    assert table.columns == ("model", "recall", "parity")
    rows = {row[0]: row[1:] for row in table.rows}
    assert (rows["b1"][0].value, rows["b1"][1].value, rows["b1"][1].error) == (pytest.approx(0.8), 0.5, None)
    assert (rows["m2"][0].error, rows["m2"][1]) == (pytest.approx(T2 * 0.1, rel=1e-6), None)


def drawn(figure):
    """The models of the last panel by row, and its numbers by column and row."""
    *_, longest = figure.axes
    models = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return models, {text.get_position(): text.get_text() for text in longest.texts}


def test_the_figure_begins_with_the_model_with_the_most_right_answers():
    better = [answers("x2", 0, (0.1, 0.7), None), answers("x2", 0, (0.1, 0.61), None, task="parity")]
    stopped = [answers("c1", 0, (1.0, 1.0), None), {**answers("c1", 0, (1.0, 1.0), None, task="parity"), "tests": {}}]
    models, numbers = drawn(accuracy_figure([*RECALL, *better, *stopped]))
    assert models == ["x2", "b1", "c1", "m2"]
    assert (1, 2) not in numbers  # a run that stopped has no share
    assert drawn(accuracy_figure([*RECALL, *better, *stopped], complete=True))[0] == ["x2", "b1"]
    with pytest.raises(ValueError, match=r"^results: got no model that was tested in all tasks$"):
        accuracy_figure([*RECALL[:3], RECALL[-1]], complete=True)


@pytest.mark.filterwarnings("error")
def test_the_figure_holds_any_label(tmp_path):
    """Letters that no font has, a formula that is none, and names too long for a page."""
    write(tmp_path, [answers("$\\x^", 0, (1.0, 1.0), 150, task="t" * 100), answers("n" * 500, 0, (1.0, 1.0), 150)])
    assert "](recall.png)" in write_recall_report(tmp_path, tmp_path / "out").page.read_text()


def test_a_record_whose_runs_all_stopped_has_a_page(tmp_path):
    write(tmp_path, [{**RECALL[0], "tests": {}, "fault": "diverged"}])
    assert "recall.png" not in write_recall_report(tmp_path, tmp_path / "out").page.read_text()


PART, SCORE = SERIES[0]["scores"]["a"]["filter"], RECALL[0]["tests"]["64"]
WRONG = {
    "series": [
        5, None, [], {}, {"label": ["x"]}, {"seed": "0"}, {"seed": True}, {"scores": {}}, {"scores": {"a": {}}},
        {"scores": {"a": {"other": PART}}}, {"scores": {"a": {"filter": {**PART, "mse": "low"}}}},
        {"fault": "diverged"},
        {"scores": {"a": {"filter": {"mse": 1.0}}}}, {"scores": {"a": {"filter": {**PART, "mse": math.nan}}}},
        {"scores": {"a": {"filter": {**PART, "mse": 10**400}}}},
    ],
    "recall": [
        5, {}, {"task": 1}, {"task": "../x"}, {"title": None}, {"tests": []}, {"curve": {}}, {"tests": {"long": SCORE}},
        {"tests": {"64": 1.0}}, {"chance": 2}, {"tests": {"64": {**SCORE, "accuracy": 1.5}}},
        {"tests": {"64": {**SCORE, "loss": "low"}}}, {"tests": {"64": {**SCORE, "accuracy": math.nan}}},
        {"curve": [{}]}, {"curve": [[]]}, {"curve": [{**RECALL[0]["curve"][0], "tokens": None}]},
        {"curve": [{**RECALL[0]["curve"][0], "step": 0}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "good"), [("series", SERIES[0]), ("recall", RECALL[0])])
def test_damaged_missing_and_mixed_results_are_refused(tmp_path, kind, good):
    with pytest.raises(ValueError, match=r"^folder: .* has no results"):
        read_record(tmp_path, kind)
    wrong = [json.dumps({**good, **one} if isinstance(one, dict) and one else one) for one in WRONG[kind]]
    for content in [*wrong, "{", "[" * 100_000]:
        (tmp_path / "0.json").write_text(content)
        with pytest.raises(ValueError, match=rf"^result: .*0\.json is damaged .*, expected that of a recipe of {kind}"):
            read_record(tmp_path, kind)
    write(tmp_path, [good, good])
    names = {"series": "label and seed", "recall": "task and label and seed"}[kind]
    with pytest.raises(ValueError, match=rf"^folder: got 0\.json and 1\.json of the same {names}"):
        read_record(tmp_path, kind)
    write(tmp_path, [{**good, "recipe": name, "label": name} for name in "ab"])
    with pytest.raises(ValueError, match=r"^folder: got results of the recipes a, b, expected those of one"):
        read_record(tmp_path, kind)
