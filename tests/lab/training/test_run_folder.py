"""The run folder: what may be replaced, what is damaged, and what other processes change."""

import json
import shutil
import sys

import pytest
import torch
from cover import cover, some

from rfa_lab.training import RunFolder, Stopped, resume, train
from rfa_lab.training.callbacks import read_metrics
from training.runs import at_step, contents, ctrl_c, tiny_spec, write_corpus


def test_overwrite(corpus, tmp_path):
    train(tiny_spec(corpus, max_steps=3), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("somebody's own")
    assert train(tiny_spec(corpus, max_steps=2), tmp_path / "run", overwrite=True)["steps"] == 2
    assert (tmp_path / "run" / "notes.txt").read_text() == "somebody's own"
    assert not (tmp_path / "run" / "checkpoints" / "checkpoint-3").exists()
    assert max(line["step"] for line in read_metrics(RunFolder(tmp_path / "run"))) == 2


def test_kernels_that_cannot_be_compiled_overwrite_nothing(corpus, run, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no kernel")

    before = contents(run.path)
    monkeypatch.setattr(sys.modules["rfa_lab.training.train"], "choose_backend", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        train(tiny_spec(corpus), run.path, overwrite=True)
    assert contents(run.path) == before


@pytest.mark.parametrize("split", some(["test", "train", "valid"], 1))
def test_bytes_that_are_no_text_are_found_before_training(tmp_path, split):
    corpus = write_corpus(tmp_path / "corpus")
    text = corpus / split / "a.txt"
    text.write_bytes(text.read_bytes() + b"\xff")
    with pytest.raises(ValueError, match=r"'a.txt' with byte 0xff at offset \d+, expected UTF-8"):
        train(tiny_spec(corpus), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@cover(1, overwrite=[False, True], foreign=["thesis.tex", "run.json"])
def test_a_foreign_folder_is_never_deleted(corpus, tmp_path, overwrite, foreign):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / foreign).write_text('{"entry": "of another program"}')
    (tmp_path / "mine" / "years of work.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists"):
        train(tiny_spec(corpus, max_steps=1), tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "years of work.txt").read_text() == "precious"


def test_a_damaged_record(stopped):
    text = stopped.record.read_text()
    for damaged, message in (
        ("[" * 100_000, "is damaged"),
        (text.replace('"cpu"', '"\\ud800"'), "is damaged .*surrogates not allowed"),
        (text.replace('"m2-sc-rfa"', '"m9"'), "preset: got 'm9'"),
    ):
        stopped.record.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            resume(stopped.path)


def test_a_damaged_field_is_named(run):
    """In one line, with the file."""
    whole = run.record.read_text()
    for field, value, said in (
        ("spec", None, "Input should be a valid dictionary"),
        ("processes", 0, "Input should be greater than or equal to 1"),
        ("result.valid_perplexity", float("nan"), "Input should be a finite number"),
    ):
        place = record = json.loads(whole)
        *folders, name = field.split(".")
        for folder in folders:
            place = place[folder]
        place[name] = value
        run.record.write_text(json.dumps(record))
        with pytest.raises(ValueError, match="damaged") as error:
            run.read()
        assert str(error.value).startswith(f"run: {run.record} is damaged ({field}: {said}")
        assert "\n" not in str(error.value)


def test_a_finished_run_without_its_model(run):
    """Its newest checkpoint is not its result."""
    shutil.rmtree(run.model)
    with pytest.raises(ValueError, match="is finished and its model is gone, expected one"):
        run.load_model()


def test_a_run_in_use(corpus, stopped):
    """Another process that holds it keeps this one off, whatever it wants there."""
    before = contents(stopped.path)
    with RunFolder(stopped.path).lock():
        for intrude in (
            lambda: train(tiny_spec(corpus), stopped.path, overwrite=True),
            lambda: resume(stopped.path),
            lambda: stopped.lock().__enter__(),
        ):
            with pytest.raises(ValueError, match="in use by another process, expected one at a time"):
                intrude()
    assert contents(stopped.path) == before
    with stopped.lock():
        pass


def test_checkpoints_none_of_which_is_whole(corpus, tmp_path):
    """To begin again at step 0 would throw the work and its metrics away."""
    with pytest.raises(Stopped):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(2, ctrl_c))
    (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "optimizer.pt").unlink()
    before = contents(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match=r"checkpoint-2 is damaged, it lacks optimizer\.pt"):
        resume(tmp_path / "run")
    assert contents(tmp_path / "run" / "checkpoints") == before


def test_a_stop_saves_no_weights_that_are_no_numbers(corpus, tmp_path, monkeypatch):
    spec = tiny_spec(corpus, "b1-rope", log_steps=100)
    torch_step, calls = torch.optim.Adam.step, []

    def poisoned(self, *arguments):
        torch_step(self, *arguments)
        calls.append(None)
        if len(calls) == 5:
            self.param_groups[0]["params"][0].data.fill_(torch.nan)

    monkeypatch.setattr(torch.optim.Adam, "step", poisoned)
    with pytest.raises(ValueError, match="expected finite numbers"):
        train(spec, tmp_path / "run", progress=at_step(6, ctrl_c))
    assert RunFolder(tmp_path / "run").latest_checkpoint().name == "checkpoint-3"
