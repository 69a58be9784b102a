"""`rfa forecast`: files, what is printed, one line for each fault, and going on after Ctrl-C."""

import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from training.runs import contents, messages

from rfa.cli.forecast import _digits
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
    long = pd.concat(
        [
            pd.DataFrame({"unique_id": name, "ds": range(40), "y": [r[k] for r in rows]})
            for k, name in ((1, "a"), (2, "b"))
        ]
    )
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
    rows = [
        (f"2{k // 12:03}{1 + k % 12:02}", 5 + 3 * math.sin(k * math.pi / 6) + 0.1 * math.cos(9 * k * k))
        for k in range(12, 84)
    ]
    rows = [(t, str(a).replace(".", ",")) for t, a in rows]
    file = write([(f"{t};{a}",) for t, a in rows], "t;a")
    status, out, _ = rfa("forecast", file, "--time", "t", "--horizon", "3M", "--not-robust", "--out", "o")
    assert status == 0
    for said in (
        "separator: ';'",
        "was read as dates, %Y%m",
        "decimal comma",
        "3 steps of 1 month",
        "a season of 12 steps",
    ):
        assert said in out
    assert (
        rfa("forecast", file, "--time", "t", "--horizon", "3M", "--season", "0", "--out", "p")[1].count("no season")
        == 1
    )
    out = rfa("forecast", file, "--time", "t", "--horizon", "3M", "--season", "52", "--out", "q")[1]
    assert ("no season: the readings span less" in out, "a season of" in out) == (True, False)


def test_control_characters_of_names_do_not_reach_the_terminal(rfa, write):
    """A name that holds an escape sequence: one would set the terminal's title."""
    rows = [("q\x1b[2J\x07", k, 50 if k == 20 else a) for k, a, _ in GOOD]
    status, out, err = rfa(
        "forecast", write(rows, "s,t,a"), "--time", "t", "--id", "s", "--values", "a", "--horizon", "3", "--out", "o"
    )
    assert status == 0
    assert [sign for sign in ("\x1b", "\x07") if sign in out + err] == []
    assert "q [2J" in out


def test_a_file_may_stand_after_the_columns_of_the_time(rfa, tmp_path):
    rows = [f"2024-01-{1 + k // 24:02},{k % 24:02}:00,{a}" for k, a, _ in GOOD]
    (tmp_path / "x.csv").write_text("\n".join(["Date,Time,a", *rows]) + "\n")
    assert rfa("forecast", "--time", "Date", "Time", "x.csv", "--horizon", "2h", "--out", "o")[0] == 0
    assert tables(tmp_path / "o")[0]["Date"].tolist() == ["2024-01-02 16:00:00", "2024-01-02 17:00:00"]


