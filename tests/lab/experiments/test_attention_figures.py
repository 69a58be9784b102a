"""Attention maps of every layer, on demand."""

import numpy as np
import pytest
from training.runs import tiny_spec, write_corpus

from rfa_lab.data import prepare
from rfa_lab.evaluation import attention_maps
from rfa_lab.report.figures import read_maps
from rfa_lab.training import RunFolder, train


@pytest.fixture
def run(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    train(tiny_spec(corpus, max_steps=1, eval_steps=1), tmp_path / "run")
    return tmp_path / "run"


def test_every_layer_is_drawn(rfa, run, tmp_path):
    status, said, _ = rfa("evaluate", "run", "--lengths", "16", "--attention", "maps")
    assert status == 0
    assert said.splitlines()[-1] == "attention: maps/attention.png"
    files = ["attention.png", "layer-0.npz", "layer-1.npz"]
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == files
    stream = prepare(str(tmp_path / "corpus"), "bytes").streams["test"]
    start = (len(stream) - 128) // 2
    model = RunFolder(run).load_model()
    for layer in (0, 1):
        expected, _ = attention_maps(model, stream[start : start + 128], 16, layer=layer)
        assert expected.keys() == {"weights", "undecayed"}
        for name, of in expected.items():
            np.testing.assert_array_equal(read_maps(tmp_path / "maps" / f"layer-{layer}.npz")[name], of)


@pytest.mark.parametrize("place", ["run/model", "file"])
def test_a_place_that_is_none(rfa, run, tmp_path, place):
    (tmp_path / "file").write_text("")
    status, _, err = rfa("evaluate", "run", "--attention", place)
    assert status == 2
    assert f"--attention: got {place}, expected a new or another folder" in err
