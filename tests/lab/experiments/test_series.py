"""Recipes of series: reading, running, resuming, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rfa_lab.recipes import (
    RecipeError,
    load_recall_recipe,
    load_recipe,
    load_series_recipe,
    recipe_kind,
    run_series_recipe,
)
from rfa_lab.recipes.series_contestants import FILTERS, build_network, network_predictor, score
from rfa_lab.report.records import SCORES

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = """
kind: series
name: small
setting: {process: oscillator, length: 12, forecasts: 3}
training: {steps: 2, batch_size: 4}
rates: [1e-3, 3e-2]
filters: [kalman, wolf, informed, robust]
models:
  - {preset: x2-riccati-alibi, label: x2, model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2}}
  - {preset: b1-rope, label: RoPE, model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2}}
seeds: [0, 3]
evaluation: {series: 6, columns: {trained: {}, dirtier: {outliers: 0.4, size: 30}}}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def results(out):
    return {path.stem: json.loads(path.read_text()) for path in sorted((out / "results").glob("*.json"))}


def test_the_command_runs_scores_resumes_and_writes_tables(rfa, small, tmp_path):
    out = tmp_path / "out"
    status, said, _ = rfa("experiment", small, "--out", out, "--dry-run")
    assert (status, said.count("to do")) == (0, 8)
    status, said, _ = rfa("experiment", small, "--out", out, "--only", "x2-*", "kalman-seed0")
    assert (status, "3 runs done" in said) == (0, True)
    planned = json.loads((out / "recipe.json").read_text())
    assert (planned["kind"], len(planned["runs"])) == ("series", 8)
    before = {path: path.stat().st_mtime_ns for path in (out / "results").glob("*.json")}
    status, said, _ = rfa("experiment", small, "--out", out)
    assert (status, "8 runs done" in said) == (0, True)
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())  # kept as they are
    found = results(out)
    assert sorted(found) == [
        "RoPE-seed0",
        "RoPE-seed3",
        "informed-seed0",
        "kalman-seed0",
        "robust-seed0",
        "wolf-seed0",
        "x2-seed0",
        "x2-seed3",
    ]
    assert found["x2-seed0"]["scores"]["trained"] != found["x2-seed3"]["scores"]["trained"]
    assert found["x2-seed0"]["scores"]["trained"]["filter"]["targets"] == 6 * 12
    assert found["kalman-seed0"]["scores"]["dirtier"]["forecast"]["targets"] == 6 * 3
    dirty = {name: found[f"{name}-seed0"]["scores"]["dirtier"]["filter"]["mse"] for name in FILTERS}
    assert (
        max(dirty[name] for name in FILTERS if name != "kalman") < dirty["kalman"] / 3
    )  # errors of thirty standard deviations
    first, second = found["x2-seed0"], found["x2-seed3"]
    assert set(first["trials"]) == {"0.001", "0.03"}
    assert first["learning_rate"] == second["learning_rate"] == float(min(first["trials"], key=first["trials"].get))
    assert second["trials"] == {}
    page = (out / "report" / "series.md").read_text()
    assert page.count("| x2 | 2 |") == 8


