"""Forecasts of CSV files: steps, components, outliers, sensors."""

import numpy as np
import pandas as pd
import pytest
from cover import slow

from rfa.estimation import RobustFilter, Season, Trend
from rfa.forecasting.components import components_of
from rfa.forecasting.output import forecast_file
from rfa.forecasting.request import ForecastRequest, read_request
from rfa.forecasting.table import SeriesTable, TableFormat


def table(times, values, unit="", channels=None):
    values = np.asarray(values, dtype=np.float64).reshape(len(times), -1)
    channels = channels or tuple(f"x{k}" for k in range(values.shape[1]))
    return SeriesTable(np.asarray(times, dtype=np.float64), values, channels, unit)


@pytest.mark.parametrize("missing", [[], [50, 90]])
def test_steps_of_unix_seconds_do_not_drift(tmp_path, missing):
    """A gap of 0.1 s is known to 1e-7 s there, the mean of many gaps to 1e-9."""
    tenths = np.delete(np.arange(17_000_000_000, 17_000_000_200), missing)
    text = "".join(f"{time // 10}.{time % 10},{time % 5}\n" for time in tenths)
    (tmp_path / "a.csv").write_text("t,x\n" + text)
    number = TableFormat(time_unit="number")
    found, times = read_request(ForecastRequest(file=tmp_path / "a.csv", time="t", horizon="4", table_format=number))
    expected = [f"{17_000_000_199 + k:.0f}"[:-1] + f".{(9 + k) % 10}" for k in range(1, 41)]
    assert [found.label(time) for time in times] == [each.removesuffix(".0") for each in expected]


