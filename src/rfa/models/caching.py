"""The name of a model's cache: `past_key_values`, and `cache` from transformers 5.24 on. Models take both.

A file of its own, because the decoder, the language model and replaced attention in other models need it.
"""

from dataclasses import fields

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from rfa.checks import require

CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache under either name.

    Raises:
        ValueError: where both are given.
    """
    require(past_key_values is None or cache is None, "cache", "given beside past_key_values", "one of the two")
    return past_key_values if cache is None else cache
