"""CSV files of series: what is read, and one clear error for each thing that can be wrong."""

import gzip
import math
import re

import numpy as np
import pandas as pd
import pytest

from rfa.forecasting.table import TableFormat, read_series

BERLIN, FALL = {"zone": "Europe/Berlin"}, "2024-10-27"
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
    np.testing.assert_array_equal(found.values, [[1.5, math.nan], [math.nan, 2.0], [-1e3, math.nan]])
    assert read_series(written(GOOD), "time", ["b"]).values[1].item() == 2.0
    assert (found.duration("horizon", "2.5"), found.label(0.5)) == (2.5, "0.5")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, r"^file: .* cannot be read as CSV"),
        (GOOD, {"time": "when"}, r"^time: got 'when', expected a column of .*: time, a, b"),
        (GOOD, {"values": ["time"]}, r"^values: got \['time'\], expected columns other than those of times"),
        ("time,a\n0,1\n2,1\n1,1\n", {"sort": False}, r"^time: got '1' before an earlier one \(row 4 of .* \(or --sort"),
        ("time,a\n0,1\n0,2\n", {}, r"^time: got '0' twice with different values \(rows 2 and 3 of .* --duplicates"),
        ("time,a\n0,1\n,2\n", {}, r"^time: row 3 of .* has none"),
        ("time,a\n0,1\nsoon,2\n", {}, r"^time: got '0' in row 2|^time: got 'soon' in row 3"),
        ("time,a\n0,1\ninf,2\n", {}, r"^time: got 'inf' in row 3 of .*, expected a finite number, up to 1e\+100"),
        ("time,a\n0,1\n1e300,2\n", {}, r"^time: got '1e300' in row 3 of .*, expected a finite number, up to"),
        ("time,a\n0,1\n1,cold\n", {}, r"^values: got 'cold' in row 3 of .* a number up to 1e\+30, .* \(a\)"),
        ("time,a,s\n0,1,x\n0,2,x\n", {"sensor": "s"}, r"^time: got '0' twice .*2 and 3 .* keep one row of a sensor"),
        ("time,a,s\n0,1,x\n0,2,\n", {"sensor": "s"}, r"^sensor: row 3 of .* has none"),
        ("time,a\n1.5,1\n", {"time_unit": "ns"}, r"^time: got '1.5' in row 2 .* expected a whole number of ns"),
        ("time,a\n99999999999999,1\n", {"time_unit": "s"}, r"^time: got '9+' in row 2 .* of a date that pandas knows"),
        ('time,a,b\n0,1,"x\ny"\n1,cold,\n', {"values": ["a"]}, r"^values: got 'cold' in row 4"),
        ("\n time ,a\n\n0,1\n1,cold\n", {"time": " time "}, r"^values: got 'cold' in row 5"),
        ("time,a\n0,1\n1,cold\n", {"missing": ["warm"]}, r"^values: got 'cold' in row 3 .* --missing names"),
        ('time,a\n0,"1,500"\n', {}, r"^values: got '1,500' .* --decimal or --thousands reads such signs"),
        ("time;a\n0;1.234.567\n", {}, r"^values: got '1.234.567' .* --decimal or --thousands reads such signs"),
        ("time,a\n0,1\n1,1'500\n", {}, r"^values: got \"1'500\" in row 3 .* --decimal or --thousands reads such"),
        ("time;a\n0;1,5\n", {"thousands": ","}, r"^values: got '1,5' in row 2 .* --decimal or --thousands reads"),
        ("time;a\n0;1.500\n", {"decimal": ","}, r"^values: got '1.500' in row 2 .* --decimal or --thousands reads"),
        ("time,a\n0,1\n1,5 kWh\n", {}, r"^values: got '5 kWh' in row 3 .* --missing names"),
        ("time,a\n0,1\n1,2\nTotal,3\n", {}, r"^time: got 'Total' in row 4 .* a number, or a date"),
        ("time,a\n2024-01-01T00Z,1\n2024-01-01T01,2\n", {}, r"^time: got '2024-01-01T01' in row 3 .* an offset such a"),
        ("time,a\n0,1\n", {"date_format": "%Q"}, r"^date-format: got '%Q', expected a format of dates such as %d"),
        ("time,a\n0,1\n", {"date_format": "DD.MM.YYYY"}, r"^date-format: got 'DD.MM.YYYY', expected a format of"),
        ("time,a\n0,1\n", {"date_format": "mixed"}, r"^date-format: got 'mixed', expected a format of dates"),
        ("time,a\n0,1\n1,2\n", {"separator": ";"}, r"^time: got 'time', expected a column of .*--separator"),
        ("time,a\n0,1\n", {"separator": "semi"}, r"^separator: got 'semi', expected a single character, tab or"),
        ("time,a\n0,1\n", {"decimal": ",", "thousands": ","}, r"^thousands: got ',', expected another sign"),
        ("time,a\n0,1\n", {"time_unit": "s", "date_format": "%Y"}, r"^date-format: got '%Y', expected it or --time"),
        ("time,a\n0,1\n", {"encoding": "utf-16"}, r"^file: .* its text is not in utf-16 \(--encoding\)"),
        ("time,a\n9007199254740993,1\n", {"time_unit": "number"}, r"^time: got .* expected a number up to 2\*\*53"),
        ("time,a\n03.04.2024,1\n", {}, r"^time: .* expected --date-format: %d.%m.%Y and %m.%d.%Y fit all rows"),
        ("time,a\n2024-W60-1,1\n2024-W01-2,2\n", {}, r"^time: got '2024-W60-1' in row 2 .* expected"),
        ("time,a\n13 o'clock,1\n", {}, r"^time: .* in row 2 .* a date like 2024-01-31 12:00; --date-format reads"),
        ("time,a,a\n0,1,2\n", {}, r"^file: .* has two columns 'a'.*--values names others, --no-header with --skip-row"),
        ("0,1\n1,2\n", {"time": "0"}, r"^file: got '0, 1' in the first row of .* a header: --no-header names its colu"),
        ("0,1\n1,2\n", {"time": "when"}, r"^time: got 'when', .*: 0, 1; in a file without a header --no-header names"),
        ("2024-01-01 10:00,1\n2024-01-01 11:00,2\n", {"time": "2024-01-01 10:00"}, r"^file: got '2024.* --no-header"),
        ("5/1/24 9:30,1\n5/1/24 10:00,2\n", {"time": "5/1/24 9:30"}, r"^file: got '5/1/24 9:30, 1' .* --no-header"),
        ("site 7\n\ntime,a\n0,1\n", {}, r"^time: got 'time', .*: site 7; row 3 has it, --skip-rows 2 leaves out"),
        ("# time a\n0 1\n", {}, r"^time: .* row 1 has it behind a sign, --comment '#' reads it"),
        ("time,a\ns,degC\n0,1\n1,2\n", {}, r"^time: got 's' in row 2 .* --skip-bad-rows leaves such rows out"),
        ("time,a\n3.4.2024,1\n13.4.2024,2\nmean,2\n", {}, r"^time: got 'mean' in row 4 .* like '3.4.2024'; --skip-bad"),
        ("time,a\n0,cold\n1,warm\n2,3\n", {"skip_bad_rows": True}, r"^values: got 'cold' in row 2 .*--values columns"),
        ('t,a\n0,1\n1,"1,500"\n', {"time": "t", "skip_bad_rows": True}, r"^values: got '1,500' in row 3 .*--thousands"),
        ("time,a\n0,1\n", {"comment": "//"}, r"^comment: got '//', expected a single sign"),
        ("time,a\n0,1\n", {"skip_rows": -1}, r"^skip-rows: got -1, expected a number of lines"),
        ("d,m,y,a\n1,2,2024,1\n", {"time": ["d", "m", "y"]}, r"^time: got 'd m y', expected columns in this order: ye"),
        ("time,a\n0,1 %\n1,2 kW\n", {}, r"^values: got '1 %' in row 2 .* --missing names"),
        ("time,a\n0,1\n1,2,7\n", {}, r"^file: got 3 cells in row 3 of .*, expected 2 as in its header, time, a; --sep"),
        ("time,a\n0,1,7\n1,2,7\n", {}, r"^file: got 3 cells in row 2 of .*, expected 2 as in its header"),
        ('time,a\n0,1\n1,"2\n', {}, r"^file: got a quote in row 3 of .* without an end"),
        ("time,a\n202311,1\n202312,1\n202313,1\n", {}, r"^time: got '202313' in row 4 .* as YYYYMM.*--time-unit numbe"),
        ("time,a\n2023022823,1\n2023022900,1\n", {}, r"^time: got '2023022900' in row 3 .* as YYYYMMDDHH.*--time-unit"),
        ("time,a\n2024-03-31 01:30,1\n2024-03-31 02:30,1\n", BERLIN, r"^time: got '2024.*' in row 3 .* do not skip"),
        (f"time,a\n{FALL} 02:00,1\n2024-10-28,1\n{FALL},1\n2024-10-29,1\n", BERLIN, "rows in order of time"),
        (f"time,a\n{FALL} 02:00,1\n{FALL} 02:00,1\n{FALL} 02:00,1\n", BERLIN, "the double hour of autumn twice"),
        ("time,a\n1,1\n2,1\n", BERLIN, r"^zone: got 'Europe/Berlin', but 'time' has no dates"),
        (f"time,a\n{FALL} 02:00,1\n{FALL} 02:00,2\n", {}, r"twice with different values .* or --zone tells the double"),
    ],
)
def test_each_fault_has_one_line(written, text, options, message):
    path = written(text)
    names = {"time", "values", "sensor"} & options.keys()
    given, form = {name: options[name] for name in names}, {k: v for k, v in options.items() if k not in names}
    with pytest.raises(ValueError, match=message) as caught:
        read_series(path, **{"time": "time", **given}, table_format=TableFormat(**form))
    assert "\n" not in str(caught.value)


