"""The specification of a run. It is one value, and is written to the run folder."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, create_model

from rfa.checks import check_fields, check_range, require
from rfa.models import RFAConfig, preset
from rfa.ops import choose_backend
from rfa_lab.data import check_split, check_tokenizer, is_path

_OPTIONAL = {"one_group"}  # in records, which leave it out where it has its default
LARGEST = 2**31 - 1  # of counts
_RANGES: dict[str, tuple[float, float]] = {
    "length": (2, LARGEST),
    "batch_size": (1, LARGEST),
    "accumulate": (1, LARGEST),
    "epochs": (1e-9, 1e6),
    "max_steps": (1, LARGEST),
    "learning_rate": (1e-12, 1e3),  # below it no float32 weight changes, above it all of them overflow
    "seed": (0, 2**32 - 1),
    "valid_tokens": (2, 2**63 - 1),
    "eval_steps": (1, LARGEST),
    "log_steps": (1, LARGEST),
}


@dataclass(frozen=True)
class TrainingSpec:
    """A training run. The defaults are the paper's protocol (its appendix F).

    Args:
        preset: one of `rfa.models.PRESETS`.
        model: fields of `RFAConfig` that replace the preset's, attention's by plain names such as `damping`.
        data: a corpus, file or folder, as for `rfa_lab.data.load_corpus`.
        split_by: how a corpus without splits is split, as for `rfa_lab.data.load_corpus`.
        tokenizer: as for `rfa_lab.data.load_tokenizer`.
        length: tokens of a training block.
        batch_size: blocks of a batch on one device.
        accumulate: batches of one optimiser step.
        epochs: passes over the training split, unless `max_steps` is given.
        max_steps: total number of optimiser steps.
        learning_rate: peak rate.
        seed: of initialisation and data order.
        valid_tokens: maximum number of tokens of the validation split, in blocks spread over it; None for all.
        eval_steps: number of steps between validations, each with a checkpoint; None for once an epoch.
        log_steps: number of steps between lines of metrics.
        bf16: train in bfloat16 autocast; otherwise in float32, with matrix products in TensorFloat-32 on a GPU.
        one_group: train the SDE's parameters like all others, as the paper's released code did. Otherwise they have
            half the rate, no momentum, and gradients clipped to 1e-4. Only for models that have such parameters.

    Raises:
        ValueError: for a number out of range, or an unknown preset, field, tokenizer or way to split.
    """

    preset: str
    model: dict[str, Any] = field(default_factory=dict)
    data: str = "stdlib"
    split_by: str = "file"
    tokenizer: str = "gpt2"
    length: int = 512
    batch_size: int = 16
    accumulate: int = 1
    epochs: float = 15.0
    max_steps: int | None = None
    learning_rate: float = 1e-3
    seed: int = 0
    valid_tokens: int | None = None
    eval_steps: int | None = None
    log_steps: int = 10
    bf16: bool = False
    one_group: bool = False

    def __post_init__(self):
        for name, limits in _RANGES.items():
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), *limits)
        if self.valid_tokens is not None:
            require(self.valid_tokens >= self.length, "valid_tokens", self.valid_tokens, f"at least {self.length}")
        for name in ("vocab_size", "train_length", "pad_token_id", "bos_token_id", "eos_token_id"):
            if name in self.model:
                raise ValueError(f"{name}: got {self.model[name]}, expected nothing: the run sets it from its data")
        check_split(self.split_by)
        check_tokenizer(self.tokenizer)
        config = self.model_config(vocab_size=2)
        if self.one_group and not config.attention.has_sde_parameters():
            raise ValueError(f"one_group: got True, expected False: {self.preset} has none of the SDE's parameters")
        backend = config.attention.backend
        if backend != "auto":  # a backend that is named has to run on this machine
            choose_backend(backend)

    def model_config(self, vocab_size: int, **more: Any) -> RFAConfig:
        """The model's configuration for a vocabulary."""
        return preset(self.preset, **{**self.model, **more, "vocab_size": vocab_size, "train_length": self.length})

    def with_absolute_paths(self) -> "TrainingSpec":
        """The same specification with absolute paths, which is valid in any working folder."""
        form, _, folder = self.tokenizer.partition(":")
        tokenizer = f"{form}:{Path(folder).resolve()}" if form == "gpt2" and folder else self.tokenizer
        return replace(self, data=_absolute(self.data), tokenizer=tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON. Fields of `_OPTIONAL` are left out where they have their default."""
        defaults = {each.name: each.default for each in fields(self)}
        return {n: value for n, value in asdict(self).items() if n not in _OPTIONAL or value != defaults[n]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingSpec":
        """The specification from such a dictionary. Raises `ValueError` for a wrong key, or a wrong type of value."""
        check_fields(_RECORDED, values)
        return cls(**values)


def _absolute(data: str) -> str:
    return str(Path(data).resolve()) if is_path(data) and Path(data).exists() else data


_KINDS: dict[str, Any] = {
    name: (kind, None if name in _OPTIONAL else ...) for name, kind in get_type_hints(TrainingSpec).items()
}
_RECORDED = TypeAdapter(create_model("_RecordedSpec", __config__=ConfigDict(strict=True, extra="forbid"), **_KINDS))
