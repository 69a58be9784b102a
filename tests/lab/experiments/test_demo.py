"""The demo from end to end, in miniature."""

import json
import math

import pytest
from cover import slow
from training.runs import MODEL, contents, ctrl_c, once, write_corpus

from rfa_lab.evaluation import evaluate
from rfa_lab.recipes import demo
from rfa_lab.report.contents import listed_tables
from rfa_lab.report.layout import markdown
from rfa_lab.results import read_results
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
    assert json.loads((miniature / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (miniature / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in miniature.iterdir()) == sorted(
        [*demo.MODELS, "results", "results.json", "figure.png"]
    )
    assert results["train_length"] == 8
    assert set(results["models"]) == {"rfa", "b1-rope", "b2-alibi", "m2-sc-rfa"}
    for name, model in results["models"].items():
        assert [row["length"] for row in model["rows"]] == [8, 16, 32, 64]
        assert all(math.isfinite(row["perplexity"]) for row in model["rows"])
        assert [tokens for tokens, _ in model["curve"]] == [2 * 32, 4 * 32]
        assert model["curve"][-1][1] == pytest.approx(model["record"]["result"]["valid_perplexity"])
        assert model["record"] == RunFolder(miniature / name).read()
        alone = evaluate(miniature / name, lengths=[8, 16, 32, 64], max_tokens=300)
        assert model["rows"] == alone["rows"]
        for task in ("text", "training", "evaluation"):
            done, total = [step[1:] for step in seen if step[0] == (task, name, None)][-1]
            assert done == total > 0
    assert_reported(miniature, results)


def assert_reported(folder, results):
    """`rfa report` finds each model that is finished, with the demo's own numbers."""
    found = read_results(folder)
    assert (found.missing, [run["preset"] for run in found.runs]) == ({}, list(results["models"]))
    for run in found.runs:
        model = results["models"][run["preset"]]
        assert run["evaluations"]["blocks"]["rows"] == model["rows"]
        assert run["training"]["parameters"] == model["record"]["result"]["parameters"]
        assert [point["tokens"] for point in run["curve"]] == [tokens for tokens, _ in model["curve"]]
    table = next(each for each in listed_tables(found.runs) if each.name == "table1-blocks").make()
    assert all(name in markdown(table) for name in results["models"])


def test_a_folder_of_other_files(miniature):
    miniature.mkdir(parents=True)
    (miniature / "results.json").write_text("mine")
    with pytest.raises(ValueError, match="no demo's folder"):
        demo.run_demo(miniature, overwrite=True)
    assert (miniature / "results.json").read_text() == "mine"


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
    finished = json.loads((miniature / "results.json").read_text())
    assert list(finished["models"]) == ["rfa"]
    assert (miniature / "figure.png").exists()
    assert_reported(miniature, finished)
    first = contents(miniature / "rfa")
    results = demo.run_demo(miniature, resume=True)
    assert contents(miniature / "rfa") == first
    for name, model in results["models"].items():
        for row, wanted in zip(model["rows"], whole["models"][name]["rows"], strict=True):
            assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-4)


@slow
def test_a_demo_that_is_there(miniature, monkeypatch):
    demo.run_demo(miniature)
    before = contents(miniature)
    with pytest.raises(ValueError, match="exists"):
        demo.run_demo(miniature)
    with monkeypatch.context() as changed:
        changed.setattr(demo, "SPEC", {**demo.SPEC, "seed": 1})
        with pytest.raises(ValueError, match="not this demo's"):
            demo.run_demo(miniature, resume=True)
    assert contents(miniature) == before
    again = demo.run_demo(miniature, overwrite=True)
    rows = {name: model["rows"] for name, model in json.loads(before["results.json"])["models"].items()}
    assert {name: model["rows"] for name, model in again["models"].items()} == rows  # the same seed, the same figures


def test_the_shipped_demo_fits_its_presets():
    """The real sizes make valid runs: the specification of each is built."""
    for name in demo.MODELS:
        spec = demo.TrainingSpec(preset=name, **demo.SPEC)
        assert spec.data == "stdlib"
        assert spec.length * max(demo.LENGTHS) <= demo.TEST_TOKENS
