"""The model types of this package in transformers' Auto classes, although `import rfa` does not import transformers.

`AutoConfig` looks a model type up in `CONFIG_MAPPING`, which imports the module of a configuration when it is first
asked for. That imports `rfa.models`, which registers configurations and models by transformers' own functions.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

MAPPING = "transformers.models.auto.configuration_auto"
CONFIGURATIONS = {"rfa": "RFAConfig", "rfa_time_series": "RFATimeSeriesConfig"}  # names of `rfa`, loaded when asked for


def register() -> None:
    """Make transformers know the model types, now or as soon as it is imported."""
    if hasattr(sys.modules.get(MAPPING), "CONFIG_MAPPING"):
        _add(sys.modules[MAPPING])
    else:
        sys.meta_path.insert(0, _Waiting())


def _add(mapping: Any) -> None:
    for model_type, name in CONFIGURATIONS.items():
        mapping.CONFIG_MAPPING_NAMES[model_type] = name
        mapping.CONFIG_MAPPING._modules[model_type] = sys.modules["rfa"]


class _Waiting(MetaPathFinder):
    """Finds one module as Python does, and adds the model types once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The specification of the module with the mapping; None for every other module."""
        if fullname != MAPPING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_add(module: ModuleType) -> None:
                run(module)
                _add(module)

            loader.exec_module = run_and_add
        return spec
