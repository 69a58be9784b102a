"""What a recipe's runs fail on: said before any of them where that can be known, else one run fails alone."""

import pytest
import torch
from training.runs import command, messages

from rfa.nn import filter_attention
from rfa_lab.recipes import load_recipe, run_recipe
from rfa_lab.recipes import runner as making

from .recipes import NAMES, TWO_PRESETS, recipe, write_recipe


def test_all_that_the_text_has_not(tmp_path, out, monkeypatch, capsys):
    training = {**recipe()["training"], "batch_size": 1000, "length": 450}
    evaluation = {"lengths": [16, 4096], "protocols": {"blocks": None}, "passkey": True, "attention": ["b1-rope"]}
    path = write_recipe(tmp_path, training=training, evaluation=evaluation)
    status, _, err = command(monkeypatch, capsys, "experiment", path, "--out", out)
    assert status == 2
    said = [line.removeprefix(f"rfa: {path}: ") for line in messages(err)]
    wanted = [
        "training: data: got 3 blocks in the train split, expected at least 1000 of 450 tokens",
        "training: data: got 0 blocks in the valid split, expected at least 1 of 450 tokens",
        "evaluation: lengths: got 4096, expected at most the 70",
        "evaluation: passkey: data: got a text of 19 different tokens, expected at least 21",
        "evaluation: attention: got a test split of 70",
    ]
    assert len(said) == len(wanted), said
    assert all(line.startswith(start) for line, start in zip(said, wanted, strict=True)), said
    assert not out.exists()


def test_processes_that_share_a_run_are_refused(tmp_path, out, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"processes: got 2 .* expected .*CUDA_VISIBLE_DEVICES"):
        run_recipe(load_recipe(write_recipe(tmp_path)), out)
    assert not out.exists()


def test_models_that_do_not_run_here_are_named_before_any_run(tmp_path, out, evaluated, monkeypatch, capsys):
    class CompilationError(Exception):
        """Triton's are no RuntimeErrors."""

    def broken(*_, **__):
        raise CompilationError("no\ncompiler")

    monkeypatch.setattr(filter_attention, "located_filter_attention", broken)
    path = write_recipe(tmp_path)
    status, said, err = command(monkeypatch, capsys, "experiment", path, "--out", out)
    assert (status, said) == (2, "")
    reason = "cannot make a step on this machine: CompilationError: no compiler"
    assert messages(err) == [f"rfa: {path}: {NAMES[1]}: {reason}"]  # of the two, the first
    assert not list(out.glob("runs/*"))
    outcome = run_recipe(load_recipe(path), out, only=[NAMES[0]])
    assert outcome.done == (NAMES[0],)


def fail_rope(monkeypatch, error):
    """Let the training of `b1-rope` fail, and of nothing else."""
    whole = making.train

    def train(spec, *given, **options):
        if spec.preset == "b1-rope":
            raise error
        return whole(spec, *given, **options)

    monkeypatch.setattr(making, "train", train)


def test_no_memory_fails_one_run(tmp_path, out, evaluated, monkeypatch):
    fail_rope(monkeypatch, RuntimeError("out of memory"))
    planned = load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS))
    outcome = run_recipe(planned, out)
    assert (outcome.done, outcome.failed) == ((NAMES[1],), {NAMES[0]: "out of memory"})
    monkeypatch.setenv("RFA_DEBUG", "1")
    with pytest.raises(RuntimeError, match="out of memory"):
        run_recipe(planned, out)


def test_one_failure_does_not_stop_the_others(tmp_path, out, evaluated, monkeypatch, capsys):
    path = write_recipe(tmp_path, runs=TWO_PRESETS)
    whole = making.train
    fail_rope(monkeypatch, ValueError("training: got\nno number"))
    status, said, err = command(monkeypatch, capsys, "experiment", path, "--out", out)
    assert status == 1
    assert messages(err) == [f"rfa: {NAMES[0]} failed: training: got no number"]
    assert "1 runs done" in said
    assert f"1 runs failed: {NAMES[0]}" in said
    monkeypatch.setattr(making, "train", whole)
    assert command(monkeypatch, capsys, "experiment", path, "--out", out)[0] == 0


def test_a_device_that_is_lost_stops_all(tmp_path, out, evaluated, monkeypatch):
    fail_rope(monkeypatch, torch.AcceleratorError("an illegal memory access was encountered"))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        run_recipe(load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS)), out)
    assert evaluated == []
