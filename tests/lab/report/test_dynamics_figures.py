"""What heads learned, as drawn: the result's numbers, one line a head, and the regimes' sides of zero."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from rfa.forecasting.style import shades
from rfa_lab.report.figures import noises_over_training, regimes_over_training, robustness_over_training

from .results import result

STEPS, LAYERS, HEADS = 5, 3, 4
DECAY = [0.0, 0.01, 0.1, 0.5]
NAMES = ("process_noise", "key_noise", "query_noise", "robustness", "inverse_temperature")


def learned(label="m2-sc-rfa", seed=0):
    """A run with other numbers at every step, in every layer, head and parameter; head 0 does not decay."""
    random = np.random.default_rng(seed)
    layers = {}
    for layer in range(LAYERS):
        of = {name: random.uniform(0.1, 2.0, (STEPS, HEADS)).round(4) for name in NAMES}
        steady = of["process_noise"][:, 1:] / (2 * np.array(DECAY[1:]))
        of["alpha"] = np.concatenate([np.full((STEPS, 1), -1e30), of["key_noise"][:, 1:] - steady], axis=1)
        layers[str(layer)] = {name: of[name].tolist() for name in of} | {"decay": [DECAY] * STEPS}
    tokens = [2048 * step for step in range(1, STEPS + 1)]
    return {**result(label, seed), "dynamics": {"steps": [1, 2, 3, 4, 5], "tokens": tokens, "layers": layers}}


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def columns(figure):
    """Panels by column: rows from above."""
    panels = {}
    for axes in figure.axes:
        panels.setdefault(axes.get_subplotspec().colspan.start, []).append(axes)
    return [panels[column] for column in sorted(panels)]


@pytest.mark.parametrize(
    ("draw", "rows"),
    [
        (noises_over_training, ("key_noise", "query_noise", "process_noise", None)),
        (robustness_over_training, ("robustness", "inverse_temperature")),
    ],
)
def test_lines_are_the_results(draw, rows):
    run = learned()
    figure = draw([result("b1-rope"), run])
    panels = columns(figure)
    assert len(panels) == LAYERS
    for layer, column in enumerate(panels):
        assert column[0].get_title() == f"layer {layer}"
        of = run["dynamics"]["layers"][str(layer)]
        for axes, name in zip(column, rows, strict=True):
            assert len(axes.lines) == HEADS
            for head, line in enumerate(axes.lines):
                assert to_rgba(line.get_color()) == pytest.approx(shades(HEADS)[head])
                assert line.get_xdata().tolist() == run["dynamics"]["tokens"]
                if name is not None:
                    assert line.get_ydata().tolist() == [step[head] for step in of[name]]
                elif head == 0:  # no decay, no steady state
                    assert np.isnan(line.get_ydata()).all()
                else:
                    expected = np.array(of["process_noise"])[:, head] / (2 * DECAY[head])
                    np.testing.assert_allclose(line.get_ydata(), expected)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"head {k}" for k in range(HEADS)]
    assert figure.get_suptitle() == "m2-sc-rfa, seed 0"


def test_regimes():
    run = learned()
    figure = regimes_over_training([run])
    by_head, over_training = figure.axes
    alpha = np.array([layer["alpha"] for layer in run["dynamics"]["layers"].values()])
    ends = [line for line in by_head.lines if line.get_marker() not in ("_", "None")]
    drawn = sorted(
        (round(line.get_xdata()[0]), line.get_ydata()[0]) for line in ends if np.isfinite(line.get_ydata()[0])
    )
    assert drawn == sorted((head, alpha[layer, -1, head]) for head in (1, 2, 3) for layer in range(LAYERS))
    starts = sorted(line.get_ydata()[0] for line in by_head.lines if line.get_marker() == "_")
    np.testing.assert_array_equal([each for each in starts if np.isfinite(each)], np.sort(alpha[:, 0, 1:].ravel()))
    assert over_training.get_title(loc="left") == "(b) layer 2 over training"
    for head, line in enumerate(over_training.lines[:HEADS]):
        if head:
            assert line.get_ydata().tolist() == alpha[-1, :, head].tolist()
    low, high = by_head.get_ylim()
    shown = [*alpha[:, (0, -1), 1:].ravel(), *alpha[-1, :, 1:].ravel(), 0]
    assert 3 * min(shown) < low < min(shown)  # both sides are in sight, minus infinity is not
    assert high > max(shown)


@pytest.mark.parametrize("draw", [noises_over_training, robustness_over_training, regimes_over_training])
def test_without_dynamics(draw):
    with pytest.raises(ValueError, match="got none of m1-rfa with its parameters"):
        draw([learned(), result("m1-rfa")], "m1-rfa")
