"""`benchmarks/forecasts.py`: its scores where they are known, and what a run that is started again measures."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
from scripts import script


@pytest.fixture
def forecasts():
    return script("benchmarks/forecasts.py")


@pytest.fixture
def run(forecasts, monkeypatch, tmp_path):
    """The command over three monthly series, the later halves of which are the tests; returns its lines."""
    months = np.arange(96.0)
    table = pd.concat(
        pd.DataFrame({"unique_id": name, "period": "monthly", "ds": months, "y": 200 + slope * months, "part": "train"})
        for name, slope in {"a": 1, "b": 2, "c": 3}.items()
    )
    table.loc[table["ds"] >= 84, "part"] = "test"
    table.to_csv(tmp_path / "m1.csv.gz", index=False)

    def made(*options):
        monkeypatch.setattr(sys, "argv", ["forecasts.py", "--data", str(tmp_path), *options])
        forecasts.main()
        return [json.loads(line) for line in (tmp_path / "forecasts.jsonl").read_text().splitlines()]

    return made


def test_scores_of_straight_lines(run, capsys):
    naive, ours = run("--methods", "seasonal naive", "rfa")
    assert naive["MASE"] == pytest.approx(1, rel=1e-12)  # each error is a year of the slope, which MASE divides by
    late = np.arange(84, 96)
    relative = [12 * slope * 12 / np.sum(200 + slope * late) for slope in (1, 2, 3)]
    weights = [np.sum(200 + slope * late) for slope in (1, 2, 3)]
    assert naive["WQL"] == pytest.approx(
        np.average(relative, weights=weights), rel=1e-12
    )  # one value for each quantile
    assert naive["in 90 %"] == 0
    assert ours["MASE"] < 0.2
    assert ours["series"] == 3
    assert "| rfa " in capsys.readouterr().out


def test_a_run_goes_on_where_it_was_stopped(run, forecasts, monkeypatch):
    run("--methods", "seasonal naive")
    monkeypatch.setitem(forecasts.METHODS, "seasonal naive", None)  # would raise
    lines = run("--methods", "seasonal naive", "rfa")
    assert [line["method"] for line in lines] == ["seasonal naive", "rfa"]


def test_conditions(forecasts):
    y = np.linspace(100, 200, 4000)
    wrong = forecasts.spoilt(y, "spoilt-10", 0) / y
    assert set(np.round(wrong, 9)) == {0.1, 1, 10}
    assert np.mean(wrong != 1) == pytest.approx(0.1, abs=0.02)
    lost = forecasts.spoilt(y, "gaps-20", 0)
    assert np.isnan(lost).mean() == pytest.approx(0.2, abs=0.02)
    assert not np.isnan(lost[-1])
    np.testing.assert_array_equal(forecasts.spoilt(-y, "spoilt-3", 0), -y)
    spiked = y.copy()
    spiked[50] *= 10
    assert abs(forecasts.hampel(spiked)[50] - y[50]) < 1


def test_quantiles_of_the_normal_distribution_have_its_loss(forecasts):
    """2 E[max(p e, (p - 1) e)] of a standard normal is 2 phi(z_p): the mean over 0.1 to 0.9."""
    from scipy.stats import norm

    truth = norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    quantiles = np.tile(norm.ppf(forecasts.PROBABILITIES), (len(truth), 1))
    found = forecasts.scores(np.arange(10.0), truth, np.zeros(len(truth)), quantiles, 1)
    expected = 2 * norm.pdf(norm.ppf(np.arange(1, 10) / 10)).mean()
    assert found["loss"] / len(truth) == pytest.approx(expected, rel=1e-3)
    assert found["in 90 %"] == pytest.approx(0.9, abs=1e-3)
    assert found["in 80 %"] == pytest.approx(0.8, abs=1e-3)
