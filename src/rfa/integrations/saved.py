"""The options of a replaced model in its configuration, and the way from a saved folder back to the model."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rfa.checks import require

NOTED = "rfa_attention"  # the field of the configuration
_KINDS = {"weight": str, "prior": str, "learn_decay": bool, "rotate_values": bool, "innovation": bool, "layers": list}
_EXPECTED = f"the options {', '.join(_KINDS)} that replace_attention writes"


def noted_options(config: Any) -> dict[str, Any] | None:
    """The options in a configuration, by the names of `replace_attention`; None for a model that was never replaced.

    Raises:
        ValueError: where they are not what `replace_attention` writes.
    """
    options = getattr(config, NOTED, None)
    if options is None:
        return None
    fits = isinstance(options, dict) and {name: type(x) for name, x in options.items()} == _KINDS
    require(fits, f"config.{NOTED}", options, _EXPECTED)
    return dict(options)


def check_noted(config: Any, options: dict[str, Any]) -> None:
    """Raise `ValueError` where a configuration was saved with other options."""
    for name, saved in (noted_options(config) or {}).items():
        require(options[name] == saved, name, options[name], f"{saved!r}, with which config.{NOTED} was saved")


def note_options(model: nn.Module, config: Any, options: dict[str, Any]) -> None:
    """Write the options into the model's configuration, which becomes its own: other models may share the given one."""
    own = copy.deepcopy(config)
    setattr(own, NOTED, options)
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own


def weight_files(folder: Path) -> Iterable[Path]:
    """The files of weights in a folder.

    Raises:
        ValueError: where there are none, or their index is damaged or names files elsewhere.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        single = folder / SAFE_WEIGHTS_NAME
        require(single.exists(), "folder", str(folder), f"a folder with {SAFE_WEIGHTS_NAME}")
        return [single]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        inside = all((folder / name).parent == folder and (folder / name).exists() for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"folder: got a damaged {index}, expected a map of names to files") from error
    require(inside and bool(names), "folder", sorted(names), f"files of weights in {folder}")
    return [folder / name for name in sorted(names)]


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Fill all parameters and buffers from the files of a folder.

    Raises:
        ValueError: for files that cannot be read, or where names or shapes do not fit.
    """
    missing, foreign = set(model.state_dict()), set[str]()
    for file in weight_files(folder):
        try:
            absent, unexpected = load_model(model, file, strict=False)
        except (RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split("\n")[:2])  # of many, the first
            raise ValueError(f"folder: got {file}, expected weights of this model: {reason}") from error
        missing, foreign = missing & set(absent), foreign | set(unexpected)
    both = {"missing": missing, "foreign": foreign}
    found = "; ".join(f"{kind}: {', '.join(sorted(names)[:4])}" for kind, names in both.items() if names)
    require(not found, "folder", found, f"in {folder} the weights of this model with config.{NOTED}, no more")


def empty_model(folder: Path) -> PreTrainedModel:
    """The language model of a folder's configuration with fresh weights. Code in the folder is not run.

    Raises:
        ValueError: for another model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"folder: got {folder}, expected config.json of a model of transformers: {error}") from error
    require(noted_options(config) is not None, "folder", str(folder), f"config.json with {NOTED}: {_EXPECTED}")
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=False)
    saved = (config.architectures or ["no model"])[0]
    expected = "a causal language model; for others see replace_attention"
    require(saved == type(model).__name__, "folder", saved, expected)
    if (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
