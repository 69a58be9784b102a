"""What a caller of `RobustFilter` gives and gets back: kinds of input, missing values, labels of rows, dates."""

import importlib
import importlib.util
import re
import warnings
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pytest
import torch

from rfa.estimation import Level, RobustFilter, Season, Trend
from rfa.estimation.time_axis import TimeAxis

from .series_models import column

NILE = column("nile.csv", "volume")
YEARS = np.arange(1871.0, 1971.0)
FIXED = {"sigma2.level": 1469.0, "sigma2.irregular": 15099.0}
SEASON = {"level": 0.1, "season": 0.1, "sigma2.irregular": 1.0}


def test_kinds_of_input_give_the_same_and_their_own_kind():
    kinds = (YEARS, NILE), (torch.tensor(YEARS), torch.tensor(NILE)), (YEARS.tolist(), NILE.tolist())
    expected, tensor, listed, pandas = (
        RobustFilter(Level()).fit(*given, fixed=FIXED).filter() for given in (*kinds, (pd.Series(NILE, index=YEARS),))
    )
    assert isinstance(tensor.mean, torch.Tensor)
    assert isinstance(pandas.mean, pd.Series)
    for found in (tensor, listed, pandas):
        np.testing.assert_allclose(np.asarray(found.mean), expected.mean, rtol=1e-12)
    assert pandas.states["level"].loc[1900.0] == pytest.approx(expected.mean[29])
    table = expected.to_pandas()
    assert table.index.tolist() == YEARS.tolist()
    assert set(table) == {*["value", "mean", "variance", "lower", "upper", "weight", "outlier", "innovation", "level"]}


def test_dates_are_in_the_unit_that_is_stated():
    """Days in hours: the variance of a day is 24 times that of an hour. Time zones, and dates of the library."""
    days = pd.date_range("2024-03-01", periods=30, freq="D")
    values = np.sin(np.arange(30.0))
    fixed = {"sigma2.level": 0.24, "sigma2.irregular": 1.0}
    daily = RobustFilter(Level(), robust=False).fit(pd.Series(values, days), fixed=fixed)
    hourly = RobustFilter(Level(), robust=False, time_unit="hour")
    hourly.fit(pd.Series(values, days.tz_localize("UTC")), fixed={**fixed, "sigma2.level": 0.01})
    np.testing.assert_allclose(daily.filter().mean, hourly.filter().mean, rtol=1e-10)
    assert daily.forecast(2).times.tolist() == [pd.Timestamp("2024-03-31"), pd.Timestamp("2024-04-01")]
    listed = RobustFilter(Level(), robust=False).fit([day.date() for day in days], values, fixed=fixed)
    later = date(2024, 4, 4)
    assert listed.forecast([later]).mean == pytest.approx(daily.forecast([later]).mean, rel=1e-12)
    assert daily.forecast([later]).variance.iloc[0] > daily.forecast(1).variance.iloc[0]
    months = pd.Series(values, pd.period_range("2020-01", periods=30, freq="M"))
    monthly = RobustFilter(Level()).fit(months.index.to_timestamp(), values, fixed=fixed)
    assert monthly.forecast(2).times.strftime("%Y-%m-%d").tolist() == ["2022-07-01", "2022-08-01"]


def test_steps_follow_the_calendar_of_the_index():
    """And forecasts have its kind and zone. pandas continues each index."""
    values = np.random.default_rng(0).normal(size=12)
    for index in (
        pd.period_range("2021-01", periods=12, freq="M", name="month"),
        pd.date_range("2021-01-01", periods=12, freq="MS", tz="Europe/Paris"),
        pd.date_range("2021-03-20", periods=12, freq="D", tz="Europe/Paris"),  # one day of them has 23 hours
        pd.date_range("2021-01-31", periods=12, freq="ME"),
    ):
        filter = RobustFilter(Level()).fit(pd.Series(values, index=index))
        make = pd.period_range if isinstance(index, pd.PeriodIndex) else pd.date_range
        following = make(index[-1], periods=3, freq=index.freq, name=index.name)[1:]
        found = filter.forecast(2)
        pd.testing.assert_index_equal(found.times, following)
        pd.testing.assert_index_equal(found.mean.index, following)
    filter.update(pd.Timestamp("2022-01-15"), 0.1)
    assert str(filter.forecast(1).times[0])[:10] == "2022-01-31"


