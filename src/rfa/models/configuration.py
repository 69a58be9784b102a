"""The configurations of the decoder: its sizes and its attention, and what the language model adds."""

import functools
import re
import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from transformers import PreTrainedConfig

from rfa.checks import PACKAGE, check_range, install_command, require
from rfa.files import write_text_whole
from rfa.nn import Attention
from rfa.nn.checks import check_dropout, check_sizes
from rfa.version import __version__

from .attention import (
    AttentionConfig,
    ContentAttentionConfig,
    FilterAttentionConfig,
    RoutingAttentionConfig,
    check_type,
)
from .dot_product import DotProductAttentionConfig

VERSION = "rfa_version"  # the field of a file that holds the version of the package that wrote it
_SIZES = {  # limits beyond every machine; larger values would overflow in other libraries, or never finish
    "vocab_size": (1, 2**31 - 1),
    "hidden_size": (1, 2**24),
    "intermediate_size": (1, 2**26),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**24),
    "train_length": (2, 2**31 - 1),
}


KINDS: dict[str, type[AttentionConfig]] = {
    kind.kind: kind
    for kind in (FilterAttentionConfig, RoutingAttentionConfig, DotProductAttentionConfig, ContentAttentionConfig)
}
# the plain names of attention's fields, by which constructors, recipes and `--set` reach them
ATTENTION_FIELDS = frozenset().union(*(kind.plain_names() for kind in KINDS.values()))


def read_attention(given: object) -> AttentionConfig:
    """The attention of a nested configuration in a file.

    Raises:
        ValueError: for an unknown kind or field, or values that do not fit together.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"attention: got {given!r:.80}, expected an object with kind and its fields")
    fields = dict(given)
    kind = fields.pop("kind", None)
    known = isinstance(kind, str) and kind in KINDS
    require(known, "attention.kind", kind, f"one of {', '.join(map(repr, KINDS))}")
    return KINDS[str(kind)].from_dict(fields, "attention")


# What lets a saved model load without `import rfa`: `auto_map` in config.json, and the two files that it names, which
# transformers imports where `trust_remote_code=True` is given. They import the installed `rfa`, or say how to get it.
# First the classes of this package that serve transformers' Auto classes, by model type.
AUTO_CLASSES = {
    "rfa": {
        "AutoConfig": "RFAConfig",
        "AutoModel": "RFAModel",
        "AutoModelForCausalLM": "RFAForCausalLM",
        "AutoModelForMaskedLM": "RFAForMaskedLM",
        "AutoModelForSequenceClassification": "RFAForSequenceClassification",
        "AutoModelForTokenClassification": "RFAForTokenClassification",
    },
    "rfa_time_series": {"AutoConfig": "RFATimeSeriesConfig", "AutoModel": "RFAForTimeSeries"},
}
# transformers takes imports outside `try` for packages of that name, and would advise `pip install rfa`
_CODE = '''"""The model itself is in the installed package `rfa`; transformers looks for its classes here."""

try:
    from rfa.models import {names}  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this model needs the package {package}: {install}"
        f" ({{error}})"
    ) from error
'''


def auto_map(model_type: str) -> dict[str, str]:
    """The entry of config.json: for each Auto class of transformers the file and the class that serve it."""
    return {auto: f"{_module(auto)}.{name}" for auto, name in AUTO_CLASSES[model_type].items()}


def write_remote_code(folder: Path, model_type: str) -> None:
    """Write the files that `auto_map` names."""
    need = {"package": PACKAGE, "install": install_command("hf")}
    for module in ("configuration_rfa", "modeling_rfa"):
        names = [name for auto, name in AUTO_CLASSES[model_type].items() if _module(auto) == module]
        write_text_whole(folder / f"{module}.py", _CODE.format(names=", ".join(names), **need))


def _module(auto: str) -> str:
    return "configuration_rfa" if auto == "AutoConfig" else "modeling_rfa"


def with_value_errors(cls):
    """Make the constructor raise `ValueError` with one line where `strict` raises its own errors."""
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self, *args, **kwargs):
        given = _constructor_arguments(cls, kwargs)
        try:
            construct(self, *args, **given)
        except StrictDataclassError as error:
            if isinstance(error, StrictDataclassFieldValidationError):
                for name in cls.__dataclass_fields__.keys() & given.keys():
                    check_type(name, given[name], cls.__dataclass_fields__[name].type)
            raise ValueError(" ".join(str(error.__cause__ or error).split())) from error

    cls.__init__ = init
    return cls


@with_value_errors
@strict
class DecoderConfig(PreTrainedConfig):
    """The fields of every model around the decoder. A subclass adds what its inputs and outputs need."""

    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    causal: bool = True

    attention: AttentionConfig = FilterAttentionConfig()
    refuses_idle_fields: ClassVar[bool] = False  # changes of attention without an effect

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the values fit together. `strict` calls this."""
        for name, (least, most) in _SIZES.items():
            if hasattr(self, name):
                check_range(name, getattr(self, name), least, most)
        heads = self.num_attention_heads
        check_sizes(self.hidden_size, heads)
        require(0 < self.layer_norm_eps < 1, "layer_norm_eps", self.layer_norm_eps, "a small positive number")
        self.attention.check_heads(self.hidden_size, heads)
        check_dropout(self.attention_dropout, self.attention.backend)

    def build_attention(self) -> Attention:
        """A new attention layer of one block, with initial weights."""
        return self.attention.build(
            self.hidden_size,
            self.num_attention_heads,
            self.length_in_training(),
            dropout=self.attention_dropout,
            causal=self.causal,
        )

    def length_in_training(self) -> int:
        """The typical length of a sequence in training, which some presets scale their attention by, in tokens."""
        raise NotImplementedError

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of the fields that are not transformers' own. What a class says of itself is no field."""
        ours = [each for each in cls.__mro__ if issubclass(each, DecoderConfig)]
        annotated = [item for each in ours for item in each.__annotations__.items()]
        return list(dict.fromkeys(name for name, kind in annotated if get_origin(kind) is not ClassVar))

    @classmethod
    def start_of_attention(cls, given: dict[str, Any]) -> AttentionConfig | None:
        """The attention that other arguments of the constructor change; None for the default."""
        return given.get("attention")

    def to_dict(self) -> dict[str, Any]:
        """All fields for JSON. Attention is a nested object; the version is that of this package."""
        _name_adapter_targets()  # peft asks for this dictionary just before it looks for the model type in its table
        return {**super().to_dict(), "attention": self.attention.to_dict(), VERSION: __version__}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of a `config.json`, with other values of the fields in `kwargs`, attention's included.

        Raises:
            ValueError: for an unknown value, kind or field of attention, values that do not fit together, or a file of
                a newer version.
        """
        changes = {name: kwargs.pop(name) for name in ATTENTION_FIELDS & kwargs.keys()}
        return super().from_dict({**config_dict, **changes}, **kwargs)

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write config.json, and beside it the files that `auto_map` names, if the configuration has this entry."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if getattr(self, "auto_map", None):
            write_remote_code(Path(save_directory), self.model_type)

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Do nothing. transformers would copy the package's own files, which import each other, beside a model."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ATTENTION_FIELDS:  # the assignment would have no effect, and nobody would notice
            raise ValueError(f"{name}: got {value!r}, expected an assignment to `attention`, whose field it is")
        if name == "attention" and value is not None and not isinstance(value, AttentionConfig):
            value = read_attention(value)
        super().__setattr__(name, value)


def _name_adapter_targets() -> None:
    """Tell peft, if it is loaded, which layers LoRA adapts by default: queries and values, as in Llama."""
    if (table := sys.modules.get("peft.utils.constants")) is not None:
        for model_type in ("rfa", "rfa_time_series"):
            targets = table.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            targets.setdefault(model_type, ["query_projection", "value_projection"])


_MOST_LABELS = 2**20


def _constructor_arguments(cls: type[DecoderConfig], given: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, with attention as an object of its class."""
    given = dict(given)
    _check_version(given.pop(VERSION, __version__))
    if (labels := given.get("num_labels")) is not None:  # transformers makes a name of each
        check_range("num_labels", labels, 0, _MOST_LABELS)
    attention = given.get("attention")
    if attention is not None and not isinstance(attention, AttentionConfig):
        given["attention"] = read_attention(attention)
    changes = {name: given.pop(name) for name in [*given] if name in ATTENTION_FIELDS}
    start = cls.start_of_attention(given)
    if changes:
        start = (FilterAttentionConfig() if start is None else start).changed(changes)
        for name in sorted(changes.keys() & start.without_effect()) if cls.refuses_idle_fields else ():
            raise ValueError(f"{name}: got {changes[name]!r}, expected nothing: it has no effect in this attention")
    return given if start is None else {**given, "attention": start}


