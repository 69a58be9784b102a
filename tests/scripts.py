"""Scripts that stand outside the package, as modules; processes that import what tests share."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def with_tests(**variables: str) -> dict[str, str]:
    """The environment of a process that imports what tests share, with more variables."""
    folders = [str(ROOT / "tests" / name) for name in ("", "rfa", "lab")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **variables}


def script(path: str) -> ModuleType:
    """The script at a path from the repository's root."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    folder = str((ROOT / path).parent)
    sys.path.insert(0, folder)  # as where it is run: for its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
