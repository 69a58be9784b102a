"""CSV files of series: what is read, and one clear error for each thing that can be wrong."""

import gzip
import math
import re

import numpy as np
import pandas as pd
import pytest

from rfa.forecasting.table import TableFormat, read_table

BERLIN, FALL, LONG = {"zone": "Europe/Berlin"}, "2024-10-27", {"id_col": "s", "values": ["a"]}
SAO_PAULO = {"zone": "America/Sao_Paulo"}
GOOD = "time,a,b\n0,1.5,\n0.5,nan,2\n3,-1e3,NA\n"


@pytest.fixture
def read(tmp_path):
    """Read a text, by the column "t" if it has one."""

    def found(text, time=None, values=None, id_col=None, **written):
        path = tmp_path / "series.csv"
        path.write_text(text, "utf-8")
        return read_table(path, time or re.split(r"[^\w]", text)[0], values, id_col, TableFormat(**written))

    return found


def rows(found, series=None):
    """The times and the readings of a series, or of all."""
    table = found.table if series is None else found.table[found.table[found.names.id] == series]
    return table[found.names.time].tolist(), table[found.names.target].tolist()


def lines(times):
    return "t,x\n" + "".join(f"{time},{k % 5}\n" for k, time in enumerate(times))


def test_each_column_is_a_series(read):
    found = read(GOOD)
    assert found.names == ("series", "time", "reading")
    for name, values in (("a", [1.5, math.nan, -1e3]), ("b", [math.nan, 2.0, math.nan])):
        times, readings = rows(found, name)
        assert times == [0.0, 0.5, 3.0]
        np.testing.assert_array_equal(readings, values)
    assert found.notes == []
    assert rows(read(GOOD, values=["b"])) == ([0.0, 0.5], [pytest.approx(math.nan, nan_ok=True), 2.0])


