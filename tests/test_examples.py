"""The worked examples on small data: they run, and what their pages say of them holds."""

import os
import subprocess
import sys

import pytest
import torch
from cover import slow
from experiments.recipes import NAMES, RECALL, TWO_PRESETS, write_recipe
from scripts import ROOT, script


@pytest.fixture(scope="module")
def filter_co2():
    return script("examples/filter_co2.py")


@pytest.fixture(scope="module")
def depth_as_em():
    return script("examples/depth_as_em.py")


@slow
def test_wrong_readings_are_found_and_gaps_are_bridged(filter_co2):
    times, recorded = (part[:104] for part in filter_co2.load())
    now, later = times[:91], times[91:]
    seen, hit = filter_co2.spoil(recorded[:91], 4)
    filter_ = filter_co2.fitted(now, seen)
    estimate, ahead = filter_.smooth(), filter_.forecast(later)
    missing = seen.isnan()
    assert missing.sum() > 10
    assert hit.sum() == 4
    assert torch.equal(estimate.weights.isnan(), missing)
    assert estimate.outliers[hit].all()
    assert estimate.weights[~missing & ~hit].median() > 0.8
    lower, upper = estimate.interval(0.9)
    assert ((lower < recorded[:91]) & (recorded[:91] < upper))[~missing & ~hit].double().mean() > 0.85
    assert (estimate.mean - recorded[:91])[hit].abs().max() < 1.0  # the true reading, although it was 2 to 5 ppm off
    assert estimate.variance[missing].median() > estimate.variance[~missing].median()
    assert (ahead.variance.diff() > 0).all()  # the further ahead, the wider


@slow
def test_filter_co2_reads_a_file_and_draws(filter_co2, tmp_path, capsys):
    times, recorded = filter_co2.load()
    (tmp_path / "co2.csv").write_text("date,co2\n19580329,316.1\n19580405,317.3\n19580510,\n")
    read, values = filter_co2.load(tmp_path / "co2.csv")
    torch.testing.assert_close(read, times[[0, 1, 6]])
    torch.testing.assert_close(values, recorded[[0, 1, 6]], equal_nan=True)
    filter_co2.main(filter_co2.DATA, tmp_path / "figure.png", weeks=80)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "80 weeks" in capsys.readouterr().out


def test_layers_are_iterations(depth_as_em):
    assert depth_as_em.largest_difference(length=25, series=3, steps=4, robustness=0.7) < 1e-6
    times, _, observations = depth_as_em.draw(25, 3)
    first, *_, last = depth_as_em.by_attention(times, observations, 4, 0.7)
    assert (first - last).abs().max() > 1e-3  # the steps differ


@slow
def test_depth_lowers_objective_and_error(depth_as_em, tmp_path):
    found = depth_as_em.unroll(40, 8, [1, 3])
    assert len(found) == 4
    for objective, errors in found.values():
        assert len(objective) == 4
        assert (objective.diff() <= 1e-12).all()  # rounding
        assert errors[1] < errors[0]
    assert min(found, key=lambda name: found[name][1][-1]) == ("riccati", "leave_one_out")
    depth_as_em.save(depth_as_em.plot([1, 3], found, 1.0), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@slow
def test_tasks_of_a_job_array_share_a_recipe(tmp_path):
    """Two tasks at once, as a scheduler starts them: each run is made once, and a third task finds nothing to do."""
    recipe = write_recipe(tmp_path, runs=TWO_PRESETS, evaluation={"lengths": [16, 8], "protocols": {"blocks": 300}})
    command = ["bash", str(ROOT / "examples" / "recipe.slurm"), str(recipe), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable, "SLURM_CPUS_PER_TASK": "1"}
    pipes = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    tasks = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    names = NAMES[:2]
    assert {f"{name}.json" for name in names} <= {path.name for path in (tmp_path / "out" / "results").iterdir()}
    made = {name: (tmp_path / "out" / "runs" / name / "run.json").stat().st_mtime_ns for name in names}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode == 0
    assert made == {name: (tmp_path / "out" / "runs" / name / "run.json").stat().st_mtime_ns for name in names}


@slow
def test_a_job_makes_a_recipe_of_recall(tmp_path):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECALL)
    command = ["bash", str(ROOT / "examples" / "recipe.slurm"), str(recipe), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, "8 runs done" in done.stdout) == (0, True), done.stderr
