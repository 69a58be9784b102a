"""The demo from end to end, in miniature."""

import pytest
import yaml
from training.runs import MODEL, ctrl_c, once, write_corpus

from rfa_lab.data import prepare
from rfa_lab.evaluation import perplexities
from rfa_lab.recipes import load_recipe, run_demo, runs
from rfa_lab.record import read_record
from rfa_lab.report.tables import models_table
from rfa_lab.training import RunFolder, Stopped

MODELS = ["rfa", "b1-rope"]


@pytest.fixture
def miniature(tmp_path, monkeypatch):
    given = yaml.safe_load(runs.DEMO.read_text("utf-8"))
    sizes = {"length": 8, "batch_size": 4, "max_steps": 4, "eval_steps": 2, "learning_rate": 3e-3}
    given["training"] = {**sizes, "model": MODEL, "data": str(write_corpus(tmp_path / "corpus")), "tokenizer": "bytes"}
    given["runs"] = [{"presets": MODELS, "seeds": [0]}]
    given["evaluation"] = {"lengths": [8, 16, 32, 64], "protocols": {"blocks": 300}}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(given))
    monkeypatch.setattr(runs, "DEMO", tmp_path / "demo.yaml")
    return tmp_path / "demo"


def test_a_demo_that_was_stopped_goes_on(miniature, tmp_path):
    """Its table and `rfa report` have the numbers of the models themselves."""
    stop_once = once(ctrl_c)

    def stop(stage, done, total):
        if (stage.run, stage.name, done) == ("b1-rope-seed0", "training", 2):
            stop_once()

    with pytest.raises(Stopped):
        run_demo(miniature, progress=stop)
    assert read_record(miniature)[0].labels() == ["rfa"]
    assert (miniature / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="which exists"):
        run_demo(miniature)
    results = run_demo(miniature, resume=True)
    assert results["model"].tolist() == MODELS
    found, missing = read_record(miniature)
    assert (missing, sorted(found.labels())) == ({}, sorted(MODELS))
    assert all(name in models_table(found, "blocks").markdown() for name in MODELS)
    stream = prepare(str(tmp_path / "corpus"), "bytes").streams["test"]
    for row in results.to_dict("records"):
        folder, lengths = RunFolder(miniature / "runs" / f"{row['model']}-seed0"), [8, 16, 32, 64]
        assert row["parameters"] == folder.read()["result"]["parameters"]
        alone = perplexities(folder.load_model(), stream, lengths, "blocks", scored=300)
        assert [row[length] for length in lengths] == pytest.approx([each["perplexity"] for each in alone], rel=1e-6)
    again = run_demo(miniature, overwrite=True).drop(columns="tokens/s")
    assert again[again["model"] == "rfa"].equals(results.drop(columns="tokens/s")[results["model"] == "rfa"])


def test_a_folder_of_other_files(miniature):
    miniature.mkdir(parents=True)
    (miniature / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no demo's folder"):
        run_demo(miniature, overwrite=True)
    (miniature / "recipe.json").write_text('{"name": "tiny"}')
    with pytest.raises(ValueError, match="the folder of the recipe tiny"):
        run_demo(miniature, overwrite=True)
    assert (miniature / "notes.txt").read_text() == "mine"


def test_the_shipped_demo_fits_its_presets():
    planned = load_recipe(runs.DEMO)
    assert [run.label for run in planned.runs] == [*MODELS, "b2-alibi", "m2-sc-rfa"]
    assert {run.spec.length for run in planned.runs} == {min(planned.evaluation.lengths)}