def test_a_long_file_names_its_series(read):
    found = read("s,t,a\nx,1,5\ny,1,6\nx,2,7\n01,3,8\n", "t", **LONG)
    assert found.names == ("s", "t", "a")
    assert found.table["s"].tolist() == ["x", "y", "x", "01"]
    assert rows(found, "x") == ([1, 2], [5.0, 7.0])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {"time": "t"}, r"^file: got .*series.csv', expected a CSV file with a header and rows"),
        ("t,a\n", {}, r"^file: got .*, expected a CSV file with a header and rows"),
        (GOOD, {"time": "when"}, r"^time: got 'when', expected a column of .*: time, a, b \(--separator, --skip-rows"),
        (GOOD, {"values": ["time"]}, r"^values: got \['time'\], expected columns other than those of times"),
        (GOOD, {"values": ["c"]}, r"^values: got 'c', expected a column of series.csv: time, a, b"),
        ("note,a\n0,1\n", {}, r"^time: got 'note', expected a column with another name"),
        ("s,t,weight\n0,1,2\n", {"time": "t", "id_col": "s"}, r"^values: got 'weight', expected a column with another"),
        (GOOD, {"id_col": "s", "values": ["a"]}, r"^id: got 's', expected a column of"),
        (GOOD, {"id_col": "b"}, r"^id: got '' in row 2 of series.csv, column 'b', expected a name in each row"),
        ("t,a,b,s\n0,1,2,x\n", {"id_col": "s"}, r"^values: got \['a', 'b'\], expected one column with --id"),
        ("t,a\n0,1\n0,2\n", {}, r"^time: got '0 twice with different values, in rows 2 and 3.* --duplicates mean"),
        ("t,a\n0,1\n,2\n", {}, r"^time: got '' in row 3 of series.csv, column 't', expected .*, as '0' in other rows"),
        ("t,a\n0,1\n1,2\nsoon,2\n", {}, r"^time: got 'soon' in row 4 .* --skip-bad-rows leaves such rows out"),
        ("t,a\n0,1\n1,1\ninf,2\n", {}, r"^time: got 'inf' in row 4"),
        ("t,a\n0,1\n1,cold\n", {}, r"^values: got 'cold' in row 3 of series.csv, column 'a', expected a number up to"),
        ("t,a\n0,1\n1,inf\n", {}, r"^values: got 'inf' in row 3"),
        ("t,a,b\n0,1,1\n1,5 kWh,2\n", {}, r"^values: got '5 kWh' in row 3 .* --missing names other marks"),
        ("s,t,a\nx,1,1\nx,2,2\ny,1,2'000.1\n", {"time": "t", **LONG}, r"^values: got \"2'000.1\" in row 4"),
        ("s,t,a\nx,1,1\ny,1,2 kW\ny,2,2 kW\n", {"time": "t", **LONG}, r"^values: got '2 kW' in row 3"),
        ("s,t,a\nx,1,1\ny,soon,2\ny,late,2\n", {"time": "t", **LONG}, r"^time: got 'soon' in row 3"),
        ("t,a\n1.5,1\n99e99,1\n", {"time_unit": "s"}, r"^time: got '99e99' in row 3"),
        ('t,a,b\n0,1,"x\ny"\n1,cold,\n', {"values": ["a"]}, r"^values: got 'cold' in row 4"),
        ("\n t ,a\n\n0,1\n1,cold\n", {"time": " t "}, r"^values: got 'cold' in row 5"),
        ("t,a\n0,1\n1,cold\n", {"missing": ["warm"]}, r"^values: got 'cold' in row 3 .* --missing names"),
        ('t,a\n0,"1,500"\n', {}, r"^values: got '1,500' .* --decimal or --thousands reads such signs"),
        ("t;a\n0;1.234.567\n", {}, r"^values: got '1.234.567' .* --decimal or --thousands reads such signs"),
        ("t;a\n0;1.500\n", {"decimal": ","}, r"^values: got '1.500' in row 2 .* --decimal or --thousands reads"),
        ('t,a\n0,1\n1,"1,500"\n', {"skip_bad_rows": True}, r"^values: got '1,500' in row 3 .*--thousands"),
        ("t,a\n0,cold\n1,warm\n2,3\n", {"skip_bad_rows": True}, r"^values: got 'cold' in row 2"),
        ("t,a\n2024-01-01T00Z,1\n2024-01-01T01,2\n", {}, r"^time: got '2024-01-01T01' in row 3 .* an offset such as"),
        ("t,a\n03.04.2024,1\n", {}, r"^time: .* expected --date-format: %d.%m.%Y and %m.%d.%Y fit all"),
        ("t,a\n13 o'clock,1\n", {}, r"^time: .* expected a number, or a date like 2024-01-31 12:00; --date-format"),
        ("t,a\n3.4.2024,1\n13.4.2024,2\nmean,2\n", {}, r"^time: got 'mean' in row 4 .*, as '3.4.2024' in other rows"),
        ("t,a,a\n0,1,2\n", {}, r"^values: got 'a, of which there are two', expected another column, or --no-header"),
        ("t,a\n0,1\n1,2,7\n", {}, r"^file: got 3 cells in row 3 of series.csv, expected 2 as in its header, t, a "),
        ("t,a\n0,1,7\n1,2,7\n", {}, r"^file: got rows with more cells, or open quotes of series.csv, expected 2"),
        ('t,a\n0,1\n1,"2\n', {}, r"^file: got rows with more cells, or open quotes"),
        ("t,a\n202311,1\n202312,1\n202313,1\n", {}, r"^time: got '202313' in row 4 .* --time-unit"),
        ("t,a\n2024-03-31 01:30,1\n2024-03-31 02:30,1\n", BERLIN, r"^time: got '2024.*' in row 3 .* do not skip"),
        (f"t,a\n{FALL} 02:00,1\n{FALL} 02:00,1\n{FALL} 02:00,1\n", BERLIN, "the double hour of autumn twice at most"),
        ("t,a\n1,1\n2,1\n", BERLIN, r"^zone: got 'Europe/Berlin', expected dates in the column of times"),
        ("t,a\n1,-\n2,\n", {"values": ["a"]}, r"^values: got \['a'\], expected a reading in series.csv"),
        ("t,p,b\n1,x,y\n2,x,y\n", {}, r"^values: got \['p', 'b'\], expected columns of series.csv that have numb"),
        ("t,a\n0,1\n", {"date_format": "%Q"}, r"^date-format: got '%Q', expected a format of dates such as %d"),
        ("t,a\n0,1\n", {"date_format": "DD.MM.YYYY"}, r"^date-format: got 'DD.MM.YYYY', expected a format of"),
        ("t,a\n0,1\n", {"time_unit": "s", "date_format": "%Y"}, r"^date-format: got '%Y', expected it, or --time"),
        ("t,a\n0,1\n", {"time_unit": "years"}, r"^time-unit: got 'years', expected one of s, ms"),
        ("t,a\n0,1\n", {"zone": "Mars/Base"}, r"^zone: got 'Mars/Base', expected a name such as"),
        ("t,a\n0,1\n", {"epoch": "soon"}, r"^epoch: got 'soon', expected a date such as"),
        ("t,a\n0,1\n1,2\n", {"separator": ";"}, r"^time: got 't', expected a column of .*--separator"),
        ("t,a\n0,1\n", {"separator": "semi"}, r"^separator: got 'semi', expected a single character, tab or"),
        ("t,a\n0,1\n", {"decimal": ",", "thousands": ","}, r"^thousands: got ',', expected another sign"),
        ("t,a\n0,1\n", {"thousands": "x"}, r"^thousands: got 'x', expected a point, a comma"),
        ("t,a\n0,1\n", {"decimal": "x"}, r"^decimal: got 'x', expected a point or a comma"),
        ("t,a\n0,12\n", {"encoding": "utf-16"}, r"^file: .* its text is not in utf-16 \(--encoding\)"),
        ("t,a\n0,1\n", {"encoding": "utf-99"}, r"^encoding: got 'utf-99', expected one such as cp1252"),
        ("t,a\n0,1\n", {"comment": "//"}, r"^comment: got '//', expected a single sign"),
        ("t,a\n0,1\n", {"skip_rows": -1}, r"^skip-rows: got -1, expected a number of lines"),
        ("t,a\n0,1\n", {"duplicates": "most"}, r"^duplicates: got 'most', expected one of"),
        ("site 7\n\nt,a\n0,1\n", {"time": "t"}, r"^time: got 't', .*: site 7 .*--skip-rows"),
    ],
)
def test_each_fault_has_one_line(read, text, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(text, **options)
    assert "\n" not in str(caught.value)


def test_text_among_many_series_is_left_out_and_named(read):
    found = read("s,t,a\nx,1,1\nx,2,cold\ny,1,2\ny,2,3\nz,1,5\nz,1,6\n", "t", **LONG)
    assert found.problems == {
        "x": "a: 'cold' in row 3 is no number; it is left out",
        "z": "t: 1 twice with different values, in rows 6 and 7 of series.csv",
    }
    assert found.table["s"].tolist() == ["x", "x", "y", "y"]


def test_a_bad_cell_or_time_of_a_long_file_is_left_out_and_named(read):
    text = (
        "s,t,a,note\nx,2024-01-01,1e300,p\nx,2024-01-02,2,q\ny,2024-01-32,3,\ny,2024-01-02,1.2.3,\ny,2024-01-03,6,r\n"
    )
    found = read(text, "t", id_col="s")  # of the columns one has numbers
    assert found.problems == {
        "x": "a: '1e300' in row 2 is no number; it is left out",
        "y": "t: '2024-01-32' in row 4 is no time; the row is left out; "
        "a: '1.2.3' in row 5 is no number; it is left out",
    }
    assert rows(found, "y")[0] == [pd.Timestamp("2024-01-02"), pd.Timestamp("2024-01-03")]
    np.testing.assert_array_equal(found.table["a"], [np.nan, 2, np.nan, 6])
    assert "rows: 1 of 5 left out as bad ones" in found.notes


MIDNIGHT = "2024-01-01T00:00:00"
SPELLINGS = [  # the times, options, the dates, what is said of them
    (["202311", "202312", "202401"], {}, ["2023-11", "2023-12", "2024-01"], "%Y%m"),
    (["202311.0", "202312.0", "202401.0"], {}, ["2023-11", "2023-12", "2024-01"], "%Y%m"),
    (["2023123122", "2023123123", "2024010101"], {}, ["2023-12-31T22", "2023-12-31T23", "2024-01-01T01"], "%Y%m%d%H"),
    (["202312312359", "202401010000"], {}, ["2023-12-31T23:59", MIDNIGHT], "%Y%m%d%H%M"),
    (["19580329", "19580405"], {}, ["1958-03-29", "1958-04-05"], "%Y%m%d"),
    (["1704067200.25", "1704067200.5"], {}, [f"{MIDNIGHT}.250", f"{MIDNIGHT}.500"], "epoch stamps in s"),
    (["1704067200001", "1704067200002"], {}, [f"{MIDNIGHT}.001", f"{MIDNIGHT}.002"], "stamps in ms"),
    (["1704067200000000001", "1704067200000000003"], {}, [f"{MIDNIGHT}.{1:09}", f"{MIDNIGHT}.{3:09}"], "stamps in ns"),
    (["31.01.2024 06:00", "01.02.2024 06:00"], {}, ["2024-01-31T06", "2024-02-01T06"], "%d.%m.%Y %H:%M"),
    (["1/31/2024", "02/01/2024"], {}, ["2024-01-31", "2024-02-01"], "%m/%d/%Y"),
    (["1/31/2024 12:30:00 AM", "1/31/2024 1:05:00 PM"], {}, ["2024-01-31T00:30", "2024-01-31T13:05"], "%I:%M:%S %p"),
    (["03.04.2024", "04.04.2024"], {"date_format": "%d.%m.%Y"}, ["2024-04-03", "2024-04-04"], None),
    (["2023Q4", "2024-Q1"], {}, ["2023-10", "2024-01"], "first days"),
    (["2023M09", "2023M10"], {}, ["2023-09", "2023-10"], "first days"),
    (["2023-W52", "2024W01"], {}, ["2023-12-25", "2024-01-01"], "first days"),
    (["202352", "202401", "202402"], {"date_format": "%G%V"}, ["2023-12-25", "2024-01-01", "2024-01-08"], None),
    (["2024-01-01 00:00:00 UTC", "2024-01-01 01:00:00 UTC"], {}, [MIDNIGHT, "2024-01-01T01"], None),
    (["1388102418", "1388102478"], {"epoch": "1980-01-06"}, ["2024-01-01T00:00:18", "2024-01-01T00:01:18"], None),
    (["757339200.5", "757339201"], {"epoch": "2000-01-01T12"}, [f"{MIDNIGHT}.500", "2024-01-01T00:00:01"], None),
    (["1072915200000"], {"epoch": "1989-12-31", "time_unit": "ms"}, ["2023-12-31"], None),
    (["2024-01-01T09:00+02:00", "2024-01-01T10:00+02:00"], {}, ["2024-01-01T07:00", "2024-01-01T08:00"], None),
    (["2024-10-27T02:00+02:00", "2024-10-27T02:00+01:00"], {}, ["2024-10-27", "2024-10-27T01"], "several offsets"),
    (["2024-10-27T02:00+02:00", "2024-10-27T02:00+01:00"], BERLIN, ["2024-10-27", "2024-10-27T01"], None),
]


@pytest.mark.parametrize(("stamps", "options", "dates", "said"), SPELLINGS)
def test_spellings_of_dates_are_recognised_and_said(read, stamps, options, dates, said):
    found = read(lines(stamps), **options)
    assert [said in note for note in found.notes] == ([True] if said else [])
    times = pd.DatetimeIndex(found.table["t"])
    zoned = "epoch" in options or "stamps" in (said or "") or any(x in stamps[0] for x in ("UTC", "+0"))
    assert (times.tz is not None) == zoned
    moments = times if times.tz is None else times.tz_convert("UTC").tz_localize(None)
    assert (moments.to_numpy() == np.array(dates, "M8[ns]")).all()
    if stamps[0].endswith("+02:00") and not said:
        assert str(times[0]).endswith("+02:00")


@pytest.mark.parametrize("freq", ["h", "30min"])
@pytest.mark.parametrize("order", [1, -1])
def test_the_double_hour_of_autumn_is_told_by_order(read, freq, order):
    """In each series."""
    dates = pd.date_range("2024-10-25", "2024-10-29", freq=freq, tz="Europe/Berlin")
    found = read(lines(dates.tz_localize(None)[::order]), **BERLIN)
    assert (pd.DatetimeIndex(found.table["t"])[::order] == dates).all()
    two = "t,s,a\n" + "".join(f"{date},{s},1\n" for date in dates.tz_localize(None)[::order] for s in "xy")
    assert (pd.DatetimeIndex(read(two, **LONG, **BERLIN).table["t"]) == dates[::order].repeat(2)).all()


@pytest.mark.parametrize(
    ("times", "zone", "labels"),
    [
        ([f"{FALL} 01:00", f"{FALL} 02:00", f"{FALL} 03:00"], BERLIN, ["01:00:00+02", "02:00:00+02", "03:00:00+01"]),
        (["2024-03-31 01:30", "2024-03-31 03:00"], BERLIN, ["01:30:00+01", "03:00:00+02"]),
        (["1700000000", "1700003600"], BERLIN, ["23:13:20+01", "00:13:20+01"]),
        # a day that began at 01:00
        ([f"2018-11-0{day}" for day in (3, 4, 5)], SAO_PAULO, ["00:00:00-03", "01:00:00-02", "00:00:00-02"]),
    ],
)
def test_times_on_the_clock_of_a_place(read, times, zone, labels):
    """A double hour that stands once is taken for the first, which is said."""
    found = read(lines(times), **zone)
    assert [str(time)[11:-3] for time in found.table["t"]] == labels
    assert ["once" in note for note in found.notes if "epoch" not in note] == [True] * times[0].endswith("27 01:00")


@pytest.mark.parametrize("stamps", [["190060", "190113"], ["0", "1704067200"], ["99", "100"], ["1990", "1991"]])
def test_other_numbers_stay_numbers(read, stamps):
    found = read(lines(stamps))
    assert (found.table["t"].tolist(), found.notes) == ([int(stamp) for stamp in stamps], [])
    assert read(lines(["202312", "202401"]), time_unit="number").table["t"].tolist() == [202312, 202401]


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("t;x\n0;1,5\n1;-0,25\n", {}, ["separator: ';'", "decimal comma"]),
        ("t\tx\n0\t1.5\n1\t-0.25\n", {}, ["separator: tab"]),
        ("t   x\n0  1.5\n1     -0.25\n", {}, ["separator: space"]),
        ("t|x\n0|1.5\n1|-0.25\n", {}, ["separator: '|'"]),
        ("t;x\n0;1,500\n1;-0,250\n", {"separator": ";", "decimal": ","}, []),
        ('t, x\n0, "1,5"\n1, "-0,25"\n', {}, ["decimal comma"]),
        ("t#x\n0,0#1,5\n1,0#-0,25\n", {"separator": "#", "decimal": ","}, []),
        ('t,x\n0,1.5\n1,"-0.25"\n', {"thousands": ","}, []),
        ("\ufefft,x\r\n0,1.5\r\n1,-0.25\r\n", {"time": "t"}, []),
        ("t,,x,\n0,4,1.5,\n1,4,-0.25,\n", {}, []),  # columns without a name
    ],
)
def test_separators_and_signs_of_numbers(read, text, options, said):
    found = read(text, **options)
    assert rows(found) == ([0.0, 1.0], [1.5, -0.25])
    assert [part in note for part, note in zip(said, found.notes, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("encoding", "given", "said"),
    [("utf-8-sig", None, 0), ("utf-16", None, 0), ("cp1252", None, 1), ("utf-16-be", "utf-16-be", 0)],
)
def test_encodings(tmp_path, encoding, given, said):
    (tmp_path / "x.csv").write_bytes("t,T in °C\n0,1\n1,2\n".encode(encoding))
    found = read_table(tmp_path / "x.csv", "t", written=TableFormat(encoding=given))
    assert (found.table["series"].tolist(), len(found.notes)) == (["T in °C"] * 2, said)


def test_a_compressed_file_is_read_and_an_absent_one_named(tmp_path):
    with gzip.open(tmp_path / "x.csv.gz", "wt") as file:
        file.write("t,x\n0,1\n1,2\n")
    assert rows(read_table(tmp_path / "x.csv.gz", "t"))[1] == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"^file: .*y.csv does not exist, expected a CSV file"):
        read_table(tmp_path / "y.csv", "t")


