"""Forecasts of CSV files: the choice of components, outliers, windows, naive forecasts, training that is stopped."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from cover import slow
from safetensors.torch import load_file
from training.runs import at_step, contents, ctrl_c

from rfa.estimation import RobustFilter, Season, Trend
from rfa.forecasting.components import components_of
from rfa.forecasting.network import (
    NetworkRequest,
    SeriesWindows,
    forecast_by_network,
    read_training_data,
    split_windows,
)
from rfa.forecasting.request import FILES, ForecastRequest, check_out, read_request
from rfa.forecasting.table import SeriesTable, TableFormat
from rfa.models import TimeSeriesCollator
from rfa_lab.training import Stopped
from rfa_lab.training.forecast_network import forecast_file, load_network, resume_network, train_network
from rfa_lab.training.naive_forecast import learned_naive

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def table(times, values, unit="", channels=None):
    values = torch.as_tensor(values, dtype=torch.float64).reshape(len(times), -1)
    channels = channels or tuple(f"x{k}" for k in range(values.shape[1]))
    return SeriesTable(torch.as_tensor(times, dtype=torch.float64), values, channels, unit)


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
        (
            ["2020-01-29", "2020-01-30"],
            {"horizon": "1M", "step": "Q"},
            "horizon: got '1M', expected at least one step, Q",
        ),
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


def test_windows_of_a_month_reach_the_next_month(tmp_path):
    """A mean month has 30.4 days, and half of all months 31."""
    months = [f"{2000 + k // 12}-{1 + k % 12:02}-01,{k % 5}" for k in range(60)]
    (tmp_path / "a.csv").write_text("t,x\n" + "\n".join(months) + "\n")
    data = read_training_data(NetworkRequest(files=(str(tmp_path / "a.csv"),), time="t", horizon="1M"))
    assert {place.end - place.now for place in data.split.train} == {2}
    assert [place.now for place in data.split.train] == list(range(3, 47))  # the first 48 rows are for training


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
    monkeypatch.setattr("rfa.forecasting.filter._FITTED", 30)
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
    monkeypatch.setattr("rfa.forecasting.filter._FITTED", 30)
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
    monkeypatch.setattr("rfa.forecasting.filter._FITTED", 30)
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


def test_windows_are_what_was_seen_and_what_came_within_the_horizon():
    times = [0.0, 1.0, 1.5, 4.0, 5.0, 6.5, 7.0, 9.0, 9.5, 12.0, 13.0, 14.0]
    values = [1.0, 2.0, math.nan, 4.0, 5.0, 6.0, 7.0, math.nan, 9.0, 10.0, 11.0, 12.0]
    one = table(times, values)
    split = split_windows([one], 2.0, 0.4, seed=0)
    border = times[7]  # the last 40 % of 12 rows begin here
    expected = []
    for now, time in enumerate(times):
        later = [k for k in range(now + 1, 12) if times[k] <= time + 2]
        seen = sum(not math.isnan(values[k]) for k in range(now + 1))
        if not math.isnan(values[now]) and seen >= 4 and any(not math.isnan(values[k]) for k in later):
            expected.append((now, later))
    train = [(now, later) for now, later in expected if times[later[-1]] < border]
    valid = [(now, later) for now, later in expected if now >= 6]
    found = [[(p.now, list(range(p.now + 1, p.end))) for p in places] for places in (split.train, split.valid)]
    assert found == [train, valid]
    assert train
    example = SeriesWindows([one], split.valid, context=3)[0]
    now, later = valid[0]
    rows = [now - 2, now - 1, now, *later]
    np.testing.assert_array_equal(example["times"], [times[k] - times[now] for k in rows])
    seen = [values[k] if k <= now else math.nan for k in rows]
    asked = [values[k] if k > now else math.nan for k in rows]
    np.testing.assert_array_equal(example["values"][:, 0], seen)
    np.testing.assert_array_equal(example["targets"][:, 0], asked)


def test_windows_of_unix_seconds_hold_all_rows_of_the_horizon():
    """Times are then known to 1e-7 s: 21 steps of 0.1 s are 2.1 s for every window."""
    one = table(1.7e9 + 0.1 * np.arange(200), np.sin(np.arange(200)))
    split = split_windows([one], 2.1, 0.2, seed=0)
    assert {p.end - p.now - 1 for p in split.train} == {21}


def test_a_network_sees_the_same_on_a_high_level(tmp_path):
    """As of a meter's total: training, forecasts and outliers. The readings are multiples of 1/64, so exact."""
    level = 1e9
    hours = np.arange(120.0)
    values = np.round(64 * (10 + 4 * np.sin(2 * np.pi * hours / 24))) / 64
    values[60] += 50
    found = []
    for above in (0.0, level):
        file = write_csv(tmp_path / "x.csv", table(hours, above + values))
        request = ForecastRequest(file=file, time="t", horizon="12")
        training = {"steps": 4, "context": 24, "batch_size": 8, **SIZES}
        found.append(forecast_file(request, tmp_path / f"{above}", model="network", training=training))
    low, high = (each["channels"]["x0"] for each in found)
    assert np.ptp(low["mean"]) > 0
    rounding = {"rtol": 0, "atol": 1e-5}  # of training in float32, which is not told the level
    np.testing.assert_allclose(np.subtract(high["mean"], level), low["mean"], **rounding)
    for level_of, ends in low["intervals"].items():
        for name, end in ends.items():
            np.testing.assert_allclose(np.subtract(high["intervals"][level_of][name], level), end, **rounding)
    assert [one["time"] for one in high["outliers"]] == [one["time"] for one in low["outliers"]]
    for score in ("nll", "mse", "crps"):
        assert found[1]["scores"]["network"][score] == pytest.approx(found[0]["scores"]["network"][score], rel=1e-5)


