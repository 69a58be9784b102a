"""Make one run: the trials of its learning rate, its training, its evaluation and its result."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rfa.files import held
from rfa.progress import Stage, StageProgress
from rfa_lab.results import write_result
from rfa_lab.training import RunFolder, resume, train
from rfa_lab.training.callbacks import Diverged

from .evaluation_parts import delete_parts, evaluated_in_parts
from .plan import is_lost, run_folder, started_record
from .rates import DIVERGED, losses_of, needed_trials, trial_loss, with_best_rate
from .recipe import PlannedRun, Recipe
from .run_result import finished_result, make_result, result_path


def advance(
    recipe: Recipe,
    run: PlannedRun,
    trials_of: Mapping[str, Sequence[PlannedRun]],
    out: Path,
    report: StageProgress,
    until: float | None,
) -> Literal["done", "claimed", "tried elsewhere"]:
    """Make the trials that a run needs and no other process makes, then the run itself.

    A run waits for trials that another process makes. It holds no lock then, so no two processes wait for each other.

    Args:
        recipe: the recipe.
        run: of the recipe.
        trials_of: the trials of each run of the recipe by `trials_by_run`; runs of one model have the same ones.
        out: the folder of run folders and results.
        report: called with the stage, the amount done and the total.
        until: the time of `time.monotonic` from which on the run is saved and stopped; None for no limit.

    Raises:
        ValueError: if a run of this model was begun with another rate than the trials choose.
    """
    trials = trials_of[run.name]
    if finished_result(recipe, run, out) is not None:
        return "done"
    tried: dict[float, dict[str, Any]] = {}
    while left := [trial for trial in needed_trials(trials, run.rates, losses_of(tried)) if _rate(trial) not in tried]:
        for trial in left:
            with _claimed(out, trial) as mine:
                if mine:
                    _make_trial(recipe, trial, out, report, until)
            record = started_record(recipe, trial, out)
            if record is not None and trial_loss(record) is not None:
                tried[_rate(trial)] = record
        if any(_rate(trial) not in tried for trial in left):
            return "tried elsewhere"
    chosen = with_best_rate(run, losses_of(tried))
    if tried:
        _check_rate(recipe, [other for other in recipe.runs if trials_of[other.name] == trials], _rate(chosen), out)
    with _claimed(out, run) as mine:
        if not mine:
            return "claimed"
        if finished_result(recipe, run, out) is None:
            _make(recipe, chosen, tried, out, report, until)
    return "done"


def _rate(run: PlannedRun) -> float:
    return run.spec.learning_rate


def _check_rate(recipe: Recipe, runs: Sequence[PlannedRun], rate: float, out: Path) -> None:
    """Raise `ValueError` if one of a model's runs has another rate: means over seeds would be of two models."""
    for run in runs:
        made = finished_result(recipe, run, out) or started_record(recipe, run, out, any_rate=True)
        if made is not None and (found := made["spec"]["learning_rate"]) != rate:
            raise ValueError(
                f"rates: got {run.name} in {out} with {found:g}, but the trials of its model choose {rate:g}; expected "
                "one rate for all its runs: delete its folder and its result, and it is made again"
            )


def _claimed(out: Path, run: PlannedRun) -> AbstractContextManager[bool]:
    return held(out / ".claims" / f"{run.name}.lock")


def _make_trial(recipe: Recipe, trial: PlannedRun, out: Path, report: StageProgress, until: float | None) -> None:
    """Train or resume a trial. Its record keeps the validation loss, or that training diverged; its weights go."""
    folder, record = run_folder(out, trial), started_record(recipe, trial, out)
    if record is None or trial_loss(record) is None:
        try:
            _trained(recipe, trial, out, report, until)
        except Diverged as error:
            folder.write({**folder.read(), DIVERGED: str(error)})
    delete_weights(folder)


def _make(
    recipe: Recipe,
    run: PlannedRun,
    tried: Mapping[float, Mapping[str, Any]],
    out: Path,
    report: StageProgress,
    until: float | None,
) -> None:
    """Train or resume a run, evaluate it, write the result, and delete the model unless the recipe keeps it.

    Its record keeps that training diverged: a later call says so again, instead of coming to the same step.
    """
    folder, begun = run_folder(out, run), started_record(recipe, run, out)
    if begun is not None and DIVERGED in begun:
        raise Diverged(begun[DIVERGED])
    try:
        record = _trained(recipe, run, out, report, until)
    except Diverged as error:
        said = f"{error}; delete {folder.path} to make the run again"
        folder.write({**folder.read(), DIVERGED: said})
        raise Diverged(said) from error
    asked, path = recipe.asked_of(run), result_path(out, run)
    maps = path.with_name(f"{run.name}.attention.npz") if asked["attention"] else None
    evaluated = evaluated_in_parts(
        folder,
        {**asked, "attention": maps},
        lambda stage, *far: report(stage._replace(run=run.name), *far),
        limited=until is not None,
    )
    write_result(path, make_result(recipe, run, folder, record, evaluated, tried))
    delete_parts(folder)
    if not recipe.keep_models:
        delete_weights(folder)


def _trained(recipe: Recipe, run: PlannedRun, out: Path, report: StageProgress, until: float | None) -> dict[str, Any]:
    """Train or resume a run or a trial, and return its record."""

    def training(step: int, steps: int, metrics: dict[str, float]) -> None:
        report(Stage("training", run.name, metrics), step, steps)

    folder = run_folder(out, run)
    bars: dict[str, Any] = {"progress": training, "data_progress": partial(report, Stage("text", run.name))}
    bars["until"] = until
    record = started_record(recipe, run, out)
    if record is None or is_lost(folder, record):
        delete_parts(folder)
        record = train(recipe.resolved(run), folder.path, overwrite=record is not None, **bars)
    else:
        wanted = recipe.resolved(run).with_absolute_paths().to_dict()
        if record["spec"] != wanted:  # started in another checkout, whose text may be gone
            folder.write({**record, "spec": wanted})
        record = resume(folder.path, **bars)
    return record


def delete_weights(folder: RunFolder) -> None:
    """Delete the model and the checkpoints, which are large. Record, metrics and tokenizer stay."""
    for path in (folder.model, folder.checkpoints):
        shutil.rmtree(path, ignore_errors=True)
