"""Checkpoints on disk: which there are, whether they are whole, whether they can be read."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, TrainerState

_FILES = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")


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
    """How far a checkpoint came.

    Raises:
        ValueError: if its file holds something else.
    """
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if not isinstance(state.global_step, int) or not isinstance(state.max_steps, int):
        raise ValueError(f"global_step: got {state.global_step!r}, expected a number of steps")
    return state


def read_all(checkpoint: Path, model: PreTrainedModel) -> None:
    """Read every file of a checkpoint of `model`; whatever is wrong with one raises."""
    read_state(checkpoint)
    weights = checkpoint / "model.safetensors"
    if weights.is_file():
        with safe_open(weights, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = set(model.all_tied_weights_keys)
        if wrong := sorted(name for name in found.keys() | wanted.keys() - tied if found.get(name) != wanted.get(name)):
            raise ValueError(f"model.safetensors has not the model's {wrong[0]}")
    optimizer, scheduler = (
        torch.load(checkpoint / name, map_location="cpu", weights_only=True) if (checkpoint / name).is_file() else None
        for name in ("optimizer.pt", "scheduler.pt")
    )
    if optimizer is not None and not {"state", "param_groups"} <= dict(optimizer).keys():
        raise ValueError("optimizer.pt holds no optimiser's state")
    if scheduler is not None and "last_epoch" not in dict(scheduler):
        raise ValueError("scheduler.pt holds no schedule's state")
    for file in checkpoint.glob("rng_state*.pth"):  # Python's and NumPy's states among them; our own file
        if "python" not in torch.load(file, map_location="cpu", weights_only=False):
            raise ValueError(f"{file.name} holds no random state")
    for file in checkpoint.glob("*.json"):
        json.loads(file.read_text(encoding="utf-8"))
