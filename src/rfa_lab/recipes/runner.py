"""Make all runs of a recipe. Several processes can share the work; each run is made once.

<out>/runs/<run>/            run folders; records and metrics stay, models stay only if the recipe keeps them
<out>/runs/<model>-rate-<r>/ the same for trials of learning rates, without models
<out>/results/<run>.json     one result file for each run, whole
<out>/results/trigram.json   the same evaluation of a trigram, trained on the same tokens
<out>/recipe.json            the recipe's name, title and runs, so that a report can name missing runs
<out>/.claims/<run>.lock     locked by the process that makes the run, until that process ends
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from rfa.files import held
from rfa.progress import Stage, StageProgress
from rfa_lab import evaluation
from rfa_lab.data import PreparedData, prepare
from rfa_lab.evaluation.probes import ProbeKind
from rfa_lab.results import Planned, write_planned, write_result
from rfa_lab.training import TRAINED_ON, OutOfTime, RunFolder, Stopped, resume, train, trial_step
from rfa_lab.training.callbacks import Diverged

from .plan import check_versions, finished_results, is_lost, run_folder, selected_runs, started_record
from .reading import Faults
from .recipe import PlannedRun, Recipe
from .run_result import (
    DIVERGED,
    finished_result,
    losses_of,
    make_result,
    needed_trials,
    result_path,
    trial_loss,
    trials_by_run,
    with_best_rate,
)
from .time_limit import TimeIsUp, TimeLimit
from .trigram_result import is_of_another_text, lacks_trigram, write_trigram

# An evaluation under a time limit: in parts that are kept, so that it ends after several calls

_FOLDER = "evaluation"
_ALONE = ("by_position", "passkey", "attention")  # entries of a result that are None in the other parts


def evaluated_in_parts(
    run: RunFolder, asked: Mapping[str, Any], progress: StageProgress, limited: bool
) -> dict[str, Any]:
    """What `rfa_lab.evaluation.full_evaluation` returns, and with parts the "environments" in which they were made.

    Args:
        run: the folder of a trained run.
        asked: the arguments of `full_evaluation`.
        progress: as there. If it raises, finished parts stay.
        limited: whether time is limited. Otherwise all is evaluated at once, with the run loaded once, unless there are
            parts of an earlier call.
    """
    if not limited and not (run.path / _FOLDER).is_dir():
        return evaluation.full_evaluation(run.path, **asked, progress=progress)
    whole: dict[str, Any] = {}
    environments = []
    for name, part in _parts(asked):
        path = run.path / _FOLDER / f"{name}.json"
        found = _finished(path, part)
        if found is None:
            found = evaluation.full_evaluation(run.path, **part, progress=progress)
            write_result(path, {"asked": _named(part), "found": found})
        given = {entry: value for entry, value in found.items() if value is not None or entry not in whole}
        evaluations = {**whole.get("evaluations", {}), **found["evaluations"]}
        whole = {**whole, **given, "evaluations": evaluations}
        environments.append(found["environment"])
    return {**whole, "environments": environments}


def delete_parts(run: RunFolder) -> None:
    """Delete the parts of a run: its result is written, or it is trained anew."""
    shutil.rmtree(run.path / _FOLDER, ignore_errors=True)


def _parts(asked: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the arguments of each part. The loss by position comes with `blocks`, which computes it anyway."""
    nothing = {**asked, "protocols": {}, "by_position": False, "passkey": False, "attention": None}
    for protocol, tokens in asked["protocols"].items():
        with_positions = asked["by_position"] and protocol == "blocks"
        yield protocol, {**nothing, "protocols": {protocol: tokens}, "by_position": with_positions}
    for name in _ALONE:
        if asked[name] and not (name == "by_position" and "blocks" in asked["protocols"]):
            yield name, {**nothing, name: asked[name]}


def _finished(path: Path, part: Mapping[str, Any]) -> dict[str, Any] | None:
    """A part that was evaluated before; None if there is none, or one of other arguments."""
    maps = part["attention"]
    if not path.is_file() or (maps is not None and not maps.is_file()):
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["found"] if stored["asked"] == _named(part) else None
    except (ValueError, KeyError, TypeError):  # damaged: it is made again
        return None


