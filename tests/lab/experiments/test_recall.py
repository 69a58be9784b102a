"""Recipes of recall: reading, running, resuming, and the commands."""

import csv
import json
import time
from pathlib import Path

import pytest

from rfa.files import held
from rfa_lab.recipes import RecipeError, load_recall_recipe, recall_runner, run_recall_recipe
from rfa_lab.results import Planned, write_planned
from rfa_lab.training import series
from rfa_lab.training.trainer import make_optimizer

RECIPE = Path(__file__).parents[3] / "recipes" / "recall.yaml"
SMALL = """
kind: recall
name: small
title: A small one
model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2}
training: {steps: 2, batch_size: 4, length: 16, every: 1, held_out: 8}
tasks:
  - {task: recall, pairs: 2, keys: 4, values: 4, filler: 2}
  - {task: timed_recall, label: by time, questions: 2, values: 4, lag: 3.5}
models:
  - {preset: b1-rope}
  - {preset: m2-sc-rfa, label: m2 plain, one_group: true, model: {innovation: false, hidden_size: 12}}
seeds: [0, 3]
evaluation: {lengths: [32, 16], sequences: 6}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def results(out):
    return {path.stem: json.loads(path.read_text()) for path in sorted((out / "results").glob("*.json"))}


def test_the_command_runs_resumes_and_writes_tables(rfa, small, tmp_path):
    out = tmp_path / "out"
    status, said, _ = rfa("experiment", small, "--out", out, "--dry-run")
    assert (status, said.count("to do")) == (0, 8)
    status, said, _ = rfa("experiment", small, "--out", out, "--only", "recall-*-seed0")
    assert (status, "2 runs done" in said) == (0, True)
    waiting = ["recall-b1-rope-seed3", "recall-m2-plain-seed3"]
    waiting = [f"by-time-{model}-seed{seed}" for seed in (0, 3) for model in ("b1-rope", "m2-plain")] + waiting
    status, said, _ = rfa("report", out)
    assert (status, "missing: 6 runs: not begun: " in said) == (0, True)
    page = (out / "report" / "recall.md").read_text().partition("## What is missing")[2]
    assert all(name in said and name in page for name in waiting)
    before = {path: path.stat().st_mtime_ns for path in (out / "results").glob("*.json")}
    status, said, _ = rfa("experiment", small, "--out", out)
    assert (status, "8 runs done" in said) == (0, True)
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())  # kept as they are
    found = results(out)
    assert sorted(found) == [
        f"{task}-{model}-seed{seed}"
        for task in ("by-time", "recall")
        for model in ("b1-rope", "m2-plain")
        for seed in (0, 3)
    ]
    run = found["recall-m2-plain-seed3"]
    assert [point["tokens"] for point in run["curve"]] == [64, 128]  # 4 sequences of 16 tokens in each step
    assert {length: test["questions"] for length, test in run["tests"].items()} == {"16": 12, "32": 12}
    assert run["spec"]["model"] == {
        "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "innovation": False
    }  # fmt: skip
    assert run["chance"] == 0.25
    assert (run["spec"]["training"]["one_group"], run["spec"]["training"]["seed"]) == (True, 3)
    assert run["curve"] != found["recall-m2-plain-seed0"]["curve"]
    page = (out / "report" / "recall.md").read_text()
    assert page.startswith("# A small one")
    assert page.count("| m2 plain | 2 |") == 4  # two tables of two tasks
    assert page.count("| m2 plain |") == 6  # and two overviews
    table = csv.DictReader((out / "report" / "tables" / "by-time-accuracy.csv").open())
    mean = {row["model"]: float(row["32 tokens"]) for row in table}
    own = [found[f"by-time-b1-rope-seed{seed}"]["tests"]["32"]["accuracy"] for seed in (0, 3)]
    assert mean["b1-rope"] == pytest.approx(sum(own) / 2)
    (out / "report" / "recall.md").unlink()
    status, said, _ = rfa("report", out)
    assert (status, (out / "report" / "recall.md").read_text()) == (0, page)
    assert "missing" not in said + page
    (out / "recipe.json").write_text("[]")
    status, _, fault = rfa("report", out)
    assert (status, "recipe.json is damaged" in fault) == (1, True)
    assert "recipe.json is damaged" in (out / "report" / "recall.md").read_text()
    status, _, fault = rfa("experiment", small, "--out", out)
    assert (status, "recipe.json is damaged" in fault) == (2, True)
    write_planned(out, Planned(name="large", title="", runs=[], kind="recall"))
    for more in ((), ("--dry-run",)):
        status, _, fault = rfa("experiment", small, "--out", out, *more)
        assert (status, f"out: got {out}, the folder of the recipe large, expected one of small" in fault) == (2, True)
    (out / "recipe.json").unlink()  # a folder of an older version
    small.write_text(SMALL.replace("name: small", "name: large"))
    status, _, fault = rfa("experiment", small, "--out", out)
    assert (status, f"out: got {out}, the folder of the recipe small, expected one of large" in fault) == (2, True)


def test_ctrl_c_keeps_finished_runs(rfa, small, tmp_path, monkeypatch):
    train, out = recall_runner.train_on_task, tmp_path / "out"

    def stops_at_the_third(*given):
        if len(results(out)) == 2:
            raise KeyboardInterrupt
        return train(*given)

    monkeypatch.setattr(recall_runner, "train_on_task", stops_at_the_third)
    status, _, err = rfa("experiment", small, "--out", out, "--only", "*")
    assert (status, "go on with: rfa experiment" in err, "--only" in err) == (130, True, True)
    assert len(results(out)) == 2
    assert not [path for path in (out / "results").iterdir() if path.suffix not in (".json", ".lock")]


def test_a_limit_of_time_keeps_finished_runs(rfa, small, tmp_path, monkeypatch):
    """The clock passes the limit in a step of the third run; the same command makes what is left."""
    now, steps, out = [1000.0], [], tmp_path / "out"
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    train = recall_runner.train_on_task

    def an_hour_in_the_third(model, task, training, report):
        def passes(done, total):
            steps.append(done)
            now[0] += 3600 * (len(steps) == 5)  # runs have two steps
            report(done, total)

        return train(model, task, training, passes)

    monkeypatch.setattr(recall_runner, "train_on_task", an_hour_in_the_third)
    given = ("experiment", small, "--out", out, "--for", "9m")
    status, said, err = rfa(*given)
    (line,) = (line for line in said.splitlines() if line.startswith("stopped after 9m: "))
    third = load_recall_recipe(small).runs[2].name
    assert line == (
        f"stopped after 9m: in {third}, which begins anew (a run has to fit into the time given); "
        f"go on with: rfa experiment {small} --out {out} --for 9m"
    )
    assert (status, len(results(out)), len(steps)) == (0, 2, 5), err
    assert f"2 runs done: {out / 'report'}" in said
    status, said, _ = rfa(*given)
    assert (status, "stopped" in said, len(results(out)), len(steps)) == (0, False, 8, 5 + 6 * 2)
    assert rfa(*given[:-1], "soon")[0] == 2


def test_a_limit_of_time_before_the_first_result(rfa, small, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now.append(now[-1] + 3600) or now[-1])
    status, said, err = rfa("experiment", small, "--out", tmp_path / "out", "--for", "9m")
    assert (status, "before recall-b1-rope-seed0; go on with" in said, "0 runs done" in said) == (0, True, True), err


def test_a_run_that_diverges_is_recorded(rfa, small, tmp_path, monkeypatch):
    def far_too_fast(model, rate, one_group):
        return make_optimizer(model, rate * (1e36 if model.config.attention.kind == "dot_product" else 1), one_group)

    monkeypatch.setattr(series, "make_optimizer", far_too_fast)
    for _ in range(2):  # a later call finds it recorded
        assert len(run_recall_recipe(load_recall_recipe(small), tmp_path, only=("recall-*",)).done) == 4
    found = results(tmp_path)
    for seed in (0, 3):
        assert found[f"recall-b1-rope-seed{seed}"]["tests"] == {}
        assert found[f"recall-m2-plain-seed{seed}"]["fault"] is None
    assert rfa("report", tmp_path)[0] == 0
    assert "b1-rope, seed 3: training: got a loss of nan in step 2" in (tmp_path / "report" / "recall.md").read_text()


def test_a_run_of_another_process_is_left_to_it(rfa, small, tmp_path):
    out = tmp_path / "out"
    with held(out / "results" / ".recall-b1-rope-seed0.lock"):
        status, said, _ = rfa("experiment", small, "--out", out)
    assert (status, "recall-b1-rope-seed0: another process is making this run" in said) == (0, True)
    assert ("7 runs done" in said, len(results(out))) == (True, 7)


def test_a_result_of_other_settings_is_refused(rfa, small, tmp_path):
    out, only = tmp_path / "out", ("--only", "recall-b1-rope-seed0")
    assert rfa("experiment", small, "--out", out, *only)[0] == 0
    small.write_text(SMALL.replace("pairs: 2", "pairs: 3"))
    status, _, err = rfa("experiment", small, "--out", out, *only)
    assert (status, "is of other settings than" in err.splitlines()[-1]) == (2, True)
    (out / "results" / "recall-b1-rope-seed0.json").write_text("{")
    status, _, err = rfa("experiment", small, "--out", out, *only)
    assert (status, "is damaged" in err) == (2, True)


def test_results_of_another_commit_are_refused_unless_told_otherwise(rfa, small, tmp_path):
    """An unknown commit is another one too."""
    out, name = tmp_path / "out", "recall-b1-rope-seed0"
    rfa("experiment", small, "--out", out, "--only", "recall-b1-*")
    path = out / "results" / f"{name}.json"
    made = json.loads(path.read_text())
    for commit, named in (("0123abcd", " 0123abcd"), (None, "")):
        environment = {**made["environment"], "commit": commit}
        path.write_text(json.dumps({**made, "environment": environment}))
        status, _, err = rfa("experiment", small, "--out", out, "--only", "recall-*")
        assert status == 2
        assert err.startswith(f"rfa: out: {name} in {out} was made by rfa {environment['rfa']}{named}, this is ")
        assert "--other-version" in err
        assert rfa("experiment", small, "--out", out, "--only", "recall-m2-*")[0] == 2  # other runs count too
        assert len(results(out)) == 2
        assert rfa("experiment", small, "--out", out, "--only", "recall-b1-*")[0] == 0  # nothing to make
    status, said, _ = rfa("experiment", small, "--out", out, "--only", "recall-*", "--other-version")
    assert (status, "4 runs done" in said) == (0, True)
    assert [results(out)[one]["environment"]["commit"] for one in (name, "recall-m2-plain-seed0")] == [
        None,
        made["environment"]["commit"],
    ]


def test_a_model_may_have_tasks_of_its_own(small):
    small.write_text(SMALL.replace("{preset: b1-rope}", "{preset: b1-rope, tasks: [by time]}"))
    names = [run.name for run in load_recall_recipe(small).runs if run.seed == 0]
    assert names == ["recall-m2-plain-seed0", "by-time-b1-rope-seed0", "by-time-m2-plain-seed0"]


def test_the_recipe_of_the_repository_can_be_read():
    recipe = load_recall_recipe(RECIPE)
    assert len({run.name for run in recipe.runs}) == len(recipe.runs)
    assert {run.seed for run in recipe.runs[: len(recipe.runs) // 3]} == {0}
    assert recipe.lengths == (64, 128, 256, 512)
    for run in recipe.runs:
        assert recipe.config_of(run).vocab_size == run.task.task.vocabulary


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pairs: 2", "pairs: 6, repeats: 1, keys: 9, values: 4}\n  - {task: copy", r"tasks\[0\]: length: got 16, exp"),
        ("lag: 3.5", "lag: 30.0", r"tasks\[1\]: length: got 16, expected at least 34 tokens"),
        ("keys: 4", "keys: 0", r"tasks\[0\]: keys: got 0, expected at least 1"),
        ("pairs: 2", "pairs: 2, corrupted: 1.5", r"tasks\[0\]: corrupted: got 1.5, expected a share"),
        ("pairs: 2", "pairs: two", r"tasks\[0\]: pairs: got 'two', expected a whole number"),
        ("pairs: 2", "pears: 2", r"tasks\[0\]: pears: unknown key"),
        ("task: recall", "task: recal", r"tasks\[0\]: task: got 'recal', expected one of recall, copy"),
        ("task: recall,", "task: [],", r"tasks\[0\]: label: got \[\]"),
        ("label: by time", "label: recall", r"tasks: recall: named 2 times"),
        ("label: by time", "label: a/b", r"tasks\[1\]: label: got 'a/b'"),
        ("label: m2 plain", "label: b1-rope", r"models: b1-rope: named 2 times"),
        (
            "label: by time, questions: 2, values: 4, lag: 3.5}\nmodels:",
            "label: recall by, questions: 2, values: 4, lag: 3.5}\nmodels:\n  - {preset: b1-rope, label: by b1-rope}",
            r"models: recall-by-b1-rope-seed0: the name of two runs",
        ),
        ("preset: b1-rope", "preset: b1", r"models\[0\]: preset: got 'b1'"),
        ("innovation: false", "inovation: false", r"models\[1\]: model: inovation: not a field"),
        ("innovation: false", "vocab_size: 9", r"models\[1\]: model: vocab_size: not here"),
        ("num_attention_heads: 2", "num_attention_heads: 3", r"models\[0\]: model: .*3"),
        ("steps: 2", "steps: 0", r"training: steps: got 0"),
        ("steps: 2", "steps: 2, seed: 1", r"training: seed: not here"),
        ("steps: 2", "steps: 2, one_group: true", r"training: one_group: not here"),
        ("length: 16", "length: 1", r"training: length: got 1, expected at least 2"),
        ("[0, 3]", "[3, 3]", r"seeds: got \[3, 3\], expected different"),
        ("[32, 16]", "[32, 32]", r"evaluation: lengths: got \[32, 32\]"),
        ("[32, 16]", "[32, 8.5]", r"evaluation: lengths: got \[32, 8.5\]"),
        ("sequences: 6", "sequences: 0", r"evaluation: sequences: got 0"),
        ("sequences: 6", "sequences: many", r"evaluation: sequences: got 'many', expected a whole number"),
        ("sequences: 6", "sequences: true", r"evaluation: sequences: got True"),
        ("{preset: b1-rope}", "{preset: b1-rope, model: {3: 4}}", r"models\[0\]: model: 3: not here"),
        (
            "{preset: b1-rope}",
            "{preset: b1-rope, tasks: [recal]}",
            r"models\[0\]: tasks: got 'recal', expected some of rec",
        ),
        ("{preset: b1-rope}", "b1-rope", r"models\[0\]: got 'b1-rope', expected a mapping"),
        ("{task: recall, pairs", "{3: 4, pairs", r"tasks\[0\]: task: got None, expected one of recall"),
        ("{task: recall, pairs", "{task: recall, 3: 4, pairs", r"tasks\[0\]: 3: unknown key"),
        ("name: small", "name: a b", r"name: got 'a b'"),
        ("evaluation:", "evaluations:", r"evaluation: missing"),
    ],
)
def test_each_fault_is_one_line_of_the_command(rfa, small, old, new, message):
    small.write_text(SMALL.replace(old, new))
    with pytest.raises(RecipeError, match=message):
        load_recall_recipe(small)
    status, _, err = rfa("experiment", small, "--out", "out")
    assert (status, "Traceback" in err) == (2, False)
    assert all(line.startswith("rfa: ") for line in err.splitlines())


def test_lists_that_are_empty_and_data_are_refused(rfa, small):
    given = SMALL.split("tasks:")[0] + "tasks: []\nmodels: []\nseeds: []\nevaluation: {lengths: [], sequences: 6}\n"
    small.write_text(given)
    status, _, err = rfa("experiment", small, "--out", "out")
    assert status == 2
    for what in ("tasks: got no tasks", "models: got no models", "seeds: got []", "lengths: got []"):
        assert what in err
    small.write_text(SMALL)
    status, _, err = rfa("experiment", small, "--out", "out", "--data", "stdlib")
    assert (status, "data: got stdlib, expected none" in err) == (2, True)
