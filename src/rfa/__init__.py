"""Robust Filter Attention: self-attention as robust, precision-weighted state estimation.

`import rfa` loads neither PyTorch nor anything else. Each public name is loaded when it is first asked for. `__all__`
and `dir(rfa)` have the names that what is installed can load.
"""

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .checks import MissingExtra, installed
from .version import __version__

if TYPE_CHECKING:
    from . import appendix, dynamics, estimation, forecasting, integrations, models, nn, ops, parallel
    from .appendix import tensor_filter_attention
    from .models import RFAConfig, RFATimeSeriesConfig
    from .ops import robust_filter_attention

__all__ = [
    "__version__",
    "appendix",
    "dynamics",
    "estimation",
    "nn",
    "ops",
    "robust_filter_attention",
    "tensor_filter_attention",
]
if installed("transformers"):
    __all__ += ["RFAConfig", "RFATimeSeriesConfig", "integrations", "models", "parallel"]
if installed("pandas") and installed("narwhals"):
    __all__ += ["forecasting"]

_NAMES = {
    "RFAConfig": "models",
    "RFATimeSeriesConfig": "models",
    "robust_filter_attention": "ops",
    "tensor_filter_attention": "appendix",
}
_FOLDERS = {"appendix", "dynamics", "estimation", "forecasting", "integrations", "models", "nn", "ops", "parallel"}


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first used.

        Raises:
            AttributeError: for a folder that needs a library which is not installed, so that `hasattr` is false; its
                import raises `MissingExtra`.
            MissingExtra: for another name that needs one: `from rfa import RFAConfig` hides an `AttributeError`.
        """
        if name in _NAMES:
            globals()[name] = getattr(importlib.import_module(f"rfa.{_NAMES[name]}"), name)
            return globals()[name]
        if name not in _FOLDERS:
            raise AttributeError(f"module 'rfa' has no attribute {name!r}")
        try:
            return importlib.import_module(f"rfa.{name}")
        except MissingExtra as error:
            raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    """All public names that can be loaded, loaded or not."""
    return sorted({*globals(), *__all__})


# The model types of this package in transformers' Auto classes, although `import rfa` does not import transformers.
# `AutoConfig` looks a model type up in `CONFIG_MAPPING`, which imports the module of a configuration when it is first
# asked for. That imports `rfa.models`, which registers configurations and models by transformers' own functions.

_MAPPING = "transformers.models.auto.configuration_auto"
_CONFIGURATIONS = {
    "rfa": "RFAConfig",
    "rfa_time_series": "RFATimeSeriesConfig",
}  # names of `rfa`, loaded when asked for


def _register_auto_classes() -> None:
    """Make transformers know the model types, now or as soon as it is imported."""
    if hasattr(sys.modules.get(_MAPPING), "CONFIG_MAPPING"):
        _add(sys.modules[_MAPPING])
    else:
        sys.meta_path.insert(0, _Waiting())


def _add(mapping: Any) -> None:
    for model_type, name in _CONFIGURATIONS.items():
        mapping.CONFIG_MAPPING_NAMES[model_type] = name
        mapping.CONFIG_MAPPING._modules[model_type] = sys.modules["rfa"]


class _Waiting(MetaPathFinder):
    """Finds one module as Python does, and adds the model types once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The specification of the module with the mapping; None for every other module."""
        if fullname != _MAPPING:
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


_register_auto_classes()
