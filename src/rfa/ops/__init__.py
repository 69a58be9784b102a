"""One operation, several implementations. Names load when they are first used: `cpu/build.py` needs no PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import available_backends, choose_backend
    from .filter_attention import robust_filter_attention

__all__ = ["available_backends", "choose_backend", "robust_filter_attention"]


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "filter_attention" if name == "robust_filter_attention" else "backends"
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)  # the hub has another name
        return globals()[name]
