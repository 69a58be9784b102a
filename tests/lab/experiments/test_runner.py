"""Runs of a recipe: made once, by however many processes, whatever stopped them."""

import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from training.runs import MODEL, command, contents, ctrl_c, messages, once

from rfa.progress import Stage
from rfa_lab.recipes import load_recipe, run_recipe, states
from rfa_lab.recipes import runs as making
from rfa_lab.record import measurements, read_record, read_rows
from rfa_lab.training import RunFolder, Stopped

from .recipes import NAMES, TWO_PRESETS, claimed_elsewhere, recipe, write_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def at(task: str, step: int, act):
    """A progress callback that acts at a step of a task, once."""
    act = once(act)

    def progress(stage, done, total):
        shown = stage if isinstance(stage, str) else f"{stage.run}: {stage.name}"  # text on the command line
        if shown.startswith(task) and done == step:
            act()

    return progress


def test_all_runs(tmp_path, out, evaluated):
    path = write_recipe(tmp_path, evaluation={**recipe()["evaluation"], "attention": ["m2-sc-rfa"]})
    seen = []
    outcome = run_recipe(load_recipe(path), out, progress=lambda *step: seen.append(step))
    assert (outcome.done, outcome.claimed, outcome.failed) == (tuple(NAMES), (), {})
    assert evaluated == NAMES
    planned = json.loads((out / "recipe.json").read_text())
    assert planned == {"name": "tiny", "title": "A tiny recipe", "runs": NAMES}
    assert (Stage("runs"), 0, 3) in seen
    assert seen[-1] == (Stage("runs"), 3, 3)
    assert {path.name for path in (out / "results").iterdir()} == {
        *(f"{name}.parquet" for name in NAMES),
        "m2-sc-rfa-seed0.npz",
    }
    found, missing = read_record(out)
    assert missing == {}
    assert found.runs()["label"].tolist() == ["b1-rope", "m2-sc-rfa b=0.5", "m2-sc-rfa"]  # in order of files
    settings, folder = found.settings[NAMES[2]], RunFolder(out / "runs" / NAMES[2])
    assert (settings["recipe"], settings["train_length"]) == ("tiny", 8)
    assert settings["spec"]["model"] == {**MODEL, "damping": 0.5}
    assert settings["environment"] == folder.read()["environment"]
    assert (settings["training"]["steps"], settings["training"]["tokens"]) == (4, 4 * 32)
    assert found.protocols() == ["blocks", "matched"]
    assert found.values("validation").columns.tolist() == [2 * 32, 4 * 32]
    heads = MODEL["num_attention_heads"]
    robustness = found.values(f"robustness layer 1 head {heads - 1}")
    assert robustness.columns.tolist() == [1, 2, 3, 4]
    assert "b1-rope" not in robustness.index.unique("label")
    assert not folder.model.exists()  # a record keeps figures, not weights
    assert not folder.checkpoints.exists()
    assert folder.metrics.is_file()


def test_what_is_done_is_skipped(tmp_path, out, evaluated):
    planned = load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS))
    assert run_recipe(planned, out, only=["b1-*"]).done == (NAMES[0],)
    before = contents(out / "results")
    (tmp_path / "corpus").rename(tmp_path / "text")
    with pytest.raises(ValueError, match="corpus"):  # said before the next run begins
        run_recipe(planned, out)
    assert run_recipe(planned, out, only=[NAMES[0]]).done == (NAMES[0],)  # nothing left that needs the text
    (tmp_path / "text").rename(tmp_path / "corpus")
    assert run_recipe(planned, out).done == tuple(NAMES[:2])
    assert evaluated == NAMES[:2]
    assert before.items() <= contents(out / "results").items()
    with pytest.raises(ValueError, match="got 'b2', expected some of b1-rope-seed0, m2-sc-rfa-seed0"):
        run_recipe(planned, out, only=["b2"])


def test_stopped_and_gone_on(tmp_path, out, evaluated):
    planned = load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS))
    with pytest.raises(Stopped):
        run_recipe(planned, out, progress=at(f"{NAMES[1]}: training", 3, ctrl_c))
    assert [(state.state, state.step) for state in states(planned, out)] == [("done", 4), ("half done", 3)]
    steps = []

    def is_step(stage):
        return stage.name == "training" and "validated" not in stage.metrics

    run_recipe(planned, out, progress=lambda stage, done, total: steps.append(done) if is_step(stage) else None)
    assert steps == [4]
    rows = read_rows(out / "results" / f"{NAMES[1]}.parquet")
    assert rows.values("robustness layer 0 head 0").columns.tolist() == [1, 2, 3, 4]


