"""Run a recipe of recall: train each model on its task, test it at all lengths, one result file for each run."""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rfa.environment import environment
from rfa.models import RFAForCausalLM
from rfa.progress import Stage, StageProgress
from rfa_lab.data.synthetic import SyntheticTask
from rfa_lab.results import Planned
from rfa_lab.training.callbacks import Diverged
from rfa_lab.training.synthetic import TaskScore, task_score, train_on_task

from .claims import ClaimedOutcome, make_claimed, stored_result
from .plan import selected_names
from .recall_recipe import RECALL_KIND, RecallRecipe, RecallRun

RECALL_FORMAT = 1
_TEST_SEED = 20_260_000  # of the sequences that all models and seeds are tested on


def run_recall_recipe(
    recipe: RecallRecipe,
    out: str | Path,
    *,
    only: tuple[str, ...] = (),
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
) -> ClaimedOutcome:
    """Make all runs that have no result yet. Several processes may share a folder.

    Args:
        recipe: what to run.
        out: the folder; results are written to `out/results/NAME.json`.
        only: names of runs, in which `*` matches any text; all by default.
        seconds: time after which the call stops; the next call begins its last run anew. None for no limit.
        other_version: go on where another version or commit of rfa made some of the results. Each names its own.
        progress: called with the stage, the amount done and the total.

    Raises:
        ValueError: for a name in `only` that matches no run, a result of another recipe, or one of another version
            without `other_version`.
        OSError: if a result cannot be written.
    """
    results = Path(out) / "results"
    names = selected_names([run.name for run in recipe.runs], only)
    planned = {run.name: run for run in recipe.runs}
    return make_claimed(
        tuple(name for name in planned if name in names),
        Planned(name=recipe.name, title=recipe.title, runs=list(planned), kind="recall"),
        results,
        finished=lambda name: finished_recall_result(recipe, planned[name], results / f"{name}.json"),
        make=lambda name, report: _result(recipe, planned[name], report),
        seconds=seconds,
        other_version=other_version,
        progress=progress,
    )


def finished_recall_result(recipe: RecallRecipe, run: RecallRun, path: Path) -> dict[str, Any] | None:
    """The result of a run, or None where it is still to do.

    Raises:
        ValueError: for a damaged file, or one of other settings.
    """
    return stored_result(path, RECALL_FORMAT, _spec(recipe, run), recipe.path)


def _spec(recipe: RecallRecipe, run: RecallRun) -> dict[str, Any]:
    """All that a result depends on."""
    return {
        "task": {"kind": type(run.task.task).__name__, **asdict(run.task.task)},  # type: ignore[call-overload]
        "preset": run.model.preset,
        "model": dict(run.model.model),
        "training": asdict(recipe.training_of(run)),
        "lengths": list(recipe.lengths),
        "sequences": recipe.sequences,
    }


def _result(recipe: RecallRecipe, run: RecallRun, progress: StageProgress) -> dict[str, Any]:
    started, training = time.perf_counter(), recipe.training_of(run)
    torch.manual_seed(run.seed)
    model = RFAForCausalLM(recipe.config_of(run))

    def report(done: int, total: int) -> None:
        progress(Stage("training", run.name), done, total)

    curve: dict[int, TaskScore] = {}
    fault = None
    try:
        curve = train_on_task(model, run.task.task, training, report)
    except Diverged as error:  # the other runs go on
        fault = str(error)
    trained = time.perf_counter()
    tests = {}
    for index, length in enumerate(recipe.lengths if fault is None else ()):
        progress(Stage("evaluation", run.name), index, len(recipe.lengths))
        tests[str(length)] = _entries(_test(model, run.task.task, length, recipe.sequences))
    tokens = training.batch_size * training.length
    return {
        "format": RECALL_FORMAT,
        "kind": RECALL_KIND,
        "recipe": recipe.name,
        "title": recipe.title,
        "run": run.name,
        "task": run.task.label,
        "label": run.model.label,
        "seed": run.seed,
        "spec": _spec(recipe, run),
        "chance": 1 / run.task.task.answers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [{"step": step, "tokens": step * tokens, **_entries(score)} for step, score in curve.items()],
        "tests": tests,
        "fault": fault,
        "seconds": {"training": trained - started, "evaluation": time.perf_counter() - trained},
        "environment": environment(),
    }


def _test(model: RFAForCausalLM, task: SyntheticTask, length: int, sequences: int) -> TaskScore:
    return task_score(model, task.sample(sequences, length, torch.Generator().manual_seed(_TEST_SEED)))


def _entries(score: TaskScore) -> dict[str, Any]:
    """A score for a file. A loss that is not finite is None."""
    return {**score._asdict(), "loss": score.loss if math.isfinite(score.loss) else None}
