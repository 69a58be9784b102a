"""The state of a recipe: the progress of each run, and the work that is left."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from rfa.checks import require
from rfa.environment import environment
from rfa_lab.results import read_planned
from rfa_lab.training import RunFolder, TrainingSpec

from .recipe import PlannedRun, Recipe
from .run_result import (
    DIVERGED,
    finished_result,
    losses_of,
    needed_trials,
    trial_loss,
    trials_by_run,
    versions_of,
    with_names_only,
    with_rate_of,
)


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


def run_folder(out: Path, run: PlannedRun) -> RunFolder:
    """The run folder of a run."""
    return RunFolder(out / "runs" / run.name)


def selected_runs(recipe: Recipe, only: Sequence[str]) -> tuple[PlannedRun, ...]:
    """The runs of a recipe that are named in `only`, or all runs if it is empty. `*` in a name matches any text.

    Raises:
        ValueError: for a name that matches no run.
    """
    chosen = selected_names([run.name for run in recipe.runs], only)
    return tuple(run for run in recipe.runs if run.name in chosen)


def selected_names(names: Sequence[str], only: Sequence[str]) -> set[str]:
    """The names that `only` selects, or all names if it is empty.

    Raises:
        ValueError: for an entry of `only` that matches no name.
    """
    for name in only:
        if not any(fnmatchcase(known, name) for known in names):
            raise ValueError(f"only: got {name!r}, expected some of {', '.join(names)}")
    return {known for known in names if not only or any(fnmatchcase(known, name) for name in only)}


def states(
    recipe: Recipe, out: str | Path, only: Sequence[str] = (), tokens_per_second: float | None = None
) -> list[RunState]:
    """The progress of each run, and before it of the trials of its learning rate. Nothing is written.

    Args:
        recipe: the recipe.
        out: the folder of run folders and results.
        only: names of runs; empty for all runs.
        tokens_per_second: the speed of training of every run; by default that of finished runs.

    Raises:
        ValueError: for a speed that is not positive, an unknown name in `only`, a damaged result or run folder, or a
            folder of another recipe.
    """
    out = Path(out)
    if tokens_per_second is not None:
        require(0 < tokens_per_second < math.inf, "tokens_per_second", tokens_per_second, "a positive number")
    results = finished_results(recipe, out)
    trials = trials_by_run(recipe)
    chosen = selected_runs(recipe, only)
    units = {
        unit.name: unit
        for run in chosen
        for unit in (*_listed_trials(recipe, trials[run.name], out, run.name in results), run)
    }
    return [_state(recipe, unit, out, results, tokens_per_second) for unit in units.values()]


def measured_on(recipe: Recipe, out: str | Path) -> str | None:
    """The names of the devices that made the finished runs; None if there are none.

    Raises:
        ValueError: as `finished_results`.
    """
    made = [result["environment"] for result in finished_results(recipe, Path(out)).values()]
    names = [one.get("machine") if one.get("device") in ("cpu", None) else one["device"] for one in made]
    return " and ".join(dict.fromkeys(map(str, names))) or None


def check_folder(out: Path, name: str) -> None:
    """Raise `ValueError` for a folder of another recipe than that of this name, or whose list of runs is damaged."""
    planned = read_planned(out)
    found = planned["name"] if planned else _recipe_of(out / "results")
    if found not in (name, None):
        raise ValueError(f"out: got {out}, the folder of the recipe {found}, expected one of {name}")


def _recipe_of(results: Path) -> str | None:
    """The recipe that the first result names; None if there is none that can be read."""
    for path in sorted(results.glob("*.json")):
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["recipe"])
        except (ValueError, KeyError, TypeError, OSError, RecursionError):
            continue  # it is refused where it is needed
    return None


def finished_results(recipe: Recipe, out: Path) -> dict[str, dict[str, Any]]:
    """All existing results of a recipe, by the run's name.

    Raises:
        ValueError: for a damaged result, or a folder of another recipe.
    """
    check_folder(out, recipe.name)
    return {run.name: result for run in recipe.runs if (result := finished_result(recipe, run, out)) is not None}


def started_record(recipe: Recipe, run: PlannedRun, out: Path, any_rate: bool = False) -> dict[str, Any] | None:
    """The content of run.json of a started run; None if the run was not started.

    Args:
        recipe: the recipe.
        run: of the recipe.
        out: the folder of run folders and results.
        any_rate: whether a run may have each possible rate, while its own is not chosen yet. A trial never may.

    Raises:
        ValueError: if run.json is damaged, or if its specification differs from the recipe's.
    """
    folder = run_folder(out, run)
    if not folder.record.exists():
        return None
    record = folder.read()
    wanted = recipe.resolved(run).to_dict()
    if any_rate and not run.trial:
        wanted = with_rate_of(record["spec"], wanted, run.rates)
    if with_names_only(record["spec"]) != with_names_only(wanted):
        raise ValueError(f"run: {folder.path} is another run than {recipe.path} names, expected a new folder for --out")
    return record


def check_versions(begun: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Raise `ValueError` if another version or commit of rfa began the folder.

    Args:
        begun: results and contents of run.json, by the names of runs and trials.
        out: the folder, for the message.
    """
    (here,) = versions_of({"environment": environment()})
    for name, made in begun.items():
        if other := [version for version in versions_of(made) if version != here]:
            raise ValueError(
                f"out: {name} in {out} was made by rfa {other[0]}, this is {here}; expected the same, a new folder, or "
                "--other-version: the results say what made them"
            )


