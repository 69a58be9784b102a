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

from .compiler import MEND, TARGETS, BuildError, compile_library, compiler_version, find_compiler, flags

# The kernels that a wheel has, one library for each kind of processor


def load_prebuilt(sources: Path) -> ctypes.CDLL:
    """The library of the widest registers that the wheel has and this processor can run.

    Args:
        sources: the folder of the sources; `prebuilt/` stands beside it.

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


SOURCES = Path(__file__).parent / "kernels"
USUAL = "20 to 110 s"  # on one core of 2023


def load_library(sources: Path = SOURCES) -> ctypes.CDLL:
    """The shared library of a folder of sources: the wheel's for this processor, or one compiled here.

    Args:
        sources: a folder of `.cpp` files and their headers. By default the kernels of the operator.

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