def test_labels_keep_times_apart(written):
    number = {"table_format": TableFormat(time_unit="number")}
    milliseconds = read_series(written("ms,x\n1700000000123,1\n1700000000124,2\n"), "ms", **number)
    assert milliseconds.label(1700000000124.0)[-3:] == "124"
    microseconds = read_series(written("us,x\n1700000000000123,1\n1700000000000124,2\n"), "us", **number)
    assert microseconds.label(1700000000000125.0) == "1700000000000125"
    seconds = read_series(written("s,x\n1700000000.123456,1\n1700000000.2,2\n"), "s", **number)
    assert [seconds.label(time) for time in (1700000000.123456, 0.1 + 0.2)] == ["1700000000.123456", "0.3"]
    found = read_series(written("t,x\n2024-01-01 00:00:00,1\n2024-01-01 00:00:01.5,2\n"), "t")
    assert [found.label(time) for time in found.times.tolist()] == ["2024-01-01 00:00:00", "2024-01-01 00:00:01.500000"]


@pytest.mark.parametrize(
    ("dates", "labels", "axis"),
    [
        (["2024-01-01T09:00+02:00", "2024-01-01T10:00+02:00"], "2024-01-01 11:00:00+02:00", "2024-01-01T11:00"),
        (["2024-01-01T09:00Z", "2024-01-01T10:00Z"], "2024-01-01 11:00:00+00:00", "2024-01-01T11:00"),
        (["2024-10-27T02:00+02:00", "2024-10-27T02:00+01:00"], "2024-10-27 03:00:00+01:00", "2024-10-27T03:00"),
        (["2024-01-01T00:00+01:00", "2024-01-02T00:00+01:00"], "2024-01-03 00:00:00+01:00", "2024-01-03T00:00"),
        (["2024-01-01", "2024-01-02"], "2024-01-03", "2024-01-03"),
    ],
)
def test_labels_have_the_offset_of_the_file(written, dates, labels, axis):
    """Of two offsets the last one's, which is said."""
    found = read_series(written("t,x\n" + "".join(f"{date},1\n" for date in dates)), "t")
    assert ["several offsets" in note for note in found.notes] == [True] * (dates[0][16:] != dates[-1][16:])
    assert (found.times.tolist(), found.label(2.0)) == ([0.0, 1.0], labels)
    assert found.axis(np.array([2.0]))[0] == np.datetime64(axis)


