"""The state of a recipe: the progress of each run, and the work that is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from .rates import DIVERGED
from .recipe import PlannedRun, Recipe
from .runs import Runs


@dataclass(frozen=True)
class RunState:
    """The progress of a run.

    Args:
        run: of the recipe.
        state: "done", "diverged", "to evaluate", "half done" or "to do".
        step: step of the newest checkpoint; the last step of a trained run.
        steps: total number of steps; None if it depends on a text that was not read yet.
        tokens: total number of training tokens; None as for `steps`.
        seconds: remaining training time by the speed of finished runs; None if there are no finished runs.
    """

    run: PlannedRun
    state: str
    step: int
    steps: int | None
    tokens: int | None
    seconds: float | None


def states(recipe: Recipe, out: str | Path, only: Sequence[str] = ()) -> list[RunState]:
    """The progress of each run, and before it of the trials of its learning rate. Nothing is written.

    Args:
        recipe: the recipe.
        out: the folder of run folders and results.
        only: names of runs; empty for all runs.

    Raises:
        ValueError: as `run_recipe`, for names and folders.
    """
    runs = Runs(recipe, Path(out))
    results, units = runs.results(), dict[str, PlannedRun]()
    for run in runs.runs_named(only):
        trials = [
            trial for trial, _ in runs.needed_trials(run) if run.name not in results or runs.record(trial) is not None
        ]
        units |= {unit.name: unit for unit in (*trials, run)}
    return [_run_state(runs, unit, results) for unit in units.values()]


def _run_state(runs: Runs, run: PlannedRun, results: Mapping[str, Any]) -> RunState:
    steps, tokens = _steps_and_tokens(run, results)
    if run.name in results:
        training = results[run.name]["training"]
        return RunState(run, "done", training["steps"], training["steps"], training["tokens"], 0.0)
    record, state, step = runs.record(run), "to do", 0
    tried = run.trial and runs.result_of(run) is not None
    if record is not None and (tried or DIVERGED in record):
        return RunState(run, "done" if tried else "diverged", record["steps"], steps, tokens, 0.0)
    if record is not None and not runs.is_lost(run, record):
        if record["finished"]:
            state, step = "to evaluate", record["steps"]
        elif (checkpoint := runs.folder(run).latest_checkpoint()) is not None:
            state, step = "half done", int(checkpoint.name.rpartition("-")[2])
    left = tokens if tokens is None or not steps else tokens * max(steps - step, 0) / steps
    speed = _mean_speed(runs.recipe, run, results)
    return RunState(run, state, step, steps, tokens, None if left is None or speed is None else left / speed)


def _steps_and_tokens(run: PlannedRun, results: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Number of steps and tokens: from the specification, or from a finished run of the same sizes."""
    spec = run.spec
    if spec.max_steps is not None:
        return spec.max_steps, spec.max_steps * spec.accumulate * spec.batch_size * spec.length
    sizes = ("epochs", "max_steps", "length", "batch_size", "accumulate")
    for result in results.values():
        if all(result["spec"][name] == getattr(spec, name) for name in sizes):
            return result["training"]["steps"], result["training"]["tokens"]
    return None, None


def _mean_speed(recipe: Recipe, run: PlannedRun, results: Mapping[str, Any]) -> float | None:
    """Tokens per second of this model's finished runs, or of all finished runs if the model has none."""
    labels = {each.name: each.label for each in recipe.runs}
    speeds = [(labels[name], made["training"]["tokens_per_second"]) for name, made in results.items()]
    measured = [(label, speed) for label, speed in speeds if speed]
    own = [speed for label, speed in measured if label == run.label]
    return mean(own or [speed for _, speed in measured]) if measured else None
