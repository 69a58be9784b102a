"""The one configuration of the one decoder: its sizes, and what its attention computes."""

import functools
import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from rfa.nn import Attention
from rfa.nn.checks import check_range, require

from .attention import AttentionConfig, FilterAttentionConfig
from .fields import kind_in_words
from .flat import FLAT_NAMES, change, from_flat, read_attention

_WRONG_KIND = re.compile(r"Field '(\w+)' ")  # how `strict` begins
_SIZES = {  # far beyond what fits any machine; larger ones would end as somebody else's overflow, or never
    "vocab_size": (1, 2**31 - 1),
    "hidden_size": (1, 2**24),
    "intermediate_size": (1, 2**26),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**24),
    "train_length": (2, 2**31 - 1),
}


def _with_value_errors(cls):
    """Let the constructor raise `ValueError` in one line where `strict` raises errors of its own."""
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self, *args, **kwargs):
        try:
            construct(self, *args, **_nested(kwargs))
        except StrictDataclassError as error:
            cause = error.__cause__
            message = " ".join((str(cause) if isinstance(cause, ValueError | TypeError) else str(error)).split())
            if (of_a_field := _WRONG_KIND.match(message)) and (field := of_a_field[1]) in kwargs:
                message = (
                    f"{field}: got {kwargs[field]!r}, expected {kind_in_words(cls.__dataclass_fields__[field].type)}"
                )
            raise ValueError(message) from error

    cls.__init__ = init
    return cls


@_with_value_errors
@strict
class RFAConfig(PreTrainedConfig):
    """Sizes by Hugging Face's names, and what attention computes. The defaults are `m2-sc-rfa` at the paper's size.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: the decoder's sizes.
        intermediate_size: of the feed-forward network; four times `hidden_size`.
        train_length: tokens of a training block, T_train.
        layer_norm_eps, use_cache: as elsewhere in transformers.
        attention: what attention computes: a `FilterAttentionConfig`, `RoutingAttentionConfig` or
            `DotProductAttentionConfig`, or the dictionary that its `to_dict` gives.
        **kwargs: attention's fields by flat names, such as `damping=0.2`; the attention given is changed by them.

    Raises:
        ValueError: if a value is unknown or values do not fit together.
    """

    model_type = "rfa"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (the Trainer adds lists to it)

    vocab_size: int = 50257
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    train_length: int = 512
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    attention: AttentionConfig = FilterAttentionConfig()

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of the `strict` validation: which values fit together."""
        for name, (least, most) in _SIZES.items():
            check_range(name, getattr(self, name), least, most)
        heads = self.num_attention_heads
        fits = self.hidden_size % heads == 0
        require(fits, "hidden_size", self.hidden_size, f"a multiple of num_attention_heads = {heads}")
        require(0 < self.layer_norm_eps < 1, "layer_norm_eps", self.layer_norm_eps, "a small positive number")
        self.attention.check_heads(self.hidden_size, heads)

    def build_attention(self) -> Attention:
        """The attention layer of one block, with initial weights."""
        return self.attention.build(self.hidden_size, self.num_attention_heads, self.train_length)

    def has_head_dynamics(self) -> bool:
        """Whether `RFAPreTrainedModel.head_dynamics` of its model finds any: parameters of the SDE, head by head."""
        return self.attention.has_head_dynamics()

    def to_dict(self) -> dict[str, Any]:
        """All fields for JSON, with attention as an object of its own."""
        return {**super().to_dict(), "attention": self.attention.to_dict()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of a `config.json`, one of an older version included, whose attention has flat names.

        Raises:
            ValueError: for an unknown value, kind or field of attention, or values that do not fit together.
        """
        given = dict(config_dict)
        if "attention" not in given:
            given["attention"] = from_flat({name: given.pop(name) for name in FLAT_NAMES & given.keys()})
        given |= {name: kwargs.pop(name) for name in FLAT_NAMES & kwargs.keys()}
        return super().from_dict(given, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str]) -> Any:
        """The configuration of one file, read as `from_dict` reads it."""
        return cls.from_dict(json.loads(Path(json_file).read_text(encoding="utf-8")))

    def __setattr__(self, name: str, value: object) -> None:
        if name in FLAT_NAMES:  # it would change nothing in silence
            raise ValueError(f"{name}: got {value!r}, expected an assignment to `attention`, whose field it is")
        super().__setattr__(name, value)


def _nested(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with attention as one of its classes."""
    given = dict(given)
    attention = given.get("attention")
    if attention is not None and not isinstance(attention, AttentionConfig):
        attention = given["attention"] = read_attention(attention)
    if flat := {name: given.pop(name) for name in FLAT_NAMES & given.keys()}:
        given["attention"] = change(attention, flat)
    return given