@pytest.mark.parametrize("given", ["", "-3h", "0D", "soon", "inf", "24", "P1.5M", "P0.5Y", "P", "PT", "pt1h", "-PT1H"])
def test_durations_that_are_none(written, given):
    table = read_series(written("when,x\n2024-01-01,1\n2024-01-02,2\n"), "when")
    with pytest.raises(ValueError, match=r"^horizon: got .* expected a length of time"):
        table.duration("horizon", given)
    numbers = read_series(written(GOOD), "time")
    with pytest.raises(
        ValueError, match=r"^horizon: got '24h', expected a number above 0; the times are .* --time-unit"
    ):
        numbers.duration("horizon", "24h")
    with pytest.raises(ValueError, match=r"^horizon: got '9999999D', expected at most 106751 days"):
        table.duration("horizon", "9999999D")


MIDNIGHT = "2024-01-01T00:00:00"


def iso(dates, unit="s"):
    return np.array(dates, f"datetime64[{unit}]")


def lines(times):
    return "t,x\n" + "".join(f"{time},{k % 5}\n" for k, time in enumerate(times))


SPELLINGS = [  # the times, options, the dates, what is said of them
    (["202311", "202312", "202401"], {}, ["2023-11", "2023-12", "2024-01"], "YYYYMM"),
    (["202311.0", "202312.0", "202401.0"], {}, ["2023-11", "2023-12", "2024-01"], "YYYYMM"),
    (["2023364", "2023365", "2024001"], {}, ["2023-12-30", "2023-12-31", "2024-01-01"], "YYYYDDD"),
    (["2023123123", "2023123124", "2024010101"], {}, ["2023-12-31T23", MIDNIGHT, "2024-01-01T01"], "YYYYMMDDHH"),
    (["202312312359", "202401010000"], {}, ["2023-12-31T23:59", MIDNIGHT], "YYYYMMDDHHMM"),
    (["19580329", "19580405"], {"date_format": "%Y%m%d"}, ["1958-03-29", "1958-04-05"], None),
    (["1704067200.25", "1704067200.5"], {}, [f"{MIDNIGHT}.250", f"{MIDNIGHT}.500"], "epoch stamps in s"),
    (["1704067200001", "1704067200002"], {}, [f"{MIDNIGHT}.001", f"{MIDNIGHT}.002"], "stamps in ms"),
    (["1704067200000000001", "1704067200000000003"], {}, [f"{MIDNIGHT}.{1:09}", f"{MIDNIGHT}.{3:09}"], "stamps in ns"),
    (["31.01.2024 06:00", "01.02.2024 06:00"], {}, ["2024-01-31T06", "2024-02-01T06"], "%d.%m.%Y %H:%M"),
    (["1/31/2024", "02/01/2024"], {}, ["2024-01-31", "2024-02-01"], "%m/%d/%Y"),
    (["1/31/2024 12:30:00 AM", "1/31/2024 1:05:00 PM"], {}, ["2024-01-31T00:30", "2024-01-31T13:05"], "%I:%M:%S %p"),
    (["2024-01-31 12:00 AM", "2024-02-01 12:00 AM"], {}, ["2024-01-31", "2024-02-01"], "%Y-%m-%d %I:%M %p"),
    (["2023Q3", "2023Q4", "2024Q1"], {}, ["2023-07", "2023-10", "2024-01"], None),
    (["2023-Q4", "2024-Q1"], {}, ["2023-10", "2024-01"], None),
    (["2023M09", "2023M10"], {}, ["2023-09", "2023-10"], None),
    (["202352", "202401", "202402"], {"date_format": "%G%V"}, ["2023-12-25", "2024-01-01", "2024-01-08"], None),
    (["2023-W52", "2024-W01"], {"date_format": "%G-W%V"}, ["2023-12-25", "2024-01-01"], None),
    (["2023-W52", "2024-W01"], {}, ["2023-12-25", "2024-01-01"], None),
    (["2023W52", "2024W01"], {}, ["2023-12-25", "2024-01-01"], None),
    (["2023-W52-7", "2024-W01-1"], {}, ["2023-12-31", "2024-01-01"], None),
    (["1994-S1", "1994-S2"], {}, ["1994-01-01", "1994-07-01"], None),
    (["1994H2", "1995H1"], {}, ["1994-07-01", "1995-01-01"], None),
    (["2024-01-01 00:00:00 UTC", "2024-01-01 01:00:00 UTC"], {}, [MIDNIGHT, "2024-01-01T01"], None),
    ([f"2024-01-01T0{k}+01:00[Europe/Berlin]" for k in range(2)], {}, [MIDNIGHT, "2024-01-01T01"], None),
    (["1388102418", "1388102478"], {"epoch": "1980-01-06"}, ["2024-01-01T00:00:18", "2024-01-01T00:01:18"], None),
    (["3786912000", "3786912060"], {"epoch": "1904-01-01"}, [MIDNIGHT, "2024-01-01T00:01"], None),
    (["757339200.5", "757339201"], {"epoch": "2000-01-01T12"}, [f"{MIDNIGHT}.500", "2024-01-01T00:00:01"], None),
    (["1072915200000"], {"epoch": "1989-12-31", "time_unit": "ms"}, ["2023-12-31"], None),
]


