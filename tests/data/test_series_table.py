"""CSV files of series: what is read, and one clear error for each thing that can be wrong."""

import math

import pytest
import torch

from rfa.data.series_table import read_series

GOOD = "time,a,b\n0,1.5,\n0.5,nan,2\n3,-1e3,NA\n"


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "series.csv"
        path.write_text(text, "utf-8")
        return path

    return write


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
        (GOOD, {"values": ["time"]}, r"^values: got \['time'\], expected columns other than 'time'"),
        (GOOD, {"values": ["a", "a"]}, r"^values: .* each once"),
        ("time,a\n0,1\n2,1\n1,1\n", {}, r"^time: got '1' before an earlier one \(row 4 of .* strictly increasing"),
        ("time,a\n0,1\n0,2\n", {}, r"^time: got '0' twice \(row 3"),
        ("time,a\n0,1\n,2\n", {}, r"^time: row 3 of .* has none"),
        ("time,a\n0,1\nsoon,2\n", {}, r"^time: got '0' in row 2|^time: got 'soon' in row 3"),
        ("time,a\n0,1\ninf,2\n", {}, r"^time: row 3 of .* is infinite"),
        ("time,a\n0,1\n1,cold\n", {}, r"^values: got 'cold' in row 3 of .* expected a finite number \(a\)"),
        ("time,a\n0,1\n1,-inf\n", {}, r"^values: got '-inf' in row 3"),
        ("time,a,b\n0,1,\n1,2,\n", {}, r"^values: 'b' has no reading"),
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


@pytest.mark.parametrize("given", ["", "-3h", "0D", "soon", "inf"])
def test_durations_that_are_none(written, given):
    table = read_series(written("when,x\n2024-01-01,1\n2024-01-02,2\n"), "when")
    with pytest.raises(ValueError, match=r"^horizon: got .* expected a length of time"):
        table.duration("horizon", given)
    numbers = read_series(written(GOOD), "time")
    with pytest.raises(ValueError, match=r"^horizon: got '24h', expected a number above 0"):
        numbers.duration("horizon", "24h")
