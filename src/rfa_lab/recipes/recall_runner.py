"""Run a recipe of recall: train each model on its task, test it at all lengths, one result file for each run."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rfa.environment import environment
from rfa.files import held
from rfa.models import RFAForCausalLM
from rfa.progress import Stage, StageProgress
from rfa_lab.data.synthetic import SyntheticTask
from rfa_lab.results import Planned, write_planned, write_result
from rfa_lab.training.callbacks import Diverged
from rfa_lab.training.synthetic import TaskScore, task_score, train_on_task

from .plan import check_folder, check_versions, selected_names
from .recall_recipe import RECALL_KIND, RecallRecipe, RecallRun
from .time_limit import TimeIsUp, TimeLimit

# Runs that leave a result file alone: each is claimed by one process, and a finished one is never made again


class ClaimedOutcome(NamedTuple):
    """The names of the runs that have a result, and of those that another process makes.

    Args:
        done: names of runs that have a result.
        claimed: names of runs that other processes are making.
        stopped: where the call stopped because its time was over; None if it came to its end.
    """

    done: list[str]
    claimed: list[str]
    stopped: str | None = None


def make_claimed(
    names: Sequence[str],
    planned: Planned,
    results: Path,
    finished: Callable[[str], Mapping[str, Any] | None],
    make: Callable[[str, StageProgress], Mapping[str, Any] | None],
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
) -> ClaimedOutcome:
    """Make the runs that have no result yet, and write each result whole. Several processes may share a folder.

    The list of all runs is written beside the results, so that a report can name those that are missing.

    Args:
        names: of the runs, in the order in which they are made.
        planned: name, title and kind of the recipe, and the names of all its runs.
        results: the folder of `NAME.json`.
        finished: the result of a run; None if it has none.
        make: the result of a run, which it reports to the function given; None if another process has to finish first.
        seconds: time after which the call stops; a run that was begun is lost. None for no limit.
        other_version: go on where another version or commit of rfa made some of the results.
        progress: called with the stage, the amount done and the total.

    Raises:
        ValueError: for a folder of another recipe, and for results of another version or commit without
            `other_version`, if there is more to make.
        OSError: if a result cannot be written.
    """
    check_folder(results.parent, planned["name"])
    if not other_version:
        stored = {name: result for name in planned["runs"] if (result := finished(name)) is not None}
        if any(name not in stored for name in names):
            check_versions(stored, results.parent)
    write_planned(results.parent, planned)
    outcome, limit = ClaimedOutcome([], []), TimeLimit(seconds, progress, saves=False)
    try:
        for index, name in enumerate(names):
            limit.report(Stage("runs", name), index, len(names))
            with held(results / f".{name}.lock") as free:
                if not free:
                    outcome.claimed.append(name)
                    continue
                if finished(name) is None:
                    result = make(name, limit.report)
                    if result is None:
                        outcome.claimed.append(name)
                        continue
                    write_result(results / f"{name}.json", result)
                outcome.done.append(name)
    except TimeIsUp:
        rest = [name for name in names if name not in (*outcome.done, *outcome.claimed)]
        made_elsewhere = [name for name in rest if finished(name) is not None]
        outcome.done.extend(made_elsewhere)
        return outcome._replace(stopped=limit.where() if len(made_elsewhere) < len(rest) else None)
    return outcome


def stored_result(path: Path, form: int, spec: Mapping[str, Any], recipe: Path) -> dict[str, Any] | None:
    """The result of a run, or None where it is still to do.

    Args:
        path: of the result.
        form: the format that it should have.
        spec: all that it should depend on.
        recipe: the recipe's file, for the message.

    Raises:
        ValueError: for a damaged file, or one of other settings.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        same = result["format"] == form and result["spec"] == spec
        if not isinstance(result["environment"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path) from None
    if not same:
        raise ValueError(f"result: {path} is of other settings than {recipe} names; delete it, or choose a new folder")
    return result


def damaged(path: Path) -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(f"result: {path} is damaged; delete it, and it is made again")


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
