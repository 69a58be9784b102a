"""Former names of the lab's packages: `rfa.training` is `rfa_lab.training`. The library itself imports none of them."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType
from typing import Any

FORMER = {name: name for name in ("bench", "cli", "data", "evaluation", "export", "report", "results", "training")}
FORMER["experiments"] = "recipes"


class FormerPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `rfa.NAME...` in `rfa_lab`, with a `DeprecationWarning` that names the new path."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A specification for a former name; None for any other."""
        return importlib.machinery.ModuleSpec(name, FormerPaths()) if _present(name) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module of the new path itself."""
        new = str(_present(spec.name))
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already; the import system has replaced its specification."""
        module.__spec__ = self.own


def _present(name: str) -> str | None:
    package, _, rest = name.partition(".")
    first, dot, rest = rest.partition(".")
    return f"rfa_lab.{FORMER[first]}{dot}{rest}" if package == "rfa" and first in FORMER else None


def install() -> None:
    """Look for former names after all other finders, once."""
    if not any(isinstance(finder, FormerPaths) for finder in sys.meta_path):
        sys.meta_path.append(FormerPaths())