@pytest.mark.parametrize(("stamps", "options", "dates", "said"), SPELLINGS)
def test_spellings_of_dates_are_recognised_and_said(written, stamps, options, dates, said):
    found = read_series(written(lines(stamps)), "t", table_format=TableFormat(**options))
    assert [said in note for note in found.notes] == ([True] if said else [])
    assert (found.axis(found.times) == iso(dates, "ns")).all()
    labels = [found.label(time).replace(" ", "T") for time in found.times.tolist()]
    assert (
        iso([label[:-6] if label[-6:-2] in ("+00:", "+01:") else label for label in labels], "ns") == iso(dates, "ns")
    ).all()
    assert labels[0].endswith("+00:00") == ("epoch" in options or "UTC" in stamps[0] or "stamps" in (said or ""))
    assert labels[0].endswith("+01:00") == ("Berlin" in stamps[0])


@pytest.mark.parametrize("freq", ["h", "30min", "15min"])
@pytest.mark.parametrize("order", [1, -1])
def test_the_double_hour_of_autumn_is_told_by_order(written, freq, order):
    """pandas has the dates with their offsets. Numbers are of the clock: equal hours of the day are a day apart."""
    dates = pd.date_range("2024-10-25", "2024-10-29", freq=freq, tz="Europe/Berlin")
    found = read_series(written(lines(dates.tz_localize(None)[::order])), "t", table_format=TableFormat(**BERLIN))
    assert (found.dates(found.times) == dates).all()
    np.testing.assert_allclose(found.since_origin(dates), found.times, rtol=0, atol=1e-12)
    noon = found.times[dates.hour * 60 + dates.minute == 720]
    assert {*np.diff(noon)} == {found.duration("season", "1D")}
    two = written("t,s,x\n" + "".join(f"{date},{s},1\n" for s in "ab" for date in dates.tz_localize(None)))
    assert (
        read_series(two, "t", sensor="s", table_format=TableFormat(**BERLIN)).times.tolist()
        == np.repeat(found.times, 2).tolist()
    )