def test_of_many_series_some_are_held_out():
    several = [table(np.arange(12.0), np.arange(12.0) + k) for k in range(10)]
    split = split_windows(several, 2.0, 0.3, seed=1)
    train, valid = ({p.series for p in places} for places in (split.train, split.valid))
    assert (len(train), len(valid), train & valid) == (7, 3, set())
    assert split == split_windows(several, 2.0, 0.3, seed=1)
    assert valid != {p.series for p in split_windows(several, 2.0, 0.3, seed=2).valid}


def test_naive_forecasts():
    """Of a pattern that repeats each day the value a day before is exact; of a walk the last value is best."""
    hours = np.arange(24.0 * 8)
    pattern = table(hours, np.sin(2 * np.pi * hours / 24) + 0.1 * np.cos(2 * np.pi * hours / 8), "h")
    split = split_windows([pattern], 30.0, 0.2, seed=0)
    naive = learned_naive([pattern], split.train)
    assert naive.words == "value 1D before"
    place = split.valid[0]
    found, truth = naive(pattern, place), pattern.values[place.now + 1 : place.end]
    torch.testing.assert_close(found.mean, truth, rtol=0, atol=1e-12)  # rounding of a sine
    random = np.random.default_rng(0)
    walk = table(hours, random.normal(size=len(hours)).cumsum(), "h")
    split = split_windows([walk], 10.0, 0.2, seed=0)
    naive = learned_naive([walk], split.train)
    assert naive.words == "last value"
    errors = {lead: [] for lead in (1, 10)}
    for p in split.train:
        for lead in (1, 10):
            if p.now + lead < p.end:
                errors[lead].append(float(walk.values[p.now + lead, 0] - walk.values[p.now, 0]))
    found = naive(walk, split.train[0])
    assert set(found.mean.flatten().tolist()) == {float(walk.values[split.train[0].now, 0])}
    near, far = (math.sqrt(np.mean(np.square(errors[lead]))) for lead in (1, 10))
    assert near < float(found.stddev[0, 0]) < float(found.stddev[-1, 0]) < far  # bins hold several leads


@pytest.fixture(scope="module")
def wave(tmp_path_factory):
    """A request of eight steps on one short file of two channels."""
    random = np.random.default_rng(0)
    times = random.exponential(size=70).cumsum()
    values = np.stack([np.sin(times), 100 + 5 * np.cos(times)], 1) + 0.1 * random.normal(size=(70, 2))
    values[12:20, 1] = np.nan
    folder = tmp_path_factory.mktemp("wave")
    file = write_csv(folder / "x.csv", table(times, values))
    request = NetworkRequest(files=(str(file),), time="t", horizon="4", steps=8, context=12, batch_size=8, **SIZES)
    train_network(request, folder / "whole")
    return request, folder


