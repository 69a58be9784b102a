"""Recipes of series and of recall: running, resuming, reports, and the command."""

import json
import math
import time

import pytest

from rfa_lab.recipes import load_recipe, recall, run_recipe
from rfa_lab.recipes import series as recipe_of_series
from rfa_lab.recipes.rates import needed_rates, possible_rates
from rfa_lab.recipes.series_contestants import FILTERS, build_network, network_predictor, score
from rfa_lab.report.records import SCORES
from rfa_lab.results import Planned, write_planned
from rfa_lab.training import series as training_of_series
from rfa_lab.training.trainer import make_optimizer

from .recipes import RECALL, SERIES


@pytest.fixture
def series(tmp_path):
    path = tmp_path / "series.yaml"
    path.write_text(SERIES)
    return path


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECALL)
    return path


def results(out):
    return {path.stem: json.loads(path.read_text()) for path in sorted((out / "results").glob("*.json"))}


def changed(out):
    return {path: path.stat().st_mtime_ns for path in (out / "results").glob("*.json")}


def test_recall_runs_resumes_and_writes_tables(rfa, small, tmp_path):
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
    before = changed(out)
    status, said, _ = rfa("experiment", small, "--out", out)
    assert (status, f"8 runs done: {out / 'report' / 'recall.md'}" in said) == (0, True)
    assert before.items() <= changed(out).items()  # kept as they are
    found = results(out)
    assert sorted(found) == sorted([*waiting, "recall-b1-rope-seed0", "recall-m2-plain-seed0"])
    run = found["recall-m2-plain-seed3"]
    assert [point["tokens"] for point in run["curve"]] == [64, 128]  # 4 sequences of 16 tokens in each step
    assert {length: test["questions"] for length, test in run["tests"].items()} == {"16": 12, "32": 12}
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert run["spec"]["model"] == {**sizes, "innovation": False}
    assert run["chance"] == 0.25
    assert (run["spec"]["training"]["one_group"], run["spec"]["training"]["seed"]) == (True, 3)
    assert run["curve"] != found["recall-m2-plain-seed0"]["curve"]


def test_models_are_tested_on_what_the_task_says(small, tmp_path):
    """A model that learns the same is the same, and is scored on other sequences; a model may have its own rate."""
    text = RECALL.replace("{preset: b1-rope}", "{preset: b1-rope, tasks: [recall, wrong, right]}")
    task = "{task: recall, label: wrong, pairs: 2, keys: 4, values: 4, filler: 2, test: {repeats: 2, corrupted: 0.5}}"
    right = task.replace("wrong", "right").replace("repeats: 2, corrupted: 0.5", "corrupted: 0.0")
    small.write_text(text.replace("tasks:\n", f"tasks:\n  - {task}\n  - {right}\n", 1))
    load_recipe(small)
    run_recipe(load_recipe(small), tmp_path, only=["*b1-rope-seed0"])
    plain, wrong, right = (results(tmp_path)[f"{name}-b1-rope-seed0"] for name in ("recall", "wrong", "right"))
    assert wrong["curve"] == plain["curve"] == right["curve"]
    assert wrong["tests"]["16"] != plain["tests"]["16"] == right["tests"]["16"]
    assert wrong["spec"]["test"] == {**wrong["spec"]["task"], "repeats": 2, "corrupted": 0.5}
    assert "test" not in plain["spec"]
    assert wrong["tests"]["16"]["questions"] < 12 == plain["tests"]["16"]["questions"]
    small.write_text(RECALL.replace("{preset: b1-rope}", "{preset: b1-rope, learning_rate: 1e-2}"))
    run_recipe(load_recipe(small), tmp_path / "fast", only=["recall-*-seed0"])
    fast = results(tmp_path / "fast")
    assert [one["spec"]["training"]["learning_rate"] for one in fast.values()] == [1e-2, 2e-3]
    assert fast["recall-b1-rope-seed0"]["curve"] != plain["curve"]