def test_steps_without_a_frequency_follow_the_dates():
    """Ends of months, two sensors at each date; dates without a rule have no next one."""
    ends = pd.date_range("2019-12-31", periods=5, freq="ME")
    fixed = {"sigma2.level": 0.1}
    filter = RobustFilter(Level()).fit(ends.repeat(2).to_numpy(), np.arange(10.0), sensor=["a", "b"] * 5, fixed=fixed)
    expected = [ends[-1] + k * pd.offsets.MonthEnd(1) for k in (1, 2, 3)]
    assert pd.DatetimeIndex(filter.forecast(3, sensor="a").times).tolist() == expected
    dates = pd.DatetimeIndex(["2020-01-01", "2020-02-03", "2020-02-10", "2020-05-05"]).to_numpy()
    with pytest.raises(ValueError, match="without a frequency"):
        RobustFilter(Level()).fit(dates, np.arange(4.0), fixed=fixed).forecast(3)


ROUNDED = {
    "Unix seconds at 10 Hz": (1.7e9 + 0.1 * np.arange(60), 0.1),
    "float32": (1000 + np.float32(0.1) * np.arange(60, dtype=np.float32), 0.1),
    "a list": (list(1.7e9 + 1e-3 * np.arange(60)), 1e-3),
}


@pytest.mark.parametrize(("times", "step"), ROUNDED.values(), ids=ROUNDED)
def test_steps_of_times_that_their_dtype_rounds(times, step):
    """What the dtype cannot hold is no irregularity; gaps of half a step to one and a half are."""
    fixed = {"sigma2.level": 1.0, "sigma2.irregular": 1.0}
    found = RobustFilter(Level()).fit(times, np.zeros(60), fixed=fixed).forecast(3).times
    spacing = abs(float(np.spacing(np.asarray(times)[-1])))
    np.testing.assert_allclose(np.asarray(found) - float(times[-1]), step * np.arange(1, 4), atol=spacing)
    gaps = step * np.random.default_rng(0).uniform(0.5, 1.5, 60)
    uneven = (float(times[0]) + gaps.cumsum()).astype(np.asarray(times).dtype)
    with pytest.raises(ValueError, match="without a frequency"):
        RobustFilter(Level()).fit(uneven, np.zeros(60), fixed=fixed).forecast(3)


MARKS = {
    "numpy.ma": lambda x: np.ma.masked_invalid(x),
    "numpy.ma, whole numbers": lambda x: np.ma.masked_equal(np.where(np.isnan(x), -9999, x).astype(int), -9999),
    "None": lambda x: [None if np.isnan(each) else each for each in x],
    **{
        kind: lambda x, kind=kind: pd.Series(pd.array([None if np.isnan(each) else each for each in x], dtype=kind))
        for kind in ("Int64", "double[pyarrow]")
    },
    "a table": lambda x: pd.DataFrame({"v": pd.array([None if np.isnan(each) else each for each in x], dtype="Int64")}),
}


@pytest.mark.parametrize("marked", MARKS.values(), ids=MARKS)
def test_each_mark_of_a_missing_value_is_nan(marked):
    """In values, and in what is known of a missing reading."""
    values = np.round(NILE[:40])
    values[[3, 20]] = np.nan
    known = np.round(10 * np.sin(np.arange(40.0))) + 20
    known[20] = np.nan
    expected = RobustFilter(Level()).fit(YEARS[:40], values, exog=known, offset=known, noise=known)
    found = RobustFilter(Level()).fit(
        YEARS[:40], marked(values), exog=marked(known), offset=np.ravel(marked(known)), noise=np.ravel(marked(known))
    )
    assert found.parameters == pytest.approx(expected.parameters, rel=1e-12)
    with pytest.raises(
        ValueError, match=r"exog: got 'NaN or infinite values, nan in row 3, .*, expected finite numbers where"
    ):
        RobustFilter(Level()).fit(YEARS[:40], known, exog=marked(values))


def test_what_is_known_of_a_missing_reading_may_be_missing_too():
    """States and parameters are those with any number there. The reading itself is not known."""
    values, exog = NILE[:60].copy(), np.cos(np.arange(60.0))
    values[[10, 30]] = np.nan
    holes = exog.copy()
    holes[[10, 30]] = np.nan
    filled, found = (RobustFilter(Level()).fit(YEARS[:60], values, exog=each) for each in (exog, holes))
    assert found.parameters == pytest.approx(filled.parameters, rel=1e-6)  # the unit of beta differs
    smooth, expected = found.smooth(), filled.smooth()
    np.testing.assert_allclose(smooth.states["level"], expected.states["level"], rtol=1e-6)
    assert np.flatnonzero(np.isnan(smooth.mean)).tolist() == [10, 30]
    assert np.flatnonzero(np.isnan(smooth.variance)).tolist() == [10, 30]
    part = RobustFilter(Level()).fit(YEARS[:60], values, noise=np.abs(holes))
    assert np.isfinite(part.update(YEARS[60], np.nan, noise=np.nan).mean[0])
    with pytest.raises(ValueError, match="noise: got 'NaN or infinite values, nan in row 0"):
        part.update(YEARS[61], 1.0, noise=np.nan)
    with pytest.raises(ValueError, match="noise: got 'NaN or infinite values, nan in row 11"):
        RobustFilter(Level()).fit(YEARS[:60], values, noise=np.roll(holes**2, 1))
    assert np.isnan(found.update(YEARS[60], np.nan, exog=np.nan).mean[0])
    with pytest.raises(ValueError, match="exog: got 'NaN"):
        found.update(YEARS[61], 1.0, exog=np.nan)
    with pytest.raises(ValueError, match="exog: got 'NaN"):
        found.forecast([YEARS[61]], exog=[np.nan])


