"""Two processes share a run: the same steps as one process, one run folder, one stop."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from cover import slow

from rfa.training import RunFolder
from training.runs import messages, weights

SIZES = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=4"]
# 24 validation blocks, a whole number of batches for both: the Trainer fills up a last one that is shared unevenly
STEPS = ["--max-steps", "8", "--eval-steps", "4", "--valid-tokens", "384"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rfa.cli"]


def start(folder, *arguments):
    return subprocess.Popen(
        [*LAUNCH, "train", *map(str, arguments), "--out", "run"],
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def small(corpus, batch):
    return "--data", corpus, "--tokenizer", "bytes", "--length", 16, "--batch-size", batch, "--set", *SIZES


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def assert_same_result(first, second):
    """Two halves of a batch, averaged, are the batch, up to rounding that Adam's first steps enlarge."""
    mine, theirs = (json.loads((folder / "run.json").read_text()) for folder in (first, second))
    assert mine["finished"] is theirs["finished"] is True
    assert mine["result"]["valid_loss"] == pytest.approx(theirs["result"]["valid_loss"], abs=1e-4)
    assert mine["result"]["tokens"] == theirs["result"]["tokens"]
    assert weights(first).keys() == weights(second).keys()


@slow
def test_two_processes_are_one(rfa, monkeypatch, corpus, tmp_path):
    """Two with batches of 2, one with batches of 4."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    status, _, err = rfa("train", *small(corpus, 4), *STEPS, "--out", "alone")
    assert status == 0, err
    out = finish(start(tmp_path, *small(corpus, 2), *STEPS))
    assert len(out.splitlines()) == 1  # the first process speaks
    assert_same_result(tmp_path / "run", tmp_path / "alone")
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"checkpoint-4", "checkpoint-8"}


@slow
def test_ctrl_c_stops_both_at_one_step_and_both_resume(corpus, tmp_path):
    """SIGINT to all processes of the terminal, as Ctrl-C sends it."""
    process = start(tmp_path, *small(corpus, 2), "--max-steps", 100_000, "--log-steps", 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(900):
        if process.poll() is not None or (metrics.is_file() and metrics.stat().st_size):
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    said = [line for line in messages(err) if line.startswith("rfa: stopped at step")]
    assert said, err
    assert len(set(said)) == 1
    run = RunFolder(tmp_path / "run")
    step = int(said[0].split()[4])
    assert run.latest_checkpoint().name == f"checkpoint-{step}"
    record = run.read()
    record["spec"]["max_steps"] = step + 3
    run.write(record)
    finish(start(tmp_path, "--resume"))
    assert run.read()["steps"] == step + 3
