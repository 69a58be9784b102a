"""What a result keeps of a run's metrics."""

from itertools import pairwise
from pathlib import Path

from rfa.experiments import load_recipe, states
from rfa.experiments.run_result import dynamics_over_training


def line(step):
    return {"step": step, "tokens": 32 * step, "dynamics": {"0": {"decay": [0.5 * step, 1.0]}}}


def test_the_course_of_parameters_is_thinned_out_from_the_first_step_to_the_last():
    found = dynamics_over_training([*map(line, range(25, 2001, 25)), {"step": 2000, "valid_loss": 4.0}])
    steps = found["steps"]
    assert (len(steps), steps[0], steps[-1]) == (64, 25, 2000)
    assert {later - step for step, later in pairwise(steps)} == {25, 50}  # spread over all of it
    assert found["tokens"] == [32 * step for step in steps]
    assert found["layers"] == {"0": {"decay": [[0.5 * step, 1.0] for step in steps]}}


def test_a_short_course_is_kept_whole():
    assert dynamics_over_training([line(step) for step in (1, 2, 3)])["steps"] == [1, 2, 3]
    assert dynamics_over_training([{"step": 1, "loss": 4.0}]) == {"steps": [], "tokens": [], "layers": {}}


def test_the_stored_record_is_that_of_its_recipe():
    """It was made from a folder `novels`, which `gutenberg:novels` stands for now."""
    folder = Path(__file__).parents[2]
    recipe = load_recipe(folder / "recipes" / "novels-small.yaml")
    assert {state.state for state in states(recipe, folder / "results" / "novels-small")} == {"done"}