def test_a_claim_and_a_dead_one(tmp_path, out, evaluated):
    planned = load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS))
    with claimed_elsewhere(out, NAMES[0]):
        outcome = run_recipe(planned, out)
        assert (outcome.done, outcome.claimed) == ((NAMES[1],), (NAMES[0],))
    assert run_recipe(planned, out).done == tuple(NAMES[:2])
    assert evaluated == [NAMES[1], NAMES[0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (None, "is damaged or no record"),
        ({"training": {**recipe()["training"], "max_steps": 5}}, "is of another spec"),
    ],
)
def test_a_damaged_or_foreign_result(tmp_path, out, evaluated, changes, said):
    run_recipe(load_recipe(write_recipe(tmp_path)), out, only=[NAMES[0]])
    path = out / "results" / f"{NAMES[0]}.parquet"
    if changes is None:
        path.write_bytes(path.read_bytes()[:-100])
    planned, before = load_recipe(write_recipe(tmp_path, **(changes or {}))), contents(out)
    for look in (run_recipe, states):
        with pytest.raises(ValueError, match=said) as raised:
            look(planned, out)
        assert "\n" not in str(raised.value)
    assert contents(out) == before


def test_another_checkout_goes_on(tmp_path, out, evaluated):
    """The text may lie elsewhere; what it held is in the record."""
    with pytest.raises(Stopped):
        run_recipe(load_recipe(write_recipe(tmp_path)), out, progress=at(f"{NAMES[0]}: training", 2, ctrl_c))
    moved = load_recipe(write_recipe(tmp_path / "elsewhere"))
    shutil.move(tmp_path / "corpus", tmp_path / "gone")
    assert run_recipe(moved, out, only=[NAMES[0]]).done == (NAMES[0],)
    (settings,) = read_rows(out / "results" / f"{NAMES[0]}.parquet").settings.values()
    assert len(settings["resumed"]) == 1
    other = load_recipe(write_recipe(tmp_path), data="stdlib")
    with pytest.raises(ValueError, match=r"of another spec than|another run than"):
        run_recipe(other, out)


def test_another_version(tmp_path, out, evaluated, monkeypatch):
    planned = load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS))
    with pytest.raises(Stopped):
        run_recipe(planned, out, progress=at(f"{NAMES[0]}: training", 2, ctrl_c))
    before = contents(out)
    there, here = making.environment(), {**making.environment(), "commit": "abc"}
    monkeypatch.setattr(making, "environment", lambda: here)
    with pytest.raises(ValueError, match=f"{NAMES[0]} in .* was made by rfa .* --other-version"):  # not finished
        run_recipe(planned, out)
    assert contents(out) == before
    run_recipe(planned, out, other_version=True, only=NAMES[:1])
    made = [f"{each['rfa']} {each['commit']}" for each in (there, here)]
    assert read_rows(out / "results" / f"{NAMES[0]}.parquet").settings[NAMES[0]]["versions"] == made