@pytest.mark.parametrize(
    ("times", "labels"),
    [
        (["2024-10-27 01:00", "2024-10-27 02:00", "2024-10-27 03:00"], ["01:00:00+02", "02:00:00+02", "03:00:00+01"]),
        (["2024-10-27 02:30", "2024-10-27 03:00", "2024-10-27 03:30"], ["02:30:00+01", "03:00:00+01", "03:30:00+01"]),
        (["2024-10-27 01:30", "2024-10-27 02:00", "2024-10-27 02:30"], ["01:30:00+02", "02:00:00+02", "02:30:00+02"]),
        (["2024-03-31 01:30", "2024-03-31 03:00"], ["01:30:00+01", "03:00:00+02"]),
        (["2024-10-27T02:00+02:00", "2024-10-27T02:00+01:00"], ["02:00:00+02", "02:00:00+01"]),
        (["1700000000", "1700003600"], ["23:13:20+01", "00:13:20+01"]),
    ],
)
def test_times_on_the_clock_of_a_place(written, times, labels):
    """A double hour that stands once is the one without a gap; the first, which is said, where both have one."""
    found = read_series(written(lines(times)), "t", table_format=TableFormat(**BERLIN))
    assert [found.label(time)[11:-3] for time in found.times.tolist()] == labels
    assert ["once" in note for note in found.notes if "epoch" not in note] == [True] * (times[0].endswith("27 01:00"))


def test_a_day_without_midnight_has_a_label(written):
    """In Sao Paulo 4 November 2018 began at 01:00."""
    path = written(lines(["2018-11-03 23:30", "2018-11-04 01:00", "2018-11-04 01:30"]))
    found = read_series(path, "t", table_format=TableFormat(zone="America/Sao_Paulo"))
    expected = ["2018-11-03 23:30:00-03:00", "2018-11-04 01:00:00-02:00", "2018-11-04 01:30:00-02:00"]
    assert found.labels(found.times) == expected


@pytest.mark.parametrize("fraction", [".4", ".400", ".123456"])
@pytest.mark.parametrize("freq", ["5min", "h", "D"])
def test_fractions_of_a_second_stay_in_what_is_written(written, fraction, freq):
    dates = pd.date_range(f"2024-01-01 00:00:00{fraction}", periods=30, freq=freq)
    found = read_series(written(lines(dates[:20])), "t")
    assert [pd.Timestamp(found.label(float(k))) for k in found.since_origin(dates)] == dates.tolist()


@pytest.mark.parametrize(
    "times",
    [
        ["0 days 22:00:00", "0 days 23:30:00", "1 days 01:00:00"],
        ["22:00:00", "23:30:00", '"1 day, 1:00:00"'],
        ["0 days", "1 days", "2 days"],
    ],
)
def test_lengths_of_time_are_times(written, times):
    """As pandas writes them, and Python."""
    found = read_series(written(lines(times)), "t")
    lengths = pd.to_timedelta([time.strip('"').replace(",", "") for time in times])
    assert [pd.Timedelta(found.label(time)) for time in found.times.tolist()] == [*lengths]
    assert found.duration("horizon", "36h") * pd.Timedelta(1, unit=found.unit) == pd.Timedelta("36h")


def test_weeks_in_digits_name_the_way(written):
    """They stay numbers where they cannot be months. Where most could be, the fault names the way too."""
    way = "--date-format %G%V: weeks"
    for few in (["202351", "202352", "202401"], ["202401"]):
        assert way in read_series(written(lines(few)), "t").notes[0]
    with pytest.raises(ValueError, match=way):
        read_series(written(lines(["202352", "202401", "202402"])), "t")


@pytest.mark.parametrize("stamps", [["190060", "190113"], ["2024000", "2024367"], ["0", "1704067200"], ["99", "100"]])
def test_other_numbers_stay_numbers(written, stamps):
    found = read_series(written("t,x\n" + "".join(f"{stamp},1\n" for stamp in stamps)), "t")
    assert (found.unit, found.times.tolist(), found.notes) == ("", [float(stamp) for stamp in stamps], ())


def test_the_unit_of_times_by_option(written):
    path = written("t,x\n0,1\n86400,2\n")
    found = read_series(path, "t", table_format=TableFormat(time_unit="s"))
    assert (found.label(found.times[1].item()), found.notes) == ("1970-01-02 00:00:00+00:00", ())
    path.write_text("t,x\n202312,1\n202401,2\n")
    found = read_series(path, "t", table_format=TableFormat(time_unit="number"))
    assert (found.times.tolist(), found.unit, found.notes) == ([202312.0, 202401.0], "", ())


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("t;x\n0;1,5\n1;-0,25\n", {}, ["separator: ';'", "decimal comma"]),
        ("t\tx\n0\t1.5\n1\t-0.25\n", {}, ["separator: tab"]),
        ("t   x\n0  1.5\n1     -0.25\n", {}, ["separator: space"]),
        ("t|x\n0|1.5\n1|-0.25\n", {}, ["separator: '|'"]),
        ("t;x\n0;1,500\n1;-0,250\n", {"separator": ";", "decimal": ","}, []),
        ('t,x\n0,"1,5"\n1,"-0,25"\n', {}, ["decimal comma"]),
        ("t#x\n0,0#1,5\n1,0#-0,25\n", {"separator": "#", "decimal": ","}, []),
        ('t,x\n0,1.5\n1,"-0.25"\n', {"thousands": ","}, []),
        ('t, x\n0, "1,5"\n1, "-0,25"\n', {}, ["decimal comma"]),
        ("\ufefft,x\n0,1.5\n1,-0.25\n", {}, []),
    ],
)
def test_separators_and_signs_of_numbers(written, text, options, said):
    found = read_series(written(text), "t", table_format=TableFormat(**options))
    assert (found.times.tolist(), found.values.flatten().tolist()) == ([0.0, 1.0], [1.5, -0.25])
    assert len(found.notes) == len(said)
    assert all(part in note for part, note in zip(said, found.notes, strict=True))