def test_series_run_resume_and_write_tables(rfa, series, tmp_path):
    out = tmp_path / "out"
    status, said, _ = rfa("experiment", series, "--out", out, "--dry-run")
    assert (status, said.count("to do")) == (0, 8)
    status, said, _ = rfa("experiment", series, "--out", out, "--only", "x2-seed3", "kalman-seed0")
    assert (status, "3 runs done" in said, "another process" in said) == (0, True, False)
    assert sorted(results(out)) == ["kalman-seed0", "x2-seed0", "x2-seed3"]  # the first seed looks for the rate
    planned = json.loads((out / "recipe.json").read_text())
    assert (planned["kind"], len(planned["runs"])) == ("series", 8)
    before = changed(out)
    status, said, _ = rfa("experiment", series, "--out", out)
    assert (status, "8 runs done" in said) == (0, True)
    assert before.items() <= changed(out).items()
    found = results(out)
    networks = [f"{name}-seed{seed}" for name in ("x2", "RoPE") for seed in (0, 3)]
    assert sorted(found) == sorted([*networks, *(f"{name}-seed0" for name in FILTERS)])
    first, second = found["x2-seed0"], found["x2-seed3"]
    assert first["scores"]["trained"] != second["scores"]["trained"]
    assert first["scores"]["trained"]["filter"]["targets"] == 6 * 12
    assert found["kalman-seed0"]["scores"]["dirtier"]["forecast"]["targets"] == 6 * 3
    dirty = {name: found[f"{name}-seed0"]["scores"]["dirtier"]["filter"]["mse"] for name in FILTERS}
    robust = max(dirty[name] for name in FILTERS if name != "kalman")
    assert robust < dirty["kalman"] / 3  # errors of thirty standard deviations
    losses = {float(rate): loss for rate, loss in first["trials"].items()}
    assert {*losses} == {*needed_rates(possible_rates([1e-3, 3e-2]), [1e-3, 3e-2], losses)}
    assert first["learning_rate"] == second["learning_rate"] == float(min(first["trials"], key=first["trials"].get))
    assert second["trials"] == {}
    assert (out / "report" / "series.md").read_text().count("| x2 | 2 |") == 8


@pytest.mark.parametrize(
    ("best", "trials", "chosen"),
    [
        (5e-3, [1e-3, 3e-2, 3.33333e-5], 1e-3),
        (8e-3, [1e-3, 3e-2, 0.9], 3e-2),
        (0.8, [1e-3, 3e-2, 0.9], 0.9),
        (1e-5, [1e-3, 3e-2, 3.33333e-5, 1.11111e-6], 3.33333e-5),
    ],
)
def test_a_best_rate_of_series_at_an_end_is_looked_for_beyond_it(series, tmp_path, monkeypatch, best, trials, chosen):
    """Losses are made up, as distances of the rate from the best one."""
    made = []

    def train(network, setting, training, *_):
        made.append((training.steps, training.learning_rate))
        return [0.0]

    monkeypatch.setattr(recipe_of_series, "train_network", train)
    monkeypatch.setattr(recipe_of_series, "validation_loss", lambda *_: abs(math.log(made[-1][1] / best)))
    series.write_text(SERIES.replace("steps: 2", "steps: 6"))
    assert run_recipe(load_recipe(series), tmp_path, only=["x2-*"]).done == ("x2-seed0", "x2-seed3")
    assert made == [*((2, rate) for rate in trials), (6, chosen), (6, chosen)]
    assert list(results(tmp_path)["x2-seed0"]["trials"]) == [str(rate) for rate in trials]


def test_folders_of_other_recipes_and_damaged_lists(rfa, small, tmp_path):
    out, only = tmp_path / "out", ("--only", "recall-b1-rope-seed0")
    assert rfa("experiment", small, "--out", out, *only)[0] == 0
    (out / "recipe.json").write_text("[]")
    status, _, fault = rfa("report", out)
    assert (status, "recipe.json is damaged" in fault) == (1, True)
    status, _, fault = rfa("experiment", small, "--out", out)
    assert (status, "recipe.json is damaged" in fault) == (2, True)
    write_planned(out, Planned(name="large", title="", runs=[], kind="recall"))
    for more in ((), ("--dry-run",)):
        status, _, fault = rfa("experiment", small, "--out", out, *more)
        assert (status, f"out: got {out}, the folder of the recipe large, expected one of small" in fault) == (2, True)
    (out / "recipe.json").unlink()  # a folder of an older version
    small.write_text(RECALL.replace("name: small", "name: large"))
    status, _, fault = rfa("experiment", small, "--out", out)
    assert (status, f"out: got {out}, the folder of the recipe small, expected one of large" in fault) == (2, True)
    small.write_text(RECALL.replace("pairs: 2", "pairs: 3"))
    status, _, err = rfa("experiment", small, "--out", out, *only)
    assert (status, "spec.task.pairs: got 2, expected 3" in err) == (2, True)
    (out / "results" / "recall-b1-rope-seed0.json").write_text("{")
    status, _, err = rfa("experiment", small, "--out", out, *only)
    assert (status, "is damaged" in err) == (2, True)


