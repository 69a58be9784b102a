"""A run that was stopped, by Ctrl-C, and resumed is the run that was not."""

import json
import time

import pytest
import torch
from cover import some

from rfa.models.saved_files import checkpoints_in
from rfa_lab.training import RunFolder, Stopped, callbacks, resume, train
from rfa_lab.training.callbacks import read_metrics
from training.runs import STOPPING, at_step, contents, ctrl_c, tiny_spec, weights, write_corpus


def metrics(folder):
    """All lines but their dynamics, which `test_metrics` looks at."""
    return [{k: v for k, v in line.items() if k != "dynamics"} for line in read_metrics(RunFolder(folder))]


def assert_same_run(first, second):
    mine, theirs = (json.loads((folder / "run.json").read_text()) for folder in (first, second))
    assert mine["steps"] == theirs["steps"]
    assert mine["finished"] is theirs["finished"] is True
    assert mine["result"]["valid_loss"] == pytest.approx(theirs["result"]["valid_loss"], abs=1e-4)
    assert mine["result"]["tokens"] == theirs["result"]["tokens"]
    for name, value in weights(first).items():
        torch.testing.assert_close(value, weights(second)[name], atol=1e-4, rtol=0)
    assert metrics(first) == [pytest.approx(line, abs=1e-4) for line in metrics(second)]


KINDS = {
    "m2-sc-rfa": {"preset": "m2-sc-rfa"},
    "accumulated": {"preset": "m2-sc-rfa", "accumulate": 3},
    "epochs": {"preset": "b1-rope", "max_steps": None, "epochs": 0.5, "eval_steps": None},
    "second epoch": {"preset": "m2-sc-rfa", "batch_size": 20},  # five steps an epoch
}


@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_stopped_and_resumed(corpus, tmp_path, kind):
    spec = tiny_spec(corpus, **KINDS[kind])
    train(spec, tmp_path / "whole")
    step = 7 if kind == "second epoch" else 5
    with pytest.raises(Stopped) as stopped:
        train(spec, tmp_path / "parts", progress=at_step(step, ctrl_c))
    assert stopped.value.step == step
    assert RunFolder(tmp_path / "parts").latest_checkpoint().name == f"checkpoint-{step}"
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["finished"] is False
    record = resume(tmp_path / "parts")
    assert record == json.loads((tmp_path / "parts" / "run.json").read_text())
    assert record["resumed"] == [record["environment"]]  # here the same machine and versions
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("validating", some([True, False], 1))
def test_stopped_at_the_last_step_is_finished(corpus, finished, tmp_path, validating):
    """And stopped: what would follow, as the next run of a recipe, was not wanted."""
    with pytest.raises(Stopped, match="stopped at step 8 of 8"):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(8, ctrl_c, validating=validating))
    assert resume(tmp_path / "run", progress=lambda *_: pytest.fail("it went on"))["finished"]
    assert_same_run(finished, tmp_path / "run")


@pytest.mark.parametrize("step", some([5, 2], 1))  # before the first checkpoint, and after it
def test_killed_and_resumed(corpus, finished, tmp_path, step):
    def die():
        raise SystemExit("as if by SIGKILL: nothing is saved")

    spec = tiny_spec(corpus)
    with pytest.raises(SystemExit):
        train(spec, tmp_path / "parts", progress=at_step(step, die))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a line that was being written
    steps = []

    def made(step, _, figures):
        if "validated" not in figures:
            steps.append(step)

    resume(tmp_path / "parts", progress=made)
    assert steps == list(range(1 if step == 2 else 4, 9))
    assert_same_run(finished, tmp_path / "parts")


def test_ctrl_c_while_validating(corpus, finished, tmp_path, caplog):
    """The step that was validated is the last one, and nothing of the validation is lost."""
    with pytest.raises(Stopped, match="stopped at step 3 of 8"):
        train(tiny_spec(corpus), tmp_path / "parts", progress=at_step(3, ctrl_c, validating=True))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rfa")]
    assert said == [STOPPING]
    assert [path.name for path in checkpoints_in(tmp_path / "parts" / "checkpoints")] == ["checkpoint-3"]
    resume(tmp_path / "parts")
    assert_same_run(finished, tmp_path / "parts")


def test_a_second_ctrl_c_stops_at_once(corpus, tmp_path):
    def twice():
        ctrl_c()
        time.sleep(callbacks.REPEATED)
        ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(5, twice))
    assert RunFolder(tmp_path / "run").latest_checkpoint().name == "checkpoint-3"
    assert resume(tmp_path / "run")["steps"] == 8


def test_changed_data_are_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    with pytest.raises(Stopped):
        train(tiny_spec(corpus), tmp_path / "run", progress=at_step(2, ctrl_c))
    before = contents(tmp_path / "run")
    text = corpus / "train" / "a.txt"
    original = text.read_text()
    text.write_text(original.replace("a", "b", 1))
    with pytest.raises(ValueError, match="has changed since run"):
        resume(tmp_path / "run")
    assert contents(tmp_path / "run") == before
    text.write_text(original)
    assert resume(tmp_path / "run")["finished"]


def test_other_processes_than_began_are_refused(stopped):
    record = stopped.read()
    assert record["processes"] == 1
    stopped.write({**record, "processes": 2})
    before = contents(stopped.path)
    with pytest.raises(ValueError, match="processes: got 1, expected 2"):
        resume(stopped.path)
    assert contents(stopped.path) == before