BAD = {  # rows of one series, options, and what the line says
    "text": ([(0, 1), (1, "cold")], {}, "values: got 'cold' in row 3 of x.csv, column 'a', expected a number"),
    "infinite": ([(0, 1), (1, "inf")], {}, "values: got 'inf' in row 3"),
    "equal times": ([(0, 1), (0, 2)], {}, "time: got '0 twice with different values, in rows 2 and 3"),
    "all missing": ([(0, ""), (1, "NA")], {}, "values: got ['a'], expected a reading in x.csv"),
    "one reading": ([("2024-01-01", 1)], {}, "series 'a': one reading, at 2024-01-01: it does not tell the length"),
    "horizon 0": (GOOD, {"--horizon": ["0"]}, "horizon: got 0, expected a number of steps >= 1"),
    "horizon": (GOOD, {"--horizon": ["3 moons"]}, "horizon: got '3 moons', expected a number of steps >= 1, or a leng"),
    "length": (GOOD, {"--horizon": ["24h"]}, "h: got '24h', expected a number of steps: the times are numbers"),
    "no id": ([(0, 1, "x"), (1, 2, "")], {"--id": ["b"]}, "id: got '' in row 3 of x.csv, column 'b', expected a name"),
    "column": (GOOD, {"--values": ["c"]}, "values: got 'c', expected a column of x.csv: t, a, b"),
    "season": (GOOD, {"--season": ["-1"]}, "season_length: got -1.0"),
    "format": (GOOD, {"--date-format": ["DD.MM.YYYY"]}, "date-format: got 'DD.MM.YYYY', expected a format of dates"),
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


def test_a_band_on_a_high_level_is_shown():
    """A meter's total: its last digits are the forecast."""
    for mean, width, shown in ((10.0, 2.0, "10"), (1e9 + 12.25, 4.0, "1000000012.2"), (0.0, 1.0, "0")):
        assert f"{mean:.{_digits(mean, width)}g}" == shown


def test_many_series(rfa, shops, tmp_path):
    status, out, err = rfa("forecast", shops, *PANEL)
    assert (status, [line for line in messages(err) if not line.startswith("series:")]) == (0, [])
    assert "2 series forecast, 119 readings, 1 refused" in out
    assert "not as asked: c: no reading" in out
    ahead, past, _, failed = tables(tmp_path / "o")
    assert [*ahead] == ["shop", "day", "rfa", "rfa-lo-50", "rfa-hi-50", "rfa-lo-90", "rfa-hi-90"]
    assert ahead["shop"].tolist() == ["a"] * 7 + ["b"] * 7
    assert ahead["day"].tolist() == [f"2024-03-0{k}" for k in range(1, 8)] * 2
    for name, slope, first in (("a", 1.0, 110.0), ("b", -0.5, 60.0)):
        rows = ahead[ahead["shop"] == name]
        np.testing.assert_allclose(rows["rfa"], first + slope * np.arange(7), atol=2.5)
        assert (rows["rfa-hi-90"] - rows["rfa-lo-90"] < 12).all()
    assert past.loc[past["outlier"], ["shop", "day", "sold"]].to_numpy().tolist() == [["a", "2024-02-10", 9999.0]]
    assert past.loc[past["shop"].eq("a"), "cleaned"].between(48, 112).all()
    assert failed["id"].tolist() == ["c"]
    assert rfa("forecast", shops, *PANEL, "--overwrite")[0] == 0


def test_bad_series_among_many_are_reported_and_the_others_forecast(rfa, shops, tmp_path):
    """Text, infinite values, equal times, one reading, a constant."""
    bad = {"text": ["p"] * 5, "inf": [1, 2, "inf", 4, 5], "one": [3], "equal": [7] * 30, "none": ["", ""]}
    days = pd.date_range("2024-01-01", periods=30).strftime("%Y-%m-%d")
    rows = [f"{name},{days[k]},{x}" for name, values in bad.items() for k, x in enumerate(values)]
    with (tmp_path / shops).open("a") as file:
        file.write("\n".join([*rows, "twice,2024-01-01,1", "twice,2024-01-01,2"]) + "\n")
    status, out, _ = rfa("forecast", shops, *PANEL)
    assert (status, "5 series forecast" in out) == (0, True)
    ahead, _, _, failed = tables(tmp_path / "o")
    assert {*ahead["shop"]} == {"a", "b", "inf", "one", "equal"}
    assert ahead.loc[ahead["shop"] == "equal", "rfa"].tolist() == [7.0] * 7
    said = dict(failed.to_numpy().tolist())
    assert said.keys() == {"c", "inf", "none", "text", "twice"}
    assert said["inf"] == "sold: 'inf' in row 189 is no number; it is left out"
    assert said["text"] == "sold: 'p' in row 182 is no number; it is left out; no reading: all values are missing"
    assert said["twice"].startswith("day: 2024-01-01 00:00:00 twice with different values, in rows 225 and 226")


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
    assert (
        "expected the same file and the same options" in rfa("forecast", shops, *PANEL, "--resume", "--not-robust")[2]
    )
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
