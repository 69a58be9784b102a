"""The filter in other libraries: decoders of transformers here; each other library has a file."""

from rfa.checks import installed

__all__ = []

if installed("transformers"):
    from .replace_attention import ReplacedAttention, load_replaced, replace_attention

    __all__ += ["ReplacedAttention", "load_replaced", "replace_attention"]
