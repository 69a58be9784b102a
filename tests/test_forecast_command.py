"""`rfa forecast`: files, what is printed, and one line for each fault."""

import csv
import json
import math

import numpy as np
import pandas as pd
import pytest
from training.runs import contents, messages

from rfa.cli.forecast import _digits
from rfa.estimation import Level, RobustFilter

GOOD = [(k, round(math.sin(k / 3) + 0.1 * math.cos(9 * k * k), 3), k % 7) for k in range(40)]
LEVEL = ["--components", "level"]


@pytest.fixture
def write(tmp_path):
    def file(rows, header="t,a,b", name="x.csv"):
        lines = [header, *(",".join(map(str, row)) for row in rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return name

    return file


def test_the_files_hold_the_filters_own_numbers(rfa, write, tmp_path):
    rows = [(k, "" if k == 9 else 50.0 if k == 20 else a, b) for k, a, b in GOOD]
    status, out, err = rfa(
        "forecast", write(rows), "--time", "t", "--values", "a", "--horizon", "3", *LEVEL, "--out", "o"
    )
    assert (status, messages(err)) == (0, [])
    files = ["cleaned.csv", "figure.png", "forecast.csv", "forecast.json"]
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == files
    values = np.array([float(a or "nan") for _, a, _ in rows])
    level = RobustFilter(Level()).fit(np.arange(40.0), values)
    ahead = level.forecast([40.0, 41.0, 42.0])
    with (tmp_path / "o" / "forecast.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["time"], row["channel"]) for row in table] == [("40", "a"), ("41", "a"), ("42", "a")]
    written = {
        name: np.array([float(row[name]) for row in table]) for name in table[0] if name not in ("time", "channel")
    }
    np.testing.assert_allclose(written["mean"], ahead.mean, rtol=1e-9)  # printed to 16 digits
    for level_of in (50, 90):  # wider or narrower than the model's, by its errors
        lower, upper = written[f"lower_{level_of}"], written[f"upper_{level_of}"]
        np.testing.assert_allclose(upper + lower, 2 * ahead.mean, rtol=1e-9)
        model = np.subtract(*ahead.interval(level_of / 100)[::-1])
        assert ((upper - lower > 0.5 * model) & (upper - lower < 2 * model)).all()
    one = json.loads((tmp_path / "o" / "forecast.json").read_text())["channels"]["a"]
    assert one["parameters"] == pytest.approx(level.parameters)
    assert [(found["time"], found["value"]) for found in one["outliers"]] == [("20", 50.0)]
    past = level.smooth()
    assert one["outliers"][0]["weight"] == pytest.approx(past.weights[20])
    cleaned = pd.read_csv(tmp_path / "o" / "cleaned.csv")
    assert [*cleaned] == ["time", "channel", "reading", "estimate", "lower_90", "upper_90", "weight", "outlier"]
    assert (cleaned["time"].tolist(), cleaned.index[cleaned["outlier"]].tolist()) == ([*range(40)], [20])
    found = cleaned[["reading", "estimate", "lower_90", "upper_90", "weight"]].to_numpy()
    lower, upper = past.interval(0.9)
    np.testing.assert_allclose(found.T, [values, past.mean, lower, upper, past.weights], rtol=1e-6)
    assert "outlier: a 50 at 20" in out
    before = contents(tmp_path / "o")
    status, _, err = rfa("forecast", "x.csv", "--time", "t", "--horizon", "3", *LEVEL, "--out", "o")
    assert (status, len(messages(err)), contents(tmp_path / "o")) == (2, 1, before)
    assert "--overwrite" in err


def test_the_first_model_of_the_printed_list_is_the_chosen_one(rfa, write):
    status, out, err = rfa("forecast", write(GOOD), "--time", "t", "--values", "a", "--horizon", "3", "--out", "o")
    assert (status, messages(err)) == (0, [])
    model = out.partition("model of a: ")[2].partition(" (chosen")[0]
    assert f"with a season): {model} " in out
    assert model.startswith("level + ar + cycle:1")  # 6 pi is 18.85


def test_control_characters_of_names_do_not_reach_the_terminal(rfa, tmp_path):
    """A column and a sensor whose names hold an escape sequence: one would set the terminal's title."""
    rows = [f"{k},q\x1b[2J,{a}" for k, a, _ in GOOD]
    rows[20] = "20,q\x1b[2J,50"
    (tmp_path / "x.csv").write_text("\n".join(["t,s,a\x1b]0;mine\x07", *rows]) + "\n")
    status, out, err = rfa("forecast", "x.csv", "--time", "t", "--sensor", "s", "--horizon", "3", *LEVEL, "--out", "o")
    assert status == 0
    assert [sign for sign in ("\x1b", "\x07") if sign in out + err] == []
    assert "outlier: a ]0;mine 50 at 20" in out
    assert "for readings of sensor q [2J" in out


def test_two_sensors_and_dates(rfa, write, tmp_path):
    rows = [(f"2024-01-{1 + k // 24:02} {k % 24:02}:00", sensor, a) for k, a, _ in GOOD for sensor in "pq"]
    given = ["--time", "t", "--sensor", "s", "--horizon", "90min", "--step", "30min", "--not-robust"]
    status, _, err = rfa("forecast", write(rows, "t,s,a"), *given, *LEVEL, "--out", "o")
    assert (status, messages(err)) == (0, [])
    found = json.loads((tmp_path / "o" / "forecast.json").read_text())
    assert (found["unit"], found["step"], found["robust"]) == ("h", 0.5, False)
    one = found["channels"]["a"]
    assert one["times"] == ["2024-01-02 15:30:00", "2024-01-02 16:00:00", "2024-01-02 16:30:00"]
    assert set(one["parameters"]) == {"sigma2.irregular.p", "sigma2.irregular.q", "sigma2.level"}


def test_a_file_as_a_logger_writes_it(rfa, tmp_path):
    """Every choice is a line, here and in forecast.json; the forecast is that of the plain file."""
    plain = [(f"2020-{1 + k % 12:02}-01" if k < 12 else f"2021-{k - 11:02}-01", a, k % 3) for k, a, _ in GOOD[:20]]
    plain[7] = (plain[7][0], "", plain[7][2])
    (tmp_path / "plain.csv").write_text("\n".join(["t,a,b", *(",".join(map(str, row)) for row in plain)]) + "\n")
    rows = [f"{t.replace('-', '')[:6]};{str(a).replace('.', ',') or '-999'};{b};" for t, a, b in plain]
    rows = [*rows[5:], *rows[:6]]
    (tmp_path / "logger.csv").write_bytes("\r\n".join(["t;a;b;°C", "", *rows]).encode("cp1252"))
    given = ["--time", "t", "--horizon", "3M", *LEVEL]
    status, _, err = rfa("forecast", "plain.csv", *given, "--out", "p")
    assert (status, messages(err)) == (0, [])
    status, out, err = rfa("forecast", "logger.csv", *given, "--missing", "-999", "9999", "--out", "l")
    assert (status, messages(err)) == (0, [])
    first, second = (json.loads((tmp_path / name / "forecast.json").read_text()) for name in "pl")
    assert second["channels"] == first["channels"]
    assert first["channels"]["a"]["times"] == ["2021-09-01", "2021-10-01", "2021-11-01"]
    assert first["notes"][0] == "steps: 1M of the calendar (--step chooses another)"
    starts = ["encoding: cp1252", "separator: ';'", "numbers: ", "times: 't' was read as dates, YYYYMM"]
    starts += ["rows: sorted", "rows: 1 of a time", "values: '°C' left out", "steps: 1M"]
    assert [note.startswith(start) for note, start in zip(second["notes"][:8], starts, strict=True)] == [True] * 8
    assert [f"note: {note}" in out for note in second["notes"][:8]] == [True] * 8


def test_angles_are_filtered_without_their_jumps(rfa, tmp_path):
    """The forecast is that of the angles unwrapped, in the range of the readings; without the option it is said."""
    angles = np.array([178 + 0.1 * k + 0.01 * (7 * k % 5) for k in range(40)])
    angles[30] += 90.0  # a wrong reading
    for name, values in (("plain", angles), ("turned", (angles + 180) % 360 - 180)):
        (tmp_path / name).write_text("t,x\n" + "".join(f"{k},{x:.2f}\n" for k, x in enumerate(values)))
    given = ["--time", "t", "--horizon", "5", "--components", "trend"]
    assert rfa("forecast", "plain", *given, "--out", "p")[0] == 0
    said = "x: values jump by nearly 360, as angles do (in 1 of 39 steps)"
    assert said in rfa("forecast", "turned", *given, "--out", "j")[1]
    status, out, _ = rfa("forecast", "turned", *given, "--angle", "360", "--out", "a")
    assert (status, "jump" in out, "outlier: x -89 at 30, expected -178.9" in out) == (0, False, True)
    plain, found = (pd.read_csv(tmp_path / name / "forecast.csv").iloc[:, 2:] for name in "pa")
    np.testing.assert_allclose(found, plain - 360, atol=1e-6)
    plain, found = (pd.read_csv(tmp_path / name / "cleaned.csv") for name in "pa")
    assert found["estimate"].between(-180, 180).all()
    np.testing.assert_allclose(np.exp(1j * np.radians(found["estimate"] - plain["estimate"])), 1, atol=1e-6)
    np.testing.assert_allclose(found["reading"], (plain["reading"] + 180) % 360 - 180, atol=1e-9)
    np.testing.assert_allclose(found["upper_90"] - found["lower_90"], plain["upper_90"] - plain["lower_90"], atol=1e-6)


def test_a_file_may_stand_after_the_columns_of_the_time(rfa, tmp_path):
    rows = [f"2024-01-{1 + k // 24:02},{k % 24:02}:00,{a}" for k, a, _ in GOOD]
    (tmp_path / "x.csv").write_text("\n".join(["Date,Time,a", *rows]) + "\n")
    given = ["--horizon", "2h", *LEVEL, "--out", "o"]
    assert rfa("forecast", "--time", "Date", "Time", "x.csv", *given)[0] == 0
    content = json.loads((tmp_path / "o" / "forecast.json").read_text())
    assert (content["time"], content["last"]) == (["Date", "Time"], "2024-01-02 15:00:00")


DATES = [(f"2024-01-{1 + k // 24:02} {k % 24:02}:00", a, b) for k, a, b in GOOD]


FAULTS = [
    ([(0, 1, 2), (0, 2, 2)], {}, "--duplicates mean, first or last"),
    (GOOD[:3], {}, "values: got \"3 readings in 'a'\", expected at least 4"),
    ([(k, k, 1 if k < 3 else "") for k in range(9)], {"--values": ["a", "b"]}, "in 'b'\", expected at least 4; --"),
    (GOOD, {"--horizon": ["1e300"]}, "horizon: got '1e300, 1e+300 steps of 1', expected at most 100000; --step"),
    (GOOD, {"--components": ["level", "level"]}, "components: got 'level level', expected each component once"),
    (DATES, {"--horizon": ["5h"], "--components": ["season:7D"]}, "at most the span of the series, 39 h"),
    (GOOD, {"--components": ["level", "trend"]}, "model: got"),
    (GOOD, {"--out": ["mine"]}, "out: mine has other files, thesis.tex"),
    (GOOD, {"--out": ["x.csv"]}, "out: x.csv is a file"),
    (GOOD, {"--angle": ["360"], "--values": ["a", "b"], "--counts": []}, "angle: got '--angle with --positive or"),
    ([(k, 100 * k, 1) for k in range(9)], {"--angle": ["360"]}, "angle: got \"0 to 800 in 'a'\", expected values"),
]


def test_each_fault_is_one_line_and_nothing_is_written(rfa, write, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    for rows, changes, says in FAULTS:
        write(rows)
        options = {"--time": ["t"], "--values": ["a"], "--horizon": ["3"], "--out": ["o"], **changes}
        before = contents(tmp_path)
        arguments = [word for name, given in options.items() for word in (name, *given)]
        status, out, err = rfa("forecast", "x.csv", *arguments)
        assert (status, out, len(messages(err))) == (2, "", 1), err
        assert says in err
        assert contents(tmp_path) == before


def test_a_band_on_a_high_level_is_shown():
    """A meter's total: its last digits are the forecast."""
    for mean, width, shown in ((10.0, 2.0, "10"), (1e9 + 12.25, 4.0, "1000000012.2"), (0.0, 1.0, "0")):
        assert f"{mean:.{_digits(mean, width)}g}" == shown


# Many series in one long file


PANEL = ["--id", "shop", "--time", "day", "--values", "sold", "--out", "o"]


@pytest.fixture
def shops(write):
    """Three shops: `a` with a wrong reading and a gap, `b` falling, `c` without a reading."""
    days = pd.date_range("2024-01-01", periods=60).strftime("%Y-%m-%d")
    rows = [(name, day, "") for name in "bac" for day in days]
    for k, (name, day, _) in enumerate(rows):
        t = k % 60
        sold = {"a": 50 + t + math.sin(9 * t), "b": 90 - t / 2 + math.cos(7 * t), "c": math.nan}[name]
        rows[k] = (
            name,
            day,
            "" if name == "c" or (name == "a" and t == 20) else 9999 if (name, t) == ("a", 40) else sold,
        )
    return write(rows, "shop,day,sold")


def test_many_series(rfa, shops, tmp_path):
    status, out, err = rfa("forecast", shops, *PANEL, "--horizon", "7")
    assert (status, [line for line in messages(err) if not line.startswith("series:")]) == (0, [])
    assert "2 series forecast, 1 readings refused" in out
    assert "not done: c: no reading" in out
    ahead, past, failed = (pd.read_csv(tmp_path / "o" / f"{name}.csv") for name in ("forecast", "cleaned", "failed"))
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
    assert (tmp_path / "o" / "figure.png").stat().st_size > 10_000
    assert rfa("forecast", shops, *PANEL, "--horizon", "7")[0] == 2  # the folder is not empty
    assert rfa("forecast", shops, *PANEL, "--horizon", "1w", "--overwrite")[0] == 0


def test_bad_arguments_of_many_series(rfa, shops, tmp_path):
    for arguments, said in (
        (["--horizon", "0"], "h: got 0"),
        (["--horizon", "7", "--angle", "360"], "angle: got 360.0, expected nothing: it is not for many series"),
        (["--horizon", "7", "--id", "store"], "id: got 'store', expected one of the columns 'shop', 'day', 'sold'"),
        (["--horizon", "7", "--time", "shop"], "time: got 'b', expected a date such as 2024-03-31"),
        (["--horizon", "7", "--values", "day"], "values: got '2024-01-01', expected a number"),
        (["--horizon", "7", "--values", "sold", "day"], "values: got ['sold', 'day'], expected one column with --id"),
    ):
        kept = {name: value for name, value in zip(PANEL[::2], PANEL[1::2], strict=True) if name not in arguments}
        status, _, err = rfa("forecast", shops, *(x for pair in kept.items() for x in pair), *arguments)
        assert (status, len(messages(err))) == (2, 1)
        assert said in messages(err)[0]
        assert not (tmp_path / "o" / "forecast.csv").exists()
