"""The notebooks run, their pages are theirs, and what they say of their results holds."""

import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from cover import slow
from scripts import script

notebooks = script("docs/notebooks.py")
NAMES = [pytest.param(name, marks=slow if name == "learn-a-filter" else ()) for name in notebooks.NAMES]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A notebook by its name, run once: its page, what it defines, and the folder of its figures."""

    @functools.cache
    def once(name):
        folder = tmp_path_factory.mktemp(name)
        return *notebooks.written(name, folder), folder

    return once


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_that_of_its_notebook(run, name):
    fresh, _, folder = run(name)
    page = (notebooks.PAGES / f"{name}.md").read_text("utf-8")
    assert notebooks.without_printed(page) == notebooks.without_printed(fresh), f"run python docs/notebooks.py {name}"
    figures = {path.name for path in notebooks.PAGES.glob(f"{name}-*.png")}
    assert figures == {path.name for path in folder.iterdir()} == {*re.findall(rf"\(({name}-\d+\.png)\)", page)}


def test_a_notebook_is_stored_without_what_it_prints():
    for name in notebooks.NAMES:
        content = json.loads((notebooks.NOTEBOOKS / f"{name}.ipynb").read_text("utf-8"))
        code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == [], name


def test_a_cell_prints_its_last_value_as_jupyter_does():
    names = {}
    assert notebooks._run("a = 2\nprint(a)\na + 1", "cell", names) == "2\n3\n"
    assert notebooks._run("a + 1;", "cell", names) == notebooks._run("None", "cell", names) == ""
    assert notebooks.without_printed("b\n\n```text\n1\n\n2\n```\n\nc") == "b\n\nc"
    with pytest.raises(ZeroDivisionError):
        notebooks._run("a / 0", "cell", names)


@pytest.mark.parametrize(("chosen", "stays"), [({"MPLBACKEND": "svg"}, "svg"), ({}, "agg")])
def test_figures_of_the_library_appear_in_a_notebook(chosen, stays):
    """Jupyter names its way to draw in MPLBACKEND. Where nothing is chosen, no window is opened."""
    program = "import rfa.forecasting.figure, matplotlib; print(matplotlib.get_backend())"
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | chosen
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().lower() == stays


def co2(names):
    """The wrong readings have the least weights, gaps the wider bands, and the Kalman filter the widest."""
    found, seen, wrong = names["found"], names["seen"], names["wrong"]
    assert found.weights.iloc[wrong].max() < 0.5 < 0.8 < found.weights.drop(found.weights.index[wrong]).median()
    assert found.variance[seen.isna()].median() > found.variance[seen.notna()].median()
    assert names["kalman"].smooth().variance.median() > 1.5 * found.variance.median()


def sensors(names):
    """Marks help with zeros and stuck values; spikes need none; a second sensor narrows the dropout's band."""
    table, missing = names["table"], names["fault"] == "missing"
    assert (table["as they are"][["zeros", "stuck"]] > 4 * table["with the marks"][["zeros", "stuck"]]).all()
    assert names["second"].smooth().outliers[names["fault"] == "spike"].all()
    assert names["two"].variance[missing].max() < names["one"].variance[missing].max()


def tracking(names):
    """The robust filters are the better ones, live, looking back and with functions; wrong readings are found."""
    truth = names["at_readings"]
    errors = {name: np.linalg.norm((found - truth)[3:, [0, 2]]) for name, found in names["states"].items()}
    assert errors["smoothed"] < errors["robust"] < 0.5 * errors["Kalman"]
    assert names["outliers"][names["wrong"]].mean() > 0.7 > 0.05 > names["outliers"][~names["wrong"]].mean()
    robot = {name: np.linalg.norm((found - names["route"])[:, :2]) for name, found in names["estimates"].items()}
    assert robot["robust"] < 0.25 * robot["EKF"]


def attention(names):
    """Past the start the Kalman filter's weights are the Riccati prior's line."""
    line = names["log_gain"] + names["log_rest"] * names["steps"]
    torch.testing.assert_close(names["kalman"].log()[:20], line[:20], atol=1e-4, rtol=0)


def learn_a_filter(names):
    """Forecasts are far better than the mean, whose squared error is a half."""
    errors = {name: torch.stack(found).double().mean() for name, found in names["squares"].items()}
    assert errors["robust filter"] < errors["Kalman filter"] < 0.1


CLAIMS = {"co2": co2, "sensors": sensors, "tracking": tracking, "attention": attention}
CLAIMS["learn-a-filter"] = learn_a_filter


@pytest.mark.parametrize("name", NAMES)
def test_what_a_notebook_says_of_its_results_holds(run, name):
    CLAIMS[name](run(name)[1])
