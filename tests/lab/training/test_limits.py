"""Runs that stop when their time is up, and runs that keep their best model."""

import json
import shutil
import time

import pytest
import torch

from rfa.models.saved_files import checkpoints_in
from rfa_lab.training import OutOfTime, RunFolder, resume, train
from rfa_lab.training.callbacks import read_metrics
from training.runs import at_step, tiny_spec, weights

SPEC = {"max_steps": 12, "eval_steps": 3, "learning_rate": 0.03}


@pytest.fixture(scope="session")
def one_word(corpus, tmp_path_factory):
    """A training text of one word, which is soon known too well for another validation text."""
    folder = shutil.copytree(corpus, tmp_path_factory.mktemp("one word") / "corpus")
    (folder / "train" / "a.txt").write_text(800 * "a ")
    return folder


def valid_losses(folder):
    return {line["step"]: line["valid_loss"] for line in read_metrics(RunFolder(folder)) if "valid_loss" in line}


def test_a_run_in_parts_is_the_run_in_one(corpus, finished, tmp_path, caplog):
    """Each call has no time at all, and makes one step. All losses and weights are equal bit for bit."""
    with pytest.raises(OutOfTime, match="stopped at step 1 of 8"):
        train(tiny_spec(corpus), tmp_path / "parts", until=time.monotonic())
    for step in range(2, 9):
        with pytest.raises(OutOfTime, match=f"stopped at step {step} of 8"):
            resume(tmp_path / "parts", until=time.monotonic())
    record = resume(tmp_path / "parts", until=time.monotonic())  # it was finished in time or not
    assert (record["finished"], len(record["resumed"])) == (True, 7)
    lines, whole = (
        [{k: v for k, v in line.items() if k != "dynamics"} for line in read_metrics(RunFolder(folder))]
        for folder in (tmp_path / "parts", finished)
    )
    assert [line for line in lines if "valid_loss" not in line or line["step"] in (3, 6, 8)] == whole
    for name, value in weights(finished).items():
        assert torch.equal(value, weights(tmp_path / "parts")[name])
    assert not caplog.records  # no word of a signal


def test_a_limit_that_is_not_reached(corpus, finished, tmp_path):
    record = train(tiny_spec(corpus), tmp_path / "run", until=time.monotonic() + 3600)
    assert (record["steps"], "best_step" in record["result"]) == (8, False)
    assert "keep_best" not in record["spec"]  # as in older records
    assert record["result"]["valid_loss"] == json.loads((finished / "run.json").read_text())["result"]["valid_loss"]


@pytest.mark.parametrize("stopped", [False, True])
def test_the_best_model_is_kept(one_word, tmp_path, stopped):
    if stopped:
        with pytest.raises(OutOfTime):
            train(tiny_spec(one_word, keep_best=True, **SPEC), tmp_path / "run", until=time.monotonic())
        record = resume(tmp_path / "run")
    else:
        record = train(tiny_spec(one_word, keep_best=True, **SPEC), tmp_path / "run")
    losses = valid_losses(tmp_path / "run")
    best = min(losses, key=losses.__getitem__)
    assert best not in (12, 9)  # the case that matters: two checkpoints come after it
    assert (record["result"]["best_step"], record["result"]["valid_loss"]) == (best, losses[best])
    assert record["steps"] == 12
    kept = RunFolder(tmp_path / "run")
    assert [path.name for path in checkpoints_in(kept.checkpoints)] == [f"checkpoint-{s}" for s in (best, 9, 12)]
    model = kept.load_model()
    batch = torch.arange(16)[None] + 97
    expected = kept.load_model(kept.checkpoints / f"checkpoint-{best}")(batch).logits
    assert torch.equal(model(batch).logits, expected)
    assert not torch.equal(kept.load_model(kept.checkpoints / "checkpoint-12")(batch).logits, expected)


def test_a_best_model_that_is_lost(one_word, tmp_path):
    def lose():
        best = min(losses := valid_losses(tmp_path / "run"), key=losses.__getitem__)
        (tmp_path / "run" / "checkpoints" / f"checkpoint-{best}" / "model.safetensors").write_bytes(b"")

    spec = tiny_spec(one_word, keep_best=True, **SPEC)
    with pytest.raises(ValueError, match=r"keep_best: .* cannot be read"):
        train(spec, tmp_path / "run", progress=at_step(11, lose))
