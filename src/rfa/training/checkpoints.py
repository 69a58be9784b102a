"""Checkpoints on disk: which there are, whether they are whole, whether they can be read."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_pt_utils import safe_globals

from .saved_files import check_digests, read_config

_FILES = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
_COUNTS = ("max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size")
_STEPS = {"global_step": 0, **dict.fromkeys(_COUNTS, 1)}  # and the least that each may be


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def missing_files(checkpoint: Path) -> list[str]:
    """Checkpoints are renamed into place when they are whole; these files were lost since."""
    sharded = any(checkpoint.glob("*fsdp*"))  # FSDP has files of its own for weights and optimiser
    needed = ("trainer_state.json",) if sharded else _FILES
    random_states = [] if any(checkpoint.glob("rng_state*.pth")) else ["rng_state.pth"]
    return [name for name in needed if not (checkpoint / name).is_file()] + random_states


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a checkpoint.

    Raises:
        ValueError: if its file holds something else.
    """
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    for name, least in _STEPS.items():
        given = getattr(state, name)
        if type(given) is not int or given < least:
            raise ValueError(f"{name}: got {given!r:.80}, expected a number of at least {least}")
    kinds: dict[str, type] = {"log_history": list, "stateful_callbacks": dict, "best_model_checkpoint": type(None)}
    for name, kind in kinds.items():
        if not isinstance(getattr(state, name), kind):
            raise ValueError(f"{name}: got {getattr(state, name)!r:.80}, expected {kind.__name__}")
    of_the_trainer = "TrainerControl" in state.stateful_callbacks
    if not (of_the_trainer and all(isinstance(line, dict) for line in state.log_history)):
        raise ValueError("log_history, stateful_callbacks: got others than the Trainer's, expected these")
    return state


def read_all(checkpoint: Path, model: PreTrainedModel) -> None:
    """Read every file of a checkpoint of `model`; whatever is wrong with one raises, and none of them runs code."""
    for sharded in (".metadata", "global_step*"):  # what FSDP and DeepSpeed unpickle
        if found := sorted(checkpoint.rglob(sharded)):
            raise ValueError(f"it holds {found[0].name}, a sharded state, expected a full one (FULL_STATE_DICT)")
    check_digests(checkpoint)
    read_state(checkpoint)
    weights = checkpoint / "model.safetensors"
    if weights.is_file():
        with safe_open(weights, framework="pt") as file:
            held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = set(model.all_tied_weights_keys)
        if wrong := sorted(name for name in held.keys() | wanted.keys() - tied if held.get(name) != wanted.get(name)):
            raise ValueError(f"model.safetensors has not the model's {wrong[0]}")
    states = {file.name: _read_numbers(file) for file in sorted(checkpoint.glob("*.pt*"))}
    random_states = [name for name in states if name.startswith("rng_state")]
    kinds = {"optimizer.pt": ("optimiser's", "param_groups"), "scheduler.pt": ("schedule's", "last_epoch")}
    for name, (whose, holds) in {**kinds, **dict.fromkeys(random_states, ("generator's", "python"))}.items():
        if name in states and not (isinstance(states[name], dict) and holds in states[name]):
            raise ValueError(f"{name} holds no {whose} state")
    if (checkpoint / "config.json").is_file():
        read_config(checkpoint)
    for file in checkpoint.glob("*.json"):
        json.loads(file.read_text(encoding="utf-8"))


def _read_numbers(file: Path) -> Any:
    """A file of PyTorch's, Python's and NumPy's random states among them: tensors and numbers, no other objects."""
    try:
        with safe_globals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle that PyTorch would not have written
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose own text says how to run what is in there
        raise ValueError(f"{file.name} holds other things than tensors and numbers, or is damaged") from error
