"""Recipes of seconds, and a stand-in for the evaluation, which has tests of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from training.runs import MODEL, write_corpus

from rfa.progress import Stage
from rfa_lab.training import RunFolder

TRAINING = {"tokenizer": "bytes", "length": 8, "batch_size": 4, "max_steps": 4, "eval_steps": 2, "log_steps": 1}


def recipe(**changes: Any) -> dict[str, Any]:
    """Two presets, one of them with two dampings, one seed."""
    given = {
        "name": "tiny",
        "title": "A tiny recipe",
        "training": {**TRAINING, "data": "corpus", "model": MODEL},
        "runs": [
            {"presets": ["b1-rope", "m2-sc-rfa"], "seeds": [0]},
            {"presets": ["m2-sc-rfa"], "seeds": [0], "model": {"damping": 0.5}, "label": "b=0.5"},
        ],
        "evaluation": {"lengths": [16, 8], "protocols": {"blocks": 300, "matched": None}},
    }
    return {**given, **changes}


TWO_PRESETS = [{"presets": ["b1-rope", "m2-sc-rfa"], "seeds": [0]}]
NAMES = ["b1-rope-seed0", "m2-sc-rfa-seed0", "m2-sc-rfa-b=0.5-seed0"]


def write_recipe(folder: Path, **changes: Any) -> Path:
    """The recipe in a file, its corpus beside it."""
    folder.mkdir(exist_ok=True)
    if not (folder / "corpus").exists():
        write_corpus(folder / "corpus")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe(**changes), sort_keys=False))
    return path


def stand_in(folder, *, lengths, protocols, attention=None, progress=None):
    """What `rfa_lab.evaluation.full_evaluation` returns, without its work."""
    assert RunFolder(folder).weights().is_dir()
    if attention is not None:
        attention.parent.mkdir(parents=True, exist_ok=True)
        attention.write_bytes(b"maps")
    if progress is not None:
        progress(Stage("blocks"), 1, 1)
    rows = [{"length": length, "loss": 1.0, "perplexity": 2.718, "targets": 9, "stderr": None} for length in lengths]
    return {
        "evaluations": {protocol: {"rows": rows, "books": {}} for protocol in protocols},
        "attention_summary": None,
        "fingerprint": "test",
        "environment": {"rfa": "elsewhere"},
    }


@contextmanager
def claimed_elsewhere(out: Path, name: str) -> Iterator[None]:
    """Another process claims a run, and is killed at the end."""
    lock = out / ".claims" / f"{name}.lock"
    program = (
        "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
        "print(flush=True); sys.stdin.read()"
    )
    lock.parent.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", program, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield
        process.kill()
