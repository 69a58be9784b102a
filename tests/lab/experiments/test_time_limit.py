"""A recipe in parts of a limited time: the same results as in one go, in a folder that can be carried."""

import shutil
import time

import pytest
from training.runs import command, contents, messages

from rfa_lab.recipes import load_recipe, run_recipe, runs, seconds_of, states
from rfa_lab.record import read_rows
from rfa_lab.training import RunFolder
from rfa_lab.training.callbacks import read_metrics

from .recipes import NAMES, TWO_PRESETS, recipe, write_recipe
from .test_rates import RATES, TRIALS, several

MEASURED = {"environment", "resumed", "training"}  # they hold times


class Clock:
    """A clock that stands still until a test moves it on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def over_at(clock, wanted):
    """A progress callback that lets an hour pass at a place."""

    def progress(stage, done, total):
        if wanted == f"{stage.run} {stage.name} {done}":
            clock.now += 3600

    return progress


def figures(out, name):
    found = read_rows(out / "results" / f"{name}.parquet")
    losses = [line["loss"] for line in read_metrics(RunFolder(out / "runs" / name)) if "loss" in line]
    settings = {key: value for key, value in found.settings[name].items() if key not in MEASURED}
    return settings, found.rows[["measure", "x", "value"]].astype({"measure": str}).to_numpy().tolist(), losses


def test_in_parts_as_in_one(tmp_path, out, evaluated, clock):
    """Training is stopped in a trial, in a run and in an evaluation; then the folder is carried elsewhere."""
    planned = several(tmp_path / "here", rates=RATES[:2])
    whole = run_recipe(planned, tmp_path / "whole")
    assert whole.stopped is None
    stops = {
        f"{TRIALS[0]} training 2": f"at step 2 of 4 of {TRIALS[0]}",
        "b1-rope-seed0 training 5": "at step 5 of 12 of b1-rope-seed0",
        "b1-rope-seed0 blocks 1": "in b1-rope-seed0: blocks, which begins anew",
        "b1-rope-seed1 training 12": "at step 12 of 12 of b1-rope-seed1",
    }
    for index, (place, said) in enumerate(stops.items()):
        outcome = run_recipe(planned, out, seconds=60, progress=over_at(clock, place))
        assert outcome.stopped.startswith(said), (index, outcome)
        moved = tmp_path / f"carried {index}"
        shutil.copytree(out, moved)
        shutil.rmtree(out)
        out = moved
        planned = several(tmp_path / f"there {index}", rates=RATES[:2])  # recipe and text, elsewhere too
    outcome = run_recipe(planned, out, seconds=60)
    assert (outcome.done, outcome.stopped) == (whole.done, None)
    for name in whole.done:
        assert figures(out, name) == figures(tmp_path / "whole", name)


@pytest.mark.parametrize("place", ["before the first run", f"at step 1 of 4 of {NAMES[0]}"])
def test_shorter_than_a_step(tmp_path, out, evaluated, clock, place):
    planned = load_recipe(write_recipe(tmp_path))
    first = " trial_steps 0" if "before" in place else f"{NAMES[0]} training 1"
    outcome = run_recipe(planned, out, seconds=1, progress=over_at(clock, first))
    assert (outcome.done, outcome.failed, outcome.stopped) == ((), {}, place)
    assert states(planned, out)[0].step == (0 if "before" in place else 1)
    assert run_recipe(planned, out).done == tuple(NAMES)


def test_durations():
    wanted = {"9m": 540, "90s": 90, "1h30m": 5400, "2h": 7200, "1h1m1s": 3661}
    assert {given: seconds_of(given) for given in wanted} == wanted
    for given in ("", "9", "m", "0m", "-9m", "9m1h", "9.5m", "9 m", "inf"):
        with pytest.raises(ValueError, match=r"for: got .*, expected a duration such as 9m"):
            seconds_of(given)


def test_another_version(tmp_path, out, evaluated, monkeypatch, clock):
    planned = load_recipe(write_recipe(tmp_path, runs=TWO_PRESETS))
    run_recipe(planned, out, seconds=60, progress=over_at(clock, f"{NAMES[0]} training 2"))
    before = contents(out)
    there, here = runs.environment(), {**runs.environment(), "commit": "abc"}
    monkeypatch.setattr(runs, "environment", lambda: here)
    with pytest.raises(ValueError, match=f"{NAMES[0]} in .* was made by rfa .* --other-version"):  # not finished
        run_recipe(planned, out)
    assert contents(out) == before
    run_recipe(planned, out, other_version=True, only=NAMES[:1])
    made = [f"{each['rfa']} {each['commit']}" for each in (there, here)]
    assert read_rows(out / "results" / f"{NAMES[0]}.parquet").settings[NAMES[0]]["versions"] == made


def test_the_command(tmp_path, out, evaluated, monkeypatch, capsys):
    path = write_recipe(tmp_path, training={**recipe()["training"], "max_steps": 100_000, "eval_steps": 100_000})
    arguments = ("experiment", path, "--out", out, "--for", "3s")
    status, said, err = command(monkeypatch, capsys, *arguments)
    assert status == 0
    assert not [line for line in messages(err) if line.startswith("rfa")]
    (line,) = (line for line in said.splitlines() if line.startswith("stopped after 3s: "))
    assert line.endswith(f"go on with: rfa experiment {path} --out {out} --for 3s")
    for given in ("soon", "0s"):
        status, _, err = command(monkeypatch, capsys, *arguments[:-1], given)
        assert (status, messages(err)) == (
            2,
            [f"rfa: for: got '{given}', expected a duration such as 9m, 90s or 1h30m"],
        )
