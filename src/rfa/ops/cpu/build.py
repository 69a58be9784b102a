"""The kernels, compiled for this machine on first use and kept in the cache."""

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import BinaryIO

from rfa.files import cache_folder, cached_file, write_text_whole

SOURCES = Path(__file__).parent / "kernels"
MEND = "install a C++17 compiler (g++ or clang++) or name one in CXX"


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


def flags(version: str) -> list[str]:
    """Compiler flags for the widest vectors of this machine. Not -ffast-math: NaN and roundings must stay.

    Args:
        version: what the compiler says of itself.
    """
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    numbers = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    order = [] if "clang" in version else ["-fschedule-insns", "-fsched-pressure", "-Wno-psabi"]
    return ["-std=c++17", "-O3", native, *numbers, *order, "-fopenmp", "-fPIC"]


@functools.cache
def _version(*compiler: str) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace").stdout


@functools.cache
def compiled_library(sources: Path | None = None) -> Path:
    """The shared library of a folder of sources. It is compiled unless the cache has one for this compiler and machine.

    Of several processes one compiles and the others wait. Where the cache cannot be written, the library is made in a
    temporary folder.

    Args:
        sources: a folder of `.cpp` files and their headers. By default the kernels of the operator.

    Raises:
        BuildError: if there is no compiler, or it fails; its whole output is then in the log named.
    """
    compiler, sources = find_compiler(), sources or SOURCES
    try:
        name = f"kernels-{_key(compiler, sources)}.so"
        try:
            return _compiled(compiler, sources, cache_folder() / "cpu", name)
        except OSError:
            return _compiled(compiler, sources, Path(tempfile.mkdtemp(prefix="rfa-cpu-")), name)
    except OSError as error:
        raise BuildError(f"{' '.join(compiler)}: {error}; {MEND}") from None


def _compiled(compiler: list[str], sources: Path, folder: Path, name: str) -> Path:
    return cached_file(folder / name, lambda file: _compile(compiler, sources, file, folder))


def _compile(compiler: list[str], sources: Path, file: BinaryIO, folder: Path) -> None:
    command = [*compiler, *flags(_version(*compiler))]
    with tempfile.TemporaryDirectory() as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sorted(sources.glob("*.cpp"))}
        library = Path(scratch) / "kernels.so"
        _run({folder / f"{source.stem}.log": ([*command, "-c", str(source)], made) for source, made in objects.items()})
        _run({folder / "link.log": ([*command, "-shared", *map(str, objects.values())], library)})
        file.write(library.read_bytes())


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
                write_text_whole(log, " ".join(whole) + "\n" + said)
                lines = said.strip().splitlines() or [f"exit status {process.returncode}"]
                raise BuildError(f"{whole[0]} failed: {lines[-1]} (log: {log}); {MEND}")


def _key(compiler: list[str], sources: Path | None = None) -> str:
    """A digest of all that the library depends on; a home folder may be shared by different machines."""
    digest = hashlib.sha256()
    for source in sorted((sources or SOURCES).iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = _version(*compiler)
    digest.update("\0".join([*compiler, version, *flags(version), platform.machine(), _processor()]).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instruction sets of this processor, where the system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
