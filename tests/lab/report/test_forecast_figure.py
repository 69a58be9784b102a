"""The figure of a forecast: what its artists hold, against the numbers that were given."""

import numpy as np
import pytest

from rfa.forecasting.figure import ForecastPanel, forecast_panels
from rfa.forecasting.style import save


def panel(times, later):
    values = np.array([1.0, 2.0, np.nan, 300.0, 2.5])
    past = times, np.ones(5), np.zeros(5), np.full(5, 2.0)
    intervals = {0.5: (np.full(2, 1.5), np.full(2, 2.5)), 0.9: (np.full(2, 1.0), np.full(2, 4.0))}
    return ForecastPanel("load", (times, values), (times[3:4], values[3:4]), past, later, np.full(2, 2.0), intervals)


@pytest.mark.parametrize("dates", [False, True])
def test_the_figure_holds_what_it_was_given(dates, tmp_path):
    times, later = np.arange(5.0), np.array([5.0, 6.0])
    if dates:
        times, later = (np.datetime64("2024-01-01", "ns") + x.astype("timedelta64[D]") for x in (times, later))
    figure = forecast_panels([panel(times, later), panel(times, later)])
    assert len(figure.axes) == 2
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["reading"].get_ydata(), [1.0, 2.0, np.nan, 2.5])  # not the outlier
    np.testing.assert_array_equal(lines["forecast"].get_xdata(), later)
    low, high = axes.get_ylim()
    assert (low, high) == pytest.approx((0.85, 4.15))  # from the readings to the end of the 90 % interval, and 5 %
    assert lines["outlier"].get_ydata() == pytest.approx([high])  # at the edge
    bands = [(path.get_label(), path.get_paths()[0].get_extents()) for path in axes.collections]
    assert {label: (box.y0, box.y1) for label, box in bands[1:]} == {
        "90 % interval": (1, 4),
        "50 % interval": (1.5, 2.5),
    }
    save(figure, tmp_path / "figure.png")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_a_good_reading_at_the_time_of_another_sensors_outlier_is_drawn():
    one = panel(np.array([0.0, 1.0, 2.0, 3.0, 3.0]), np.array([5.0, 6.0]))._replace(name="$\\cost$\x1b")
    axes = forecast_panels([one]).axes[0]
    assert axes.get_title(loc="left") == "$\\cost$ "
    drawn = next(line for line in axes.get_lines() if line.get_label() == "reading")
    np.testing.assert_array_equal(drawn.get_ydata(), [1.0, 2.0, np.nan, 2.5])
