"""Recipes: several training runs, their evaluations, and the rows of each run."""

from .plan import RunState, states
from .reading import RecipeError
from .recipe import Recipe, load_recipe
from .runs import Outcome, Runs, run_recipe

__all__ = [
    "Outcome",
    "Recipe",
    "RecipeError",
    "RunState",
    "Runs",
    "load_recipe",
    "run_recipe",
    "states",
]
