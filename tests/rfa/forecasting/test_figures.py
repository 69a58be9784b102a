"""The figure of a forecast holds what it was given; a figure is saved closed, and the same in every format."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from rfa.forecasting.figure import forecast_figure, save, styled
from rfa.forecasting.request import ChannelForecast
from rfa.forecasting.table import SeriesTable
from rfa_lab.report.figures import plain_numbers


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def figure():
    @styled
    def draw():
        figure, panels = plt.subplots(1, 2)
        panels[0].plot([1, 2], [3, 4], label="a line")
        figure.legend(loc="outside lower center")
        return figure

    return draw()


@pytest.mark.parametrize(("name", "magic"), [("f.png", b"\x89PNG"), ("f.svg", b"<?xml")])
def test_save(figure, tmp_path, name, magic):
    save(figure, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert figure.number not in plt.get_fignums()  # closed


def test_every_format_shows_the_same(figure, tmp_path, monkeypatch):
    """Each has its own measures of text: laid out for each anew, panels would differ."""
    places, savefig = [], figure.savefig

    def saved(*given, **options):
        savefig(*given, **options)
        places.append([axes.get_position().bounds for axes in figure.axes])

    monkeypatch.setattr(figure, "savefig", saved)
    save(figure, tmp_path / "f.pdf", tmp_path / "f.png")
    assert places[0] == places[1]


@pytest.mark.parametrize(("low", "high"), [(68, 84), (68.3, 680), (15, 4_000)])
def test_perplexities_can_be_read_off(low, high):
    figure, axes = plt.subplots()
    axes.plot([1, 2], [low, high])
    plain_numbers(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    ticks = [float(label.get_text()) for label in axes.get_yticklabels() if label.get_text()]
    shown = [tick for tick in ticks if bottom <= tick <= top]
    assert 4 <= len(shown) <= 12
    assert shown[0] < low * (high / low) ** 0.3  # also where the best models are


LATER = np.array([5.0, 6.0])


def channel(times, name="load"):
    """A channel with an outlier in its fourth row, and its forecast."""
    values = np.array([1.0, 2.0, np.nan, 300.0, 2.5])
    past = pd.DataFrame({"time": times, "reading": values, "estimate": 1.0, "lower_90": 0.0, "upper_90": 2.0})
    past = past.assign(weight=1.0, outlier=values == 300.0)
    intervals = {0.5: (np.full(2, 1.5), np.full(2, 2.5)), 0.9: (np.full(2, 1.0), np.full(2, 4.0))}
    one = ChannelForecast(name=name, mean=np.full(2, 2.0), intervals=intervals, past=past)
    return one, SeriesTable(times, values[:, None], (name,))


@pytest.mark.parametrize("origin", [None, pd.Timestamp("2024-01-01", tz="Europe/Paris")])
def test_the_figure_holds_what_it_was_given(origin, tmp_path):
    one, table = channel(np.arange(5.0))
    table = table._replace(origin=origin, unit="" if origin is None else "D")
    figure = forecast_figure([one, one], table, LATER)
    assert len(figure.axes) == 2
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["reading"].get_ydata(), [1.0, 2.0, np.nan, 2.5])  # not the outlier
    later = LATER if origin is None else np.array(["2024-01-06", "2024-01-07"], "M8")
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
    one, table = channel(np.array([0.0, 1.0, 2.0, 3.0, 3.0]), "$\\cost$\x1b")
    axes = forecast_figure([one], table, LATER).axes[0]
    assert axes.get_title(loc="left") == "$\\cost$ "
    drawn = next(line for line in axes.get_lines() if line.get_label() == "reading")
    np.testing.assert_array_equal(drawn.get_ydata(), [1.0, 2.0, np.nan, 2.5])