@pytest.mark.parametrize(
    ("cells", "decimal", "thousands", "values"),
    [
        (["1,234.5", "-12,345,678", "7"], None, ",", [1234.5, -12345678, 7]),
        (["12,34,567.25", "1"], None, ",", [1234567.25, 1]),
        (["1.234,5", "0,25"], ",", ".", [1234.5, 0.25]),
        (["1\u202f234,5", "1"], ",", "\u202f", [1234.5, 1]),
        (["1'500", "2"], None, "'", [1500, 2]),
    ],
)
def test_thousands(read, cells, decimal, thousands, values):
    text = "t;x\n" + "".join(f"{k};{cell}\n" for k, cell in enumerate(cells))
    assert rows(read(text, decimal=decimal, thousands=thousands))[1] == values


def test_marks_of_missing_readings(read):
    """In any spelling of their number, and in values only; a column of text is left out, which is said."""
    found = read("t,a,b,c\n-999,-999.0,1,x\n0,2,bad,x\n9999,9.999e3,-99,x\n", missing=("-999", "9999", "bad"))
    assert found.table["t"].tolist() == [-999, 0, 9999] * 2
    assert np.nan_to_num(found.table["reading"], nan=7.0).tolist() == [7.0, 2.0, 7.0, 1.0, 7.0, -99.0]
    assert found.notes == ["values: 'c' left out, without a number"]


