"""`rfa train` when it is stopped: one line, the right status, nothing lost."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cover import slow

from rfa_lab import training
from rfa_lab.evaluation import evaluate
from rfa_lab.training import RunFolder
from training.runs import STOPPING, messages

SIZES = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=4"]
SMALL = ["--tokenizer", "bytes", "--length", "16", "--batch-size", "4", "--set", *SIZES]


@slow
def test_ctrl_c(corpus, tmp_path):
    """A real SIGINT to a real process."""
    arguments = [sys.executable, "-m", "rfa_lab", "train", "--data", corpus, *SMALL, "--max-steps", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*arguments, "--log-steps", "1", "--out", "run"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(600):
        if process.poll() is not None or (metrics.is_file() and metrics.stat().st_size):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(messages(err)) == 2, err
    heard, line = messages(err)
    assert heard == STOPPING
    step = re.fullmatch(r"rfa: stopped at step (\d+) of 100000; go on with: rfa train --resume --out run", line)[1]
    assert out == ""
    assert RunFolder(tmp_path / "run").latest_checkpoint().name == f"checkpoint-{step}"
    assert math.isfinite(evaluate(tmp_path / "run", lengths=[16])["rows"][0]["loss"])


def entry_point():
    """What an installed `rfa` does."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    module, function = re.search(r'^rfa = "([\w.]+):(\w+)"', text, re.MULTILINE).groups()
    return f"import sys; from {module} import {function}; sys.exit({function}())"


@pytest.mark.parametrize("answer", ["raise", "pass"])
def test_ctrl_c_while_libraries_are_imported(tmp_path, answer):
    """Whatever the library that is being imported makes of it."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
        f"except KeyboardInterrupt:\n    {answer}\n"
    )
    sources = Path(training.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{sources}"}
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + entry_point()
    command = [sys.executable, "-c", program, "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rfa: stopped\n")