def test_a_limit_of_time_keeps_finished_runs(rfa, small, tmp_path, monkeypatch):
    """The clock passes the limit in a step of the third run; the same command makes what is left."""
    now, steps, out = [1000.0], [], tmp_path / "out"
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    train = recall.train_on_task

    def an_hour_in_the_third(model, task, training, report):
        def passes(done, total):
            steps.append(done)
            now[0] += 3600 * (len(steps) == 5)  # runs have two steps
            report(done, total)

        return train(model, task, training, passes)

    monkeypatch.setattr(recall, "train_on_task", an_hour_in_the_third)
    given = ("experiment", small, "--out", out, "--for", "9m")
    status, said, err = rfa(*given)
    (line,) = (line for line in said.splitlines() if line.startswith("stopped after 9m: "))
    third = load_recipe(small).runs[2].name
    assert line == (
        f"stopped after 9m: in {third}: training, which begins anew (it has to fit into the time given); "
        f"go on with: rfa experiment {small} --out {out} --for 9m"
    )
    assert (status, len(results(out)), len(steps)) == (0, 2, 5), err
    assert f"2 runs done: {out / 'report'}" in said
    status, said, _ = rfa(*given)
    assert (status, "stopped" in said, len(results(out)), len(steps)) == (0, False, 8, 5 + 6 * 2)


def test_a_run_that_diverges_is_recorded(rfa, small, tmp_path, monkeypatch):
    def far_too_fast(model, rate, one_group):
        return make_optimizer(model, rate * (1e36 if model.config.attention.kind == "dot_product" else 1), one_group)

    monkeypatch.setattr(training_of_series, "make_optimizer", far_too_fast)
    for _ in range(2):  # a later call finds it recorded
        assert len(run_recipe(load_recipe(small), tmp_path, only=("recall-*",)).done) == 4
    found = results(tmp_path)
    for seed in (0, 3):
        assert found[f"recall-b1-rope-seed{seed}"]["tests"] == {}
        assert found[f"recall-m2-plain-seed{seed}"]["fault"] is None
    assert rfa("report", tmp_path)[0] == 0
    assert "b1-rope, seed 3: training: got a loss of nan in step 2" in (tmp_path / "report" / "recall.md").read_text()


def test_a_first_seed_that_fails_is_not_made_again_for_the_others(series, tmp_path, monkeypatch):
    tried = []

    def without_memory(*given):
        tried.append(given)
        raise RuntimeError("no memory")

    monkeypatch.setattr(recipe_of_series, "train_network", without_memory)
    outcome = run_recipe(load_recipe(series), tmp_path, only=["x2-*", "kalman-seed0"])
    assert (outcome.done, len(tried)) == (("kalman-seed0",), 1)
    assert outcome.failed == {"x2-seed0": "no memory", "x2-seed3": "needs x2-seed0, which failed"}


DIVERGING = """
kind: series
name: diverging
setting: {process: oscillator, length: 12, forecasts: 3, outliers: 0.9}
training: {steps: 9, batch_size: 4}
rates: RATES
models:
  - preset: x2-riccati-alibi
    label: normal
    model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, scaling: training, likelihood: gaussian}
  - {preset: gru-d, label: GRU-D, model: {hidden_size: 8}, setting: {outliers: 0}}
seeds: [0, 3]
evaluation: {series: 6, columns: {trained: {size: 10}}}
"""


