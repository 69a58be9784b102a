"""The recipe of unseen series: its filters against `RobustFilter` itself, and training that is stopped."""

import json
import re

import numpy as np
import pytest
import torch
from scripts import ROOT

from rfa.estimation import Autoregression, Level, RobustFilter
from rfa_lab.data.unseen_series import UnseenSetting
from rfa_lab.recipes import load_recipe, run_recipe, series_contestants
from rfa_lab.recipes.series_contestants import FITTED, fitted_filter
from rfa_lab.training import series as training_of_series

RECIPE = f"""
kind: series
name: small
setting: {{unseen: simulated, length: 24, shortest: 20, left_out: 2, forecasts: 3, horizon: 6}}
training: {{steps: 9, batch_size: 4}}
rates: [1e-3, 1e-2]
filters: [level-ar, chosen]
models:
  - {{preset: rfa, label: rfa, model: {{hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2}}}}
  - {{preset: gru-d, label: GRU-D, model: {{hidden_size: 8, scaling: training}}}}
seeds: [0, 1]
evaluation:
  series: 3
  columns:
    held out: &now {{shortest: null, known: 1.0, left_out: 0}}
    Nile: {{<<: *now, unseen: nile, path: {ROOT / "examples" / "nile.csv"}, outliers: 0.2}}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return load_recipe(path)


def test_filters_are_fitted_to_each_series_and_score_the_signal_and_readings():
    setting = UnseenSetting(length=40, left_out=0, forecasts=4, horizon=5, known=1.0)
    batch = setting.batch(2, torch.Generator().manual_seed(3))
    found = fitted_filter("level-ar", batch)
    for k in range(2):
        times, values = batch.times[k].numpy(), batch.values[k, :, 0].numpy()
        fitted = RobustFilter(Level() + Autoregression()).fit(times[:40], values[:40])
        ahead = fitted.forecast(np.unique(times[40:]))
        here = np.searchsorted(np.unique(times[40:]), times[40:])
        np.testing.assert_allclose(found.mean[k, 40:, 0], ahead.mean[here], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found.variance[k, 40:, 0], ahead.variance[here], rtol=1e-3)
        now, noise = fitted.filter(), fitted.parameters["sigma2.irregular"]
        np.testing.assert_allclose(found.mean[k, 39, 0], now.mean[-1], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found.variance[k, 39, 0], now.variance[-1] - noise, rtol=1e-3, atol=1e-6)
    assert fitted_filter("chosen", batch).mean.isfinite().all()


def test_a_stopped_run_goes_on_from_its_checkpoint_as_if_nothing_had_been(recipe, tmp_path, monkeypatch):
    assert training_of_series._SAVED % series_contestants._AHEAD == 0  # so nothing that was drawn ahead is lost
    monkeypatch.setattr(training_of_series, "_SAVED", 2)
    monkeypatch.setattr(series_contestants, "_AHEAD", 2)
    whole, parts, steps, only = tmp_path / "whole", tmp_path / "parts", [], ["rfa-seed0", "level-ar-seed0"]
    assert len(run_recipe(recipe, whole, only=only).done) == 2

    def stops(stage, done, total):
        if (stage.name, stage.run, done, total) == ("training", "rfa-seed0", 7, 9):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_recipe(recipe, parts, only=only, progress=stops)
    run_recipe(recipe, parts, only=only, progress=lambda stage, *far: steps.append((stage.name, stage.run, *far)))
    made = [step for name, run, step, _ in steps if (name, run) == ("training", "rfa-seed0")]
    assert made == [7, 8, 9]
    assert not [run for name, run, *_ in steps if name == "training" and "rfa-seed0, rate" in run]  # trials are kept
    for path in sorted((whole / "results").glob("*.json")):
        one, two = (json.loads((out / "results" / path.name).read_text()) for out in (whole, parts))
        assert {**one, "seconds": 0, "environment": 0} == {**two, "seconds": 0, "environment": 0}
    found = json.loads((whole / "results" / "rfa-seed0.json").read_text())["scores"]
    assert found["held out"]["filter"]["targets"] == 3
    assert (found["held out"]["forecast"]["targets"], list(found["Nile"])) == (9, ["forecast"])


def test_a_checkpoint_of_other_settings_is_not_gone_on_with(recipe, tmp_path):
    run_recipe(recipe, tmp_path / "out", only=["rfa-seed0"])
    changed = tmp_path / "small.yaml"
    changed.write_text(RECIPE.replace("batch_size: 4", "batch_size: 5"))
    for path in (tmp_path / "out" / "results").glob("*.json"):
        path.unlink()
    steps = []
    run_recipe(load_recipe(changed), tmp_path / "out", only=["rfa-seed0"], progress=lambda *made: steps.append(made))
    assert [done for stage, done, _ in steps if (stage.name, stage.run) == ("training", "rfa-seed0")] == [*range(1, 10)]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[level-ar, chosen]", "[kalman]", "got 'kalman', expected some of level-ar, chosen"),
        ("unseen: nile", "unseen: nil", "columns.Nile: unseen: got 'nil'"),
    ],
)
def test_faults(tmp_path, old, new, said):
    (tmp_path / "small.yaml").write_text(RECIPE.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(said)):
        load_recipe(tmp_path / "small.yaml")


def test_simulated_processes_have_no_fitted_filters(tmp_path):
    text = RECIPE.replace("unseen: simulated, length: 24, shortest: 20, left_out: 2", "length: 24")
    (tmp_path / "small.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"got {FITTED[0]!r}, expected some of kalman"):
        load_recipe(tmp_path / "small.yaml")
