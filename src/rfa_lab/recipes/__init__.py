"""Recipes: several training runs, their evaluations, and one result file for each run."""

from .plan import RunState, check_folder, measured_on, selected_names, states
from .reading import RecipeError, recipe_kind
from .recall_recipe import RecallRecipe, load_recall_recipe
from .recall_runner import ClaimedOutcome, finished_recall_result, run_recall_recipe
from .recipe import EvaluationPlan, PlannedRun, Recipe, load_recipe
from .runner import Outcome, run_recipe
from .series_recipe import SeriesRecipe, load_series_recipe
from .series_runner import finished_series_result, run_series_recipe
from .time_limit import seconds_of

__all__ = [
    "ClaimedOutcome",
    "EvaluationPlan",
    "Outcome",
    "PlannedRun",
    "RecallRecipe",
    "Recipe",
    "RecipeError",
    "RunState",
    "SeriesRecipe",
    "check_folder",
    "finished_recall_result",
    "finished_series_result",
    "load_recall_recipe",
    "load_recipe",
    "load_series_recipe",
    "measured_on",
    "recipe_kind",
    "run_recall_recipe",
    "run_recipe",
    "run_series_recipe",
    "seconds_of",
    "selected_names",
    "states",
]
