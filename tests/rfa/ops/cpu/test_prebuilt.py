"""The kernels of a wheel: the choice for a processor, loading without a compiler, and the OpenMP of PyTorch."""

import ctypes
import shutil

import pytest
import torch

from rfa.ops.cpu import build, compiler
from rfa.ops.cpu.compiler import TARGETS, compile_library, find_compiler

V3 = " ".join(["flags : fpu sse", *TARGETS["x86-64-v3"]])
V4 = " ".join([V3, *TARGETS["x86-64-v4"]])
THREADS = """
extern "C" int threads() {
  int count = 0;
#pragma omp parallel num_threads(3) reduction(+ : count)
  count += 1;
  return count;
}
"""


@pytest.fixture(scope="module")
def compiled():
    """The session's kernels, which stand in for those of a wheel."""
    return build.compiled_library()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder of sources in a wheel's package, with a cache of its own and without a compiler."""
    (tmp_path / "package" / "prebuilt").mkdir(parents=True)
    monkeypatch.setenv("RFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-compiler-of-this-name")
    monkeypatch.setattr(compiler, "instruction_sets", lambda: V4)
    return tmp_path / "package" / "kernels"


@pytest.mark.parametrize(
    ("processor", "there", "chosen"),
    [
        (V4, ["x86-64-v3", "x86-64-v4"], "x86-64-v4"),
        (V3, ["x86-64-v3", "x86-64-v4"], "x86-64-v3"),
        (V4, ["x86-64-v3"], "x86-64-v3"),
        (V4.replace("avx512dq", ""), ["x86-64-v3", "x86-64-v4"], "x86-64-v3"),
        ("flags : fpu sse2 avx", ["x86-64-v3", "x86-64-v4"], None),
        ("Features : fp asimd", ["armv8-a"], "armv8-a"),
        (V4, [], None),
    ],
)
def test_the_widest_registers_that_the_processor_has(installed, monkeypatch, processor, there, chosen):
    monkeypatch.setattr(compiler, "instruction_sets", lambda: processor)
    for target in there:
        (installed.parent / "prebuilt" / f"{target}.so").touch()
    found = compiler.prebuilt_library(installed)
    assert (found and found.stem) == chosen


def test_prebuilt_kernels_need_no_compiler(compiled, installed, tmp_path, capfd):
    shutil.copy(compiled, installed.parent / "prebuilt" / "x86-64-v4.so")
    library = build.load_library(installed)
    assert library.rfa_problem_size() > 0
    assert build.describe_library(library) == "prebuilt for x86-64-v4"
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "cache").exists()


def test_prebuilt_kernels_that_do_not_load_are_compiled(installed):
    (installed.parent / "prebuilt" / "x86-64-v4.so").write_text("of another system")
    with pytest.raises(build.BuildError, match="no-compiler-of-this-name"):
        build.load_library(installed)


def test_a_library_for_a_wheel_takes_the_openmp_of_pytorch(tmp_path):
    """It names no runtime of its own, which a machine without a compiler may lack, and runs on threads."""
    (tmp_path / "threads.cpp").write_text(THREADS)
    target = next(name for name, sets in TARGETS.items() if set(compiler.instruction_sets().split()).issuperset(sets))
    content = compile_library(find_compiler(), tmp_path, tmp_path, target)
    assert b"libgomp.so" not in content
    assert torch.get_num_threads()  # PyTorch is loaded
    (tmp_path / "threads.so").write_bytes(content)
    assert ctypes.CDLL(str(tmp_path / "threads.so")).threads() == 3
