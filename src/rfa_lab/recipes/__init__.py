"""Recipes: several training runs, their evaluations, and one result file for each run.

A recipe is of text, of series or of recall, as its `kind` says. `recipe.py`, `series.py` and `recall.py` have what each
kind holds and how one run of it is made. `runner.py` makes all runs of any recipe.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rfa.progress import StageProgress

from .plan import RunState, measured_on, states
from .reading import BaseRecipe, RecipeError, read_recipe
from .recall import RecallRecipe, RecallRuns
from .recipe import EvaluationPlan, PlannedRun, Recipe
from .runner import Outcome, Runs, make_runs, seconds_of
from .series import SeriesRecipe, SeriesRuns
from .text_runs import TextRuns

_RECIPES: dict[str, type[BaseRecipe]] = {"text": Recipe, "series": SeriesRecipe, "recall": RecallRecipe}
_RUNS: dict[str, type[Any]] = {"text": TextRuns, "series": SeriesRuns, "recall": RecallRuns}


def load_recipe(path: str | Path, data: str | None = None) -> Any:
    """Read a recipe and check all of it.

    Args:
        path: of a YAML file, as in `recipes/`.
        data: a corpus, file or folder that replaces the recipe's; for a recipe of series a local copy of its table.

    Returns:
        A `Recipe`, or the `SeriesRecipe` or `RecallRecipe` that the file's `kind` names.

    Raises:
        RecipeError: with all faults of the recipe.
        ValueError: for data that replace none.
        OSError: if it cannot be read.
    """
    return read_recipe(Path(path), _RECIPES, data)


def runs_of(recipe: BaseRecipe, out: str | Path) -> Runs[Any, Any]:
    """The runs of a recipe in a folder."""
    return _RUNS[recipe.kind](recipe, Path(out))


def run_recipe(
    recipe: BaseRecipe,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    seconds: float | None = None,
    other_version: bool = False,
    progress: StageProgress | None = None,
    failure: Callable[[str, str], None] | None = None,
) -> Outcome:
    """Make every run of a recipe that has no result yet: train or resume it, evaluate it, and write the result.

    Several processes may share a recipe and a folder. A process skips a run that another one is making, and checks it
    again later. It ends when every run is done, is made by another process, or has failed here. After a failure the
    other runs are still made. A run whose learning rate others choose comes after them.

    With text each model first makes a step on this machine, so that a model that cannot run here is found at once.

    Args:
        recipe: the recipe.
        out: the folder of run folders and results.
        only: names of runs, in which `*` matches any text; empty for all runs.
        seconds: time after which the call saves and stops; a step of training that was begun is made. All state is in
            `out`, which can be carried elsewhere. A run of series or of recall begins anew. None for no limit.
        other_version: go on in a folder that another version or commit of rfa began. Results name all of them.
        progress: called with the stage, the amount done and the total. Stages of the whole call are "runs" (the number
            of runs), "text" and "trial_steps" (a step of each model). Stages of a run are "text", "training" and those
            of its evaluation.
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
    return make_runs(
        runs_of(recipe, out),
        only=only,
        seconds=seconds,
        other_version=other_version,
        progress=progress,
        failure=failure,
    )


__all__ = [
    "EvaluationPlan",
    "Outcome",
    "PlannedRun",
    "RecallRecipe",
    "Recipe",
    "RecipeError",
    "RunState",
    "SeriesRecipe",
    "load_recipe",
    "measured_on",
    "run_recipe",
    "runs_of",
    "seconds_of",
    "states",
]
