"""The demo of series, with fewer steps and series."""

import json

import pytest

from rfa.experiments import series_demo
from rfa.training.series import SeriesTraining


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    setting = series_demo.SETTING.changed(length=12, forecasts=4)
    monkeypatch.setattr(series_demo, "SETTING", setting)
    monkeypatch.setattr(series_demo, "TRAINING", SeriesTraining(steps=2, batch_size=4, learning_rate=1e-2))
    monkeypatch.setattr(
        series_demo, "COLUMNS", {"as trained": setting, "wrong": setting.changed(outliers=0.3, size=30.0)}
    )
    monkeypatch.setattr(series_demo, "SERIES", 8)


def test_it_prints_a_table_and_writes_results_and_figure(rfa, tmp_path):
    out = tmp_path / "demo"
    status, said, _ = rfa("demo", "--series", "--out", out)
    assert status == 0
    found = json.loads((out / "results.json").read_text())
    assert list(found["mse"]) == [*series_demo.NETWORKS, *series_demo.FILTERS]
    assert all(name in said for name in found["mse"])
    wrong = {name: errors["wrong"]["filter"] for name, errors in found["mse"].items()}
    assert wrong["robust filter, true model"] < wrong["Kalman filter, true model"] / 3
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = rfa("demo", "--series", "--out", out)
    assert (status, "expected an empty folder, or --overwrite" in err) == (2, True)
    assert rfa("demo", "--series", "--out", out, "--overwrite")[0] == 0


def test_other_files_stay(rfa, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for more in ([], ["--overwrite"]):
        status, _, err = rfa("demo", "--series", "--out", tmp_path, *more)
        assert (status, "has mine.txt, expected an empty folder" in err) == (2, True)
    assert rfa("demo", "--series", "--resume", "--out", tmp_path)[0] == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"
