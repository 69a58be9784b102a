"""Recipes: several training runs, their evaluations, and the rows of each run."""

from pathlib import Path

from .plan import RunState, measured_on, states
from .reading import RecipeError, read_recipe
from .recipe import Recipe
from .runs import Outcome, Runs, run_recipe, seconds_of


def load_recipe(path: str | Path, data: str | None = None) -> Recipe:
    """Read a recipe and check all of it.

    Args:
        path: of a YAML file, as in `recipes/`.
        data: a corpus, file or folder that replaces the recipe's.

    Raises:
        RecipeError: with all faults of the recipe.
        OSError: if it cannot be read.
    """
    return read_recipe(Path(path), Recipe, data)


__all__ = [
    "Outcome",
    "Recipe",
    "RecipeError",
    "RunState",
    "Runs",
    "load_recipe",
    "measured_on",
    "run_recipe",
    "seconds_of",
    "states",
]
