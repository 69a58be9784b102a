"""Several runs and their evaluations, joined into results."""

from .folder import Results, read_results
from .plan import RunState, states
from .reading import RecipeError
from .recipe import EvaluationPlan, PlannedRun, Recipe, load_recipe
from .results import read_result
from .runner import Outcome, run_recipe

__all__ = [
    "EvaluationPlan",
    "Outcome",
    "PlannedRun",
    "Recipe",
    "RecipeError",
    "Results",
    "RunState",
    "load_recipe",
    "read_result",
    "read_results",
    "run_recipe",
    "states",
]
