"""Recipes: several training runs, their evaluations, and the rows of each run."""

from .plan import RunState, states
from .recipe import Recipe, RecipeError, load_recipe
from .runs import run_demo, run_recipe

__all__ = [
    "Recipe",
    "RecipeError",
    "RunState",
    "load_recipe",
    "run_demo",
    "run_recipe",
    "states",
]
