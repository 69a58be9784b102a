"""Recipes with several learning rates: each model takes its best."""

import json
import math
import subprocess
import sys
from pathlib import Path

from cover import slow
from scripts import with_tests
from training.runs import MODEL

from rfa_lab.recipes import Recipe, load_recipe, run_recipe, states
from rfa_lab.recipes.rates import needed_rates, possible_rates, trials_by_run
from rfa_lab.record import read_record, read_rows
from rfa_lab.training import RunFolder, TrainingSpec, train, trainer

from .recipes import TRAINING, write_recipe

RATES = [1e-3, 1e-2, 0.1]
RUNS = [{"presets": ["b1-rope"], "seeds": [0, 1]}]
LADDER = [*RUNS, {"presets": ["b1-rope"], "seeds": [1], "label": "quarter", "max_steps": 3}]
TRIALS = [f"b1-rope-rate-{rate}" for rate in ("1e-3", "1e-2", "1e-1")]


def several(folder: Path, runs=RUNS, rates=RATES, **changes) -> Recipe:
    training = {**TRAINING, "data": "corpus", "model": MODEL, "max_steps": 12, **changes}
    return load_recipe(write_recipe(folder, runs=runs, rates=rates, training=training))


def test_the_best_rate_serves_all_runs_of_a_model(tmp_path, out, evaluated):
    planned = several(tmp_path, LADDER)
    outcome = run_recipe(planned, out)
    assert outcome.done == ("b1-rope-seed0", "b1-rope-seed1", "b1-rope-quarter-seed1")
    losses = {}
    for rate, name in zip(RATES, TRIALS, strict=True):  # by hand: a third of the steps, the first seed
        spec = TrainingSpec(**{**planned.spec_of(planned.runs[0]).to_dict(), "learning_rate": rate, "max_steps": 4})
        losses[rate] = train(spec, tmp_path / name)["result"]["valid_loss"]
    best = min(losses, key=losses.__getitem__)
    assert len(set(losses.values())) == 3
    for name, steps in zip(outcome.done, (12, 12, 3), strict=True):
        result = read_rows(out / "results" / f"{name}.parquet").settings[name]
        assert result["trials"] == {f"{rate:g}": loss for rate, loss in losses.items()}
        assert result["learning_rate"] == result["spec"]["learning_rate"] == best
        assert RunFolder(out / "runs" / name).read()["spec"]["learning_rate"] == best
        assert result["training"]["steps"] == steps
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted([*outcome.done, *TRIALS])
    assert not RunFolder(out / "runs" / TRIALS[0]).model.exists()
    assert [(state.run.name, state.state) for state in states(planned, out)] == [
        (name, "done") for name in (*TRIALS, *outcome.done)
    ]
    assert evaluated == list(outcome.done)  # trials are not


def test_what_is_only_evaluated_otherwise_is_tried_once(tmp_path):
    runs = [
        {"presets": ["b1-rope", "b2-alibi"], "seeds": [3]},
        {"presets": ["m2-sc-rfa"], "seeds": [3]},
        {"presets": ["m2-sc-rfa"], "seeds": [3], "label": "released", "one_group": True},
        {"presets": ["m2-sc-rfa"], "seeds": [3], "label": "b=0.5", "model": {"damping": 0.5}},
    ]
    tried = {name: next(iter(trials.values())) for name, trials in trials_by_run(several(tmp_path, runs)).items()}
    assert len({trial.name for trial in tried.values()}) == 5
    assert tried["b1-rope-seed3"].name == TRIALS[0]
    assert (tried["b2-alibi-seed3"].spec.seed, tried["b2-alibi-seed3"].spec.max_steps) == (3, 4)


def test_rates_beyond_the_list():
    assert possible_rates([1.5e-3, 3e-3, 6e-3]) == (1.5e-3, 3e-3, 6e-3, 7.5e-4, 3.75e-4, 1.2e-2, 2.4e-2)
    assert possible_rates([0.1, 1e-3, 1e-2]) == (0.1, 1e-3, 1e-2, 1e-4, 1e-5)  # never 1 or more
    assert possible_rates([2e-2]) == (2e-2,)
    assert possible_rates([1e-6, 1e-2]) == (1e-6, 1e-2, 1e-10)  # never less than a run may have


def test_a_best_rate_at_an_end_is_looked_for_beyond_it(tmp_path):
    trials = trials_by_run(several(tmp_path))["b1-rope-seed1"]
    first, three = {1e-3: 1.0, 1e-2: 2.0, 0.1: 3.0}, dict.fromkeys(RATES, math.inf)
    for losses, wanted in (
        ({1e-3: 1.0, 1e-2: 2.0}, RATES),  # one is not finished
        ({1e-3: 2.0, 1e-2: 1.0, 0.1: 3.0}, RATES),
        ({1e-3: 2.0, 1e-2: 2.0, 0.1: 3.0}, [*RATES, 1e-4]),  # the first of equal ones
        (first | {1e-4: 0.5, 1e-5: 0.1}, [*RATES, 1e-4, 1e-5]),  # two at most
        ({1e-3: 3.0, 1e-2: 2.0, 0.1: 1.0}, RATES),  # the next would be 1
        (three, [*RATES, 1e-4]),  # a lower one may train
    ):
        assert sorted(needed_rates(tuple(trials), RATES, losses)) == sorted(wanted)


