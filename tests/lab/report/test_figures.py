"""Figures hold the data that were put in, and say what their axes are."""

import matplotlib.pyplot as plt
import pytest

from rfa.forecasting.style import plain_numbers, save
from rfa_lab.report.figures import speed_over_length, training_and_extrapolation

CURVES = {"b1-rope": [(64, 200.0), (128, 120.0)], "m2-sc-rfa": [(64, 190.0), (128, 100.0)]}
ROWS = {
    "b1-rope": [{"length": 16, "perplexity": 120.0}, {"length": 32, "perplexity": 300.0}],
    "m2-sc-rfa": [{"length": 16, "perplexity": 100.0}, {"length": 32, "perplexity": 95.0}],
}


@pytest.fixture
def figure():
    figure = training_and_extrapolation(CURVES, ROWS, 16)
    yield figure
    plt.close(figure)


def drawn(axes):
    return {line.get_label(): list(map(tuple, line.get_xydata())) for line in axes.lines if line.get_label()[0] != "_"}


def test_lines_are_the_data(figure):
    over_training, over_length = figure.axes
    assert drawn(over_training) == CURVES
    assert drawn(over_length) == {name: [(r["length"], r["perplexity"]) for r in rows] for name, rows in ROWS.items()}
    assert any(set(line.get_xdata()) == {16} for line in over_length.lines)  # the training length
    assert [label.get_text() for label in over_length.get_xticklabels()] == ["16", "32"]
    assert {text.get_text() for text in over_length.get_legend().get_texts()} == set(ROWS)


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
    plt.close(figure)


def test_save_is_whole_or_nothing(figure, tmp_path, monkeypatch):
    (tmp_path / "f.png").write_bytes(b"the old figure")

    def full(path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        save(figure, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes() == b"the old figure"
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]


def test_a_share_above_the_bound_is_shown():
    """It cannot be, so that it must be seen: the machine's peak was measured too low."""
    line = {
        "benchmark": "operator",
        "pass": "forward",
        "preset": "m2-sc-rfa",
        "peer": "sdpa",
        "device": "cpu",
        "processor": "any",
        "threads": 1,
        "dtype": "float32",
        "length": 64,
        "ratio": {"median": 0.9, "q1": 0.8, "q3": 1.0},
        "bound": {"rfa": {"seconds": 3.0}, "peer": {"seconds": 0.5}},
        "seconds": {"rfa": [2.0], "peer": [1.0]},
    }
    figure = speed_over_length([line])
    shares = figure.axes[1]
    assert sorted(line.get_ydata()[0] for line in shares.lines) == [50.0, 100, 150.0]
    assert shares.get_ylim()[1] > 150
    plt.close(figure)
