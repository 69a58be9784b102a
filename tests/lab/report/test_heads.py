"""What heads learned and where they look, as drawn: the result's numbers, the sides of zero, attention maps."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from rfa.forecasting.style import shades
from rfa_lab.report.contents import listed_figures
from rfa_lab.report.figures.heads import (
    attention_maps,
    near_attention,
    noises_over_training,
    regimes_over_training,
    robustness_over_training,
)
from rfa_lab.results import read_maps, read_results, write_maps

from .results import result, whole_result, write_results

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
    figure = draw(run)
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
    figure = regimes_over_training(run)
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


def maps(heads=3, blocks=8, seed=0):
    """Causal rows that sum to one, in the form of `rfa_lab.evaluation.attention_maps`."""
    random = np.random.default_rng(seed)
    weights = np.tril(random.uniform(0, 1, (heads, blocks, blocks)) ** 12)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float16)


def pictures(figure):
    return [axes for axes in figure.axes if axes.get_images() and axes.get_visible()]


def test_maps_are_drawn_as_read(tmp_path):
    write_maps({"weights": maps()}, tmp_path / "a.npz")
    figure = attention_maps({"one": read_maps(tmp_path / "a.npz"), "two": maps(seed=1)}, train_length=8)
    panels = pictures(figure)
    assert len(panels) == 6
    assert [axes.get_title() for axes in panels[:3]] == ["head 0", "head 1", "head 2"]
    assert [axes.get_ylabel() for axes in panels[::3]] == ["one", "two"]
    for axes, weights in zip(panels, [*maps(), *maps(seed=1)], strict=True):
        (image,) = axes.get_images()
        drawn = image.get_array()
        causal = np.tril(np.ones((8, 8), dtype=bool))
        assert (drawn.mask == ~causal).all()
        np.testing.assert_allclose(drawn.data[causal], np.maximum(weights.astype(np.float32), 1e-5)[causal], rtol=1e-6)
        assert image.norm is pictures(figure)[0].get_images()[0].norm  # one scale
        assert image.get_extent() == [0, 64, 64, 0]
        (line,) = axes.lines
        x, y = line.get_data()
        assert (np.array(y) - np.array(x)).tolist() == [8, 8]  # the training length before the query
    bar = next(axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    assert bar.get_xlabel() == "weight of a query on 8 neighbouring keys, after decay"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "is damaged"),
        ({"other": np.ones(3)}, "is damaged .*weights"),
        ({"weights": np.array([None])}, "is damaged"),
        ({"weights": np.zeros((3, 4, 5))}, r"got shape \(3, 4, 5\)"),
        ({"weights": np.zeros((0, 4, 4))}, r"got shape \(0, 4, 4\)"),
        ({"weights": np.full((1, 2, 2), np.nan)}, "got weights from nan"),
        ({"weights": np.full((1, 2, 2), 3.0)}, "to 3 of"),
    ],
)
def test_what_are_no_maps(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays or {"weights": maps()})
    if arrays is None:  # a file that was cut
        (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-200])
    with pytest.raises(ValueError, match=message):
        read_maps(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="got no file"):
        read_maps(tmp_path / "gone.npz")
    with pytest.raises(ValueError, match="maps: got none"):
        attention_maps({}, 16)


def test_near_maps_are_drawn_as_read(tmp_path):
    random = np.random.default_rng(2)
    near = np.tril(random.uniform(0.1, 1, (2, 3, 8)), 5).astype(np.float16)
    write_maps({"weights": maps(), "near": near}, tmp_path / "a.npz")
    read = read_maps(tmp_path / "a.npz", "near")
    np.testing.assert_array_equal(read, near.astype(np.float32))
    panels = pictures(near_attention({"m": read}, train_length=4))
    assert [axes.get_title() for axes in panels] == ["head 0", "head 1"]
    for axes, weights in zip(panels, read, strict=True):
        (image,) = axes.get_images()
        drawn = image.get_array()
        assert drawn.mask.sum(1).tolist() == [2, 1, 0]  # keys after the query
        np.testing.assert_allclose(drawn.data[~drawn.mask], weights[~drawn.mask], rtol=1e-6)
        assert axes.get_xlim() == (-8, 0)
        (line,) = axes.lines
        x, y = map(np.array, line.get_data())
        assert (y - 3 - x).tolist() == [4, 4]  # a query stands at its row less the number of rows
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 2\) of m, expected \(heads, queries, keys\)"):
        near_attention({"m": read[:, :, :2]}, train_length=4)
    write_maps({"weights": maps()}, tmp_path / "old.npz")
    with pytest.raises(ValueError, match="is damaged"):
        read_maps(tmp_path / "old.npz", "near")


def test_files_of_older_versions_have_no_maps_before_decay(tmp_path):
    """Nothing is refused: neither a file without them nor the stored files of `results/`."""
    results, old = tmp_path / "results", whole_result("b1-rope", maps=True)
    write_results(tmp_path, [old, whole_result("m2-sc-rfa", maps=True)])
    near = read_maps(results / old["attention"], "near")
    new = {"weights": maps(), "near": near, "undecayed": maps(seed=3), "undecayed_near": near}
    write_maps(new, results / old["attention"])
    found = read_results(tmp_path)
    assert found.refused == {}
    with_both, without = found.runs
    np.testing.assert_array_equal(with_both["undecayed"], maps(seed=3).astype(np.float32))
    assert (without["undecayed"], without["undecayed_near"]) == (None, None)
    assert without["maps"].shape == (2, 3, 3)
    stored = list(Path(__file__).parents[3].glob("results/*/results/*.attention.npz"))
    assert stored
    assert {read_maps(path, name).ndim for path in stored for name in ("weights", "near")} == {3}


RUNS = [whole_result("b1-rope"), whole_result("m2-sc-rfa")]
DRAWN = ["noises-m2-sc-rfa", "robustness-m2-sc-rfa", "regime-m2-sc-rfa"]


def test_heads_of_the_papers_models_and_of_another_start():
    runs = []
    for label, alpha in (("m2-sc-rfa", 0.9), ("m2-sc-rfa wide", -1.0), ("m2-sc-rfa b=0.5", 0.9)):
        layers = {"0": {"alpha": [[None, alpha], [None, -alpha]]}}  # the first head does not decay
        runs.append({**RUNS[1], "label": label, "dynamics": {"steps": [1, 2], "tokens": [1, 2], "layers": layers}})
    riccati = {
        **runs[1],
        "label": "m2-sc-rfa riccati",
        "config": {**runs[1]["config"], "prior": "riccati"},
    }  # whose bias knows no alpha
    runs.append(riccati)
    found = [name for name in [each.name for each in listed_figures(runs)] if "m2-sc-rfa" in name]
    assert found == [*DRAWN, "regime-m2-sc-rfa-wide"]
    assert not [name for name in [each.name for each in listed_figures(RUNS)] if "m2-sc-rfa" in name]


def test_maps_of_the_first_seed():
    mapped = [{**run, "maps": np.full((2, 4, 4), 0.1 * place)} for place, run in enumerate(RUNS)]
    again = {**mapped[0], "seed": 1, "maps": np.full((2, 4, 4), 0.9)}
    (attention,) = [each for each in listed_figures([*mapped, again]) if each.name == "attention"]
    figure = attention.draw([*mapped, again])
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [round(float(image[3, 0]), 6) for image in images] == [1e-5, 1e-5, 0.1, 0.1]
    assert "attention" not in [each.name for each in listed_figures(RUNS)]


def test_maps_before_decay_have_rows_of_their_own():
    """As the paper draws its models with decay; a run whose file is older has one row."""
    whole, before = np.full((2, 4, 4), 0.1), np.full((2, 4, 4), 0.3)
    mapped = [{**RUNS[0], "maps": whole}, {**RUNS[1], "maps": whole, "undecayed": before, "undecayed_near": None}]
    (attention,) = [each for each in listed_figures(mapped) if each.name == "attention"]
    assert "rows before decay: the softmax weight alone" in attention.caption
    figure = attention.draw(mapped)
    images = [round(float(axes.images[0].get_array()[3, 0]), 6) for axes in figure.axes if axes.images]
    assert images == [0.1, 0.1, 0.1, 0.1, 0.3, 0.3]
    bar = next(axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    assert bar.get_xlabel().endswith("after decay unless the row says before")