def _named(part: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as JSON holds them. Maps have the name of their file, because folders move."""
    maps = part["attention"]
    return {**part, "lengths": list(part["lengths"]), "attention": None if maps is None else maps.name}


# Make one run: the trials of its learning rate, its training, its evaluation and its result


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


_PAUSE = 2.0  # seconds between looks at trials that other processes make


@dataclass(frozen=True)
class Outcome:
    """The outcome of `run_recipe` in one process.

    Args:
        done: names of runs that have a result.
        claimed: names of runs that other processes are making.
        failed: the error of each failed run, by name.
        stopped: where the call stopped because its time was over; None if it came to its end.
    """

    done: tuple[str, ...]
    claimed: tuple[str, ...]
    failed: dict[str, str]
    stopped: str | None = None


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
    failure: Callable[[str, str], None] | None = None,
) -> Outcome:
    """Make every run of a recipe that has no result yet: train or resume it, evaluate it, and write the result.

    First each model makes a step on this machine, so that a model that cannot run here is found at once. Several
    processes may share a recipe and a folder. A process skips a run that another one is making, and checks it again
    later. It ends when every run is done, is made by another process, or has failed here. After a failure the other
    runs are still made. Where the recipe has several learning rates, the trials of each model come before its runs,
    and processes share them too.

    Args:
        recipe: the recipe.
        out: the folder of run folders and results.
        only: names of runs; empty for all runs.
        seconds: time after which the call saves and stops; a step of training that was begun is made. All state is in
            `out`, which can be carried elsewhere. None for no limit.
        other_version: go on in a folder that another version or commit of rfa began. Results name all of them.
        progress: called with the stage, the amount done and the total. Stages of the whole call are "runs" (the number
            of runs), "text" and "trial_steps" (a step of each model). Stages of a run are "text", "training" and those
            of `full_evaluation`.
        failure: called with the name of a failed run and the reason.

    Returns:
        The names of runs that are done, claimed by other processes, or failed.

    Raises:
        ValueError: before any run. The reason is an unknown name in `only`, a damaged result or run folder, one of
            another recipe, one of another version without `other_version`, bad data, lengths longer than the test
            split, a model that cannot make a step here, or processes that were launched to share one run.
        OSError: if the disk is full.
        torch.AcceleratorError: for an error after which this process cannot use the device any more.
        Stopped, KeyboardInterrupt: on Ctrl-C. A run that is being trained is saved first.
    """
    if (launched := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(
            f"processes: got {launched} that share each run, expected `rfa experiment` itself, started once for each "
            "device (CUDA_VISIBLE_DEVICES=0, 1, ...): the processes share the recipe"
        )
    out, limit, failed = Path(out), TimeLimit(seconds, progress), dict[str, str]()
    try:
        return _run_all(recipe, out, only, other_version, limit, failed, failure)
    except (OutOfTime, TimeIsUp):
        done = finished_results(recipe, out)
        chosen = [run.name for run in selected_runs(recipe, only)]
        return Outcome(tuple(name for name in chosen if name in done), (), failed, limit.where())


def _run_all(
    recipe: Recipe,
    out: Path,
    only: Sequence[str],
    other_version: bool,
    limit: TimeLimit,
    failed: dict[str, str],
    failure: Callable[[str, str], None] | None,
) -> Outcome:
    """As `run_recipe`. Raises `OutOfTime` or `TimeIsUp` when the time is over."""
    runs, report = selected_runs(recipe, only), limit.report
    finished = finished_results(recipe, out)
    waiting = [run for run in runs if run.name not in finished]
    trials = trials_by_run(recipe)
    begun: dict[str, Mapping[str, Any]] = dict(finished)
    for run in waiting:  # this raises if a folder is damaged or of another recipe
        for unit in (*trials[run.name], run):
            record = started_record(recipe, unit, out, any_rate=True)
            begun.update({} if record is None else {unit.name: record})
    if waiting and not other_version:
        check_versions(begun, out)
    if not recipe.keep_models:
        for run in runs:
            if run not in waiting:  # a process may have been killed before it deleted them
                delete_weights(run_folder(out, run))
    if waiting or lacks_trigram(recipe, out):
        text = _check_text(recipe, waiting[0] if waiting else recipe.runs[0], begun, report)
        _check_machine(recipe, waiting, report)
        if lacks_trigram(recipe, out) or is_of_another_text(recipe, text, out):
            write_trigram(recipe, text, out)
    write_planned(out, Planned(name=recipe.name, title=recipe.title, runs=[run.name for run in recipe.runs]))
    going = True
    while waiting and going:
        made = tried_elsewhere = False
        for run in waiting:
            report(Stage("runs"), len(runs) - len(waiting), len(runs))
            try:
                state = advance(recipe, run, trials, out, report, limit.until)
            except (Stopped, TimeIsUp, OSError, torch.AcceleratorError):
                raise
            except Exception as error:  # of any type: the other runs may still succeed
                if os.environ.get("RFA_DEBUG"):
                    raise
                state, named = "done", isinstance(error, ValueError | RuntimeError)
                failed[run.name] = str(error) if named else f"{type(error).__name__}: {error}"
                if failure is not None:
                    failure(run.name, failed[run.name])
            tried_elsewhere |= state == "tried elsewhere"
            if state == "done":
                made, waiting = True, [other for other in waiting if other is not run]
        waiting = [run for run in waiting if finished_result(recipe, run, out) is None]
        going = made or tried_elsewhere
        if tried_elsewhere and not made:
            time.sleep(_PAUSE)
    report(Stage("runs"), len(runs) - len(waiting), len(runs))
    claimed = tuple(run.name for run in waiting)
    done = tuple(run.name for run in runs if run.name not in {*claimed, *failed})
    return Outcome(done, claimed, failed)


def _check_text(
    recipe: Recipe, run: PlannedRun, finished: Mapping[str, Mapping[str, Any]], report: StageProgress
) -> PreparedData:
    """The text that all runs share. Raises `RecipeError` with everything that it is too short for.

    Raises `ValueError` if a run that was begun has another text.
    """
    spec, faults = recipe.resolved(run), Faults(str(recipe.path))
    text = prepare(spec.data, spec.tokenizer, spec.split_by, progress=partial(report, Stage("text")))
    read = text.fingerprint_of(*TRAINED_ON), text.fingerprints["test"]
    for name, result in finished.items():
        if (result["data"]["fingerprint"], result["data"]["test_fingerprint"]) != read:
            raise ValueError(f"data: {name} was made on another text than {spec.data} holds now, expected a new --out")
    blocks = {split: len(stream) // spec.length for split, stream in text.streams.items()}
    for split, least in (("train", spec.batch_size), ("valid", 1)):
        if blocks[split] < least:
            expected = f"at least {least} of {spec.length} tokens"
            faults.add("training", f"data: got {blocks[split]} blocks in the {split} split, expected {expected}")
    longest, stream = max(recipe.evaluation.lengths), text.streams["test"]
    found = len(stream)
    if longest > found:
        faults.add("evaluation", f"lengths: got {longest}, expected at most the {found} tokens of the test split")
    if recipe.evaluation.passkey:
        for kind in get_args(ProbeKind):
            try:
                evaluation.probe_layout(kind, stream, spec.length, longest, text.tokenizer)
            except ValueError as error:
                faults.add("evaluation", f"passkey: {error}")
    mapped = evaluation.MAP_LENGTHS * spec.length
    if recipe.evaluation.attention and mapped > found:
        expected = f"at least {mapped} tokens, {evaluation.MAP_LENGTHS} training lengths"
        faults.add("evaluation", f"attention: got a test split of {found} tokens, expected {expected}")
    faults.raise_if_any()
    return text


def _check_machine(recipe: Recipe, runs: Sequence[PlannedRun], report: StageProgress) -> None:
    """Make a step of each model, and raise `RecipeError` with all models that cannot run here."""
    faults = Faults(str(recipe.path))
    models = list({(run.spec.preset, repr(run.spec.model)): run for run in runs}.values())
    for done, run in enumerate(models):
        report(Stage("trial_steps"), done, len(models))
        try:
            trial_step(run.spec)
        except Exception as error:  # compilers raise exceptions of their own
            faults.add(run.name, f"cannot make a step on this machine: {type(error).__name__}: {error}")
    report(Stage("trial_steps"), len(models), len(models))
    faults.raise_if_any()
