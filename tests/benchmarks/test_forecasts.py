"""`benchmarks/forecasts.py`: its scores on series that are known, and that no method sees what it forecasts."""

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
    """The command over one monthly series; returns its results."""

    def made(values, *options):
        months = pd.date_range("2000-01-01", periods=len(values), freq="MS")
        pd.DataFrame({"time": months, "value": values}).to_csv(tmp_path / "air.csv", index=False)
        out = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["forecasts.py", "--data", str(tmp_path), "--out", str(out), *options])
        forecasts.main()
        return json.loads(out.read_text())["results"]["air"]

    return made


def test_the_naive_forecast_of_a_slope_and_a_season_has_the_error_that_mase_divides_by(run):
    months = np.arange(120.0)
    found = run(2 * months + 30 * np.sin(months * np.pi / 6), "--methods", "naive")["naive"]
    assert found["mase"] == pytest.approx(1, rel=1e-9)  # both are a year of the slope
    assert found["coverage"] == 1  # an error of 24, within 1.64 times 24
    assert len(found["origins"]) == 6


def test_what_is_there_is_not_measured_again_unless_it_is_asked_for(run, capsys):
    values = np.random.default_rng(0).normal(size=80)
    first = run(values, "--methods", "naive")
    capsys.readouterr()
    both = run(1000 * np.arange(80.0), "--methods", "naive", "rfa")
    assert both["naive"] == first["naive"]
    assert both["rfa"]["mase"] < 0.5  # a straight line
    assert both["rfa"]["origins"][0]["components"].split(" + ")[0].endswith("trend")
    assert "| air | " in capsys.readouterr().out
    again = run(1000 * np.arange(80.0), "--methods", "naive", "--again")
    assert again["naive"]["mase"] == pytest.approx(1)


def test_no_method_sees_what_it_forecasts(forecasts, monkeypatch):
    seen = []

    def peer(values, series):
        seen.append(values)
        return (np.zeros(series.horizon),) * 3

    monkeypatch.setitem(forecasts.PEERS, "naive", peer)
    values = np.arange(120.0)
    values[-20] = np.nan
    series = forecasts.SERIES["development"]["air"]
    lines = forecasts.measured(pd.DataFrame({"value": values}), series, "naive", fresh=False)["origins"]
    assert [len(past) for past in seen] == [line["origin"] for line in lines]
    assert all((past <= line["origin"] - 1).all() for past, line in zip(seen, lines, strict=True))
    assert not set(forecasts.origins(values, series, True)) & {line["origin"] for line in lines}


def test_peers_forecast_a_slope_with_a_season(forecasts):
    months = np.arange(96.0)
    generator = np.random.default_rng(1)
    values = 300 + 2 * months + 30 * np.sin(months * np.pi / 6) + generator.normal(size=96)
    series = forecasts.SERIES["development"]["air"]
    for name, peer in forecasts.PEERS.items():
        mean, lower, upper = (np.asarray(part) for part in peer(values[:-12], series))
        assert mean.shape == lower.shape == upper.shape == (12,), name
        assert (lower < mean).all(), name
        assert (mean < upper).all(), name
        error = np.abs(mean - values[-12:]).mean()
        assert error == pytest.approx(24, abs=1) if name == "naive" else error < 8, (name, error)
