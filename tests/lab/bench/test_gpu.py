"""`make gpu` without a GPU: its commands are understood, it stops and goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
import typer
from cover import slow
from scripts import ROOT, script

from rfa_lab import cli  # noqa: F401  the commands
from rfa_lab.bench import Setting, cases
from rfa_lab.cli.app import app
from rfa_lab.recipes import load_recipe, seconds_of

COMMIT = "0123456789abcdef"
MACHINE = {"device": "a GPU", "commit": COMMIT}


@pytest.fixture(scope="module")
def gpu():
    return script("benchmarks/gpu.py")


@pytest.fixture
def table(gpu):
    return sys.modules[gpu.Stage.__module__]


def options_of(command):
    """The values that a command of `rfa` reads from its arguments."""
    name, *arguments = command
    group = typer.main.get_command(app)
    return group.commands[name].make_context(name, arguments).params


@pytest.mark.parametrize("tiny", [False, True])
def test_the_commands_are_understood(table, monkeypatch, tmp_path, tiny):
    """By the programs themselves, up to the point where they would begin."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("rfa.ops.backends.missing", lambda name: None)
    scripts = {name: script(f"benchmarks/{name}.py") for name in ("fuzz", "captured", "kernel_times")}
    ran = set()
    for stage in table.stages(table.Place(tmp_path, tiny)):
        assert stage.parts, stage.name
        assert len({part.name for part in stage.parts}) == len(stage.parts)
        for part in stage.parts:
            first, *rest = part.arguments
            if first == "-m" and rest[0] == "rfa_lab.cli":
                ran.add(rest[1])
                given = options_of(rest[1:])
                if rest[1] == "bench":
                    what, setting = given["what"], Setting(given["device"], given["dtype"], given["backend"])
                    names = ("lengths", "batch", "heads", "channels", "presets", "peers")
                    (case,) = cases(what, setting, **{n: given[n] or () if n != "batch" else given[n] for n in names})
                    assert case.rounds
                else:
                    assert load_recipe(given["recipe"], given["data"]).name == "novels-paper-size"
                    if given["time_limit"] is not None:
                        assert seconds_of(given["time_limit"]) < 540 - 30
            elif first == "-m":
                ran.add(rest[0])
                assert (rest[0], (ROOT / rest[1]).is_dir()) == ("pytest", True)
                assert part.environment["RFA_TESTS"] in ("", "all")
            else:
                ran.add(Path(first).stem)
                assert scripts[Path(first).stem].parser().parse_args(rest).device == "cuda"
    assert ran == {"bench", "experiment", "pytest", "fuzz", "captured", "kernel_times"}


@pytest.fixture
def run(gpu, monkeypatch, tmp_path):
    """`make gpu` with stages of one's own: a name and its commands, each a line of Python."""
    monkeypatch.setattr(gpu, "described", lambda environment: MACHINE)
    for module in (gpu, sys.modules["kept"]):
        monkeypatch.setattr(module, "source_commit", lambda package: COMMIT)

    def made(stages, *options):
        def part(name, code):
            return gpu.Part(name, ["-c", code], (tmp_path / "kept",) if name.startswith("on") else ())

        given = [gpu.Stage(name, "", [part(*each) for each in parts.items()]) for name, parts in stages.items()]
        monkeypatch.setattr(gpu, "stages", lambda place: given)
        status = gpu.main(["--out", str(tmp_path / "out"), *options])
        files = (tmp_path / "out").glob(f"{COMMIT[:12]}/*.json")
        return status, {path.stem: json.loads(path.read_text()) for path in files}

    return made


def touch(path):
    return f"open({str(path)!r}, 'a').write('x')"


def test_what_is_done_is_not_done_again(run, tmp_path, capsys):
    stages = {"one": {"a": touch(tmp_path / "a"), "b": touch(tmp_path / "b")}}
    for _ in range(2):
        status, files = run(stages)
        assert (status, files["one"]["status"]) == (0, "done")
    assert "done before at this commit" in capsys.readouterr().out
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "x"
    assert files["one"]["machine"] == MACHINE
    assert files["one"]["commit"] == COMMIT
    run(stages, "--again")
    assert (tmp_path / "a").read_text() == "xx"


def test_a_failure_is_said_and_others_run(run, tmp_path, capsys):
    bad = {"a": "print('so far'); raise SystemExit('it broke')", "b": touch(tmp_path / "b")}
    status, files = run({"bad": bad, "good": {"c": touch(tmp_path / "c")}})
    assert status == 1
    assert {name: file["status"] for name, file in files.items()} == {"bad": "failed", "good": "done"}
    assert files["bad"]["parts"]["a"]["said"] == ["so far", "it broke"]
    out = capsys.readouterr().out
    assert "it broke" in out
    assert out.splitlines()[-2:] == ["gpu: bad: failed", "gpu: good: done"]
    status, files = run({"bad": {**bad, "a": "pass"}})  # mended: what had been done stays
    assert (status, files["bad"]["status"]) == (0, "done")
    assert (tmp_path / "b").read_text() == "x"


