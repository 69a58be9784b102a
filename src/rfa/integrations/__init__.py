"""The filter in other libraries: decoders of transformers here; sktime, darts, statsforecast and fugue a file each.

The import registers the attention "rfa" with transformers, where that is installed.
"""

from rfa.checks import installed

__all__ = []

if installed("transformers"):
    from .attention_interface import student_t_attention
    from .replace_attention import load_replaced, replace_attention
    from .replaced_attention import ReplacedAttention

    __all__ += ["ReplacedAttention", "load_replaced", "replace_attention", "student_t_attention"]
