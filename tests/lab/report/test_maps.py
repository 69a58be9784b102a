"""Attention maps: read, refused, and drawn as they are."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rfa_lab.report.figures import attention_maps, near_attention
from rfa_lab.results import read_maps, read_results, write_maps

from .results import whole_result, write_results


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def maps(heads=3, blocks=8, seed=0):
    """Causal rows that sum to one, in the form of `rfa_lab.evaluation.attention_maps`."""
    random = np.random.default_rng(seed)
    weights = np.tril(random.uniform(0, 1, (heads, blocks, blocks)) ** 12)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float16)


def pictures(figure):
    return [axes for axes in figure.axes if axes.get_images() and axes.get_visible()]


def test_maps_are_drawn_as_read(tmp_path):
    write_maps({"weights": maps()}, tmp_path / "a.npz")
    figure = attention_maps({"one": tmp_path / "a.npz", "two": maps(seed=1)}, train_length=16, length=64)
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
        assert (np.array(y) - np.array(x)).tolist() == [16, 16]  # the training length before the query
    bar = next(axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    assert bar.get_xlabel() == "weight of a query on 8 neighbouring keys, after decay"


def test_rows_before_decay_say_so():
    figure = attention_maps({"m": maps(), "m\nbefore decay": maps(seed=1)}, train_length=16, length=64)
    assert [axes.get_ylabel() for axes in pictures(figure)[::3]] == ["m", "m\nbefore decay"]
    bar = next(axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    assert bar.get_xlabel() == "weight of a query on 8 neighbouring keys, after decay unless the row says before"


def damaged(path, how):
    write_maps({"weights": maps()}, path)
    whole = path.read_bytes()
    contents = {"empty": b"", "text": b"maps", "cut": whole[: len(whole) // 2], "flipped": None}[how]
    if contents is None:
        middle = len(whole) // 2
        contents = whole[:middle] + bytes(byte ^ 0xFF for byte in whole[middle : middle + 8]) + whole[middle + 8 :]
    path.write_bytes(contents)


@pytest.mark.parametrize("how", ["empty", "text", "cut", "flipped"])
def test_damaged_files(tmp_path, how):
    damaged(tmp_path / "a.npz", how)
    with pytest.raises(ValueError, match=r"maps: .*a\.npz is damaged"):
        read_maps(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.ones(3)}, "is damaged .*weights"),
        ({"weights": np.array([None])}, "is damaged"),
        ({"weights": np.zeros((3, 4, 5))}, r"got shape \(3, 4, 5\)"),
        ({"weights": np.zeros((4, 4))}, r"got shape \(4, 4\)"),
        ({"weights": np.zeros((0, 4, 4))}, r"got shape \(0, 4, 4\)"),
        ({"weights": np.full((1, 2, 2), np.nan)}, "got weights from nan"),
        ({"weights": np.full((1, 2, 2), -0.5)}, "got weights from -0.5"),
        ({"weights": np.full((1, 2, 2), 3.0)}, "to 3 of"),
    ],
)
def test_what_are_no_maps(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_maps(tmp_path / "a.npz")


def test_no_file_and_no_maps(tmp_path):
    with pytest.raises(ValueError, match="got no file"):
        read_maps(tmp_path / "gone.npz")
    with pytest.raises(ValueError, match="maps: got none"):
        attention_maps({}, 16)
    with pytest.raises(ValueError, match=r"got shape \(3, 4, 5\) of m"):
        attention_maps({"m": np.zeros((3, 4, 5))}, 16)


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
    for stored in Path(__file__).parents[2].glob("results/*/results/*.attention.npz"):
        assert read_maps(stored).ndim == read_maps(stored, "near").ndim == 3
