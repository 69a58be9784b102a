"""Recipes: several training runs, their evaluations, and one result file for each run."""

from .plan import RunState, states
from .reading import RecipeError
from .recipe import EvaluationPlan, PlannedRun, Recipe, load_recipe
from .runner import Outcome, run_recipe

__all__ = [
    "EvaluationPlan",
    "Outcome",
    "PlannedRun",
    "Recipe",
    "RecipeError",
    "RunState",
    "load_recipe",
    "run_recipe",
    "states",
]
