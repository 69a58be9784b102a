"""The kernels, compiled for this machine on first use and kept in the cache."""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import BinaryIO

from rfa.cache import cache_folder, cached_file
from rfa.files import write_text_whole

SOURCES = Path(__file__).parent / "kernels"
MEND = "install a C++17 compiler (g++ or clang++) or name one in CXX"


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message is one line that says why and how to mend it."""


def find_compiler() -> str:
    """`$CXX`, or the first of g++, clang++ and c++.

    Raises:
        BuildError: if there is none.
    """
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler: got {named or 'none of g++, clang++, c++'}; {MEND}")


def flags() -> list[str]:
    """For the widest vectors of this machine. No -ffast-math: NaN must stay NaN, and roundings where they stand."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    numbers = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    order = ["-fschedule-insns", "-fsched-pressure", "-Wno-psabi"]  # g++; clang++ passes over them
    return ["-std=c++17", "-O3", native, *numbers, *order, "-fopenmp", "-fPIC", "-shared"]


@functools.cache
def compiled_library() -> Path:
    """The shared library, compiled unless one for these sources, this compiler and this machine lies in the cache.

    Of several processes one compiles and the others wait. Where the cache cannot be written, the library is made
    anew in a temporary folder.

    Raises:
        BuildError: if there is no compiler, or it fails; its whole output is then in the log named.
    """
    compiler = find_compiler()
    name = f"kernels-{_key(compiler)}.so"
    try:
        return cached_file(cache_folder() / "cpu" / name, lambda file: _compile(compiler, file, cache_folder() / "cpu"))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="rfa-cpu-"))
        return cached_file(folder / name, lambda file: _compile(compiler, file, folder))


def _compile(compiler: str, file: BinaryIO, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "kernels.so"
        command = [compiler, *flags(), str(SOURCES / "kernels.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode or not made.is_file():
            log = folder / "compile.log"
            write_text_whole(log, " ".join(command) + "\n" + done.stdout + done.stderr)
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise BuildError(f"{compiler} failed: {lines[-1]} (log: {log}); {MEND}")
        file.write(made.read_bytes())


def _key(compiler: str) -> str:
    """A digest of all that the library depends on; a home folder may be shared by different machines."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace").stdout
    digest.update("\0".join([compiler, version, *flags(), platform.machine(), _processor()]).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instructions that this processor has, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
