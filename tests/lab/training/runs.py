"""Runs of a second: a tiny corpus, a tiny model, and what stops them."""

import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rfa_lab import cli
from rfa_lab.training import TrainingSpec

WORDS = ["the", "old", "sea", "of", "time", "and", "a", "small", "house", "by", "night", "we", "saw", "him", "there"]
STOPPING = "stopping when this step is done and saved; a second signal stops at once, unsaved"
MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def text(characters: int, seed: int = 0) -> str:
    words = random.Random(seed)
    return " ".join(words.choice(WORDS) for _ in range(characters // 2))[:characters]


def write_corpus(folder: Path, train: int = 1600, valid: int = 400, test: int = 700) -> Path:
    """A folder `train/ valid/ test/` with so many characters (and, in `bytes`, one token more)."""
    for seed, (split, characters) in enumerate({"train": train, "valid": valid, "test": test}.items()):
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / split / "a.txt").write_text(text(characters, seed))
    return folder


def tiny_spec(corpus: Path, preset: str = "m2-sc-rfa", **changes: Any) -> TrainingSpec:
    """100 training blocks of 16 bytes in batches of 4: 25 batches an epoch."""
    given = {
        "model": MODEL,
        "data": str(corpus),
        "tokenizer": "bytes",
        "length": 16,
        "batch_size": 4,
        "max_steps": 8,
        "eval_steps": 3,
        "log_steps": 1,
    }
    return TrainingSpec(preset, **{**given, **changes})


def once(act):
    """`act` the first time that it is called, nothing later."""
    called = []

    def first():
        if not called:
            called.append(True)
            act()

    return first


def at_step(wanted: int, act, *, validating: bool = False):
    """A progress callback that calls `act`, once, after a step or in the validation that follows it."""
    act = once(act)

    def progress(step, steps, figures):
        if step == wanted and ("validated" in figures) == validating:
            act()

    return progress


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """Run `rfa` in this process; exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["rfa", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return exit_.value.code or 0, out, err


def messages(err: str) -> list[str]:
    """Lines of standard error, progress apart: bars (`tests/report` sees to it that an unused one leaves none), and
    what stands for them in a file, where something takes long."""
    bars = r"━|\d+/\d+ +[-\d]+:|^(?!rfa: ).*: \d+/\d+$|Writing model shards"
    return [line for line in err.splitlines() if line.strip() and not re.search(bars, line)]
