"""The components of a pandas series are those that `rfa forecast` takes for its file, unless it takes a free season."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from cover import slow

from rfa.forecasting.components import components_of
from rfa.forecasting.dates import UNITS
from rfa.forecasting.filter import forecast_channels
from rfa.forecasting.request import ForecastRequest, read_request
from rfa.integrations.series_filter import default_model


def daily(count=24 * 6):
    """A day in hours, a level, noise, a gap and a wrong reading."""
    random = np.random.default_rng(0)
    hours = np.arange(count)
    values = 5 + np.sin(2 * np.pi * hours / 24) + np.cos(4 * np.pi * hours / 24) + 0.1 * random.normal(size=count)
    values[30:40], values[60] = np.nan, 1000.0
    return pd.Series(values, pd.date_range("2024-05-01", periods=count, freq="h"), name="value")


def options(unit="day"):
    return SimpleNamespace(model=None, robust=True, time_unit=unit)


def test_a_day_is_found():
    model = default_model(daily().index, daily().to_numpy(), options("hour"))
    assert [one.period for one in model.components if one.name == "season"] == [24.0]


@slow
def test_it_is_the_choice_of_the_command_in_any_unit(tmp_path):
    series = daily()
    series.to_csv(tmp_path / "a.csv", index_label="time")
    request = ForecastRequest(file=tmp_path / "a.csv", time="time", horizon="3h")
    table, query_times = read_request(request)
    (found,) = forecast_channels(request, table, query_times)
    words = found.details["components"].split(" + ")
    assert any(word.startswith("season:1D") for word in words)
    ahead = pd.date_range(series.index[-1], periods=4, freq="h")[1:]
    for unit, name in (("day", "D"), ("hour", "h")):
        in_unit = table._replace(times=table.times * UNITS[table.unit] / UNITS[name], unit=name)
        model = default_model(series.index, series.to_numpy(), options(unit), ahead)
        assert model.components == components_of(words, in_unit).components.components


def test_of_numbers_and_of_short_series():
    assert [*default_model(pd.RangeIndex(60), 3.0 * np.arange(60.0), options()).states] == ["level", "trend"]
    assert [*default_model(pd.RangeIndex(3), np.array([1.0, np.nan, 5.0]), options()).states] == ["level"]


def test_what_has_no_choice_is_named():
    with pytest.raises(ValueError, match=r"time_unit: got 'year', expected one of second, minute, hour, day where no"):
        default_model(daily().index, daily().to_numpy(), options("year"))
    with pytest.raises(ValueError, match=r"values: got 'missing values in all rows', expected some readings"):
        default_model(pd.RangeIndex(5), np.full(5, np.nan), options())