def test_a_later_seed_makes_the_first_one_too(rfa, small, tmp_path):
    status, said, _ = rfa("experiment", small, "--out", tmp_path / "out", "--only", "x2-seed3")
    assert (status, sorted(results(tmp_path / "out"))) == (0, ["x2-seed0", "x2-seed3"])
    assert "another process" not in said


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
evaluation: {series: 6, columns: {trained: {}}}
"""


def diverging(path, rates):
    """Readings are wrong by 1e154, so that squared errors lie just below the largest number.

    One step too large, and the loss of a normal likelihood is infinite. The other network learns from clean series.
    """
    path.write_text(DIVERGING.replace("RATES", rates))
    recipe = load_series_recipe(path)
    return replace(recipe, setting=recipe.setting.changed(size=1e154))


def test_a_rate_with_which_training_diverges_loses(small, tmp_path):
    run_series_recipe(diverging(small, "[0.5, 1e-3]"), tmp_path, only=("normal-seed0",))
    found = results(tmp_path)["normal-seed0"]
    assert (found["learning_rate"], found["trials"]["0.5"], found["fault"]) == (1e-3, None, None)
    assert found["trials"]["0.001"] > 0
    assert set(found["scores"]["trained"]["filter"]) >= SCORES.keys()


@pytest.mark.parametrize("rates", ["[0.5]", "[0.4, 0.5]"])
def test_a_run_that_diverges_is_recorded_and_the_others_go_on(rfa, small, tmp_path, rates):
    recipe, out = diverging(small, rates), tmp_path / "out"
    for _ in range(2):  # a later call finds it recorded
        assert len(run_series_recipe(recipe, out).done) == 4
    found = results(out)
    for seed in (0, 3):
        assert found[f"normal-seed{seed}"]["scores"] == {}
        assert found[f"normal-seed{seed}"]["fault"].startswith("training: got a loss of ")
        assert found[f"GRU-D-seed{seed}"]["fault"] is None
    assert rfa("report", out)[0] == 0
    page = (out / "report" / "series.md").read_text()
    assert "Stopped: normal, seed 0: training: got a loss of " in page
    assert "| normal | 0, 2 stopped |" in page
    assert "| GRU-D | 2 |" in page


def test_a_network_whose_answers_are_not_finite_leaves_a_result(small):
    setting = load_series_recipe(small).setting
    network = build_network("x2-riccati-alibi", {"hidden_size": 8, "num_attention_heads": 2}, setting, 0)
    network.head.bias.data.fill_(float("nan"))
    found = score(network_predictor(network), setting, 6)
    assert {found[part][name] for part in found for name in ("mse", "nll", "crps")} == {None}


def test_a_result_of_other_settings_is_refused(rfa, small, tmp_path):
    out = tmp_path / "out"
    assert rfa("experiment", small, "--out", out, "--only", "kalman-seed0")[0] == 0
    small.write_text(SMALL.replace("series: 6", "series: 7"))
    status, _, err = rfa("experiment", small, "--out", out, "--only", "kalman-seed0")
    assert status == 2
    assert err.splitlines()[-1].startswith("rfa: result: ")
    assert "is of other settings than" in err.splitlines()[-1]
    (out / "results" / "kalman-seed0.json").write_text("{")
    status, _, err = rfa("experiment", small, "--out", out, "--only", "kalman-seed0")
    assert status == 2
    assert "is damaged" in err


def test_recipes_of_the_repository_can_be_read():
    assert len(list(RECIPES.glob("series-*.yaml"))) == 5
    for path in RECIPES.glob("*.yaml"):
        kind = recipe_kind(path)
        assert (kind == "series") == path.name.startswith("series-")
        {"series": load_series_recipe, "recall": load_recall_recipe, None: load_recipe}[kind](path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("process: oscillator", "process: walk", r"setting: process: got 'walk'"),
        ("length: 12", "lenght: 12", r"setting: lenght: unknown key"),
        ("steps: 2", "steps: 0", r"training: steps: got 0"),
        (
            "[kalman, wolf, informed, robust]",
            "[particle]",
            r"filters: got 'particle', expected some of kalman, wolf, informed",
        ),
        ("preset: b1-rope", "preset: b1", r"models\[1\]: preset: got 'b1'"),
        ("label: RoPE", "label: x2", r"models: x2: named 2 times"),
        ("hidden_size: 8", "hiden_size: 8", r"models\[0\]: model: hiden_size: unknown field"),
        ("hidden_size: 8", "hidden_size: 7", r"models\[0\]: model: hidden_size: got 7"),
        ("[0, 3]", "[zero]", r"seeds: got \['zero'\]"),
        ("series: 6", "series: 1", r"evaluation: series: got 1"),
        ("length: 12", "length: 12.5", r"setting: length: got 12.5, expected a whole number"),
        ("length: 12", "gap: .inf", r"setting: gap: got inf, expected a number"),
        ("length: 12", "length: a", r"setting: length: got 'a', expected a whole number"),
        ("steps: 2", "steps: true", r"training: steps: got True, expected a whole number between -1e\+09 and 1e\+09"),
        ("label: RoPE", "label: x 2, setting: {process: tracker}", r"process: got another one"),
        ("[kalman, wolf, informed, robust]", "[{}]", r"filters: got \{\}"),
        ("[0, 3]", "[3, 3]", r"seeds: got \[3, 3\], expected different"),
        ("columns: {trained", "columns: {trained: {process: tracker}, other", r"setting: process: got another one"),
        (
            "b1-rope, label: RoPE, model: {",
            "c4-fox, model: {causal: false, ",
            r"models\[1\]: model: gates: got 'forget'",
        ),
        ("name: small", "name: ''", r"name: got ''"),
        ("outliers: 0.4", "outliers: 4", r"evaluation\.columns\.dirtier: outliers: got 4"),
    ],
)
def test_each_fault_is_named(small, old, new, message):
    small.write_text(SMALL.replace(old, new))
    with pytest.raises(RecipeError, match=message):
        load_series_recipe(small)