def test_a_training_that_was_stopped_ends_at_the_same_network(wave, tmp_path):
    request, folder = wave
    with pytest.raises(Stopped):
        train_network(request, tmp_path / "net", progress=at_step(3, ctrl_c))
    assert json.loads((tmp_path / "net" / "network.json").read_text())["finished"] is False
    record = resume_network(tmp_path / "net")
    whole = json.loads((folder / "whole" / "network.json").read_text())
    assert record["validation_losses"] == pytest.approx(whole["validation_losses"], abs=1e-5)  # float32
    expected = load_file(folder / "whole" / "model" / "model.safetensors")
    for name, found in load_file(tmp_path / "net" / "model" / "model.safetensors").items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-5)
    before = contents(tmp_path)
    assert resume_network(tmp_path / "net") == record
    assert contents(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "net").iterdir()) == ["checkpoints", "model", "network.json"]


def test_the_best_weights_are_kept(wave):
    request, folder = wave
    model, record = load_network(folder / "whole")
    data = read_training_data(NetworkRequest(**record["request"]))
    windows = SeriesWindows(data.series, data.split.valid, data.context)
    losses = []
    for index in range(0, len(windows), request.batch_size):
        batch = TimeSeriesCollator()([windows[k] for k in range(index, min(index + request.batch_size, len(windows)))])
        losses += [model(**batch).loss.item()] * len(batch["times"])
    assert np.mean(losses) == pytest.approx(min(record["validation_losses"]), abs=1e-4)  # float32, other padding
    assert len(record["validation_losses"]) == 8


@torch.no_grad()
def test_scores_are_those_of_the_forecasts(wave):
    """The negative log likelihood of the windows, in spreads of the channels."""
    _, folder = wave
    model, record = load_network(folder / "whole")
    data = read_training_data(NetworkRequest(**record["request"]))
    windows = SeriesWindows(data.series, data.split.valid, data.context)
    spread = torch.tensor(model.config.spread)
    total, inside, count = 0.0, 0.0, 0
    for example in (windows[k] for k in range(len(windows))):
        found = model(example["times"][None], example["values"][None]).distribution
        seen = ~example["targets"].isnan()
        likelihood = found.log_prob(example["targets"].nan_to_num()[None])[0] + spread.log()
        total, count = total - float(likelihood[seen].sum()), count + int(seen.sum())
        draws = torch.distributions.StudentT(found.df, found.loc, found.scale).sample((2000,))
        share = (draws < example["targets"].nan_to_num()).float().mean(0)[0]
        inside += float(((share > 0.05) & (share < 0.95))[seen].sum())
    scores = record["scores"]["network"]
    assert scores["targets"] == count
    assert scores["nll"] == pytest.approx(total / count, abs=1e-4)  # float32
    assert scores["coverage"] == pytest.approx(inside / count, abs=0.05)  # readings near the ends of the intervals


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_network_whose_files_changed_is_refused(wave, tmp_path, name):
    """One bit of the last number of the weights, or one digit of the configuration."""
    _, folder = wave
    shutil.copytree(folder / "whole", tmp_path / "net")
    file = tmp_path / "net" / "model" / name
    content = bytearray(file.read_bytes())
    content[content.rindex(b"8") if name == "config.json" else -1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^network: .*model cannot be read .*{name} is not as it was saved"):
        load_network(tmp_path / "net")


def test_a_training_does_not_go_on_with_other_files(wave, tmp_path):
    """A file that came later, and one that has changed."""
    request, folder = wave
    file, later = tmp_path / "files" / "x.csv", tmp_path / "files" / "y.csv"
    file.parent.mkdir()
    file.write_bytes((folder / "x.csv").read_bytes())
    request = replace(request, files=(str(file.parent),))
    with pytest.raises(Stopped):
        train_network(request, tmp_path / "net", progress=at_step(2, ctrl_c))
    later.write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"^file: got '[^,]*y.csv', expected the files with which training began"):
        resume_network(tmp_path / "net")
    later.unlink()
    file.write_text(file.read_text() + "900,1,1\n")
    with pytest.raises(ValueError, match=r"^file: got .*x.csv.*, expected the files with which training began"):
        resume_network(tmp_path / "net")
    with pytest.raises(ValueError, match="--resume or --overwrite"):
        train_network(request, tmp_path / "net")