def _check_version(given: object) -> None:
    """Raise `ValueError` for a file of a newer minor version: it may have fields that would be ignored here."""
    found, installed = ([int(x) for x in re.findall(r"\d+", str(version))[:2]] for version in (given, __version__))
    expected = f"at most {__version__}, the installed version; a newer one: {install_command('hf')}"
    require(len(found) == 2 and found <= installed, VERSION, given, expected)


@with_value_errors
@strict
class RFAConfig(DecoderConfig):
    """The configuration of the language model. The defaults are the preset `rfa` at the paper's size.

    Sizes have the names that transformers uses.

    Args:
        vocab_size: number of token ids.
        hidden_size, num_hidden_layers, num_attention_heads: the decoder's sizes.
        intermediate_size: size of the feed-forward network; by default four times `hidden_size`.
        attention_dropout: share of the attention weights that training drops; it needs the reference backend.
        train_length: tokens of a training block, T_train.
        causal: tokens see earlier tokens only. Off for a bidirectional encoder, as `RFAForMaskedLM` is; then there is
            no cache, and attention cannot have gates or a content clock.
        layer_norm_eps, use_cache: as elsewhere in transformers.
        attention: an `AttentionConfig` of any kind, such as `FilterAttentionConfig`, or the dictionary from its
            `to_dict`.
        **kwargs: fields of attention by their plain names, such as `damping=0.2`. They replace those of `attention`.

    Raises:
        ValueError: if a value is unknown or values do not fit together.
    """

    model_type = "rfa"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 (the Trainer adds lists to it)

    vocab_size: int = 50257
    train_length: int = 512
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def length_in_training(self) -> int:
        """The training length, in tokens."""
        return self.train_length
