"""`--dry-run`: hours for a device, and whether all that the runs need is there."""

import itertools
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from cover import slow
from training.runs import MODEL, command, messages, write_corpus

from rfa_lab.recipes import load_recipe, run_recipe, states
from rfa_lab.recipes import plan as dry_run
from rfa_lab.record import read_rows
from rfa_lab.training import trainer

from .recipes import TRAINING, TWO_PRESETS, recipe, write_recipe

SHIPPED = Path(__file__).parents[3] / "recipes"
Usage = namedtuple("Usage", "total used free")


def test_hours_at_a_speed(tmp_path, out, evaluated, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    path = write_recipe(tmp_path, training={**recipe()["training"], "max_steps": 9000})
    arguments = ("experiment", path, "--out", out, "--dry-run")
    status, said, _ = command(monkeypatch, capsys, *arguments, "--tokens-per-second", 100)
    assert status == 0
    # three runs of 9000 steps of 32 tokens: 8640 seconds
    assert "left to train: 2 h 24 min, evaluation apart" in " ".join(said.split())
    assert [line.partition(":")[0] for line in said.splitlines()[-3:]] == ["text", "tokenizer", "disk"]
    assert not out.exists()
    status, _, err = command(monkeypatch, capsys, *arguments, "--tokens-per-second", 0)
    assert (status, messages(err)[0].startswith("rfa: tokens_per_second: got 0.0")) == (2, True)
    status, _, err = command(monkeypatch, capsys, *arguments[:-1], "--tokens-per-second", 100)
    assert (status, messages(err)[0].startswith("rfa: --tokens-per-second: got 100, expected --dry-run")) == (2, True)
    assert not out.exists()


def test_the_device_of_finished_runs(tmp_path, out, evaluated, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    path = write_recipe(tmp_path, runs=TWO_PRESETS)
    run_recipe(load_recipe(path), out, only=["b1*"])
    path_of = out / "results" / "b1-rope-seed0.parquet"
    frame = pd.read_parquet(path_of)
    frame["settings"] = frame["settings"].astype(str).str.replace('"device": "cpu"', '"device": "NVIDIA H200"')
    frame.to_parquet(path_of)
    _, said, _ = command(monkeypatch, capsys, "experiment", path, "--out", out, "--dry-run")
    assert "left to train on NVIDIA H200: 0 min" in " ".join(said.split())


def test_what_is_missing(tmp_path, out, monkeypatch, capsys):
    training = {**TRAINING, "model": MODEL, "data": "nowhere", "tokenizer": "gpt2:words"}
    path = write_recipe(tmp_path, training=training)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 1000))
    status, said, _ = command(monkeypatch, capsys, "experiment", path, "--out", out, "--dry-run")
    assert status == 1
    text, tokenizer, disk = said.splitlines()[-3:]
    assert text == f"text: missing: {tmp_path / 'nowhere'}: {tmp_path / 'nowhere'} does not exist"
    assert tokenizer.endswith(f"words: {tmp_path / 'words'} lacks encoder.json, vocab.bpe")
    assert disk.startswith("disk: missing: about ")


def test_the_disk_that_is_needed(tmp_path, out, evaluated):
    """About what a run leaves: 28 bytes a parameter, with two checkpoints."""
    training = {**recipe()["training"], "model": {**MODEL, "hidden_size": 128}}
    planned = load_recipe(write_recipe(tmp_path, keep_models=True, runs=TWO_PRESETS, training=training))
    run_recipe(planned, out, only=["m2*"])
    left = sum(file.stat().st_size for name in ("model", "checkpoints") for file in out.glob(f"runs/*/{name}/**/*.*"))
    one, *_ = (run for run in planned.runs if run.spec.preset == "m2-sc-rfa")
    assert 0.7 < 28 * dry_run._parameters(one) / left < 1.5  # "about": the parameters are estimated
    assert dry_run._KEPT == 28
    required = dry_run.requirements(planned, states(planned, out), out)
    needed = [each.said.split()[1] for each in required if each.what == "disk"]
    assert needed == [f"{(28 + 52) * dry_run._parameters(planned.runs[0]) / 1e9:.1f}"]


def test_epochs_before_the_text_is_read(tmp_path, out):
    """As the paper's: 15 passes over 117,351,000 tokens in 214,875 steps."""
    planned = load_recipe(SHIPPED / "table1-wikitext103.yaml")
    first = states(planned, out, ["b1-rope-seed0"])[0]
    assert first.steps == 214_875
    assert first.tokens == 214_875 * 16 * 512
    assert states(planned, out, ["b1-rope-seed0"], 1e6)[0].seconds == pytest.approx(first.tokens / 1e6)


def test_the_text_that_is_given_is_counted_and_the_speed_measured(tmp_path, out, monkeypatch, capsys):
    """As the runs count themselves, whatever the recipe says of its own text; the hours are of this machine."""
    monkeypatch.setenv("COLUMNS", "300")
    training = {name: value for name, value in recipe()["training"].items() if name != "max_steps"}
    path = write_recipe(
        tmp_path, runs=TWO_PRESETS, training={**training, "epochs": 2, "eval_steps": 12}, train_tokens=10**9
    )
    planned = load_recipe(path)
    assert dry_run.counted(planned).train_tokens == 10**9
    given = write_corpus(tmp_path / "given", train=200)
    other = dry_run.counted(load_recipe(path, str(given)))
    assert other.train_tokens == 201  # bytes, and the end of the text
    monkeypatch.setattr(trainer, "perf_counter", partial(next, itertools.count(0, 0.125)))
    status, said, _ = command(monkeypatch, capsys, "experiment", path, "--out", out, "--data", given, "--dry-run")
    said = " ".join(said.split())
    assert status == 0
    # a step of a batch of 4 blocks of 8 tokens takes an eighth of a second; 6 batches an epoch
    assert "2 runs done; 768 tokens; left to train on this machine (256 tokens a second of b1-rope, measured" in said
    monkeypatch.undo()
    assert run_recipe(load_recipe(path, str(given)), out, only=["b1*"]).done
    (result,) = read_rows(out / "results" / "b1-rope-seed0.parquet").settings.values()
    assert result["training"]["tokens"] == 384
    first, last = states(other, tmp_path / "elsewhere", tokens_per_second=100.0)
    assert (first.tokens, first.steps) == (last.tokens, last.steps) == (384, 12)
    assert result["training"]["steps"] == 12


@slow
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("[!s]*.yaml")), ids=lambda path: path.stem)
def test_it_answers_within_twenty_seconds(path, out):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = ("-m", "rfa_lab.cli", "experiment", path, "--out", out, "--dry-run")
    made = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == int("missing: " in made.stdout), made.stderr  # such as a text that is fetched
    assert "runs done" in made.stdout or "to do" in made.stdout
    assert "Traceback" not in made.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # processor time, whatever else the machine does
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