@pytest.mark.parametrize(
    ("encoding", "given", "said"),
    [
        ("utf-8-sig", None, 0),
        ("utf-16", None, 1),
        ("cp1252", None, 1),
        ("utf-16-be", "utf-16-be", 0),
    ],
)
def test_encodings(tmp_path, encoding, given, said):
    (tmp_path / "x.csv").write_bytes("t,T in °C\n0,1\n1,2\n".encode(encoding))
    found = read_series(tmp_path / "x.csv", "t", table_format=TableFormat(encoding=given))
    assert (found.channels, found.values.flatten().tolist(), len(found.notes)) == (("T in °C",), [1.0, 2.0], said)


def test_a_compressed_file_is_read(tmp_path):
    with gzip.open(tmp_path / "x.csv.gz", "wt") as file:
        file.write("t,x\n0,1\n1,2\n")
    assert read_series(tmp_path / "x.csv.gz", "t").values.flatten().tolist() == [1.0, 2.0]


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
def test_thousands(written, cells, decimal, thousands, values):
    text = "t;x\n" + "".join(f"{k};{cell}\n" for k, cell in enumerate(cells))
    found = read_series(written(text), "t", table_format=TableFormat(decimal=decimal, thousands=thousands))
    assert found.values.flatten().tolist() == values


def test_marks_of_missing_readings(written):
    """In any spelling of their number, and in values only."""
    path = written("t,a,b\n-999,-999.0,1\n0,2,bad\n9999,9.999e3,-99\n")
    found = read_series(path, "t", table_format=TableFormat(missing=("-999", "9999", "bad")))
    assert found.times.tolist() == [-999.0, 0.0, 9999.0]
    assert np.nan_to_num(found.values, nan=7.0).tolist() == [[7.0, 1.0], [2.0, 7.0], [7.0, -99.0]]


def test_spaces_around_a_cell_are_none_of_it(written):
    found = read_series(written("t, a, b\n0, NA,1 \n1, ,  \n2,3,\t4\n"), "t")
    assert np.nan_to_num(found.values, nan=7.0).tolist() == [[7.0, 1.0], [7.0, 7.0], [3.0, 4.0]]


def test_a_column_without_a_reading_leaves_the_others(written):
    found = read_series(written("t,a,b,c\n0,1,,2\n1,2,NA,3\n"), "t")
    assert (found.channels, found.values.tolist()) == (("a", "c"), [[1.0, 2.0], [2.0, 3.0]])
    assert found.notes == ("values: 'b' left out, without a reading",)


DOUBLED = "t,a,b\n0,1,2\n1,3,\n1,3,4\n2,5,6\n0,1,2\n"


def test_rows_that_do_not_contradict_each_other_are_merged(written):
    found = read_series(written(DOUBLED), "t")
    assert (found.times.tolist(), found.values.tolist()) == ([0, 1, 2], [[1, 2], [3, 4], [5, 6]])
    assert "row 6" in found.notes[0]  # out of order
    assert "2 of a time that another row has" in found.notes[1]


@pytest.mark.parametrize(("how", "a", "b"), [("mean", 5.0, 4.5), ("first", 3.0, 4.0), ("last", 7.0, 5.0)])
def test_rows_that_contradict_each_other_by_option(written, how, a, b):
    path = written("t,a,b\n0,1,2\n1,3,\n1,,4\n1,7,5\n2,5,6\n")
    found = read_series(path, "t", table_format=TableFormat(duplicates=how))
    assert (found.times.tolist(), found.values.tolist()) == ([0, 1, 2], [[1, 2], [a, b], [5, 6]])
    assert how in found.notes[0]


def test_sensors_of_one_time_are_no_duplicates(written):
    found = read_series(written("t , a,s\n1,3,x\n0,1,x\n0,2,y\n0,2,y\n"), "t", sensor="s ")
    assert (found.channels, found.times.tolist(), found.sensor) == (("a",), [0, 0, 1], ("x", "y", "x"))
    assert (found.values.flatten().tolist(), found.gap) == ([1, 2, 3], 1.0)


