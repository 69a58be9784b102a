"""The notebooks run, their pages are theirs, and what they say of their results holds."""

import functools
import json
import os
import re
import subprocess
import sys

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


def test_co2(run):
    """The wrong readings have the least weights, gaps the wider bands, and the Kalman filter the widest."""
    names = run("co2")[1]
    found, seen, wrong = names["found"], names["seen"], names["wrong"]
    assert (found.weights.isna() == seen.isna()).all()
    right = found.weights.drop(found.weights.index[wrong])
    assert found.weights.iloc[wrong].max() < 0.5 < 0.8 < right.median()
    assert found.outliers.iloc[wrong].sum() >= 10 >= found.outliers.sum() - 2
    assert found.variance[seen.isna()].median() > found.variance[seen.notna()].median()
    assert names["kalman"].smooth().variance.median() > 1.5 * found.variance.median()
    lower, upper = names["robust"].forecast(26).interval(0.9)
    assert names["later"].between(lower, upper).sum() >= 0.7 * names["later"].count()
    assert names["past"]["outlier"].iloc[wrong].sum() >= 8
    assert (
        names["later"]
        .between(*(names["combined"][f"rfa-{side}-90"].set_axis(names["later"].index) for side in ("lo", "hi")))
        .mean()
        > 0.6
    )


def test_sensors(run):
    """Marks help with zeros and stuck values; spikes need none; a second sensor narrows the dropout's band."""
    names = run("sensors")[1]
    table, one, two, fault = (names[name] for name in ("table", "one", "two", "fault"))
    for kind in ("zeros", "stuck"):
        assert table["as they are"][kind] > 4 * table["with the marks"][kind]
    assert table["with the marks"].max() < 1
    assert names["second"].smooth().outliers[fault == "spike"].all()
    missing = fault == "missing"
    assert two.variance[missing].max() < one.variance[missing].max()
    noises = names["both"].parameters
    assert noises["sigma2.irregular.roof"] == pytest.approx(0.16, rel=0.3)  # two standard errors of 500 readings: 0.13
    assert noises["sigma2.irregular.wall"] == pytest.approx(1.0, rel=0.3)
    assert names["seen"].weight[fault == "spike"].dropna().max() < 0.1


def test_tracking(run):
    """The robust track is the better one, live and looking back, and far fixes have no weight."""
    names = run("tracking")[1]
    truth = names["truth"][:, :2]

    def error(found):
        return (found.mean[:, :2] - truth).square().sum(-1).mean().sqrt()

    assert error(names["robust"]) < error(names["kalman"])
    assert error(names["smooth"]) < 0.7 * error(names["kalman_smooth"])
    assert error(names["again"]) < error(names["kalman_smooth"])
    assert names["weights"][names["distance"] > 8].max() < 0.1 < 0.7 < names["weights"].nanmedian()
    in_gap = names["robust"].covariance[names["gap"], 0, 0]
    assert (in_gap.diff() > 0).all()
    assert (names["smooth"].covariance[names["gap"], 0, 0] < in_gap).all()


def test_attention(run):
    """Past the start the Kalman filter's weights are the Riccati prior's line; wrong keys are believed by none."""
    names = run("attention")[1]
    line = names["log_gain"] + names["log_rest"] * names["steps"]
    torch.testing.assert_close(names["kalman"].log()[:20], line[:20], atol=1e-4, rtol=0)
    weights = names["A"][50:]
    right = weights[:, [19, 21, 40, 42]].min()
    assert weights[:, [20, 41]].max() < right
    late = slice(50, None)
    errors = [(names[name] - names["states"])[late].norm(dim=-1).mean() for name in ("riccati", "out")]
    assert errors[0] < 0.7 * errors[1]


@slow
def test_learn_a_filter(run):
    """Training lowers the loss, and forecasts are far better than the mean, whose squared error is a half."""
    names = run("learn-a-filter")[1]
    losses = [loss for _, loss in names["losses"]]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    errors = {name: torch.stack(found).double().mean() for name, found in names["squares"].items()}
    assert errors["robust filter"] < errors["Kalman filter"]
    assert max(errors.values()) < 0.1
