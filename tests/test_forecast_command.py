"""`rfa forecast`: files, what is printed, one line for each fault, and going on after Ctrl-C."""

import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from training.runs import contents, messages

from rfa.forecasting import Forecaster, output

GOOD = [(k, round(math.sin(k / 3) + 0.1 * math.cos(9 * k * k), 3), k % 7) for k in range(40)]
FILES = ["cleaned.csv", "failed.csv", "figure.png", "forecast.csv", "forecast.json", "members.csv"]
PANEL = ["--id", "shop", "--time", "day", "--values", "sold", "--horizon", "7", "--out", "o"]


@pytest.fixture
def write(tmp_path):
    def file(rows, header="t,a,b", name="x.csv"):
        lines = [header, *(",".join(map(str, row)) for row in rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return name

    return file


@pytest.fixture
def shops(write):
    """Three shops: `a` with a wrong reading and a gap, `b` falling, `c` without a reading."""
    days = pd.date_range("2024-01-01", periods=60).strftime("%Y-%m-%d")
    rows = []
    for name in "bac":
        for t, day in enumerate(days):
            sold = {"a": 50 + t + math.sin(9 * t), "b": 90 - t / 2 + math.cos(7 * t), "c": ""}[name]
            rows.append((name, day, {("a", 20): "", ("a", 40): 9999}.get((name, t), sold)))
    return write(rows, "shop,day,sold")


def tables(folder):
    return [pd.read_csv(folder / f"{name}.csv") for name in ("forecast", "cleaned", "members", "failed")]


def test_the_files_hold_the_forecasters_own_numbers(rfa, write, tmp_path):
    rows = [(k, "" if k == 9 else 50.0 if k == 20 else a, b) for k, a, b in GOOD]
    status, out, err = rfa("forecast", write(rows), "--time", "t", "--horizon", "3", "--out", "o")
    assert (status, [line for line in messages(err) if not line.startswith("series:")]) == (0, [])
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == FILES
    long = pd.DataFrame(rows, columns=["ds", "a", "b"]).melt("ds", var_name="unique_id", value_name="y")
    forecaster = Forecaster()
    expected = forecaster.forecast(long.replace("", np.nan).astype({"y": float}), 3, level=[50, 90])
    ahead, past, members, failed = tables(tmp_path / "o")
    assert [*ahead][:3] == ["series", "t", "rfa"]
    np.testing.assert_array_equal(ahead.iloc[:, 1:], expected.iloc[:, 1:])  # printed to all digits
    np.testing.assert_array_equal(past["weight"], forecaster.history()["weight"])
    assert past.loc[past["outlier"], ["series", "t", "reading"]].to_numpy().tolist() == [["a", 20, 50.0]]
    assert members["weight"].sum() == pytest.approx(2)
    assert len(failed) == 0
    assert "refused: 50 at 20" in out
    assert "note: each of 2 columns is a series of its own" in out
    content = json.loads((tmp_path / "o" / "forecast.json").read_text())
    assert [content[name] for name in ("series", "readings", "refused", "horizon")] == [2, 79, 1, 3]
    before = contents(tmp_path / "o")
    status, _, err = rfa("forecast", "x.csv", "--time", "t", "--horizon", "3", "--out", "o")
    assert (status, len(messages(err)), contents(tmp_path / "o")) == (2, 1, before)
    assert "--overwrite" in err


def test_what_was_assumed_is_printed(rfa, write):
    """Step, season, members with their weights, and what was told from the file."""
    months = [f"2{k // 12:03}{1 + k % 12:02}" for k in range(12, 84)]
    values = [5 + 3 * math.sin(k * math.pi / 6) + 0.1 * math.cos(9 * k * k) for k in range(12, 84)]
    file = write([(f"{t};{a}".replace(".", ","),) for t, a in zip(months, values, strict=True)], "t;a")
    command = ["forecast", file, "--time", "t", "--horizon", "3M"]
    status, out, _ = rfa(*command, "--not-robust", "--out", "o")
    assert status == 0
    for x in ("separator: ';'", "read as dates, %Y%m", "decimal comma", "3 steps of 1 month", "a season of 12 steps"):
        assert x in out
    assert rfa(*command, "--season", "0", "--out", "p")[1].count("no season") == 1
    out = rfa(*command, "--season", "52", "--out", "q")[1]
    assert ("no season: the readings span less" in out, "a season of" in out) == (True, False)


def test_control_characters_of_names_do_not_reach_the_terminal(rfa, write):
    """A name that holds an escape sequence: one would set the terminal's title."""
    rows = [("q\x1b[2J\x07", k, 50 if k == 20 else a) for k, a, _ in GOOD]
    status, out, err = rfa("forecast", write(rows, "shop,day,sold"), *PANEL)
    assert status == 0
    assert [sign for sign in ("\x1b", "\x07") if sign in out + err] == []
    assert "q [2J" in out


BAD = {  # rows of one series, options, and what the line says
    "text": ([(0, 1), (1, "cold")], {}, "values: got 'cold' in row 3 of x.csv, column 'a', expected a number"),
    "length": (GOOD, {"--horizon": ["24h"]}, "h: got '24h', expected a number of steps: the times are numbers"),
    "season": (GOOD, {"--season": ["-1"]}, "season_length: got -1.0"),
    "foreign": (GOOD, {"--out": ["mine"]}, "out: mine has other files, thesis.tex"),
    "a file": (GOOD, {"--out": ["x.csv"]}, "out: got 'x.csv', expected a folder"),
    "nothing": (GOOD, {"--out": ["whole"], "--resume": []}, "resume: got whole, where nothing was stopped"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_fault_is_one_line_and_nothing_is_written(rfa, write, tmp_path, name):
    rows, changes, says = BAD[name]
    write(rows, "t,a,b"[: 2 * len(rows[0]) - 1])
    for folder, file in (("mine", "thesis.tex"), ("whole", "forecast.csv")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("precious")
    options = {"--time": ["t"], "--values": ["a"], "--horizon": ["3"], "--out": ["o"], **changes}
    before = contents(tmp_path)
    status, out, err = rfa("forecast", "x.csv", *(word for key, given in options.items() for word in (key, *given)))
    assert (status, out, len(messages(err))) == (2, "", 1), err
    assert says in err
    assert contents(tmp_path) == before


def test_many_series(rfa, shops, tmp_path):
    status, out, err = rfa("forecast", shops, *PANEL)
    assert (status, [line for line in messages(err) if not line.startswith("series:")]) == (0, [])
    assert "2 series forecast, 119 readings, 1 refused" in out
    assert "not as asked: c: no reading" in out
    ahead, past, _, failed = tables(tmp_path / "o")
    assert ahead["shop"].tolist() == ["a"] * 7 + ["b"] * 7
    assert past.loc[past["outlier"], ["shop", "day", "sold"]].to_numpy().tolist() == [["a", "2024-02-10", 9999.0]]
    assert failed["id"].tolist() == ["c"]
    assert rfa("forecast", shops, *PANEL, "--overwrite")[0] == 0


def test_ctrl_c_leaves_what_is_done_and_resume_goes_on(rfa, shops, tmp_path, monkeypatch):
    """The forecast is that of one run; a block that is done is not done again."""
    monkeypatch.setattr(output, "_BLOCK", 1)
    assert rfa("forecast", shops, *PANEL[:-1], "whole")[0] == 0
    once, done = output._forecast, []

    def interrupted(forecaster, rows, *given):
        done.append(rows["shop"].iloc[0])
        if done == ["a", "b"]:
            raise KeyboardInterrupt
        return once(forecaster, rows, *given)

    monkeypatch.setattr(output, "_forecast", interrupted)
    status, _, err = rfa("forecast", shops, *PANEL)
    assert (status, messages(err)[-1]) == (130, "rfa: stopped; the same command with --resume goes on")
    ahead, _, _, failed = tables(tmp_path / "o")
    assert ({*ahead["shop"]}, failed["id"].tolist()) == ({"a"}, ["b", "c"])
    assert "--resume goes on, --overwrite replaces it" in rfa("forecast", shops, *PANEL)[2]
    said = rfa("forecast", shops, *PANEL, "--resume", "--not-robust")[2]
    assert "expected the same file and the same options" in said
    assert rfa("forecast", shops, *PANEL, "--resume")[0] == 0
    assert done == ["a", "b", "b", "c"]
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == FILES
    for name in FILES[:2] + FILES[3:4] + FILES[5:]:
        assert (tmp_path / "o" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_a_block_of_single_readings_has_the_step_of_the_file(rfa, write, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_BLOCK", 1)
    months = pd.date_range("2020-01-31", periods=40, freq="ME").strftime("%Y-%m-%d")
    rows = [*(("b", day, k % 7) for k, day in enumerate(months)), ("a", months[0], 3), ("c", months[1], 4)]
    assert rfa("forecast", write(rows, "shop,day,sold"), *PANEL[:-3], "1", *PANEL[-2:])[0] == 0
    ahead, *_, failed = tables(tmp_path / "o")
    assert (ahead["day"].tolist(), len(failed)) == (["2020-02-29", "2023-05-31", "2020-03-31"], 0)


def test_a_forecast_loads_neither_torch_nor_transformers(write, tmp_path):
    program = "import sys; from rfa_lab.__main__ import main\ntry: main()\nexcept SystemExit: pass\n"
    program += "print(sorted({'torch', 'transformers', 'scipy'} & {*sys.modules}))"
    arguments = ["forecast", write(GOOD), "--time", "t", "--horizon", "3", "--out", "o"]
    given = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(given, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.endswith("figure.png\n[]\n"), done.stderr