MIDNIGHT = pd.Timestamp("2024-01-01")
STEPS = {  # times, horizon, how many forecasts, their step
    **{
        f"hours as days, {d} decimals": ([f"{45292 + k / 24:.{d}f}" for k in range(60)], "1", 24, 1 / 24)
        for d in (4, 5, 6)
    },
    "months as years": ([f"{1990 + k / 12:.2f}" for k in range(90)], "5", 60, 1 / 12),
    "weeks as years": ([f"{2000 + k / 52:.2f}" for k in range(200)], "1", 52, 1 / 52),
    "each second minute, few between": ([f"{k}" for k in sorted({*range(0, 200, 2), 31, 77, 133, 191})], "20", 10, 2),
    "frames": ([f"{k / 30:.3f}" for k in range(90)], "10", 300, 1 / 30),
    "frames, some lost": ([f"{k / 25:.2f}" for k in range(200) if k % 31 != 5], "10", 250, 1 / 25),
    "cut to seconds": ([MIDNIGHT + pd.Timedelta(k * 10 // 7, "s") for k in range(200)], "600s", 420, 10 / 7),
    "cut to seconds, some lost": (
        [MIDNIGHT + pd.Timedelta(k * 13 // 5, "s") for k in range(200) if k % 41],
        "260s",
        100,
        2.6,
    ),
    "days without Sundays": ([f"{k}" for k in range(120) if k % 7], "24", 24, 1),
    "a minute in an hour is lost": ([MIDNIGHT + pd.Timedelta(k, "min") for k in range(900) if k % 60], "1h", 60, 1),
    "spreadsheet": (
        [MIDNIGHT + pd.Timedelta(3600 * 10**6 * k + k * 37 % 800 - 400, "us") for k in range(90)],
        "24h",
        24,
        1,
    ),
}


@pytest.mark.parametrize(("times", "horizon", "steps", "step"), STEPS.values(), ids=STEPS)
def test_rounded_times_have_the_step_of_what_was_rounded(tmp_path, times, horizon, steps, step):
    """To the error that the rounding leaves in a line, and as many forecasts as the horizon has of them."""
    (tmp_path / "a.csv").write_text("t,x\n" + "".join(f"{time},{k % 5}\n" for k, time in enumerate(times)))
    found, at = read_request(ForecastRequest(file=tmp_path / "a.csv", time="t", horizon=horizon))
    assert (len(at), at[1] - at[0]) == (steps, pytest.approx(step, rel=2e-3))
    assert abs(at[0] - float(found.times[-1]) - step) <= 1.0001 * step / 2


@pytest.mark.parametrize("start", ["2024-10-20", "2024-03-25"])
@pytest.mark.parametrize(("freq", "horizon"), [("D", "3D"), ("6h", "18h")])
def test_steps_on_the_clock_of_a_place_are_those_of_its_clock(tmp_path, start, freq, horizon):
    """A day of 23 or 25 hours among the readings makes no other step."""
    dates = pd.date_range(start, periods=17, freq=freq)
    (tmp_path / "a.csv").write_text("t,x\n" + "".join(f"{date},1\n" for date in dates[:14]))
    form = TableFormat(zone="Europe/Berlin")
    found, at = read_request(ForecastRequest(file=tmp_path / "a.csv", time="t", horizon=horizon, table_format=form))
    assert (found.dates(at) == dates[14:].tz_localize("Europe/Berlin")).all()


JANUARY = ["2020-01-31", "2020-02-29", "2020-03-31", "2020-05-31"]


@pytest.mark.parametrize(
    ("dates", "given", "expected"),
    [
        (["201911", "201912", "202001", "202003"], {"horizon": "3M"}, ["2020-04-01", "2020-05-01", "2020-06-01"]),
        (JANUARY, {"horizon": "92D"}, ["2020-06-30", "2020-07-31", "2020-08-31"]),
        (JANUARY, {"horizon": "3M", "step": "1MS"}, ["2020-06-01", "2020-07-01", "2020-08-01"]),
        pytest.param(
            ["0987-01-01", "0988-01-01", "0989-01-01"],
            {"horizon": "1Y"},
            ["0990-01-01"],
            marks=pytest.mark.skipif(pd.__version__ < "3", reason="dates of pandas 2 begin in 1677"),
        ),
        (
            ["2020-01-29", "2020-01-30", "2020-01-31", "2020-02-03", "2020-02-04"],
            {"horizon": "5B"},
            ["2020-02-05", "2020-02-06", "2020-02-07", "2020-02-10", "2020-02-11"],
        ),
        (["2020-01-29", "2020-01-30"], {"horizon": "1M", "step": "Q"}, "horizon: got '1M', expected at least one step"),
        (["2020-02-27", "2020-02-28"], {"horizon": "1M", "step": "10D"}, ["2020-03-09", "2020-03-19"]),
        (["2020-01-29", "2020-01-30"], {"horizon": "3M", "step": "M"}, ["2020-02-29", "2020-03-30", "2020-04-30"]),
        (["2020-01-29", "2020-01-30"], {"horizon": "9Y", "step": "1QE-JAN"}, None),
        (["2020-01-29", "2020-01-30"], {"horizon": "99999Y"}, "horizon: got '99999Y', expected "),
        (
            ["2020-01-29 06:00+01:00", "2020-02-29 06:00+01:00", "2020-03-29 06:00+01:00"],
            {"horizon": "2M"},
            ["2020-04-29 06:00:00+01:00", "2020-05-29 06:00:00+01:00"],
        ),
    ],
)
def test_steps_of_the_calendar(tmp_path, dates, given, expected):
    (tmp_path / "a.csv").write_text("t,x\n" + "".join(f"{date},{k}\n" for k, date in enumerate(dates)))
    request = ForecastRequest(file=tmp_path / "a.csv", time="t", **given)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read_request(request)
        return
    found, times = read_request(request)
    labels = [found.label(time) for time in times.tolist()]
    assert labels == expected if expected else (len(labels), labels[0], labels[-1]) == (36, "2020-01-31", "2028-10-31")
    fixed = given.get("step") == "10D"
    assert ["of the calendar" in note for note in found.notes if note.startswith("steps: ")] == [True] * (not fixed)


def test_words_are_components():
    one = table(np.arange(100.0), np.zeros(100), "h")
    model = components_of(["trend", "season:1D:3"], one)
    assert (model.components.components, model.period) == ((Trend(), Season(24.0, 3)), None)
    both = components_of(["level", "season:6h", "season:2D:1", "cycle:10h", "ar"], one)
    assert [component.name for component in both.components.components] == [
        "level",
        "season 6h",
        "season 2D",
        "cycle",
        "ar",
    ]
    assert components_of(["season:2h"], one).components.components == (Season(2.0, 1),)  # two readings show one wave
    assert components_of(["level", "season:7D:free"], table(np.arange(400.0), np.zeros(400), "h")).period == 168.0
    for words, expected in (
        (["season:1D:free"], "level, trend or ar"),
        (["level", "season:1D:free", "season:6h:free"], "one free"),
    ):
        with pytest.raises(ValueError, match=expected):
            components_of(words, one)


def test_a_day_of_25_hours_keeps_its_season(tmp_path):
    """A step at seven on the clock stays there, through the night and after it."""
    dates = pd.date_range("2024-10-13", "2024-10-29", freq="h", tz="Europe/Berlin", inclusive="left")
    values = pd.Series(np.where(dates.hour >= 7, 10.0, 2.0) + 0.1 * np.sin(np.arange(len(dates))), dates)
    past = values[:"2024-10-26"]
    rows = "".join(f"{date},{value}\n" for date, value in zip(past.index.tz_localize(None), past, strict=True))
    (tmp_path / "a.csv").write_text("t,x\n" + rows)
    options = {"components": ["level", "season:P1D:free"], "table_format": TableFormat(zone="Europe/Berlin")}
    request = ForecastRequest(file=tmp_path / "a.csv", time="t", horizon="49h", **options)
    found = forecast_file(request, tmp_path / "out")["channels"]["x"]
    assert pd.to_datetime(found["times"], utc=True).tolist() == values.index[len(past) :].tolist()
    np.testing.assert_allclose(found["mean"], values[len(past) :], atol=0.5)


def write_csv(path, one):
    names = ",".join(["t", *one.channels])
    rows = [
        ",".join(repr(float(x)) if x == x else "" for x in (time, *row))
        for time, row in zip(one.times, one.values, strict=True)
    ]
    path.write_text("\n".join([names, *rows]) + "\n")
    return path


@slow
def test_intervals_hold_what_they_say(tmp_path):
    """20 levels with noise, all parameters fitted: of 200 later readings near 50 % and 90 % are inside."""
    random = np.random.default_rng(3)
    values = (0.3 * random.normal(size=(70, 20))).cumsum(0) + random.normal(size=(70, 20))
    file = write_csv(tmp_path / "x.csv", table(np.arange(60.0), values[:60]))
    request = ForecastRequest(file=file, time="t", horizon="10", components=["level"])
    found = forecast_file(request, tmp_path / "out")["channels"]
    for level, least, most in (("50", 0.35, 0.65), ("90", 0.8, 0.98)):  # the ten of a series depend on each other
        inside = [
            (lower <= truth) & (truth <= upper)
            for place in range(20)
            for truth, lower, upper in zip(
                values[60:, place], *found[f"x{place}"]["intervals"][level].values(), strict=True
            )
        ]
        assert least < np.mean(inside) < most


def test_parameters_come_from_the_last_readings_and_outliers_from_all(tmp_path, monkeypatch):
    random = np.random.default_rng(1)
    values = random.normal(size=60)
    values[5] = 40.0
    monkeypatch.setattr("rfa.forecasting.filter._FITTED_READINGS", 30)
    file = write_csv(tmp_path / "x.csv", table(np.arange(60.0), values))
    request = ForecastRequest(file=file, time="t", horizon="2", components=["level"])
    found = forecast_file(request, tmp_path / "out")["channels"]["x0"]
    model = components_of(["level"], table(np.arange(60.0), values))
    fitted = RobustFilter(model.components).fit(np.arange(30.0, 60.0), values[30:]).parameters
    assert found["parameters"] == pytest.approx(fitted, rel=1e-6, abs=1e-9)
    assert (found["fitted_readings"], [each["time"] for each in found["outliers"]]) == (30, ["5"])


@pytest.mark.parametrize("word", ["damped-trend", "ar"])
def test_a_factor_that_is_rounded_to_zero_is_handed_on(tmp_path, word):
    """What is left after a unit of time, where readings are many units apart and say nothing of the next one."""
    times, values = 1e5 * np.arange(40.0), np.random.default_rng(3).normal(size=40)
    file = write_csv(tmp_path / "x.csv", table(times, values))
    request = ForecastRequest(file=file, time="t", horizon="2e5", components=[word])
    found = forecast_file(request, tmp_path / "out")["channels"]["x0"]
    assert all(0 <= value <= 1 for name, value in found["parameters"].items() if name in ("damping.trend", "ar.L1"))


@pytest.mark.parametrize("sensors", [("new",), ("old", "new")])
def test_a_sensor_that_the_last_readings_lack_takes_the_noise_of_the_others(tmp_path, monkeypatch, sensors):
    monkeypatch.setattr("rfa.forecasting.filter._FITTED_READINGS", 30)
    values = np.random.default_rng(1).normal(size=60)
    labels = [sensors[0] if k < 25 else "new" for k in range(60)]
    rows = [f"{k},{labels[k]},{float(values[k])!r}" for k in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["t,s,x", *rows]) + "\n")
    request = ForecastRequest(file=tmp_path / "x.csv", time="t", horizon="2", sensor="s", components=["level"])
    found = forecast_file(request, tmp_path / "out")["channels"]["x"]
    level = RobustFilter(components_of(["level"], table(np.arange(60.0), values)).components)
    level.fit(np.arange(30.0, 60.0), values[30:], sensor=["new"] * 30)
    noise = level.parameters["sigma2.irregular.new"]
    expected = level.parameters | {f"sigma2.irregular.{sensor}": noise for sensor in sensors}
    assert found["parameters"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found["sensor"] == "new"


def test_a_sensor_that_fell_silent_and_one_that_never_read_a_column(tmp_path, monkeypatch):
    """Their empty rows change nothing."""
    monkeypatch.setattr("rfa.forecasting.filter._FITTED_READINGS", 30)
    random = np.random.default_rng(1)
    rows = [
        (k, sensor, *(repr(float(x)) if there else "" for x, there in zip(random.normal(size=2), read, strict=True)))
        for k in range(60)
        for sensor, read in (("a", (True, True)), ("b", (k < 20, False)))
    ]
    found = []
    for some in (rows, [row for row in rows if row[2]]):
        (tmp_path / "x.csv").write_text("\n".join(["t,s,x,y", *(",".join(map(str, row)) for row in some)]) + "\n")
        request = ForecastRequest(file=tmp_path / "x.csv", time="t", horizon="2", sensor="s")
        found.append(forecast_file(request, tmp_path / "out", overwrite=True)["channels"])
    assert found[0] == found[1]
    assert set(found[0]["x"]["parameters"]) > {"sigma2.irregular.a", "sigma2.irregular.b"}
    assert "sigma2.irregular.b" not in found[0]["y"]["parameters"]
