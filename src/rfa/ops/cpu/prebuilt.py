"""The kernels that a wheel has, one library for each kind of processor."""

import ctypes
import platform
from pathlib import Path

from .compiler import TARGETS, BuildError


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
