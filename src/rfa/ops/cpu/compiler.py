"""A folder of C++ sources becomes a shared library; and the libraries that a wheel has, one for each kind of processor.

The build of a wheel loads this file alone, so it imports nothing but the standard library.
"""

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT

MEND = "install a C++17 compiler (g++ or clang++) or name one in CXX"

_V3 = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
# What a wheel has kernels for, the widest registers first: the compiler's name for it, as in `-march=`, and the
# instruction sets that it uses, as Linux names them.
TARGETS = {"x86-64-v4": _V3 + _V4, "x86-64-v3": _V3, "armv8-a": ("asimd",)}
TARGETS_OF = {"x86_64": ("x86-64-v4", "x86-64-v3"), "aarch64": ("armv8-a",)}  # by what the machine calls itself


class BuildError(RuntimeError):
    """The kernels cannot be compiled here. The message is one line that says why, and what to do."""


def find_compiler() -> list[str]:
    """`$CXX`, arguments included, or the first of g++, clang++ and c++.

    Raises:
        BuildError: if there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise BuildError(f"no C++ compiler: got {' '.join(named) or 'none of g++, clang++, c++'}; {MEND}")


@functools.cache
def compiler_version(*compiler: str) -> str:
    """What the compiler says of itself."""
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace").stdout


def flags(version: str, target: str | None = None) -> list[str]:
    """Flags for the widest vectors of a target, or of this machine. Not -ffast-math: NaN and roundings must stay."""
    arm = platform.machine() in ("arm64", "aarch64")
    march = f"-march={target}" if target else "-mcpu=native" if arm else "-march=native"
    numbers = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    order = [] if "clang" in version else ["-fschedule-insns", "-fsched-pressure", "-Wno-psabi"]
    return ["-std=c++17", "-O3", march, *numbers, *order, "-fopenmp", "-fPIC"]


def compile_library(compiler: list[str], sources: Path, logs: Path, target: str | None = None) -> bytes:
    """The content of the shared library of all `.cpp` files in a folder.

    It is for a target of `TARGETS`, which takes the OpenMP runtime that PyTorch has loaded, or for this machine.

    Raises:
        BuildError: if the compiler fails; its whole output is then in a log in the folder `logs`.
    """
    command = [*compiler, *flags(compiler_version(*compiler), target)]
    link = [part for part in command if target is None or part != "-fopenmp"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sorted(sources.glob("*.cpp"))}
        library = Path(scratch) / "kernels.so"
        _run({logs / f"{source.stem}.log": ([*command, "-c", str(source)], made) for source, made in objects.items()})
        _run({logs / "link.log": ([*link, "-shared", *map(str, objects.values())], library)})
        return library.read_bytes()


def _run(commands: dict[Path, tuple[list[str], Path]]) -> None:
    """Run all commands at once, each of which makes a file. The output of one that fails is in its log."""
    with contextlib.ExitStack() as stack:  # ends what still runs where one fails, or at an interrupt
        running = []
        for log, (command, made) in commands.items():
            whole = [*command, "-o", str(made)]
            process = subprocess.Popen(whole, stdout=PIPE, stderr=STDOUT, text=True, errors="replace")
            stack.enter_context(process)
            stack.callback(process.terminate)
            running.append((process, whole, made, log))
        for process, whole, made, log in running:
            said, _ = process.communicate()
            if process.returncode or not made.is_file():
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(" ".join(whole) + "\n" + said, encoding="utf-8")
                lines = said.strip().splitlines() or [f"exit status {process.returncode}"]
                raise BuildError(f"{whole[0]} failed: {lines[-1]} (log: {log}); {MEND}")


# The kernels that a wheel has


def load_prebuilt(sources: Path) -> ctypes.CDLL:
    """The library of the widest registers that the wheel has beside the sources and this processor can run.

    Raises:
        BuildError: if there is none, or it cannot be loaded: the OpenMP that it needs comes with PyTorch.
    """
    path = prebuilt_library(sources)
    if path is None:
        raise BuildError(f"{sources.parent / 'prebuilt'}: no kernels for this processor")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None


def prebuilt_library(sources: Path) -> Path | None:
    """The file of this library, or None."""
    can = set(instruction_sets().split())
    libraries = {target: sources.parent / "prebuilt" / f"{target}.so" for target in TARGETS}
    fit = [path for target, path in libraries.items() if can.issuperset(TARGETS[target]) and path.is_file()]
    return fit[0] if fit else None


def instruction_sets() -> str:
    """The instruction sets of this processor, where the system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
