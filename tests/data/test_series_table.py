"""CSV files of series: what is read, and one clear error for each thing that can be wrong."""

import math

import numpy as np
import pytest
import torch

from rfa.data.series_table import read_many_series, read_series

GOOD = "time,a,b\n0,1.5,\n0.5,nan,2\n3,-1e3,NA\n"


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "series.csv"
        path.write_text(text, "utf-8")
        return path

    return write


def test_a_comma_at_the_end_of_rows_shifts_nothing(written):
    found = read_series(written("time,a,b\n0,10,100,\n1,11,101,\n"), "time", ["a"])
    assert (found.times.tolist(), found.values.flatten().tolist()) == ([0.0, 1.0], [10.0, 11.0])


def test_numbers_and_missing_readings(written):
    found = read_series(written(GOOD), "time")
    assert (found.channels, found.unit, found.origin) == (("a", "b"), "", None)
    assert found.times.tolist() == [0.0, 0.5, 3.0]
    expected = torch.tensor([[1.5, math.nan], [math.nan, 2.0], [-1e3, math.nan]]).double()
    assert torch.equal(found.values.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert read_series(written(GOOD), "time", ["b"]).values[1].item() == 2.0
    assert (found.duration("horizon", "2.5"), found.label(0.5)) == (2.5, "0.5")


@pytest.mark.parametrize(
    ("dates", "format", "unit", "times"),
    [
        (["2024-01-01", "2024-01-02", "2024-01-05"], None, "D", [0, 1, 4]),
        (["2024-01-01 00:00", "2024-01-01 01:00", "2024-01-01 03:30"], None, "h", [0, 1, 3.5]),
        (["2024-03-01T00:00:00Z", "2024-03-01T00:01:00Z", "2024-03-01T00:02:30Z"], None, "min", [0, 1, 2.5]),
        (["19580329", "19580405", "19580419"], "%Y%m%d", "D", [0, 7, 21]),
    ],
)
def test_dates(written, dates, format, unit, times):
    text = "when,x\n" + "".join(f"{date},{i}\n" for i, date in enumerate(dates))
    found = read_series(written(text), "when", date_format=format)
    assert (found.unit, found.times.tolist()) == (unit, times)
    assert found.label(found.times[0].item()).startswith(f"{found.origin:%Y-%m-%d}")
    assert found.duration("horizon", "2D") == {"D": 2, "h": 48, "min": 2880}[unit]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, r"^file: .* cannot be read as CSV"),
        ("time,a\n", {}, r"^file: .* has no rows"),
        (GOOD, {"time": "when"}, r"^time: got 'when', expected a column of .*: time, a, b"),
        (GOOD, {"values": ["c"]}, r"^values: got 'c', expected a column"),
        (GOOD, {"values": ["time"]}, r"^values: got \['time'\], expected columns other than those of times"),
        (GOOD, {"values": ["a", "a"]}, r"^values: .* each once"),
        ("time,a\n0,1\n2,1\n1,1\n", {}, r"^time: got '1' before an earlier one \(row 4 of .* strictly increasing"),
        ("time,a\n0,1\n0,2\n", {}, r"^time: got '0' twice \(row 3"),
        ("time,a\n0,1\n,2\n", {}, r"^time: row 3 of .* has none"),
        ("time,a\n0,1\nsoon,2\n", {}, r"^time: got '0' in row 2|^time: got 'soon' in row 3"),
        ("time,a\n0,1\ninf,2\n", {}, r"^time: row 3 of .* is infinite"),
        (
            "time,a\n0,1\n1,cold\n",
            {},
            r"^values: got 'cold' in row 3 of .* expected a number up to 1e\+30, or an empty cell .* \(a\)",
        ),
        ("time,a\n0,1\n1,-inf\n", {}, r"^values: got '-inf' in row 3"),
        ("time,a\n0,1\n1,9.97e36\n", {}, r"^values: got '9.97e36' in row 3"),
        ("time,a,s\n0,1,x\n0,2,x\n", {"sensor": "s"}, r"^time: got '0' twice \(row 3 .* keep one row of a sensor"),
        ("time,a,s\n0,1,x\n0,2,\n", {"sensor": "s"}, r"^sensor: row 3 of .* has none"),
        ("time,a,s\n0,1,x\n", {"sensor": "q"}, r"^sensor: got 'q', expected a column"),
        ("time,a,b\n0,1,\n1,2,\n", {}, r"^values: 'b' has no reading"),
        ("time,a,a\n0,1,2\n", {}, r"^file: .* has two columns 'a'"),
        ("time,a\n0,1\n1,2,7\n", {}, r"^file: .* cannot be read as CSV: .* Expected 2 fields in line 3, saw 3"),
        ("time,a\n0,1,7\n1,2,7\n", {}, r"^file: rows of .* have more cells than its header"),
    ],
)
def test_each_fault_has_one_line(written, text, options, message):
    path = written(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_series(path, **{"time": "time", **options})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^file: .* does not exist"):
        read_series(tmp_path / "none.csv", "time")


def test_labels_keep_times_apart(written):
    assert read_series(written("ms,x\n1700000000123,1\n1700000000124,2\n"), "ms").label(1700000000124.0)[-3:] == "124"
    microseconds = read_series(written("us,x\n1700000000000123,1\n1700000000000124,2\n"), "us")
    assert microseconds.label(1700000000000125.0) == "1700000000000125"
    seconds = read_series(written("s,x\n1700000000.123456,1\n1700000000.2,2\n"), "s")
    assert [seconds.label(time) for time in (1700000000.123456, 0.1 + 0.2)] == ["1700000000.123456", "0.3"]
    found = read_series(written("t,x\n2024-01-01 00:00:00,1\n2024-01-01 00:00:01.5,2\n"), "t")
    assert [found.label(time) for time in found.times.tolist()] == ["2024-01-01 00:00:00", "2024-01-01 00:00:01.500000"]


def test_labels_of_a_hundred_readings_a_second_are_those_of_the_file(written):
    dates = [f"2024-01-01 00:00:{k // 100:02}.{k % 100:02}0000" for k in range(500)]
    found = read_series(written("t,x\n" + "".join(f"{date},1\n" for date in dates)), "t")
    expected = [date.removesuffix(".000000") for date in dates]
    assert [found.label(time) for time in found.times.tolist()] == expected
    assert (found.axis(found.times.numpy()) == np.array(dates, "datetime64[us]")).all()


@pytest.mark.parametrize(
    ("dates", "labels", "axis"),
    [
        (["2024-01-01T09:00+02:00", "2024-01-01T10:00+02:00"], "2024-01-01 11:00:00+02:00", "2024-01-01T11:00"),
        (["2024-01-01T09:00Z", "2024-01-01T10:00Z"], "2024-01-01 11:00:00+00:00", "2024-01-01T11:00"),
        (["2024-10-27T02:00+02:00", "2024-10-27T02:00+01:00"], "2024-10-27 02:00:00+00:00", "2024-10-27T02:00"),
        (["2024-01-01T00:00+01:00", "2024-01-02T00:00+01:00"], "2024-01-03 00:00:00+01:00", "2024-01-03T00:00"),
        (["2024-01-01", "2024-01-02"], "2024-01-03", "2024-01-03"),
    ],
)
def test_labels_have_the_offset_of_the_file(written, dates, labels, axis):
    """Of two offsets UTC is written, and always with `+00:00`."""
    found = read_series(written("t,x\n" + "".join(f"{date},1\n" for date in dates)), "t")
    assert (found.times.tolist(), found.label(2.0)) == ([0.0, 1.0], labels)
    assert found.axis(np.array([2.0]))[0] == np.datetime64(axis)


def test_sensors_may_read_at_one_time(written):
    found = read_series(written("time,a,s\n0,1,x\n0,2,y\n2,3,x\n"), "time", ["a"], sensor="s")
    assert (found.times.tolist(), found.sensor, found.gap) == ([0.0, 0.0, 2.0], ("x", "y", "x"), 2.0)


def test_days_without_separators_need_no_format(written):
    found = read_series(written("when,x\n19580329,1\n19580405,2\n"), "when")
    assert (found.unit, found.times.tolist(), found.label(7.0)) == ("D", [0, 7], "1958-04-05")
    assert read_series(written("when,x\n19581329,1\n19581405,2\n"), "when").unit == ""  # no 13th month


def test_many_series(tmp_path):
    """Of files, a folder, and names in a column; all in the unit of the first."""
    (tmp_path / "hours.csv").write_text("when,x\n2024-01-01 00:00,1\n2024-01-01 02:00,2\n")
    (tmp_path / "days.csv").write_text("when,x\n2024-01-01,1\n2024-01-03,\n")
    found = read_many_series([tmp_path], "when")
    assert {name: one.unit for name, one in found.items()} == {"days": "D", "hours": "D"}
    assert found["hours"].times.tolist() == [0.0, 2 / 24]
    long = tmp_path / "long" / "all.csv"
    long.parent.mkdir()
    long.write_text("who,time,x\na,0,1\nb,0,5\na,1,2\nb,3,\n")
    found = read_many_series([long], "time", ["x"], series="who")
    assert {name: one.times.tolist() for name, one in found.items()} == {"a": [0, 1], "b": [0, 3]}
    long.write_text("who,time,x\na,1,1\nb,0,5\na,0,2\n")
    with pytest.raises(ValueError, match=r"^time: got '0' before an earlier one \(row 4 of"):
        read_many_series([long], "time", ["x"], series="who")
    (tmp_path / "numbers.csv").write_text("when,x\n0,1\n1,2\n")
    with pytest.raises(ValueError, match=r"^time: got dates in some series and numbers in others"):
        read_many_series([tmp_path], "when")


@pytest.mark.parametrize("given", ["", "-3h", "0D", "soon", "inf", "24"])
def test_durations_that_are_none(written, given):
    table = read_series(written("when,x\n2024-01-01,1\n2024-01-02,2\n"), "when")
    with pytest.raises(ValueError, match=r"^horizon: got .* expected a length of time"):
        table.duration("horizon", given)
    numbers = read_series(written(GOOD), "time")
    with pytest.raises(ValueError, match=r"^horizon: got '24h', expected a number above 0"):
        numbers.duration("horizon", "24h")