def test_lengths_of_the_calendar(written):
    """Their mean."""
    found = read_series(written("t,x\n2023-01-01,1\n2023-02-01,2\n"), "t")
    year = 365.2425
    lengths = {"12M": year, "1Y": year, "Y": year, "2MS": year / 6, "QE": year / 4, "5B": 7}
    assert {given: found.duration("horizon", given) for given in lengths} == pytest.approx(lengths, rel=1e-12)
    iso = {"PT0.5H": 1 / 48, "PT1.5H": 1 / 16, "P0.5D": 0.5, "P1M": year / 12, "P1Y2M": 7 / 6 * year, "P1W": 7}
    iso |= {"PT1M": 1 / 1440, "PT0,5S": 1 / 172800, "P1DT12H": 1.5, "P1M1D": year / 12 + 1, "P0.5W": 3.5}
    assert {given: found.duration("horizon", given) for given in iso} == pytest.approx(iso, rel=1e-12)
    for given in ("0M", "1MX", "QE-XYZ", "-1M", "1.5M"):
        with pytest.raises(
            ValueError, match=r"^horizon: got .* expected a length of time above 0, such as 24h, 7D or 12M"
        ):
            found.duration("horizon", given)


HOURS = [f"2024-01-{1 + k // 24:02} {k % 24:02}:00" for k in range(23, 27)]
YMD_H = [(date[:4], date[5:7], date[8:10], date[11:13]) for date in HOURS]


@pytest.mark.parametrize(
    ("text", "time", "options", "said"),
    [
        ("\n".join(f"{date},{k}" for k, date in enumerate(HOURS)), "1", {"no_header": True}, []),
        (
            "\n".join(f"{date};{k},0" for k, date in enumerate(HOURS)),
            "1",
            {"no_header": True},
            ["separator", "numbers"],
        ),
        (  # NDBC
            "#YY  MM DD hh mm WVHT\n#yr  mo dy hr mn m\n"
            + "".join(f"{y} {m} {d} {h} 00 {k}.0\n" for k, (y, m, d, h) in enumerate(YMD_H)),
            ["#YY", "MM", "DD", "hh", "mm"],
            {"skip_bad_rows": True},
            ["separator: space", "times: '#YY MM DD hh mm' were read as year, month", "rows: 1 of 5 left out"],
        ),
        (
            "# a buoy\n#YY  MM DD hh WVHT\n#yr  mo dy hr m\n"
            + "".join(f"{y[2:]} {int(m)} {int(d)} {int(h)} {k}.0 # ok\n" for k, (y, m, d, h) in enumerate(YMD_H)),
            ["YY", "MM", "DD", "hh"],
            {"comment": "#"},
            ["separator: space", "times: 'YY MM DD hh' were read as year, month, day, hour "],
        ),
        (  # ERDDAP, and a footer
            "time,a\nUTC,m\n" + "".join(f"{date},{k}\n" for k, date in enumerate(HOURS)) + 'mean,1.5\n"a, b, c",,,\n',
            "time",
            {"skip_bad_rows": True},
            ["rows: 3 of 7 left out as bad ones, the first is row 2: UTC, m"],
        ),
        (  # LibreView
            "Glucose Data,Generated on,2024\n\nTime,Record Type,,Note,Note,a\n"
            + "".join(f"{date},0,x,,,{k}\n" for k, date in enumerate(HOURS)),
            "Time",
            {"skip_rows": 1},
            [],
        ),
        (  # Dexcom
            "Index,Time,a\n1,,Jo\n2,,\n" + "".join(f"{k},{date},{k}\n" for k, date in enumerate(HOURS)) + "9,,\n",
            "Time",
            {"skip_bad_rows": True},
            ["rows: 3 of 7 left out as bad ones, the first is row 2: 1, Jo"],
        ),
        (  # annotated CSV
            "#datatype,string,dateTime,double\n#default,_result,,\n,result,_time,a\n"
            + "".join(f",,{date},{k}\n" for k, date in enumerate(HOURS)),
            "_time",
            {"comment": "#"},
            [],
        ),
        (  # psql, with a time that is none
            " _time | a \n-------+---\n"
            + "".join(f" {date} | {k}\n" for k, date in enumerate(HOURS))
            + " 2024-02-30 00:00 | 7\n(5 rows)\n\n",
            "_time",
            {"skip_bad_rows": True},
            ["separator: '|'", "rows: 3 of 7 left out as bad ones, the first is row 2: -------+---"],
        ),
        ("Date,Time,a\n" + "".join(f"{d[:10]},{d[11:]},{k}\n" for k, d in enumerate(HOURS)), ["Date", "Time"], {}, []),
        (
            "Date,Time,a\n" + "".join(f"{d[:10]} 00:00:00,{int(d[11:13])},{k}\n" for k, d in enumerate(HOURS)),
            ["Date", "Time"],
            {},
            [],
        ),
        (
            "Date,Time,a\n" + "".join(f"{y}{m}{d},{int(h + '00')},{k}\n" for k, (y, m, d, h) in enumerate(YMD_H)),
            ["Date", "Time"],
            {},
            [],
        ),
        (
            "d,h,a\n" + "".join(f"{d}/{m}/{y},{h}:00,{k}\n" for k, (y, m, d, h) in enumerate(YMD_H)),
            ["d", "h"],
            {"date_format": "%d/%m/%Y %H:%M"},
            [],
        ),
        ("t,a\n" + "".join(f"{d},{k}.0 °C\n" for k, d in enumerate(HOURS)), "t", {}, ["values: the unit '°C' in"]),
        ("t,a\n" + "".join(f"{d},USD {k}.0\n" for k, d in enumerate(HOURS)), "t", {}, ["values: the unit 'USD' in"]),
        ("t,a\n" + "".join(f"{d},R$ {k}.0\n" for k, d in enumerate(HOURS)), "t", {}, ["values: the unit 'R$' in"]),
        ("t,a\n" + "".join(f"{d},$ 1e{k}\n" for k, d in enumerate(HOURS)), "t", {}, ["values: the unit '$' in"]),
        (
            "t;a\n" + "".join(f"{d};{k},0%\n" for k, d in enumerate(HOURS)),
            "t",
            {},
            ["separator", "values: the", "numbers"],
        ),
        (  # the hour 24 is the next day's hour 0
            "t,a\n" + "".join(f"{d},{k}\n" for k, d in enumerate([HOURS[0], "2024-01-01 24:00", *HOURS[2:]])),
            "t",
            {},
            [],
        ),
    ],
)
def test_files_as_instruments_and_services_write_them(written, text, time, options, said):
    """The lines name the rows of the file, so each must stand where its reading does."""
    found = read_series(
        written(text),
        time,
        *([] if "no_header" in options else [["a" if "WVHT" not in text else "WVHT"]]),
        table_format=TableFormat(**options),
    )
    expected = [1, 10, 100, 1000] if "$ 1e" in text else [0, 1, 2, 3]
    assert ([found.label(time)[:16] for time in found.times.tolist()], found.values.flatten().tolist()) == (
        HOURS,
        expected,
    )
    assert [note.startswith(start) for note, start in zip(found.notes, said, strict=True)] == [True] * len(said)
    lines = text.split("\n")
    assert all(re.search(rf"\D{k}(\D|$)", lines[line - 1]) for k, line in enumerate(found.lines))