def test_a_network_is_not_replaced_where_the_new_data_are_bad(wave, tmp_path):
    """Here the second column is first read in the part that is held out."""
    request, folder = wave
    shutil.copytree(folder / "whole", tmp_path / "net")
    values = np.arange(140.0).reshape(70, 2)
    values[:60, 1] = np.nan
    file = write_csv(tmp_path / "late.csv", table(np.arange(70.0), values))
    before = contents(tmp_path / "net")
    with pytest.raises(ValueError, match=r"^values: got \"no reading of 'x1' in the part for training\""):
        train_network(replace(request, files=(str(file),)), tmp_path / "net", overwrite=True)
    assert contents(tmp_path / "net") == before


def test_a_one_step_forecast_does_not_see_its_reading(wave):
    """Nor what comes later, where later readings do not change the scale."""
    _, folder = wave
    forecaster, _ = forecast_by_network(folder / "whole")
    _, record = load_network(folder / "whole")
    data = read_training_data(NetworkRequest(**record["request"]))
    one = data.series[0]
    query = one.times[-1:].numpy() + 1.0
    first = forecaster(one, query)
    other = one._replace(values=one.values.clone())
    other.values[40, 0] += 0.01  # not so much that the median deviation moves
    second = forecaster(other, query)
    before, after = (found[0].past["estimate"].to_numpy() for found in (first, second))
    at = int(np.flatnonzero(first[0].past["time"] == float(one.times[40]))[0])
    same = abs(before[: at + 1] - after[: at + 1])
    assert before[at + 1] != after[at + 1]
    assert max(same) < 0.02
    other.values[40, 0] += 1e4
    found = forecaster(other, query)[0].past
    assert found.loc[found["outlier"], "reading"].tolist() == [float(other.values[40, 0])]


def test_a_folder_with_a_stopped_training_may_be_resumed_only(tmp_path):
    (tmp_path / "network").mkdir()
    check_out(tmp_path, overwrite=False, resume=True)
    with pytest.raises(ValueError, match="has network already"):
        check_out(tmp_path, overwrite=False)
    (tmp_path / "forecast.csv").touch()
    with pytest.raises(ValueError, match=r"has forecast\.csv, network already"):
        check_out(tmp_path, overwrite=False, resume=True)
    check_out(tmp_path, overwrite=True)


def test_a_training_on_the_file_is_stopped_and_resumed(wave, tmp_path):
    _, folder = wave
    request = ForecastRequest(file=folder / "x.csv", time="t", horizon="4")
    given = {"model": "network", "training": {"steps": 3, "context": 12, "batch_size": 8, **SIZES}}
    with pytest.raises(Stopped):
        forecast_file(request, tmp_path / "out", **given, training_progress=at_step(1, ctrl_c))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["network"]
    other = tmp_path / "other.csv"
    other.write_text((folder / "x.csv").read_text() + "900,1,1\n")
    with pytest.raises(ValueError, match=r"^file: got .*other.csv', expected the file on which"):
        forecast_file(
            ForecastRequest(file=other, time="t", horizon="4"), tmp_path / "out", model="network", resume=True
        )
    for changes, training, says in [
        ({"horizon": "3"}, {}, r"^horizon: got '3', expected '4', with which the training in .*network began"),
        ({"values": ["x0"]}, {}, r"^values: got \['x0'\], expected None"),
        ({}, {"steps": 9}, r"^steps: got 9, expected 3"),
        ({}, {"preset": "m2-sc-rfa"}, r"^preset: got 'm2-sc-rfa', expected 'rfa'"),
        ({}, {"seed": 7}, r"^seed: got 7, expected 0"),
        ({"table_format": TableFormat(missing=("9",))}, {}, r"^missing: got \('9',\), expected \(\), with which"),
    ]:
        with pytest.raises(ValueError, match=says):
            forecast_file(
                replace(request, **changes), tmp_path / "out", model="network", training=training, resume=True
            )
    found = forecast_file(request, tmp_path / "out", **given, resume=True)
    assert found["scores"]["network"]["targets"] > 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*FILES, "network"}