def regression(index=None) -> tuple[pd.Series, pd.DataFrame]:
    """`y = 10 + 3 a - 2 b` with little noise, over dates."""
    random = np.random.default_rng(0)
    index = pd.date_range("2020-03-01", periods=40, freq="D", tz="Europe/Paris", name="day") if index is None else index
    exog = pd.DataFrame(random.normal(size=(40, 2)), columns=["a", "b"], index=index)
    return 10 + 3 * exog.a - 2 * exog.b + 0.1 * random.normal(size=40), exog


def coefficients(filter: RobustFilter) -> tuple[float, float]:
    states = filter.smooth().states
    return tuple(round(float(np.asarray(states[f"beta.{name}"])[-1]), 1) for name in ("a", "b"))


def test_rows_of_pandas_are_aligned_by_their_index():
    """In any order, by the index of the values, of the times, or by the times themselves."""
    y, exog = regression()
    mixed = exog.sample(frac=1, random_state=1)
    numbered, frame = exog.reset_index(drop=True), y.rename("v").reset_index()
    for name, given in {
        "index": (y, None, mixed),
        "columns of a table": (frame.day, frame.v, numbered.iloc[::-1]),
        "shuffled values": (frame.day, frame.v.iloc[::-1], numbered),
        "times of values": (frame.day, frame.v, mixed),
        "no index": (np.arange(40.0), y.to_numpy(), numbered),
    }.items():
        assert coefficients(RobustFilter(Level()).fit(*given[:2], exog=given[2])) == (3.0, -2.0), name
    labels = pd.Series(["p", "q"] * 20, y.index)
    rows = pd.DataFrame({"trend": 0.5, "level": 1.0 + exog.a.abs()}, index=y.index)
    for model, plain, moved in (
        (Level(), {"offset": exog.a, "noise": exog.b**2}, {"offset": mixed.a, "noise": mixed.b**2}),
        (Level(), {"sensor": labels.tolist()}, {"sensor": labels.iloc[::-1]}),
        (Trend(), {"observation": rows[["level", "trend"]].to_numpy()}, {"observation": rows.iloc[::-1]}),
    ):
        found, expected = (RobustFilter(model).fit(y, **each).parameters for each in (moved, plain))
        assert found == expected


def test_rows_that_cannot_be_aligned_are_refused():
    y, exog = regression()
    numbered, times = exog.reset_index(drop=True), np.arange(40.0)
    shuffled = y.reset_index(drop=True).sample(frac=1, random_state=0)  # its labels may be times, or numbers of rows
    for given, known, message in (
        ((times, shuffled), {}, "values: got 'an index from .* expected that of the times"),
        ((y,), {"exog": numbered}, "exog: got 'an index from .* expected that of the values"),
        ((y,), {"exog": exog.tz_localize(None)}, "exog: got 'an index from .* expected that of the values"),
        ((y,), {"exog": exog.iloc[[0, *range(39)]]}, "exog: got 'an index from .* expected that of the values"),
        ((times, y.to_numpy()), {"exog": numbered.iloc[::-1]}, "exog: got 'an index from 39 to 0', .* of the times"),
        ((y,), {"exog": exog.iloc[1:]}, "exog: got '39 rows', expected 40"),
    ):
        with pytest.raises(ValueError, match=message):
            RobustFilter(Level()).fit(*given, **known)


