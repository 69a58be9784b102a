"""Make all runs of a recipe. Several processes can share the work; each run is made once.

<out>/runs/<run>/            run folders; records and metrics stay, models stay only if the recipe keeps them
<out>/results/<run>.json     one result file for each run, whole
<out>/results/trigram.json   the same evaluation of a trigram, trained on the same tokens
<out>/recipe.json            the recipe's name, title and runs, so that a report can name missing runs
<out>/.claims/<run>.lock     locked by the process that makes the run, until that process ends
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from rfa import evaluation
from rfa.data import PreparedData, prepare
from rfa.evaluation.probes import ProbeKind
from rfa.files import held
from rfa.progress import Stage, StageProgress
from rfa.results import Planned, write_planned, write_result
from rfa.training import TRAINED_ON, RunFolder, Stopped, resume, train, trial_step

from .plan import finished_results, is_lost, run_folder, selected_runs, started_record
from .reading import Faults
from .recipe import PlannedRun, Recipe
from .run_result import finished_result, make_result, result_path
from .trigram_result import lacks_trigram, write_trigram


@dataclass(frozen=True)
class Outcome:
    """The outcome of `run_recipe` in one process.

    Args:
        done: names of runs that have a result.
        claimed: names of runs that other processes are making.
        failed: the error of each failed run, by name.
    """

    done: tuple[str, ...]
    claimed: tuple[str, ...]
    failed: dict[str, str]


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    progress: StageProgress | None = None,
    failure: Callable[[str, str], None] | None = None,
) -> Outcome:
    """Make every run of a recipe that has no result yet: train or resume it, evaluate it, and write the result.

    First each model makes a step on this machine, so that a model that cannot run here is found at once. Several
    processes may share a recipe and a folder. A process skips a run that another one is making, and checks it again
    later. It ends when every run is done, is made by another process, or has failed here. After a failure the other
    runs are still made.

    Args:
        recipe: the recipe.
        out: the folder of run folders and results.
        only: names of runs; empty for all runs.
        progress: called with the stage, the amount done and the total. Stages of the whole call are "runs" (the number
            of runs), "text" and "trial_steps" (a step of each model). Stages of a run are "text", "training" and those
            of `full_evaluation`.
        failure: called with the name of a failed run and the reason.

    Returns:
        The names of runs that are done, claimed by other processes, or failed.

    Raises:
        ValueError: before any run. The reason is an unknown name in `only`, a damaged result or run folder, one of
            another recipe, bad data, lengths longer than the test split, a model that cannot make a step here, or
            processes that were launched to share one run.
        OSError: if the disk is full.
        torch.AcceleratorError: for an error after which this process cannot use the device any more.
        Stopped, KeyboardInterrupt: on Ctrl-C. A run that is being trained is saved first.
    """
    if (launched := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(
            f"processes: got {launched} that share each run, expected `rfa experiment` itself, started once for each "
            "device (CUDA_VISIBLE_DEVICES=0, 1, ...): the processes share the recipe"
        )
    out = Path(out)
    runs = selected_runs(recipe, only)
    report = progress or (lambda *_: None)
    finished = finished_results(recipe, out)
    waiting = [run for run in runs if run.name not in finished]
    for run in waiting:
        started_record(recipe, run, out)  # raises if it is damaged or of another recipe
    if not recipe.keep_models:
        for run in runs:
            if run not in waiting:  # a process may have been killed before it deleted them
                _delete_weights(run_folder(out, run))
    if waiting or lacks_trigram(recipe, out):
        text = _check_text(recipe, waiting[0] if waiting else recipe.runs[0], finished, report)
        _check_machine(recipe, waiting, report)
        if lacks_trigram(recipe, out):
            write_trigram(recipe, text, out)
    write_planned(out, Planned(name=recipe.name, title=recipe.title, runs=[run.name for run in recipe.runs]))
    failed: dict[str, str] = {}
    going = True
    while waiting and going:
        going = False
        for run in waiting:
            report(Stage("runs"), len(runs) - len(waiting), len(runs))
            with held(out / ".claims" / f"{run.name}.lock") as mine:
                if not mine:
                    continue
                going = True
                if finished_result(recipe, run, out) is None:
                    try:
                        _make(recipe, run, out, report)
                    except (Stopped, OSError, torch.AcceleratorError):
                        raise
                    except Exception as error:  # of any type: the other runs may still succeed
                        if os.environ.get("RFA_DEBUG"):
                            raise
                        named = isinstance(error, ValueError | RuntimeError)
                        failed[run.name] = str(error) if named else f"{type(error).__name__}: {error}"
                        if failure is not None:
                            failure(run.name, failed[run.name])
            waiting = [other for other in waiting if other is not run]
        waiting = [run for run in waiting if finished_result(recipe, run, out) is None]
    report(Stage("runs"), len(runs) - len(waiting), len(runs))
    claimed = tuple(run.name for run in waiting)
    done = tuple(run.name for run in runs if run.name not in {*claimed, *failed})
    return Outcome(done, claimed, failed)


def _check_text(
    recipe: Recipe, run: PlannedRun, finished: Mapping[str, Mapping[str, Any]], report: StageProgress
) -> PreparedData:
    """The text that all runs share. Raises `RecipeError` with everything that it is too short for.

    Raises `ValueError` if a finished run was made on another text.
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


def _make(recipe: Recipe, run: PlannedRun, out: Path, report: StageProgress) -> None:
    """Train or resume a run, evaluate it, write the result, and delete the model unless the recipe keeps it."""

    def training(step: int, steps: int, metrics: dict[str, float]) -> None:
        report(Stage("training", run.name, metrics), step, steps)

    folder = run_folder(out, run)
    bars: dict[str, Any] = {"progress": training, "data_progress": partial(report, Stage("text", run.name))}
    record = started_record(recipe, run, out)
    if record is None or is_lost(folder, record):
        record = train(recipe.resolved(run), folder.path, overwrite=record is not None, **bars)
    else:
        wanted = recipe.resolved(run).with_absolute_paths().to_dict()
        if record["spec"] != wanted:  # started in another checkout, whose text may be gone
            folder.write({**record, "spec": wanted})
        record = resume(folder.path, **bars)
    asked, path = recipe.asked_of(run), result_path(out, run)
    maps = path.with_name(f"{run.name}.attention.npz") if asked["attention"] else None
    evaluated = evaluation.full_evaluation(
        folder.path,
        **{**asked, "attention": maps},
        progress=lambda stage, *far: report(stage._replace(run=run.name), *far),
    )
    write_result(path, make_result(recipe, run, folder, record, evaluated))
    if not recipe.keep_models:
        _delete_weights(folder)


def _delete_weights(folder: RunFolder) -> None:
    """Delete the model and the checkpoints, which are large. Record, metrics and tokenizer stay."""
    for path in (folder.model, folder.checkpoints):
        shutil.rmtree(path, ignore_errors=True)