def test_time_is_over(run, tmp_path, monkeypatch, gpu):
    """The command that goes on is stopped; the next one is left for the next call; one that is too long fails."""
    monkeypatch.setattr(gpu, "GRACE", 6.0)
    waits = "import time; time.sleep(60)"
    status, files = run({"one": {"on": waits, "b": touch(tmp_path / "b")}}, "--limit", "7")
    assert (status, files["one"]["status"]) == (0, "unfinished")
    assert {name: part["status"] for name, part in files["one"]["parts"].items()} == {"on": "unfinished"}
    assert not (tmp_path / "b").exists()
    status, files = run({"one": {"on": "pass", "b": touch(tmp_path / "b")}})
    assert files["one"]["status"] == "done"
    status, files = run({"two": {"a": waits}}, "--limit", "7")
    assert (status, files["two"]["status"]) == (1, "failed")
    assert files["two"]["parts"]["a"]["said"][-1].startswith("stopped after")


def test_ctrl_c_keeps_what_is_done(run, tmp_path, capsys):
    saves = f"import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: {touch(tmp_path / 'saved')}"
    begun = touch(tmp_path / "begun")
    stages = {"one": {"a": touch(tmp_path / "a"), "b": f"{begun}\n{saves}"}, "two": {"c": touch(tmp_path / "c")}}

    def stop():
        while not (tmp_path / "begun").exists():
            ended.wait(0.1)
        ended.wait(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    threading.Thread(target=stop).start()
    status, files = run(stages)
    assert status == 130
    assert "go on with: make gpu STAGE=one" in capsys.readouterr().err
    assert {name: part["status"] for name, part in files["one"]["parts"].items()} == {"a": "done", "b": "unfinished"}
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "c").exists()
    (status, files) = run({**stages, "one": {**stages["one"], "b": "pass"}})
    assert (status, files["one"]["status"], files["two"]["status"]) == (0, "done", "done")
    assert (tmp_path / "a").read_text() == "x"


def python(*arguments, **environment):
    """A process of its own: status, and what it said."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), **environment}
    done = subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


@slow
def test_tests_that_passed_are_not_run_again(tmp_path):
    tests, kept = tmp_path / "test_some.py", tmp_path / "kept.jsonl"
    tests.write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'of one mind'\n")
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "gpu_tests",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tests),
    ]
    given = {"GPU_TESTS": str(kept), "PYTHONPATH": str(ROOT / "benchmarks")}
    assert python(*command, **given)[0] == 1
    first = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(each["test"].split("::")[1], each["outcome"]) for each in first] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
    ]
    assert "of one mind" in first[1]["message"]
    tests.write_text("def test_good(): assert False\ndef test_bad(): pass\n")
    status, said = python(*command, **given)
    assert (status, "1 passed, 1 deselected" in said) == (0, True)
    outcomes = sys.modules["gpu_tests"] if "gpu_tests" in sys.modules else script("benchmarks/gpu_tests.py")
    session = types.SimpleNamespace(exitstatus=pytest.ExitCode.NO_TESTS_COLLECTED)
    outcomes.Outcomes(kept, worker=False).pytest_sessionfinish(session, session.exitstatus)
    assert session.exitstatus == pytest.ExitCode.OK  # none is left


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return script("benchmarks/captured.py")


def test_what_holds_of_a_compiled_call(captured, tmp_path, capsys):
    """On a CPU there is no graph, which is said; the other three hold."""
    options = ["--device", "cpu", "--backend", "reference", "--dtype", "float32", "--shape", "1", "2", "9", "8"]
    assert captured.main([*options, "--repeats", "1", "--irregular", "--json", str(tmp_path / "c.json")]) == 1
    told = json.loads((tmp_path / "c.json").read_text())
    assert told == json.loads(capsys.readouterr().out)
    assert {name: each["holds"] for name, each in told["tried"].items()} == {
        **{"waits": True, "repeated": True, "compiled": True},
        "captured": False,
    }
    assert told["tried"]["captured"]["reason"] == "there is no GPU"
    assert list(told["seconds"]) == ["plain", "compiled"]


@slow
def test_all_stages_at_the_tiny_size(gpu, tmp_path, capsys):
    """Some minutes under the interpreter. The recipe goes on until it is done."""
    status = gpu.main(["--tiny", "--out", str(tmp_path), "--limit", "1200"])
    said = capsys.readouterr().out
    assert status == 0, said
    (folder,) = tmp_path.iterdir()
    while json.loads((folder / "novels.json").read_text())["status"] != "done":
        assert gpu.main(["novels", "--tiny", "--out", str(tmp_path)]) == 0
    files = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    names = [stage.name for stage in gpu.stages(gpu.Place(tmp_path, True))]
    assert {files[name]["status"] for name in names} == {"done"}
    lines = [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]
    assert {line["benchmark"] for line in lines} == {"operator", "step", "decode", "generate", "memory"}
    assert {line["peer"] for line in lines} >= {"sdpa", "sdpa-flash", "flex", "flex-score", "b1-rope", "llama"}
    assert all(line["check"]["passed"] for line in lines)
