"""The build of a wheel with compiled kernels, on request: `HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 python -m build`.

Wheels and source distributions name the commit of the checkout that they come from, and results made with them do.

Without the request the wheel is the same for all machines, and compiles its kernels on first use.
"""

import importlib.util
import os
import platform
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("rfa/ops/cpu", "rfa/estimation", "rfa/forecasting")  # each has its sources in `kernels`


class Build(BuildHookInterface):
    """Names the commit; on request compiles the kernels for all targets of this kind of machine, for the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the commit's file, and a library for each package and target.

        A wheel with libraries is one for this platform, and for any Python 3.
        """
        if version == "editable":  # the checkout is beside it, and kernels are compiled on first use
            return
        self.scratch = tempfile.TemporaryDirectory()
        self._add_commit(build_data, "rfa" if self.target_name == "wheel" else "src/rfa")
        if self.target_name == "wheel" and os.environ.get("HATCH_BUILD_HOOK_ENABLE_CUSTOM"):
            self._add_kernels(build_data)

    def _add_commit(self, build_data: dict[str, Any], package: str) -> None:
        source = Path(self.root, "src/rfa")
        named = _load(source / "version.py")
        commit = named.source_commit(source)
        if commit and not (source / named.NAME).exists():  # a source distribution has it already
            made = Path(self.scratch.name, named.NAME)
            made.write_text(f"{commit}\n", "utf-8")
            build_data["force_include"][str(made)] = f"{package}/{named.NAME}"

    def _add_kernels(self, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "src")
        compiler = _load(source / "rfa/ops/cpu/compiler.py")
        if platform.system() != "Linux" or platform.machine() not in compiler.TARGETS_OF:
            raise SystemExit(f"rfa: no kernels for wheels of {platform.system()} {platform.machine()}, only of Linux")
        for package in PACKAGES:
            for target in compiler.TARGETS_OF[platform.machine()]:
                self.app.display_info(f"compiling {package}/kernels for {target}")
                made = Path(self.scratch.name, package, f"{target}.so")
                made.parent.mkdir(parents=True, exist_ok=True)
                kernels = source / package / "kernels"
                made.write_bytes(compiler.compile_library(compiler.find_compiler(), kernels, made.parent, target))
                build_data["force_include"][str(made)] = f"{package}/prebuilt/{target}.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made."""
        if hasattr(self, "scratch"):
            self.scratch.cleanup()


def _load(path: Path) -> Any:
    """A module by its file: the package itself needs PyTorch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