def test_dry_run(tmp_path, out, evaluated, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    path = write_recipe(tmp_path)
    arguments = ("experiment", path, "--out", out, "--dry-run")
    status, said, _ = command(monkeypatch, capsys, *arguments)
    assert status == 0
    assert not out.exists()
    assert all(any(name in line and "to do" in line and "128" in line for line in said.splitlines()) for name in NAMES)
    assert "0 of 3 runs done; 384 tokens" in said
    planned = load_recipe(path)
    with pytest.raises(Stopped):
        run_recipe(planned, out, progress=at(f"{NAMES[1]}: training", 1, ctrl_c))
    before = contents(out)
    first, second, third = states(planned, out)
    assert contents(out) == before
    (settings,) = read_rows(out / "results" / f"{NAMES[0]}.parquet").settings.values()
    speed = settings["training"]["tokens_per_second"]
    assert first.seconds == 0
    assert second.seconds == pytest.approx(96 / speed)
    assert third.seconds == pytest.approx(128 / speed)
    _, said, _ = command(monkeypatch, capsys, *arguments)
    assert "half done at step 1 of 4" in said
    assert "1 of 3 runs done" in said
    _, said, _ = command(monkeypatch, capsys, *arguments, "--only", NAMES[0], NAMES[2])
    assert NAMES[1] not in said


def test_ctrl_c(tmp_path, out, evaluated, monkeypatch, capsys):
    """While training, and where there is nothing to save."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    for task, step, said in ((NAMES[1], 2, "stopped at step 2 of 4"), (f"{NAMES[1]}: blocks", 1, "stopped")):

        @contextmanager
        def bars(task=task, step=step):
            act = at(task, step, ctrl_c)
            yield lambda *far, key: act(*far)

        monkeypatch.setattr(sys.modules["rfa_lab.cli.experiments"], "progress_bars", bars)
        status, _, err = command(monkeypatch, capsys, "experiment", "tiny.yaml", "--out", "out", "--only", "m2*", "b1*")
        assert status == 130
        hint = "rfa experiment tiny.yaml --out out --only 'm2*' 'b1*'"
        assert messages(err) == [f"rfa: {said}; go on with: {hint}"]


def test_the_course_of_parameters_is_thinned_out_from_the_first_step_to_the_last():
    lines = [{"step": step, "dynamics": {"0": {"decay": [0.5 * step, None]}}} for step in range(25, 2001, 25)]
    evaluated = {"evaluations": {}, "attention_summary": None}
    found = measurements(evaluated, [*lines, {"step": 2000, "tokens": 9, "valid_loss": 4.0}])
    steps = list(found["decay layer 0 head 0"])
    assert (len(steps), steps[0], steps[-1]) == (16, 25, 2000)
    assert found["decay layer 0 head 0"] == {step: 0.5 * step for step in steps}
    assert found["validation"] == {9: 4.0}


@pytest.mark.parametrize("name", ["novels-small", "context"])
def test_a_stored_record_is_that_of_its_recipe(name):
    """The record of code is not complete."""
    record, _ = read_record(RECIPES.parent / "results" / f"{name}.parquet")
    specs = {
        run.name: (run.spec.preset, run.spec.model, run.spec.seed) for run in load_recipe(RECIPES / f"{name}.yaml").runs
    }
    made = {run: (of["spec"]["preset"], of["spec"]["model"], of["spec"]["seed"]) for run, of in record.settings.items()}
    left = ("c2-", "c3-", "c5-", "c6-", "c12-")  # presets of commit c7550f4b, as the option `taps`
    made = {run: of for run, of in made.items() if not of[0].startswith(left) and "taps" not in of[1]}
    assert all(specs[run] == of for run, of in made.items())
    assert name == "context" or made == specs


# What runs fail on: said before any of them where that can be known, else one run fails alone


def test_all_that_the_text_has_not(tmp_path, out, monkeypatch, capsys):
    training = {**recipe()["training"], "batch_size": 1000, "length": 450}
    evaluation = {"lengths": [16, 4096], "protocols": {"blocks": None}, "attention": ["b1-rope"]}
    path = write_recipe(tmp_path, training=training, evaluation=evaluation)
    status, _, err = command(monkeypatch, capsys, "experiment", path, "--out", out)
    assert status == 2
    said = [line.removeprefix(f"rfa: {path}: ") for line in messages(err)]
    wanted = [
        "training: data: got 1601 tokens in the train split, expected at least 450000",
        "training: data, validation: got 401 tokens in the valid split, expected at least 450",
        "evaluation: lengths: got 701 tokens in the test split, expected at least 4096",
        "evaluation: attention, 8 training lengths: got 701 tokens in the test split, expected at least 3600",
    ]
    assert said == wanted
    assert not out.exists()


def test_processes_that_share_a_run_are_refused(tmp_path, out, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"processes: got 2 .* expected .*CUDA_VISIBLE_DEVICES"):
        run_recipe(load_recipe(write_recipe(tmp_path)), out)
    assert not out.exists()


def fail_rope(monkeypatch, error):
    """Let the training of `b1-rope` fail, and of nothing else."""
    whole = making.train

    def train(spec, *given, **options):
        if spec.preset == "b1-rope":
            raise error
        return whole(spec, *given, **options)

    monkeypatch.setattr(making, "train", train)


def test_one_failure_does_not_stop_the_others(tmp_path, out, evaluated, monkeypatch, capsys):
    path = write_recipe(tmp_path, runs=TWO_PRESETS)
    whole = making.train
    fail_rope(monkeypatch, ValueError("training: got\nno number"))
    status, said, err = command(monkeypatch, capsys, "experiment", path, "--out", out)
    assert status == 1
    assert messages(err) == [f"rfa: {NAMES[0]} failed: training: got no number"]
    assert "1 runs done" in said
    assert f"1 runs failed: {NAMES[0]}" in said
    monkeypatch.setenv("RFA_DEBUG", "1")
    with pytest.raises(ValueError, match="no number"):
        run_recipe(load_recipe(path), out)
    monkeypatch.delenv("RFA_DEBUG")
    monkeypatch.setattr(making, "train", whole)
    assert command(monkeypatch, capsys, "experiment", path, "--out", out)[0] == 0
