"""The commands, in this process: what they print, what they write, and how they fail."""

import json
import shutil
import sys

import pytest
import torch
import typer
from cover import slow
from ops.cpu.compiled import python
from training.runs import at_step, contents, ctrl_c, messages, tiny_spec, write_corpus

from rfa import __version__
from rfa.cli.app import app
from rfa.ops.backends import BACKENDS, missing
from rfa_lab import cli
from rfa_lab.evaluation import evaluate
from rfa_lab.training import RunFolder, Stopped, train

SIZES = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=4"]
SMALL = ["--tokenizer", "bytes", "--length", "16", "--batch-size", "4", "--max-steps", "4", "--set", *SIZES]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    train(tiny_spec(corpus, max_steps=3), out)
    return out


@pytest.fixture
def fails(rfa, tmp_path):
    """Call a command that must fail with one line on standard error, exit status 2, and nothing written."""

    def call(*arguments, says=()):
        before = contents(tmp_path), sorted(tmp_path.rglob("*"))
        status, out, err = rfa(*arguments)
        assert (status, out) == (2, "")
        assert len(messages(err)) == 1, err
        assert messages(err)[0].startswith("rfa: ")
        for words in [says] if isinstance(says, str) else says:
            assert words in err
        assert (contents(tmp_path), sorted(tmp_path.rglob("*"))) == before

    return call


def test_all_options_of_train(rfa, corpus, tmp_path):
    given = ["--epochs", "0.2", "--lr", "0.002", "--accumulate", "2", "--eval-steps", "2", "--valid-tokens", "64"]
    given += ["--log-steps", "3", "--split", "file"]
    given += ["--tokenizer", "bpe:300", "--length", "8", "--batch-size", "2", "--preset", "m2.2-flat-prior"]
    given += ["--set", "frequencies=none", "--set", "damping=1", "zero_heads=0", "learn_decay=True", "horizon=None"]
    assert rfa("train", "--data", corpus, *given, "--set", *SIZES[:3], "--out", "run")[0] == 0
    spec = RunFolder(tmp_path / "run").read()["spec"]
    expected = {"epochs": 0.2, "learning_rate": 0.002, "accumulate": 2, "eval_steps": 2, "valid_tokens": 64}
    expected |= {"log_steps": 3, "split_by": "file", "tokenizer": "bpe:300", "length": 8, "batch_size": 2}
    assert {name: spec[name] for name in expected} == expected
    model = {"frequencies": "none", "damping": 1, "zero_heads": 0, "learn_decay": True, "horizon": None}
    assert {name: spec["model"][name] for name in model} == model


def test_resume_and_overwrite(rfa, corpus, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        train(tiny_spec(corpus, max_steps=6), out, progress=at_step(2, ctrl_c))
    status, printed, _ = rfa("train", "--resume", "--out", "run")
    assert status == 0
    assert "after 6 steps" in printed
    before = contents(out)
    status, again, _ = rfa("train", "--resume", "--out", "run")  # a finished run
    assert (status, again) == (0, printed)
    assert contents(out) == before
    assert rfa("train", "--data", corpus, *SMALL, "--out", "run", "--overwrite")[0] == 0
    assert RunFolder(out).read()["steps"] == 4


def test_evaluate(rfa, run, tmp_path):
    arguments = ["--lengths", "8", "--lengths", "16", "32", "--protocol", "matched", "--max-tokens", "300"]
    arguments += ["--json", "new/result.json"]
    status, out, _ = rfa("evaluate", run, *arguments)
    assert status == 0
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    expected = evaluate(run, lengths=[8, 16, 32], protocol="matched", max_tokens=300)
    assert result == json.loads(json.dumps(expected))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]
    assert all(f"{row['perplexity']:.2f}" in out for row in result["rows"])
    assert "protocol matched" in " ".join(out.split())


