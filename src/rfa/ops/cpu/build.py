"""The kernels, compiled for this machine on first use and kept in the cache."""

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from rfa.cache import cache_folder, cached_file
from rfa.files import write_text_whole

SOURCES = Path(__file__).parent / "kernels"
MEND = "install a C++17 compiler (g++ or clang++) or name one in CXX"


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message is one line that says why and how to mend it."""


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
    """For the widest vectors of this machine. No -ffast-math: NaN must stay NaN, and roundings where they stand.

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
def compiled_library() -> Path:
    """The shared library, compiled unless one for these sources, this compiler and this machine lies in the cache.

    Of several processes one compiles and the others wait. Where the cache cannot be written, the library is made
    anew in a temporary folder.

    Raises:
        BuildError: if there is no compiler, or it fails; its whole output is then in the log named.
    """
    compiler = find_compiler()
    try:
        name = f"kernels-{_key(compiler)}.so"
        try:
            return _compiled(compiler, cache_folder() / "cpu", name)
        except OSError:
            return _compiled(compiler, Path(tempfile.mkdtemp(prefix="rfa-cpu-")), name)
    except OSError as error:
        raise BuildError(f"{' '.join(compiler)}: {error}; {MEND}") from None


def _compiled(compiler: list[str], folder: Path, name: str) -> Path:
    return cached_file(folder / name, lambda file: _compile(compiler, file, folder))


def _compile(compiler: list[str], file: BinaryIO, folder: Path) -> None:
    command = [*compiler, *flags(_version(*compiler))]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:  # a process for each, on a core each
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        running = [
            pool.submit(_run, compiler, [*command, "-c", str(source)], made, folder / f"{source.stem}.log")
            for source, made in objects.items()
        ]
        for each in running:
            each.result()
        library = Path(scratch) / "kernels.so"
        _run(compiler, [*command, "-shared", *map(str, objects.values())], library, folder / "link.log")
        file.write(library.read_bytes())


def _run(compiler: list[str], command: list[str], made: Path, log: Path) -> None:
    """Let the compiler make a file; where it fails, all that it said is in the log."""
    command = [*command, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode or not made.is_file():
        write_text_whole(log, " ".join(command) + "\n" + done.stdout + done.stderr)
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{' '.join(compiler)} failed: {lines[-1]} (log: {log}); {MEND}")


def _key(compiler: list[str]) -> str:
    """A digest of all that the library depends on; a home folder may be shared by different machines."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = _version(*compiler)
    digest.update("\0".join([*compiler, version, *flags(version), platform.machine(), _processor()]).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instructions that this processor has, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
