"""Robust Filter Attention: self-attention as robust, precision-weighted state estimation.

`import rfa` loads neither PyTorch nor anything else. Each public name is loaded when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rfa.auto_classes import register
from rfa.version import __version__

if TYPE_CHECKING:
    from rfa import data, dynamics, estimation, evaluation, export, integrations, models, nn, ops, parallel, training
    from rfa.models import RFAConfig, RFATimeSeriesConfig
    from rfa.ops import robust_filter_attention, tensor_filter_attention

__all__ = [
    "RFAConfig",
    "RFATimeSeriesConfig",
    "__version__",
    "data",
    "dynamics",
    "estimation",
    "evaluation",
    "export",
    "integrations",
    "models",
    "nn",
    "ops",
    "parallel",
    "robust_filter_attention",
    "tensor_filter_attention",
    "training",
]

_FOLDERS = {
    "RFAConfig": "models",
    "RFATimeSeriesConfig": "models",
    "robust_filter_attention": "ops",
    "tensor_filter_attention": "ops",
}

register()


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module 'rfa' has no attribute {name!r}")
        module = importlib.import_module(f"rfa.{_FOLDERS.get(name, name)}")
        if name in _FOLDERS:
            globals()[name] = getattr(module, name)
            return globals()[name]
        return module


def __dir__() -> list[str]:
    """All public names, loaded or not."""
    return sorted({*globals(), *__all__})
