"""The worked examples on small data: they run, and what their pages say of them holds."""

import os
import subprocess
import sys

import pytest
from cover import slow
from experiments.recipes import NAMES, TWO_PRESETS, write_recipe
from scripts import ROOT, script


@pytest.fixture(scope="module")
def depth_as_em():
    return script("examples/depth_as_em.py")


def test_layers_are_iterations(depth_as_em):
    assert depth_as_em.largest_difference(length=25, series=3, steps=4, robustness=0.7) < 1e-6
    times, _, observations = depth_as_em.draw(25, 3)
    first, *_, last = depth_as_em.by_attention(times, observations, 4, 0.7)
    assert (first - last).abs().max() > 1e-3  # the steps differ


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
    assert {f"{name}.parquet" for name in names} <= {path.name for path in (tmp_path / "out" / "results").iterdir()}
    made = {name: (tmp_path / "out" / "runs" / name / "run.json").stat().st_mtime_ns for name in names}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode == 0
    assert made == {name: (tmp_path / "out" / "runs" / name / "run.json").stat().st_mtime_ns for name in names}