def test_rows_of_one_time(read):
    """Those that do not contradict each other are merged, others by option."""
    found = read("t,a,b\n0,1,2\n1,3,\n1,3,4\n2,5,6\n0,1,2\n")
    assert sorted(zip(*rows(found, "b"), strict=True)) == [(0, 2.0), (1, 4.0), (2, 6.0)]
    assert "rows: 4 of a time that another row of the series has were merged" in found.notes[0]
    for how, a, b in (("mean", 5.0, 4.5), ("first", 3.0, 4.0), ("last", 7.0, 5.0)):
        found = read("t,a,b\n0,1,2\n1,3,\n1,,4\n1,7,5\n2,5,6\n", duplicates=how)
        assert (rows(found, "a")[1], rows(found, "b")[1]) == ([1, a, 5], [2, b, 6])


def test_rows_after_the_last_reading_are_left_out(read):
    found = read("t,a,b\n0,1,2\n1,,3\n2,,\n3,,\n")
    assert rows(found, "a")[0] == [0, 1]
    assert found.notes == ["rows: those after the last reading, from row 4, are left out"]


HOURS = [f"2024-01-{1 + k // 24:02} {k % 24:02}:00" for k in range(23, 27)]
YMD_H = [(date[:4], date[5:7], date[8:10], date[11:13]) for date in HOURS]


