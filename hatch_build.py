"""The build of a wheel with compiled kernels, on request: `HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 python -m build`.

A wheel that is built in a checkout names its commit, and results made with it name that too.

Without the request the wheel is the same for all machines, and compiles its kernels on first use.
"""

import importlib.util
import platform
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("rfa/ops/cpu", "rfa/estimation")  # each has its sources in `kernels`


class Kernels(BuildHookInterface):
    """Compiles the kernels for all targets of this kind of machine and puts them into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add a library for each package and target; the wheel is then one for this platform, and any Python 3."""
        if version == "editable":  # compiled on first use, as the sources may change
            return
        source = Path(self.root, "src")
        compiler = _load(source / "rfa/ops/cpu/compiler.py")
        if platform.system() != "Linux" or platform.machine() not in compiler.TARGETS_OF:
            raise SystemExit(f"rfa: no kernels for wheels of {platform.system()} {platform.machine()}, only of Linux")
        self.scratch = tempfile.TemporaryDirectory()
        for package in PACKAGES:
            for target in compiler.TARGETS_OF[platform.machine()]:
                self.app.display_info(f"compiling {package}/kernels for {target}")
                made = Path(self.scratch.name, package, f"{target}.so")
                made.parent.mkdir(parents=True, exist_ok=True)
                kernels = source / package / "kernels"
                made.write_bytes(compiler.compile_library(compiler.find_compiler(), kernels, made.parent, target))
                build_data["force_include"][str(made)] = f"{package}/prebuilt/{target}.so"
        commit = _commit(Path(self.root))
        if commit:
            named = Path(self.scratch.name, "commit.txt")
            named.write_text(f"{commit}\n")
            build_data["force_include"][str(named)] = "rfa/commit.txt"  # `rfa.training.environment` reads it
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "scratch"):
            self.scratch.cleanup()


def _commit(root: Path) -> str | None:
    """The commit of a checkout, with `-dirty` if its source differs; None outside of one."""
    if not (root / ".git").exists():
        return None
    head, changes = (
        subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True).stdout.strip()
        for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "src"))
    )
    return f"{head}-dirty" if head and changes else head or None


def _load(path: Path) -> Any:
    """A module by its file: the package itself needs PyTorch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
