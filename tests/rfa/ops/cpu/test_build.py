"""Compiling on first use: what fails, what is kept, who waits for whom, and where there is nothing to write to."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cover import slow

from rfa.ops.cpu import build

from .compiled import environment, give_library, python

USE = """
import torch
from ops.problems import problem
from rfa.ops import robust_filter_attention
inputs = problem(0, dtype=torch.float32)
found = robust_filter_attention(**inputs, backend="cpu")
torch.testing.assert_close(found, robust_filter_attention(**inputs, backend="reference"))
"""

# The packages without what they import, torch and transformers: where only files and compilers are at stake.
BUILD = """
import importlib.util, sys, types
from pathlib import Path
root = Path(importlib.util.find_spec("rfa").origin).parent
for name in ("rfa", "rfa.ops", "rfa.ops.cpu"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
from rfa.ops.cpu.build import compiled_library
print(compiled_library())
"""

AUTO = """
import warnings
import torch
from ops.problems import problem
from rfa.ops import robust_filter_attention
inputs = problem(0, dtype=torch.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = [robust_filter_attention(**inputs) for _ in range(2)]
assert torch.equal(found[1], robust_filter_attention(**inputs, backend="reference"))
print(*[w.message for w in caught if str(w.message).startswith("rfa:")], sep="\\n")
"""

COUNTED = """#!/bin/sh
for last; do :; done
case "$*" in
  *--version*) echo "counted 1.0"; exit;;
  *" -c "*) echo object > "$last"; exit;;
esac
echo run >> "{calls}"
cp "{library}" "$last"
"""

FAILING = """#!/bin/sh
case "$*" in *--version*) echo "failing 1.0"; exit;; esac
echo "forward.cpp:1: in file included from here" >&2
echo "forward.cpp:7: error: no such register" >&2
exit 1
"""

ENDLESS = """#!/bin/sh
case "$*" in *--version*) echo "endless 1.0"; exit;; esac
touch "{pids}/$$.pid"
exec sleep 600
"""


def compiler(folder, text):
    """A script that stands in for the compiler."""
    path = folder / "c++"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def counted(tmp_path):
    """`(compiler, calls)`: it counts its runs and makes the library that this session compiled."""
    calls = tmp_path / "calls"
    return compiler(tmp_path, COUNTED.format(calls=calls, library=build.compiled_library())), calls


@slow
def test_a_compiler_that_fails(tmp_path):
    """One warning, and the reference, for "auto"; its last line and the log for a name."""
    cxx = compiler(tmp_path, FAILING)
    done = python(AUTO + USE, tmp_path / "cache", CXX=cxx)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("RuntimeError")
    assert "forward.cpp:7: error: no such register" in message
    log = Path(message.split("(log: ")[1].split(")")[0])
    assert log.is_relative_to(tmp_path / "cache")
    assert "in file included from here" in log.read_text()
    assert f"{log.stem}.cpp" in log.read_text()  # of this one, while others failed beside it
    assert str(cxx) in log.read_text()

    (said,) = done.stdout.strip().splitlines()
    assert "no such register" in said
    assert str(log) in said


def test_an_interrupt_ends_the_compilers(tmp_path):
    """Of the process alone, as `kill -INT` sends it: nothing waits for them, nothing of them goes on."""
    cxx = compiler(tmp_path, ENDLESS.format(pids=tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD], env=environment(tmp_path / "cache", CXX=cxx), start_new_session=True
    )
    sources = len(list(build.SOURCES.glob("*.cpp")))
    while len(pids := list(tmp_path.glob("*.pid"))) < sources:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.stem), 0)


def test_a_cache_that_cannot_be_written(tmp_path, counted):
    """A file stands where the folder should be, for permissions do not hold back root."""
    cxx, calls = counted
    (tmp_path / "cache").write_text("not a folder")
    done = python(BUILD, tmp_path / "cache", CXX=cxx, TMPDIR=tmp_path)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().split() == ["run"]


def test_an_intact_library_needs_no_compiling(tmp_path):
    """The key of the cache is that of another process too."""
    library = give_library(tmp_path)
    before = library.stat().st_mtime_ns
    done = python(BUILD, tmp_path)
    assert (done.stdout.strip(), done.stderr) == (str(library), "")
    assert library.stat().st_mtime_ns == before
    assert [path.name for path in library.parent.glob("*.so")] == [library.name]


def test_the_key_knows_sources_compiler_flags_and_machine(monkeypatch, tmp_path):
    cxx = build.find_compiler()
    keys = {build._key(cxx)}
    with monkeypatch.context() as patch:
        patch.setattr(build, "instruction_sets", lambda: "another")
        keys.add(build._key(cxx))
    with monkeypatch.context() as patch:
        patch.setattr(build, "flags", lambda version: ["-O0"])
        keys.add(build._key(cxx))
    keys.add(build._key([str(compiler(tmp_path, FAILING))]))
    shutil.copytree(build.SOURCES, tmp_path / "kernels")
    with (tmp_path / "kernels" / "score.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "kernels")
    keys.add(build._key(cxx))
    assert len(keys) == 5
