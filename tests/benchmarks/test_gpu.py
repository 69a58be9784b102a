"""`benchmarks/gpu.py`: its stages exist, one that fails or takes too long is named, and the others run."""

import json
import os
import sys
import time

import pytest
from cover import slow
from scripts import script


@pytest.fixture
def gpu():
    return script("benchmarks/gpu.py")


@pytest.fixture
def run(gpu, monkeypatch, tmp_path):
    """The command with stages of one's own, each a line of Python; returns the lines of its results by stage."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def made(rounds, *options):
        monkeypatch.setattr(gpu, "PLAN", rounds)
        monkeypatch.setattr(gpu, "arguments", lambda stage, tiny: ["-c", stage[0]])
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), *options])
        failed = gpu.main()
        lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        return failed, [(line["stage"], line["status"]) for line in lines]

    return made


def test_the_stages_exist(gpu):
    named = [stage for _, stages in gpu.PLAN for stage in stages]
    for stage in named:
        assert stage == ["tests"] or callable(getattr(gpu, stage[0])), stage
    assert {stage[1] for stage in named if stage[0] == "check"} == set(gpu.CHECKS)
    assert sum(limit for limit, _ in gpu.PLAN[:4]) <= 190  # values, times, windows and steps come first
    assert [stages[0][0] for _, stages in gpu.PLAN[1:4]] == ["times", "windows", "step"]


def test_a_stage_that_fails_is_named_and_others_run(run, tmp_path):
    touch, fails = f"open({str(tmp_path / 'ran')!r}, 'w')", "raise SystemExit(3)"
    assert run([(9, [[fails], [touch]])]) == (1, [(fails, 3)])
    assert (tmp_path / "ran").exists()


def test_time_is_over(run):
    waits, began = "import time; time.sleep(60)", time.monotonic()
    late = [(waits, "stopped at its limit"), ("1", "no time is left")]
    assert run([(6, [[waits], ["pass"]]), (60, [["1"]])], "--limit", "9") == (2, late)
    assert time.monotonic() - began < 30


@slow
@pytest.mark.parametrize("stage", [["check", "padding"], ["windows"], ["step", "graph"]])
def test_a_stage_at_the_tiny_size(gpu, monkeypatch, tmp_path, capfd, stage):
    """Under Triton's interpreter."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(gpu, "PLAN", [(9, [stage])])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), "--tiny"])
    assert gpu.main() == 0, capfd.readouterr()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert lines
    assert all(json.loads(line).get("holds", True) for line in lines)
