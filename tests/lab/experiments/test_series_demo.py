"""The demo of series, with fewer steps and series."""

import json

import pytest

from rfa_lab.recipes import demo
from rfa_lab.training.series import SeriesTraining


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    setting = demo.SETTING.changed(length=12, forecasts=4)
    monkeypatch.setattr(demo, "SETTING", setting)
    monkeypatch.setattr(demo, "TRAINING", SeriesTraining(steps=2, batch_size=4, learning_rate=1e-2))
    monkeypatch.setattr(demo, "COLUMNS", {"as trained": setting, "wrong": setting.changed(outliers=0.3, size=30.0)})
    monkeypatch.setattr(demo, "SERIES", 8)


def test_it_prints_a_table_and_writes_results_and_figure(rfa, tmp_path):
    out = tmp_path / "demo"
    status, said, _ = rfa("demo", "--series", "--out", out)
    assert status == 0
    found = json.loads((out / "results.json").read_text())
    assert list(found["mse"]) == [*demo.NETWORKS, *demo.FILTERS]
    assert all(name in said for name in found["mse"])
    wrong = {name: errors["wrong"]["filter"] for name, errors in found["mse"].items()}
    assert wrong["robust filter, true model"] < wrong["Kalman filter, true model"] / 3
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert_reported(rfa, out, found["mse"])
    status, _, err = rfa("demo", "--series", "--out", out)
    assert (status, "expected an empty folder, or --overwrite" in err) == (2, True)


def assert_reported(rfa, out, mse):
    """The report has the demo's own errors, in its folder, which stays the demo's."""
    status, said, _ = rfa("report", out)
    assert (status, said.split()) == (0, ["page:", str(out / "report" / "series.md")])
    page = (out / "report" / "series.md").read_text().splitlines()
    for name, errors in mse.items():
        rows = [line for line in page if line.startswith(f"| {name} |")]
        assert len(rows) == 8, name  # four scores of filtering, four of forecasts
        assert f"{errors['wrong']['filter']:.3f}" in rows[0].replace("*", "")


def test_a_stopped_demo_leaves_what_is_finished(rfa, tmp_path, monkeypatch):
    out, train, trained = tmp_path / "a demo", demo.train_network, []

    def stops_at_the_fourth(*given):
        trained.append(given)
        if len(trained) == 4:
            raise KeyboardInterrupt
        return train(*given)

    monkeypatch.setattr(demo, "train_network", stops_at_the_fourth)
    assert rfa("demo", "--series", "--out", out)[0] == 0
    status, _, err = rfa("demo", "--series", "--overwrite", "--out", out)
    said = f"rfa: stopped; start again with: rfa demo --series --overwrite --out '{out}'"
    assert (status, err.splitlines()[-1]) == (130, said)
    assert list(json.loads((out / "results.json").read_text())["mse"]) == ["RFA"]
    assert [path.name for path in (out / "results").iterdir()] == ["rfa.json"]
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert rfa("report", out)[0] == 0


def test_other_files_stay(rfa, tmp_path):
    """Also the results of a recipe, which have no results.json."""
    (tmp_path / "record" / "results").mkdir(parents=True)
    status, _, err = rfa("demo", "--series", "--overwrite", "--out", tmp_path / "record")
    assert (status, "has results, expected an empty folder" in err) == (2, True)
    (tmp_path / "record" / "results").rmdir()
    (tmp_path / "record").rmdir()
    (tmp_path / "mine.txt").write_text("mine")
    for more in ([], ["--overwrite"]):
        status, _, err = rfa("demo", "--series", "--out", tmp_path, *more)
        assert (status, "has mine.txt, expected an empty folder" in err) == (2, True)
    assert rfa("demo", "--series", "--resume", "--out", tmp_path)[0] == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"