def diverging(path, rates):
    """Readings are wrong by 1e154, so that squared errors lie just below the largest number.

    One step too large, and the loss of a normal likelihood is infinite. The other network learns from clean series.
    """
    path.write_text(DIVERGING.replace("RATES", rates).replace("outliers: 0.9", "outliers: 0.9, size: 1.0e+154"))
    return load_recipe(path)


def test_a_rate_with_which_training_of_series_diverges_loses(small, tmp_path):
    run_recipe(diverging(small, "[0.5, 1e-3]"), tmp_path, only=("normal-seed0",))
    found = results(tmp_path)["normal-seed0"]
    assert (found["learning_rate"], found["trials"]["0.5"], found["fault"]) == (1e-3, None, None)
    assert found["trials"]["0.001"] > 0
    assert set(found["scores"]["trained"]["filter"]) >= SCORES.keys()


@pytest.mark.parametrize("rates", ["[0.5]", "[0.5, 0.55]"])
def test_a_run_of_series_that_diverges_is_recorded_and_the_others_go_on(rfa, small, tmp_path, rates):
    recipe, out = diverging(small, rates), tmp_path / "out"
    for _ in range(2):  # a later call finds it recorded
        assert len(run_recipe(recipe, out).done) == 4
    found = results(out)
    for seed in (0, 3):
        assert found[f"normal-seed{seed}"]["scores"] == {}
        assert found[f"normal-seed{seed}"]["fault"].startswith("training: got a loss of ")
        assert found[f"GRU-D-seed{seed}"]["fault"] is None
    assert rfa("report", out)[0] == 0
    page = (out / "report" / "series.md").read_text()
    assert "Stopped: normal, seed 0: training: got a loss of " in page
    assert "| normal | 0, 2 stopped |" in page


def test_a_network_whose_answers_are_not_finite_leaves_a_result(series):
    setting = load_recipe(series).setting
    network = build_network("x2-riccati-alibi", {"hidden_size": 8, "num_attention_heads": 2}, setting, 0)
    network.head.bias.data.fill_(float("nan"))
    found = score(network_predictor(network), setting, 6)
    assert {found[part][name] for part in found for name in ("mse", "nll", "crps")} == {None}


def test_a_run_that_another_process_finished_meanwhile_stays(small, tmp_path):
    recipe, only = load_recipe(small), ["recall-b1-rope-seed0"]
    run_recipe(recipe, tmp_path / "there", only=only)
    made, kept = (tmp_path / folder / "results" / f"{only[0]}.json" for folder in ("there", "here"))

    def finish_elsewhere(stage, done, total):
        if (stage.name, done) == ("runs", 0):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(made.read_bytes())

    assert run_recipe(recipe, tmp_path / "here", only=only, progress=finish_elsewhere).done == tuple(only)
    assert kept.read_bytes() == made.read_bytes()  # it says how many seconds it took


def test_results_of_another_commit_are_refused_unless_told_otherwise(small, tmp_path):
    """An unknown commit is another one too, also of runs that are not chosen."""
    recipe, name = load_recipe(small), "recall-b1-rope-seed0"
    run_recipe(recipe, tmp_path, only=[name])
    path = tmp_path / "results" / f"{name}.json"
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, "environment": {**made["environment"], "commit": None}}))
    said = rf"^out: {name} in .* was made by rfa {made['environment']['rfa']}, this is .* --other-version"
    with pytest.raises(ValueError, match=said):
        run_recipe(recipe, tmp_path, only=["recall-m2-*"])
    assert run_recipe(recipe, tmp_path, only=[name]).done == (name,)  # nothing to make
    assert len(run_recipe(recipe, tmp_path, only=["recall-*"], other_version=True).done) == 4
    commits = [results(tmp_path)[one]["environment"]["commit"] for one in (name, "recall-m2-plain-seed0")]
    assert commits == [None, made["environment"]["commit"]]


def test_a_model_may_have_tasks_of_its_own(small):
    small.write_text(RECALL.replace("{preset: b1-rope}", "{preset: b1-rope, tasks: [by time]}"))
    names = [run.name for run in load_recipe(small).runs if run.seed == 0]
    assert names == ["recall-m2-plain-seed0", "by-time-b1-rope-seed0", "by-time-m2-plain-seed0"]