def test_generate(rfa, run):
    status, out, err = rfa("generate", run, "--prompt", "the sea", "--max-new-tokens", "5", "--temperature", "0")
    assert status == 0
    assert out.startswith("the sea")
    assert err == ""


def test_version(rfa):
    assert rfa("--version") == (0, f"rfa {__version__}\n", "")


def test_doctor(rfa):
    from rfa.models import PRESETS

    status, out, err = rfa("doctor")
    assert (status, err) == (0, "")
    assert all(word in out for word in ("torch", "transformers", "cpu", "reference", *PRESETS))
    choices = ["cpu -> cpu" if missing("cpu") is None else "cpu -> reference"]
    if torch.cuda.is_available():
        choices += ["cuda -> triton" if missing("triton") is None else "cuda -> reference"]
    assert chosen(out) == choices
    leaves_out = [name for name in ("cpu", "triton") if missing(name) is None]
    assert ("eps 2^-24" if leaves_out else "none: only the backends cpu and triton") in out
    reasons = [f"{name} is missing: {missing(name)}" for name in BACKENDS if missing(name) is not None]
    assert [line for line in out.splitlines() if " is missing: " in line] == reasons


@slow
def test_doctor_without_a_compiler(tmp_path):
    """In one line, however narrow the terminal; the warning of `auto` would say it twice."""
    program = "import sys; from rfa_lab.cli import main; sys.argv = ['rfa', 'doctor']; main()"
    done = python(program, tmp_path, CXX="no-such-compiler", COLUMNS=60, TRITON_INTERPRET="")
    assert (done.returncode, done.stderr) == (0, "")
    assert chosen(done.stdout)[0] == "cpu -> reference"
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("cpu is missing: "))
    assert "no-such-compiler" in line
    assert "install a C++17 compiler" in line
    assert "CXX" in line


def chosen(out):
    """What `rfa doctor` says of each device."""
    return [line.split("auto chooses")[1].strip() for line in out.splitlines() if "auto chooses" in line]


TRAIN = ["train", "--data", "CORPUS", *SMALL, "--out", "run"]
FAULTS = [
    ([*TRAIN, "--preset", "m9"], ["preset: got 'm9'", "b1-rope", "m2-sc-rfa"]),
    ([*TRAIN, "--set", "colour=red"], ["colour", "not a field", "damping"]),
    ([*TRAIN, "--set", "=3"], ["--set: got '=3'", "field=value"]),
    ([*TRAIN, "--preset", "b1-rope", "--set", "damping=3"], ["damping: got 3", "no effect in b1-rope"]),
    ([*TRAIN, "--length", "100000"], ["training split: got", "100000"]),
    ([*TRAIN, "--set", "damping=" + 99_999 * "["], ["damping: got [[[[", "expected a value of the model"]),
    ([*TRAIN, "stray"], "stray"),
    ([*TRAIN, "--data", "nowhere"], ["data: got 'nowhere'", "stdlib", "wikitext-103"]),
    (["train"], "--out"),
    (["evaluate"], "RUN"),
    (["publish"], "publish"),
    (["evaluate", "RUN", "--lengths", "16", "5000"], "lengths: got 5000 for a text of 701 tokens"),
    (["evaluate", "RUN", "--protocol", "sliding", "--json", "result.json"], "protocol: got 'sliding'"),
    (["generate", "RUN", "--prompt", "caf\udce9"], "prompt: got 'caf\\udce9', expected text that UTF-8 can write"),
    (["generate", "RUN", "--temperature", "1e-9"], "temperature: got 1e-09, expected 0 or at least 1e-06"),
]


def test_each_fault_is_one_line(fails, corpus, run):
    folders = {"CORPUS": corpus, "RUN": run}
    for arguments, says in FAULTS:
        fails(*(folders.get(word, word) for word in arguments), says=says)