def test_the_rate_beyond_is_made_shared_and_chosen(tmp_path, out, evaluated):
    planned = several(tmp_path, RUNS, [1e-4, 2e-4])  # both too small for twelve steps
    assert run_recipe(planned, out).done == ("b1-rope-seed0", "b1-rope-seed1")
    result = read_rows(out / "results" / "b1-rope-seed1.parquet").settings["b1-rope-seed1"]
    assert list(result["trials"]) == ["0.0001", "0.0002", "0.0004", "0.0008"]
    assert result["trials"]["0.0008"] == min(result["trials"].values())
    assert result["learning_rate"] == 8e-4
    names = [f"b1-rope-rate-{rate}" for rate in ("1e-4", "2e-4", "4e-4", "8e-4")]
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted([*names, *names_of(planned)])
    assert [state.run.name for state in states(planned, out)] == [*names, *names_of(planned)]
    assert run_recipe(planned, out).done == ("b1-rope-seed0", "b1-rope-seed1")  # its results are the recipe's


def test_runs_of_one_model_have_one_rate(tmp_path, out, evaluated):
    """A folder of a list that ended before the best rate."""
    run_recipe(several(tmp_path, RUNS, [1e-4]), out, only=["b1-rope-seed1"])
    planned = several(tmp_path, RUNS, [1e-4, 2e-4])
    outcome = run_recipe(planned, out)
    said = (
        f"rates: got b1-rope-seed1 in {out} with 0.0001, but the trials of its model choose 0.0008; expected one rate"
    )
    assert outcome.failed.keys() == {"b1-rope-seed0"}
    assert outcome.failed["b1-rope-seed0"].startswith(said)
    assert outcome.done == ("b1-rope-seed1",)
    states_of = [(state.run.name, state.state) for state in states(planned, out, ["b1-rope-seed1"])]
    assert states_of[-1] == ("b1-rope-seed1", "done")


def names_of(planned: Recipe) -> list[str]:
    return [run.name for run in planned.runs]


def far_too_fast(monkeypatch, which):
    """Let the steps of some models and rates be so large that weights leave the range of their numbers."""
    whole = trainer.make_optimizer

    def optimizer(model, rate, one_group):
        return whole(model, rate * (1e36 if which(model, rate) else 1), one_group)

    monkeypatch.setattr(trainer, "make_optimizer", optimizer)


def test_a_run_that_diverges_is_recorded_and_the_others_go_on(tmp_path, out, evaluated, monkeypatch):
    runs = [{"presets": ["b1-rope"], "seeds": [0]}, {"presets": ["b2-alibi"], "seeds": [0]}]
    planned = several(tmp_path, runs, [1e-3], max_steps=3)
    far_too_fast(monkeypatch, lambda model, _: model.config.attention.prior == "flat")
    first = run_recipe(planned, out)
    assert first.done == ("b2-alibi-seed0",)
    assert "training: got {'loss': nan" in first.failed["b1-rope-seed0"]
    metrics = RunFolder(out / "runs" / "b1-rope-seed0").metrics.stat().st_mtime_ns
    second = run_recipe(planned, out)
    assert second == first
    assert RunFolder(out / "runs" / "b1-rope-seed0").metrics.stat().st_mtime_ns == metrics  # nothing is trained again
    assert [state.state for state in states(planned, out)] == ["diverged", "done"]
    assert read_record(out)[1] == {"1 runs": "no result yet: b1-rope-seed0"}


def test_a_rate_that_diverges_has_lost(tmp_path, out, evaluated, monkeypatch):
    planned = several(tmp_path, RUNS[:1], [1e-3, 0.9], max_steps=3)
    diverged = RunFolder(out / "runs" / "b1-rope-rate-9e-1")
    far_too_fast(monkeypatch, lambda _, rate: rate == 0.9)
    run_recipe(planned, out)
    result = read_rows(out / "results" / "b1-rope-seed1.parquet").settings["b1-rope-seed1"]
    assert (result["learning_rate"], result["trials"]["0.9"]) == (1e-3, None)
    assert "nan" in diverged.read()["diverged"]
    assert states(planned, out)[1].state == "done"  # it is not tried again


@slow
def test_two_processes_share_the_trials(tmp_path, out, evaluated, monkeypatch):
    """Each run and each trial is made once, and a run waits for the trials that the other process makes."""
    planned = several(tmp_path, [{"presets": ["b1-rope", "b2-alibi"], "seeds": [0, 1]}], max_steps=24)
    program = (
        "import sys; from rfa_lab import evaluation; from rfa_lab.recipes import load_recipe, run_recipe\n"
        "from experiments.recipes import stand_in\n"
        "evaluation.full_evaluation = stand_in; run_recipe(load_recipe(sys.argv[1]), sys.argv[2])"
    )
    environment = with_tests(OMP_NUM_THREADS="1")
    others = [
        subprocess.Popen([sys.executable, "-c", program, planned.path, out], env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    errors = [other.communicate(timeout=200)[1].decode() for other in others]
    assert [other.returncode for other in others] == [0, 0], errors
    assert len(read_record(out)[0].settings) == 4
    for run in (out / "runs").iterdir():
        assert json.loads((run / "run.json").read_text())["finished"], run
        assert "resumed" not in json.loads((run / "run.json").read_text())
