"""The kernels of this machine: those that the wheel has, or compiled on first use and kept in the cache."""

import contextlib
import ctypes
import functools
import hashlib
import platform
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from rfa.files import cache_folder, cached_file

from .compiler import (
    MEND,
    BuildError,
    compile_library,
    compiler_version,
    find_compiler,
    flags,
    instruction_sets,
    load_prebuilt,
)

SOURCES = Path(__file__).parent / "kernels"
USUAL = "20 to 110 s"  # on one core of 2023


def load_library(sources: Path = SOURCES) -> ctypes.CDLL:
    """The shared library of a folder of `.cpp` files and headers: the wheel's for this processor, or one compiled here.

    Raises:
        BuildError: if there is none and it cannot be compiled, or if it cannot be loaded.
    """
    with contextlib.suppress(BuildError):
        return load_prebuilt(sources)
    path = compiled_library(sources)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None


def describe_library(library: ctypes.CDLL) -> str:
    """In words, where a loaded library comes from."""
    path = Path(library._name)
    return f"prebuilt for {path.stem}" if path.parent.name == "prebuilt" else f"compiled for this machine, {path}"


@functools.cache
def compiled_library(sources: Path | None = None) -> Path:
    """The shared library of a folder of sources. It is compiled unless the cache has one for this compiler and machine.

    Of several processes one compiles and the others wait. Where the cache cannot be written, the library is made in a
    temporary folder. The default are the kernels of the operator.

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
    def write(file: BinaryIO) -> None:
        of = sources.parent.name
        print(f"rfa: compiling kernels ({of}) for this machine, once; usually {USUAL}", file=sys.stderr, flush=True)
        file.write(compile_library(compiler, sources, folder))

    return cached_file(folder / name, write)


def _key(compiler: list[str], sources: Path | None = None) -> str:
    """A digest of all that the library depends on; a home folder may be shared by different machines."""
    digest = hashlib.sha256()
    for source in sorted((sources or SOURCES).iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = compiler_version(*compiler)
    digest.update("\0".join([*compiler, version, *flags(version), platform.machine(), instruction_sets()]).encode())
    return digest.hexdigest()[:16]