def test_names_of_regressors_are_remembered():
    y, exog = regression()
    filter = RobustFilter(Level()).fit(y, exog=exog)
    ahead = y.index[-1] + pd.to_timedelta([1, 2], unit="D")
    future = pd.DataFrame({"b": [0.0, 1.0], "a": [1.0, 0.0]}, index=ahead)
    for given in (future, future.iloc[::-1], future.reset_index(drop=True), future[["a", "b"]].to_numpy()):
        assert filter.forecast(2, exog=given).mean.round(1).tolist() == [13.0, 8.0]
    for wrong, told in (
        (future.rename(columns={"a": "c"}), r"'columns .*', expected a, b, as in fit \(without a; unknown: c\)"),
        (future.set_axis(ahead + pd.Timedelta("1D")), "'an index from 2020-04-11"),
    ):
        with pytest.raises(ValueError, match=f"exog: got {told}"):
            filter.forecast(2, exog=wrong)
    expected = RobustFilter(Level()).fit(y, exog=exog).update(ahead[0], 13.0, exog=[1.0, 0.0]).mean
    for row in (future.iloc[0], future.iloc[[0]], future.iloc[[0]].reset_index(drop=True)):
        one = RobustFilter(Level()).fit(y, exog=exog)
        assert one.update(ahead[0], 13.0, exog=row).mean.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="exog: got 'the names b, c', expected a, b"):
        filter.update(ahead[0], 13.0, exog=future.iloc[0].rename({"a": "c"}))


def test_results_have_the_index_of_the_values():
    y, exog = regression()
    frame = y.rename("v").reset_index().set_index(pd.Index(np.arange(40) * 10, name="row"))
    filter = RobustFilter(Level()).fit(frame.day, frame.v)
    found = filter.smooth()
    frame["clean"] = found.mean
    assert frame.clean.tolist() == found.mean.tolist()
    for part in (found.values, found.variance, found.weights, found.outliers, *found.states.values()):
        assert part.index.equals(frame.index)
    pd.testing.assert_index_equal(found.times, pd.DatetimeIndex(frame.day))
    assert found.to_pandas().index.equals(frame.index)
    assert found.to_pandas().time.tolist() == frame.day.tolist()
    for index in (
        y.index,
        pd.period_range("2020-01", periods=40, freq="M", name="month"),
        pd.Index(np.arange(40) / 4, name="quarter"),
    ):
        found = RobustFilter(Level()).fit(y.set_axis(index), fixed={"level": 0.1}).filter()
        pd.testing.assert_index_equal(found.mean.index, index)
        pd.testing.assert_index_equal(found.times, index, exact="equiv", check_names=True)
        pd.testing.assert_index_equal(found.to_pandas().index, index)
    table = RobustFilter(Level()).fit(exog, sensor=list(exog)).filter()
    assert table.mean.index.equals(exog.index.repeat(2))


def test_dates_with_a_zone_stay_so():
    """In lists too. A date without one is another moment in each zone."""
    zone = timezone(timedelta(hours=2))
    days = [datetime(2024, 3, day, tzinfo=zone) for day in range(1, 21)]
    listed = RobustFilter(Level()).fit(days, np.sin(np.arange(20.0)), fixed={"level": 0.1})
    assert listed.filter().times.tolist() == days
    assert listed.forecast(1).times.tolist() == [datetime(2024, 3, 21, tzinfo=zone)]
    assert listed.forecast(1).times[0].utcoffset() == timedelta(hours=2)
    with pytest.raises(ValueError, match="got 'dates without a time zone', expected dates with a time zone"):
        listed.forecast([datetime(2024, 3, 22)])
    with pytest.raises(ValueError, match="times: got 'some dates with a time zone', expected all of them, or none"):
        RobustFilter(Level()).fit([days[0], datetime(2024, 3, 22)], [1.0, 2.0])
    masked = np.ma.masked_array(np.arange("2024-03-01", "2024-03-21", dtype="M8[D]"), mask=[*[False] * 19, True])
    for missing in (masked, [*days[:19], None], [None, *days[1:]]):
        with pytest.raises(ValueError, match="times: got 'a missing date, NaT in row"):
            RobustFilter(Level()).fit(missing, np.arange(20.0))


def test_a_daily_season_is_on_the_clock_of_the_zone():
    """A day of 25 hours keeps it: as the same readings on a clock without a zone, the double hour apart."""
    dates = pd.date_range("2024-10-20", "2024-10-29", freq="h", tz="Europe/Berlin", inclusive="left")
    hours = np.asarray(dates.hour)
    values = pd.Series(5 * np.sin(2 * np.pi * hours / 24) + np.cos(4 * np.pi * hours / 24), dates)
    filter = RobustFilter(Level() + Season(24, 2), time_unit="hour").fit(values[:"2024-10-26"])
    ahead = filter.forecast(49)
    assert ahead.times.equals(values.index[-49:])
    once = hours[-49:] != 2
    np.testing.assert_allclose(ahead.mean[once], values[-49:][once], atol=0.05)
    assert filter.filter().times.equals(values[:"2024-10-26"].index)


