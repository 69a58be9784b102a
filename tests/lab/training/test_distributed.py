"""Two processes share a run: the same steps as one process, one run folder, one stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from cover import slow
from parallel.processes import together

from rfa_lab.training import RunFolder, train
from training.runs import messages, tiny_spec

SIZES = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=4"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rfa_lab"]


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


def wait_until(process, true):
    for _ in range(900):
        if process.poll() is not None or true():
            return
        time.sleep(0.1)


def small(corpus, batch):
    return "--data", corpus, "--tokenizer", "bytes", "--length", 16, "--batch-size", batch, "--set", *SIZES


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def assert_resumes(run, step):
    """Two processes take it from this step three steps further."""
    record = run.read()
    record["spec"]["max_steps"] = step + 3
    run.write(record)
    finish(start(run.path.parent, "--resume"))
    assert run.read()["steps"] == step + 3


def _as_launched():
    """A process of `together` with the numbers that a launcher sets."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_PORT="1")
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="localhost")


def validated(corpus, folder):
    _as_launched()
    for blocks in COUNTS:
        spec = tiny_spec(Path(corpus), batch_size=2, max_steps=1, learning_rate=1e-12, valid_tokens=16 * blocks)
        train(spec, Path(folder) / f"{blocks}-of-{dist.get_world_size()}")


COUNTS = (1, 2, 5, 7)  # less than two batches of 2, and more


def test_the_validation_loss_is_that_of_one_process(corpus, tmp_path):
    """Of any number of blocks: the last batches of processes are filled up. The one step changes nothing."""
    together(validated, 2, str(corpus), str(tmp_path))
    for blocks in COUNTS:
        spec = tiny_spec(corpus, batch_size=4, max_steps=1, learning_rate=1e-12, valid_tokens=16 * blocks)
        expected = train(spec, tmp_path / "alone", overwrite=True)["result"]["valid_loss"]
        found = RunFolder(tmp_path / f"{blocks}-of-2").read()["result"]["valid_loss"]
        assert found == pytest.approx(expected, abs=1e-6)  # float32 sums in another order


@slow
def test_ctrl_c_stops_both_at_one_step_and_both_resume(corpus, tmp_path):
    """SIGINT to all processes of the terminal, as Ctrl-C sends it."""
    process = start(tmp_path, *small(corpus, 2), "--max-steps", 100_000, "--log-steps", 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.is_file() and metrics.stat().st_size)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    said = [line for line in messages(err) if line.startswith("rfa: stopped at step")]
    assert said, err
    assert len(set(said)) == 1
    run = RunFolder(tmp_path / "run")
    step = int(said[0].split()[4])
    assert run.latest_checkpoint().name == f"checkpoint-{step}"
    assert_resumes(run, step)


@pytest.mark.parametrize(
    ("given", "speaks"), [({}, True), ({"RANK": "0"}, True), ({"OMPI_COMM_WORLD_RANK": "1"}, False)]
)
def test_only_the_first_process_speaks(rfa, monkeypatch, given, speaks):
    shown = {}

    def stands_in(spec, out, overwrite, **bars):
        shown.update(bars)
        return {"steps": 1, "result": {"valid_perplexity": 1.0, "tokens": 1, "tokens_per_second": 1.0}}

    monkeypatch.setattr("rfa_lab.training.train", stands_in)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    status, said, err = rfa("train", "--out", "run")
    assert (status, bool(said), bool(shown)) == (0, speaks, speaks), err
