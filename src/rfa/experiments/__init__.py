"""Recipes: several training runs, their evaluations, and one result file for each run."""

from .plan import RunState, measured_on, states
from .reading import RecipeError
from .recipe import EvaluationPlan, PlannedRun, Recipe, load_recipe
from .runner import Outcome, run_recipe
from .series_recipe import SeriesRecipe, is_series_recipe, load_series_recipe
from .series_runner import SeriesOutcome, finished_series_result, run_series_recipe
from .time_limit import seconds_of

__all__ = [
    "EvaluationPlan",
    "Outcome",
    "PlannedRun",
    "Recipe",
    "RecipeError",
    "RunState",
    "SeriesOutcome",
    "SeriesRecipe",
    "finished_series_result",
    "is_series_recipe",
    "load_recipe",
    "load_series_recipe",
    "measured_on",
    "run_recipe",
    "run_series_recipe",
    "seconds_of",
    "states",
]