LENGTHS = pd.timedelta_range("1h", periods=20, freq="h")


@pytest.mark.parametrize(
    "times", [LENGTHS.to_series(), LENGTHS.to_numpy().astype("m8[s]"), [*LENGTHS.to_pytimedelta()]]
)
def test_lengths_of_time_are_times(times):
    filter = RobustFilter(Level(), time_unit="hour").fit(times, np.sin(np.arange(20.0)), fixed={"level": 0.1})
    numbers = RobustFilter(Level()).fit(np.arange(20.0), np.sin(np.arange(20.0)), fixed={"level": 0.1})
    np.testing.assert_allclose(filter.forecast(3).variance, numbers.forecast(3).variance, rtol=1e-9)
    assert pd.TimedeltaIndex(filter.forecast(3).times).tolist() == [LENGTHS[-1] + k * LENGTHS[0] for k in (1, 2, 3)]
    with pytest.raises(ValueError, match="got 'dates without a time zone', expected lengths of time"):
        filter.forecast(pd.date_range("2024-01-01", periods=2))


class ModelDate:
    """A date of cftime, as far as a reader sees one."""

    tzinfo = None

    def __init__(self, calendar, day):
        self.calendar, self.year, self.month, self.day = calendar, 2000, 2, day

    def isoformat(self):
        return f"2000-02-{self.day:02}"


def test_dates_of_model_calendars_are_refused_by_name():
    """In lists and indexes. Gregorian ones are dates."""
    for calendar in ("noleap", "360_day", "julian"):
        dates = [ModelDate(calendar, day) for day in range(1, 21)]
        for given in (dates, pd.Index(dates, dtype=object)):
            with pytest.raises(ValueError, match=f"calendar '{calendar}', .* numbers: cftime.date2num"):
                RobustFilter(Level()).fit(given, np.arange(20.0))
    dates = [ModelDate("standard", day) for day in range(1, 21)]
    filter = RobustFilter(Level()).fit(dates, np.sin(np.arange(20.0)), fixed={"level": 0.1})
    assert filter.forecast(2).times.tolist() == pd.date_range("2000-02-21", periods=2).as_unit("ns").asi8.tolist()


def test_times_of_polars_and_pyarrow_keep_their_zone():
    dates = pd.date_range("2024-03-01", periods=20, freq="D", tz="Europe/Berlin")
    arrow = pytest.importorskip("pyarrow")
    given = [arrow.array(dates), arrow.chunked_array([arrow.array(dates)])]
    if importlib.util.find_spec("polars") is not None:
        utc = importlib.import_module("polars").Series(dates.tz_convert("UTC").tz_localize(None).to_numpy())
        given.append(utc.dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Berlin"))
    for times in given:
        found = RobustFilter(Level()).fit(times, np.sin(np.arange(20.0)), fixed={"level": 0.1}).forecast(30).times
        assert [str(each) for each in found] == [str(dates[-1] + pd.DateOffset(days=k)) for k in range(1, 31)]


PERIODS = {  # period, unit, step of the dates, what was probably meant
    "24 hours": (
        24,
        "day",
        "h",
        "a period of 24 is 576 readings. If 24 readings are meant, that is one day, give period=1, or time_unit=.hour",
    ),
    "months": (12, "day", "MS", "0.3871 readings. If 12 readings are meant, that is one year, give period=365.24"),
    "a year in days": (1.0, "day", "7D", "0.1429 readings, and two are the least that show a pattern. time_unit gives"),
    "a year of days": (365.25, "day", "D", None),
    "no dates": (24, "day", None, None),
}


@pytest.mark.parametrize(("period", "unit", "freq", "message"), PERIODS.values(), ids=PERIODS)
def test_a_period_that_counts_readings_is_warned_of(period, unit, freq, message):
    """And no other one. A season that is longer than the series too is refused with the same words."""
    short = np.arange(8) / 24 if freq is None else pd.date_range("2020-01-01", periods=8, freq=freq)
    span = TimeAxis.of(short, unit).numbers("times", short)[-1]
    values = np.sin(np.arange(8.0))
    if span >= period:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            RobustFilter(Level() + Season(period), time_unit=unit).fit(short, values, fixed=SEASON)
        told = [str(each.message) for each in caught if each.category is UserWarning]
    else:
        with pytest.raises(ValueError, match="period of season: got") as error:
            RobustFilter(Level() + Season(period), time_unit=unit).fit(short, values, fixed=SEASON)
        told = [str(error.value)] if "unit of time" in str(error.value) else []
    assert len(told) == (message is not None)
    assert message is None or re.search(message, told[0])
