"""Robust Filter Attention: self-attention as robust, precision-weighted state estimation.

`import rfa` loads neither PyTorch nor anything else. Each public name is loaded when it is first asked for. `__all__`
and `dir(rfa)` have the names that what is installed can load.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .auto_classes import register
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

register()


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
