"""Recipes: several training runs, their evaluations, and one result file for each run.

A recipe is of text, of series or of recall, as its `kind` says. `recipe.py`, `series.py` and `recall.py` have what each
kind holds and how one run of it is made. `runner.py` makes all runs of any recipe.
"""

from pathlib import Path
from typing import Any

from .plan import RunState, measured_on, states
from .reading import BaseRecipe, RecipeError, read_recipe
from .recall import RecallRecipe, RecallRuns
from .recipe import Recipe
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


def run_recipe(recipe: BaseRecipe, out: str | Path, **options: Any) -> Outcome:
    """Make every run of a recipe that has no result in a folder yet, with the options of `runner.make_runs`."""
    return make_runs(runs_of(recipe, out), **options)


__all__ = [
    "Outcome",
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
