"""The figure of a forecast holds what it was given; a figure is saved closed, and the same in every format."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from rfa.forecasting.figure import chosen_series, forecast_figure, save, styled


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


DAYS = pd.date_range("2024-01-01", periods=7, tz="Europe/Paris")


def tables(ids, times):
    """A history of five times, with a refused reading in the fourth row, and a forecast of two, of each id."""
    values = np.array([1.0, 2.0, np.nan, 300.0, 2.5])
    past = pd.DataFrame({"id": ids[0], "t": times[:5], "x": values, "rfa": 1.0, "rfa-lo-90": 0.0, "rfa-hi-90": 2.0})
    past = past.assign(weight=1.0, outlier=values == 300.0, cleaned=[1.0, 2.0, 1.0, 1.0, 2.5])
    ends = {"rfa-lo-50": 1.5, "rfa-hi-50": 2.5, "rfa-lo-90": 1.0, "rfa-hi-90": 4.0}
    ahead = pd.DataFrame({"id": ids[0], "t": times[5:], "rfa": 2.0, **ends})
    return tuple(pd.concat([table.assign(id=name) for name in ids]) for table in (ahead, past))


@pytest.mark.parametrize("times", [np.arange(7.0), DAYS], ids=["numbers", "dates"])
def test_the_figure_holds_what_it_was_given(times, tmp_path):
    figure = forecast_figure(*tables(["$\\cost$\x1b", "b"], times), ("id", "t", "x"))
    axes = figure.axes[0]
    assert [each.get_title(loc="left") for each in figure.axes] == ["$\\cost$ ", "b"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["reading"].get_ydata(), [1.0, 2.0, np.nan, 2.5])  # not the refused one
    later = times[5:] if times is not DAYS else DAYS[5:].tz_localize(None).to_numpy()
    np.testing.assert_array_equal(lines["forecast"].get_xdata(), later)
    low, high = axes.get_ylim()
    assert (low, high) == pytest.approx((0.85, 4.15))  # from the readings to the end of the 90 % band, and 5 %
    assert lines["refused"].get_ydata() == pytest.approx([high])  # at the edge
    bands = [(path.get_label(), path.get_paths()[0].get_extents()) for path in axes.collections]
    assert {label: (box.y0, box.y1) for label, box in bands[1:]} == {"90 % band": (1, 4), "50 % band": (1.5, 2.5)}
    save(figure, tmp_path / "figure.png")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
    ahead, past = (table.drop(columns="id") for table in tables(["a"], times))
    assert len(forecast_figure(ahead, past, ("id", "t", "x")).axes) == 1  # one series, without an id


def test_the_series_that_matter_most_are_drawn():
    """Those with most refused readings, the widest bands, the largest; then others. All of a few."""
    ids = list(range(20))
    ahead, past = tables(ids, np.arange(7.0))
    past["outlier"] &= past["id"].isin([3, 4])
    ahead.loc[ahead["id"].isin([5, 6]), "rfa-hi-90"] = 40.0
    past["cleaned"] += 1000.0 * (past["id"] == 7)
    chosen = chosen_series(ahead, past, "id")
    assert chosen[:2] == [3, 4]
    assert chosen[2:4] == [5, 6]
    assert 7 in chosen
    assert len(chosen) == len({*chosen}) == 12
    assert chosen_series(ahead[ahead["id"] < 2], past[past["id"] < 2], "id") == [0, 1]
