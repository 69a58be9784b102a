"""A figure is saved whole, closed, and the same in every format; perplexities can be read off its axis."""

import matplotlib.pyplot as plt
import pytest

from rfa.forecasting.style import plain_numbers, save, styled


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