@pytest.mark.parametrize(
    ("text", "time", "options", "said"),
    [
        ("\n".join(f"{d},{k}" for k, d in enumerate(HOURS)), "1", {"no_header": True, "values": None}, []),
        (  # NDBC
            "#YY  MM DD hh mm a\n#yr  mo dy hr mn m\n"
            + "".join(f"{y} {m} {d} {h} 00 {k}.0\n" for k, (y, m, d, h) in enumerate(YMD_H)),
            ["#YY", "MM", "DD", "hh", "mm"],
            {"skip_bad_rows": True},
            ["separator: space", "rows: 1 of 5 left out"],
        ),
        (  # LibreView
            "Glucose Data,Generated on,2024\n\nTime,Record Type,,Note,Note2,a\n"
            + "".join(f"{date},0,x,,,{k}\n" for k, date in enumerate(HOURS)),
            "Time",
            {"skip_rows": 1},
            [],
        ),
        (  # annotated CSV
            "#datatype,string,dateTime,double\n#default,_result,,\n,result,_time,a\n"
            + "".join(f",,{date},{k}\n" for k, date in enumerate(HOURS)),
            "_time",
            {"comment": "#"},
            [],
        ),
        ("Date,Time,a\n" + "".join(f"{d[:10]},{d[11:]},{k}\n" for k, d in enumerate(HOURS)), ["Date", "Time"], {}, []),
        (
            "d,h,a\n" + "".join(f"{d}/{m}/{y},{h}:00,{k}\n" for k, (y, m, d, h) in enumerate(YMD_H)),
            ["d", "h"],
            {"date_format": "%d/%m/%Y %H:%M"},
            [],
        ),
    ],
)
def test_files_as_instruments_and_services_write_them(read, text, time, options, said):
    found = read(text, time, **{"values": ["a"], **options})
    assert ([str(each)[:16] for each in rows(found)[0]], rows(found)[1]) == (HOURS, [0, 1, 2, 3])
    assert [note.startswith(start) for note, start in zip(found.notes, said, strict=True)] == [True] * len(said)
