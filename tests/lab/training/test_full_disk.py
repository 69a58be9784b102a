"""A disk that is full: nothing is lost, and the run goes on from its last checkpoint."""

import errno
import json
import os
import resource
import sys

import pytest
import torch
from cover import some

from rfa.files import write_whole
from rfa_lab.training import RunFolder, resume, train
from rfa_lab.training.callbacks import read_metrics
from training.runs import at_step, contents, tiny_spec, weights


def test_write_whole_leaves_what_was_there(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    kept = contents(tmp_path)

    def fail(path):
        path.mkdir()
        (path / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device; what was there before is kept: '{target}'"):
        write_whole(target, fail)
    assert contents(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == (["target"])


# A full disk, after the checkpoint of step 3 and before that of step 6. A limit on the size of files makes real writes
# fail where they would on a full disk: with 30 kB the model, with 90 kB only the optimiser's state.


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(kind, monkeypatch):
    if isinstance(kind, int):
        return resource.setrlimit(resource.RLIMIT_FSIZE, (kind, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    monkeypatch.setattr(
        *{"torch.save": (torch, "save"), "rename": (os, "replace"), "mkdir": (os, "makedirs")}[kind], no_space
    )


@pytest.fixture
def unlimited():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("kind", some([90_000, 30_000, "torch.save", "mkdir", "rename"], 2))
def test_full_disk_while_saving(corpus, finished, tmp_path, monkeypatch, unlimited, kind):
    spec = tiny_spec(corpus)
    says = rf"; checkpoint-3 is kept, from which --resume goes on: '{tmp_path}/run/"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=says):
        train(spec, tmp_path / "run", progress=at_step(5, lambda: full_disk(kind, patch)))
    unlimited()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-3"]
    assert RunFolder(tmp_path / "run").latest_checkpoint().name == "checkpoint-3"
    assert not [name for name in contents(tmp_path / "run") if "/." in name or name.startswith(".")]
    resume(tmp_path / "run")
    for name, value in weights(finished).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize("times", some([3, 1], 1))
def test_a_run_that_lacks_only_its_model_makes_no_step_more(corpus, finished, tmp_path, monkeypatch, times):
    """The disk is full when the model is saved, after the last checkpoint; again and again."""
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["rfa_lab.training.train"], "save_model", no_space)
        for attempt in range(times):
            with pytest.raises(OSError, match=rf"checkpoint-8 is kept.*: '{tmp_path}/run"):
                resume(tmp_path / "run") if attempt else train(tiny_spec(corpus), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"] is False
    record = resume(tmp_path / "run", progress=lambda *_: pytest.fail("it went on"))
    whole = json.loads((finished / "run.json").read_text())
    assert record["steps"] == 8
    assert record["result"]["tokens"] == whole["result"]["tokens"]
    assert record["result"]["tokens_per_second"] is None  # nobody measured it
    assert record["result"]["valid_loss"] == pytest.approx(whole["result"]["valid_loss"], abs=1e-6)
    for name, value in weights(finished).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], value, atol=1e-6, rtol=0)
    lines = [line["step"] for line in read_metrics(RunFolder(tmp_path / "run")) if "loss" in line]
    assert lines == list(range(1, 9))
