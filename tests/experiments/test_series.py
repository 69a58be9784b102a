"""Recipes of series: reading, running, resuming, and the command."""

import json
from pathlib import Path

import pytest

from rfa.experiments import RecipeError, is_series_recipe, load_recipe, load_series_recipe
from rfa.experiments.known_filters import FILTERS

RECIPES = Path(__file__).parents[2] / "recipes"
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
    for path in RECIPES.glob("*.yaml"):
        assert is_series_recipe(path) == path.name.startswith("series-")
        (load_series_recipe if is_series_recipe(path) else load_recipe)(path)


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
        ("outliers: 0.4", "outliers: 4", r"evaluation\.columns\.dirtier: outliers: got 4"),
    ],
)
def test_each_fault_is_named(small, old, new, message):
    small.write_text(SMALL.replace(old, new))
    with pytest.raises(RecipeError, match=message):
        load_series_recipe(small)