def test_bad_run_folders(fails, corpus, run, tmp_path):
    old = shutil.copytree(run, tmp_path / "run")
    fails("train", "--data", corpus, *SMALL, "--out", "run", says=["run folder run exists", "--resume", "--overwrite"])
    fails("train", "--resume", "--out", "run", "--preset", "b1-rope", "--set", "damping=1", says=["--preset, --set"])
    fails("train", "--resume", "--out", "absent", says="holds no run.json")
    (old / "model" / "model.safetensors").write_bytes(b"{}")
    for command in ("generate", "evaluate"):
        fails(command, "run", says="cannot be read")
    (old / "run.json").write_text((old / "run.json").read_text().replace('"format": 1', '"format": 7'))
    for begin in (["train", "--resume", "--out"], ["evaluate"], ["generate"]):
        fails(*begin, "run", says="has format 7, expected 1")


def test_json_replaces_a_file_and_never_a_folder(rfa, run, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious").write_text("years of work")
    status, _, err = rfa("evaluate", run, "--lengths", "16", "--json", "results")
    assert (tmp_path / "results" / "precious").read_text() == "years of work"
    assert (status, len(messages(err))) == (2, 1)
    (tmp_path / "old.json").write_text("old")
    assert rfa("evaluate", run, "--lengths", "16", "--json", "old.json")[0] == 0
    assert json.loads((tmp_path / "old.json").read_text())["rows"]
    before = contents(run)
    for name in ("run.json", "metrics.jsonl", "model/config.json"):
        status, _, err = rfa("evaluate", run, "--lengths", "16", "--json", run / name)
        assert (status, "the run's own" in err) == (2, True)
    assert contents(run) == before


def test_names_are_no_markup(rfa, corpus):
    name = "[b]run[/b]"
    status, out, _ = rfa("train", "--data", corpus, *SMALL, "--out", name)
    assert status == 0
    assert out.startswith(f"{name}: validation perplexity")
    status, out, _ = rfa("evaluate", name, "--lengths", "8", "--json", f"{name}.json")
    assert status == 0
    assert f"({name})" in " ".join(out.split())


def test_json_goes_through_a_link_and_to_no_device(rfa, fails, run, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    assert rfa("evaluate", run, "--lengths", "8", "--json", "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "there.json").read_text())["rows"]
    fails("evaluate", run, "--lengths", "8", "--json", "/dev/null", says="--json: got /dev/null")


def test_an_error_that_nobody_foresaw_is_one_line(fails, monkeypatch, rfa, run):
    def broken(*_, **__):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("rfa_lab.evaluation.evaluate", broken)
    fails("evaluate", run, says="rfa: ZeroDivisionError: two lines (RFA_DEBUG=1 shows where)")
    monkeypatch.setenv("RFA_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["rfa", "evaluate", str(run)])
    with pytest.raises(ZeroDivisionError):
        cli.main()


BELOW_A_FILE = [
    ("train", "--data", "unread", "--out"),
    ("demo", "--out"),
    ("evaluate", "unread", "--json"),
    ("export", "unread", "--out"),
    ("experiment", "unread.yaml", "--out"),
    ("report", ".", "--out"),
    ("forecast", "unread.csv", "--time", "t", "--horizon", "3", "--out"),
    ("bench", "operator", "--out"),
]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(fails, tmp_path):
    """Below a file, and in a file system that takes no files: permission bits do not hold back root."""
    (tmp_path / "file").write_text("mine")
    for number, arguments in enumerate(BELOW_A_FILE):
        place = ("file/below/it", "/proc/rfa/out")[number % 2]
        fails(*arguments, place, says=(f"{arguments[-1]}: got {place}, expected a place that can be written (in ",))


def test_each_option_that_names_an_output_is_checked():
    """Every command with `--out` stands in the list above."""
    group = typer.main.get_command(app)
    named = {name for name, one in group.commands.items() if any("--out" in each.opts for each in one.params)}
    assert named == {" ".join(each[: 1 + (each[1] == "train")]) for each in BELOW_A_FILE if each[-1] == "--out"}