def test_a_column_without_a_name_is_left_out_and_may_be_asked_for(written):
    path = written(",t,x,\n0,0,1,\n1,1,2,\n")
    found = read_series(path, "t")
    assert (found.channels, found.notes) == (
        ("x",),
        ("values: 'Unnamed: 0', 'Unnamed: 3' left out, without a name (--values takes it)",),
    )
    assert read_series(path, "Unnamed: 0", ["x"]).times.tolist() == [0, 1]


LONG = [
    (i, f"2024-{1 + k:02}-01", level + k % 3) for i, level in (("a", 100), ("b", 200), ("c", 300)) for k in range(6)
]


def test_seconds_in_a_column_may_have_decimals(written):
    rows = "".join(f"2024,1,2,3,4,{s},{k}\n" for k, s in enumerate(("0.5", "1.5", "12.5", "13.0")))
    found = read_series(written("y,mo,d,h,mi,s,x\n" + rows), ["y", "mo", "d", "h", "mi", "s"])
    dates = pd.DatetimeIndex(found.labels(found.times))
    assert ((dates - pd.Timestamp("2024-01-02 03:04")).total_seconds() == [0.5, 1.5, 12.5, 13.0]).all()


def test_several_series_are_no_sensors(written, tmp_path):
    """The way is worded for sensors of one quantity; where they are taken for such, their levels are said."""
    path = written("unique_id,ds,y\n" + "".join(f"{i},{d},{y}\n" for i, d, y in LONG))
    several = "several series: forecast each by itself, from a file with its rows alone"
    with pytest.raises(
        ValueError, match=f"'unique_id' has 3 names; sensors of one quantity: --sensor unique_id; {several}"
    ):
        read_series(path, "ds", ["y"])
    found = read_series(path, "ds", ["y"], sensor="unique_id")
    assert "y: sensor 'b' is 100 off 'a', far more than their noise" in found.notes[-1]
    merged = read_series(path, "ds", ["y"], table_format=TableFormat(duplicates="mean"))
    assert merged.notes[-1].endswith("column 'unique_id' tells them apart")


def test_sensors_of_one_quantity_are_not_remarked(written):
    """Neither where they follow each other on another level: a sensor that was replaced."""
    random = np.random.default_rng(0)
    rows = [(k, s, 3 * s + random.normal()) for k in range(50) for s in range(2)]
    late = [(50 + k, 7, 1e3 + random.normal()) for k in range(50)]
    rows.append((49, 8, 4.0))  # a single reading tells no noise
    found = read_series(written("t,s,x\n" + "".join(f"{t},{s},{x}\n" for t, s, x in rows + late)), "t", sensor="s")
    assert found.notes == ()


def test_months_in_two_columns(written):
    found = read_series(written("year,month,x\n2023,11,1\n2023,12,2\n2024,1,3\n"), ["year", "month"])
    assert found.labels(found.times) == ["2023-11-01", "2023-12-01", "2024-01-01"]
