"""The versions, the commit and the machine that a result was made with."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch

from . import version as package


def environment() -> dict[str, Any]:
    """Versions, commit and machine of this process. Where no commit is known, a digest of the source stands for it."""
    return {
        "rfa": package.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version_of(name) for name in ("transformers", "accelerate", "tokenizers")},
        **_accelerated(),
        "machine": f"{cpu_name()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


@cache
def _commit() -> str | None:
    """The commit of the source that this process began with: a later one does not change it."""
    folder = Path(package.__file__).parent
    return package.source_commit(folder) or package.source_digest(folder)


def cpu_name() -> str:
    """The maker's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or "unknown CPU"


def _version_of(library: str) -> str | None:
    """The version of a library, which is not imported for it; None where it is not installed."""
    try:
        return installed_version(library)
    except PackageNotFoundError:
        return None


def _accelerated() -> dict[str, Any]:
    """Further versions on which measurements on a GPU depend."""
    if not torch.cuda.is_available():
        return {}
    built_for = "cuda" if torch.version.hip is None else "hip"
    return {built_for: getattr(torch.version, built_for), "triton": _version_of("triton")}
