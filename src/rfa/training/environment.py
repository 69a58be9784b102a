"""The versions, the commit and the machine that a result was made with."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accelerate
import tokenizers
import torch
import transformers

import rfa.version


def environment() -> dict[str, Any]:
    """Versions, commit and machine of this process."""
    return {
        "rfa": rfa.version.__version__,
        "commit": _commit(Path(__file__).parents[3]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "tokenizers": tokenizers.__version__,
        **_accelerated(),
        "machine": f"{cpu_name()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def cpu_name() -> str:
    """The maker's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or "unknown CPU"


def _accelerated() -> dict[str, Any]:
    """Further versions on which measurements on a GPU depend."""
    if not torch.cuda.is_available():
        return {}
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {"cuda": torch.version.cuda, "triton": triton}


def _commit(checkout: Path) -> str | None:
    """The commit of a source checkout, or of the one that a wheel was built in; None where neither is known.

    `-dirty` follows if the source differs from it.
    """
    if not (checkout / ".git").exists():  # git would report the commit of an unrelated repository around it
        return _commit_of_wheel(Path(rfa.version.__file__).parent)
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(checkout), *command], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "src"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changes else head


def _commit_of_wheel(package: Path) -> str | None:
    """What hatch_build.py wrote into the wheel."""
    try:
        return (package / "commit.txt").read_text().strip() or None
    except OSError:
        return None