def is_lost(folder: RunFolder, record: Mapping[str, Any]) -> bool:
    """Whether a trained run has lost its model, so that it cannot be evaluated. It has no result then either."""
    return bool(record["finished"]) and not folder.model.is_dir()


def _listed_trials(recipe: Recipe, trials: Sequence[PlannedRun], out: Path, done: bool) -> list[PlannedRun]:
    """The trials of a run that are needed, as far as its folders tell. A run that is done needs no further ones."""
    found = {trial.spec.learning_rate: started_record(recipe, trial, out) for trial in trials}
    begun = {rate: record for rate, record in found.items() if record is not None}
    wanted = needed_trials(trials, trials[0].rates if trials else (), losses_of(begun))
    return [trial for trial in wanted if not done or trial.spec.learning_rate in begun]


def _state(recipe: Recipe, run: PlannedRun, out: Path, results: Mapping[str, Any], speed: float | None) -> RunState:
    steps, tokens = _sizes(recipe, run.spec, results)
    if run.name in results:
        training = results[run.name]["training"]
        return RunState(run, "done", training["steps"], training["steps"], training["tokens"], 0.0)
    record, folder = started_record(recipe, run, out, any_rate=True), run_folder(out, run)
    state, step = "to do", 0
    if run.trial and record is not None and trial_loss(record) is not None:
        return RunState(run, "done", steps or record["steps"], steps, tokens, 0.0)
    if record is not None and DIVERGED in record:
        return RunState(run, "diverged", record["steps"], steps, tokens, 0.0)
    if record is not None and not is_lost(folder, record):
        if record["finished"]:
            state, step = "to evaluate", record["steps"]
        elif (checkpoint := folder.latest_checkpoint()) is not None:
            state, step = "half done", int(checkpoint.name.rpartition("-")[2])
    left = tokens if tokens is None or not steps else tokens * max(steps - step, 0) / steps
    speed = speed or _speed(run, results)
    return RunState(run, state, step, steps, tokens, None if left is None or speed is None else left / speed)


def _sizes(recipe: Recipe, spec: TrainingSpec, results: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Number of steps and tokens: from the specification, from a finished run of the same sizes, or about."""
    if spec.max_steps is not None:
        return spec.max_steps, spec.max_steps * spec.accumulate * spec.batch_size * spec.length
    sizes = ("epochs", "max_steps", "length", "batch_size", "accumulate")
    for result in results.values():
        if all(result["spec"][name] == getattr(spec, name) for name in sizes):
            return result["training"]["steps"], result["training"]["tokens"]
    if recipe.train_tokens is not None:
        at_once = spec.batch_size * spec.length
        batches = recipe.train_tokens // at_once
        return math.ceil(spec.epochs * math.ceil(batches / spec.accumulate)), round(spec.epochs * batches * at_once)
    return None, None


def _speed(run: PlannedRun, results: Mapping[str, Any]) -> float | None:
    """Tokens per second of this model's finished runs, or of all finished runs if the model has none."""
    speeds = {
        name: result["training"]["tokens_per_second"]
        for name, result in results.items()
        if result["training"]["tokens_per_second"]
    }
    own = [speed for name, speed in speeds.items() if results[name]["label"] == run.label]
    return mean(own or speeds.values()) if speeds else None
