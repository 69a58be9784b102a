"""`--dry-run`: hours for a device, before the text is read."""

from pathlib import Path

import pandas as pd
import pytest
from training.runs import command, messages

from rfa_lab.recipes import load_recipe, run_recipe, states

from .recipes import TWO_PRESETS, recipe, write_recipe

SHIPPED = Path(__file__).parents[3] / "recipes"


def test_hours_at_a_speed(tmp_path, out, evaluated, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    path = write_recipe(tmp_path, training={**recipe()["training"], "max_steps": 9000})
    arguments = ("experiment", path, "--out", out, "--dry-run")
    status, said, _ = command(monkeypatch, capsys, *arguments, "--tokens-per-second", 100)
    assert status == 0
    # three runs of 9000 steps of 32 tokens: 8640 seconds
    assert "left to train: 2 h 24 min, evaluation apart" in " ".join(said.split())
    assert not out.exists()
    status, _, err = command(monkeypatch, capsys, *arguments, "--tokens-per-second", 0)
    assert (status, messages(err)[0].startswith("rfa: tokens_per_second: got 0.0")) == (2, True)
    status, _, err = command(monkeypatch, capsys, *arguments[:-1], "--tokens-per-second", 100)
    assert (status, messages(err)[0].startswith("rfa: --tokens-per-second: got 100, expected --dry-run")) == (2, True)
    assert not out.exists()


def test_the_device_of_finished_runs(tmp_path, out, evaluated, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    path = write_recipe(tmp_path, runs=TWO_PRESETS)
    run_recipe(load_recipe(path), out, only=["b1*"])
    path_of = out / "results" / "b1-rope-seed0.parquet"
    frame = pd.read_parquet(path_of)
    frame["settings"] = frame["settings"].astype(str).str.replace('"device": "cpu"', '"device": "NVIDIA H200"')
    frame.to_parquet(path_of)
    _, said, _ = command(monkeypatch, capsys, "experiment", path, "--out", out, "--dry-run")
    assert "left to train on NVIDIA H200: 0 min" in " ".join(said.split())


def test_epochs_before_the_text_is_read(tmp_path, out):
    """As the paper's: 15 passes over 117,351,000 tokens in 214,875 steps."""
    planned = load_recipe(SHIPPED / "table1-wikitext103.yaml")
    first = states(planned, out, ["b1-rope-seed0"])[0]
    assert first.steps == 214_875
    assert first.tokens == 214_875 * 16 * 512
    assert states(planned, out, ["b1-rope-seed0"], 1e6)[0].seconds == pytest.approx(first.tokens / 1e6)
