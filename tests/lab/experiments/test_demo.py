"""The demo from end to end, in miniature."""

import math

import pytest
from cover import slow
from training.runs import MODEL, contents, ctrl_c, once, write_corpus

from rfa_lab.data import prepare
from rfa_lab.evaluation import perplexities
from rfa_lab.recipes import demo
from rfa_lab.record import read_record
from rfa_lab.report.tables import models_table
from rfa_lab.training import RunFolder, Stopped


@pytest.fixture
def miniature(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus")
    small = {"model": MODEL, "data": str(corpus), "tokenizer": "bytes", "length": 8, "batch_size": 4, "max_steps": 4}
    monkeypatch.setattr(demo, "SPEC", {**small, "eval_steps": 2})
    monkeypatch.setattr(demo, "TEST_TOKENS", 300)
    return tmp_path / "demo"


def test_demo(miniature):
    seen = []
    results = demo.run_demo(miniature, progress=lambda *step: seen.append(step))
    assert (miniature / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in miniature.iterdir()) == sorted([*demo.MODELS, "results", "figure.png"])
    assert results["model"].tolist() == ["rfa", "b1-rope", "b2-alibi", "m2-sc-rfa"]
    for row in results.to_dict("records"):
        name, lengths = row["model"], [8, 16, 32, 64]
        assert all(math.isfinite(row[length]) for length in lengths)
        assert row["parameters"] == RunFolder(miniature / name).read()["result"]["parameters"]
        model, stream = RunFolder(miniature / name).load_model(), prepare(demo.SPEC["data"], "bytes").streams["test"]
        alone = perplexities(model, stream, lengths, "blocks", scored=300)
        assert [row[length] for length in lengths] == [each["perplexity"] for each in alone]
        for task in ("text", "training", "blocks"):
            done, total = [step[1:] for step in seen if step[0].name == task and step[0].run == name][-1]
            assert done == total > 0
    assert_reported(miniature, results)


def assert_reported(folder, results):
    """`rfa report` finds each model that is finished, with the demo's own numbers."""
    found, missing = read_record(folder)
    assert (missing, sorted(found.labels())) == ({}, sorted(results["model"]))
    losses = found.values("loss blocks")
    for row in results.to_dict("records"):
        for length in losses:
            assert math.exp(losses[length].loc[row["model"], 0]) == pytest.approx(row[int(length)], rel=1e-6)  # float32
    assert all(name in models_table(found, "blocks").markdown() for name in results["model"])


def test_a_folder_of_other_files(miniature):
    miniature.mkdir(parents=True)
    (miniature / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no demo's folder"):
        demo.run_demo(miniature, overwrite=True)
    assert (miniature / "notes.txt").read_text() == "mine"


@slow
def test_a_demo_that_was_stopped(miniature):
    """The first model stays as it is, the second goes on, the others begin; the figures are an unstopped demo's."""

    stop_once = once(ctrl_c)

    def stop(stage, done, total):
        if (stage.run, stage.name, done) == ("b1-rope", "training", 2):
            stop_once()

    whole = demo.run_demo(miniature.with_name("whole"))
    with pytest.raises(Stopped):
        demo.run_demo(miniature, progress=stop)
    assert read_record(miniature)[0].labels() == ["rfa"]
    assert (miniature / "figure.png").exists()
    first = contents(miniature / "rfa")
    results = demo.run_demo(miniature, resume=True)
    assert contents(miniature / "rfa") == first
    for length in (8, 16, 32, 64):
        assert results[length].tolist() == pytest.approx(whole[length].tolist(), rel=1e-4)


@slow
def test_a_demo_that_is_there(miniature, monkeypatch):
    first = demo.run_demo(miniature).drop(columns="tokens/s")
    before = contents(miniature)
    with pytest.raises(ValueError, match="exists"):
        demo.run_demo(miniature)
    with monkeypatch.context() as changed:
        changed.setattr(demo, "SPEC", {**demo.SPEC, "seed": 1})
        with pytest.raises(ValueError, match="another run than this demo's"):
            demo.run_demo(miniature, resume=True)
    assert contents(miniature) == before
    again = demo.run_demo(miniature, overwrite=True).drop(columns="tokens/s")
    assert again.equals(first)  # the same seed, the same figures


def test_the_shipped_demo_fits_its_presets():
    """The real sizes make valid runs: the specification of each is built."""
    for name in demo.MODELS:
        spec = demo.TrainingSpec(preset=name, **demo.SPEC)
        assert spec.data == "stdlib"
        assert spec.length * max(demo.LENGTHS) <= demo.TEST_TOKENS
