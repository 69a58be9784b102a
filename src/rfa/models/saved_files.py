"""The saved files of a run: digests, the model, the tokenizer and checkpoints.

Only numbers and JSON are read, nothing that could run code. transformers' own loaders read more: code that a folder
names, pickles, other formats. The digests find damage. They do not protect against an attacker, who can change a
digest together with its file.
"""

import json
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import logging

from rfa.files import sha256, write_text_whole

from . import RFAConfig
from .configuration import DecoderConfig
from .decoder import RFAPreTrainedModel

DIGESTS = "digests.json"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show only errors of transformers and no bars inside the block. Restore the caller's choice afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def write_digests(folder: Path) -> None:
    """Write the sha256 of every file of a folder into its `digests.json`. Call it after all other files are written."""
    digests = {name: sha256(path) for name, path in _files(folder).items()}
    write_text_whole(folder / DIGESTS, json.dumps(digests, indent=2) + "\n")


def check_digests(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise `ValueError` if a file, of these names or of all, differs from what was saved, where there are digests."""
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{DIGESTS} is damaged ({error})") from error
    if not isinstance(digests, dict):
        raise ValueError(f"{DIGESTS} is damaged: got {digests!r:.40}, expected the sha256 of each file")
    found = _files(folder)  # only files of the folder are opened, whatever paths `digests.json` names
    for name in sorted(digests if names is None else set(names)):
        if name not in found:
            raise ValueError(f"{name} is gone")
        if name not in digests:
            raise ValueError(f"{name} has no sha256 in {DIGESTS}: it came after the others were saved")
        if sha256(found[name]) != digests[name]:
            raise ValueError(f"{name} is not as it was saved, by its sha256 in {DIGESTS}")


def _files(folder: Path) -> dict[str, Path]:
    """All files of a folder by name, without the digests themselves."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS)
    return {path.relative_to(folder).as_posix(): path for path in paths}


Model = TypeVar("Model", bound=RFAPreTrainedModel)
PRECISIONS = ("float16", "bfloat16", "float32", "float64")


def read_model(folder: Path, kind: type[Model]) -> Model:
    """The model of a kind from `config.json` and `model*.safetensors`, in evaluation mode. No other file is read.

    Raises:
        ValueError: for a file that changed since it was saved, weights that do not fit the configuration, or a file
            that names code.
        Exception: from safetensors or transformers, for damaged files.
    """
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise ValueError("it lacks model.safetensors")
    check_digests(folder, ("config.json", *(file.name for file in weights)))
    config = read_config(folder, kind.config_class)
    state = {name: tensor for file in weights for name, tensor in load_file(file).items()}
    model, info = cast(Any, kind).from_pretrained(None, config=config, state_dict=state, output_loading_info=True)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[fault]:
            raise ValueError(f"{fault.replace('_', ' ')}: {', '.join(map(str, sorted(info[fault])))}")
    return cast(Model, model.eval())


def read_config(folder: Path, kind: type[DecoderConfig] = RFAConfig) -> DecoderConfig:
    """The configuration of `config.json`: the fields of its kind and the precision of the weights.

    Raises:
        ValueError: for invalid values, or a file that names code.
    """
    given = _read_json(folder / "config.json")
    fields = {name: given[name] for name in kind.field_names() if name in given}
    dtype = given.get("dtype", given.get("torch_dtype"))  # the latter from older versions of transformers
    if dtype is not None and dtype not in PRECISIONS:
        raise ValueError(f"dtype: got {dtype!r:.80}, expected one of {', '.join(PRECISIONS)}")
    return cast(DecoderConfig, kind.from_dict({**fields, "dtype": dtype}))


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `tokenizer.json` and `tokenizer_config.json`. No other file is read."""
    check_digests(folder, ("tokenizer.json", "tokenizer_config.json"))
    given = _read_json(folder / "tokenizer_config.json")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = given.get("eos_token")
    if not isinstance(end, str) or backend.token_to_id(end) is None:
        raise ValueError(f"eos_token: got {end!r:.80}, expected an entry of the vocabulary")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False)


def _read_json(file: Path) -> dict[str, Any]:
    given = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(given, dict):
        raise ValueError(f"{file.name}: got {given!r:.80}, expected an object")
    if "auto_map" in given:  # with this key a folder tells transformers to run its own code
        raise ValueError(f"{file.name}: got auto_map, which names code to run, expected none")
    return given


_FILES = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
_COUNTS = ("max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size")
_STEPS = {"global_step": 0, **dict.fromkeys(_COUNTS, 1)}  # with the smallest valid value of each


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def missing_files(checkpoint: Path) -> list[str]:
    """The files that a checkpoint lost after it was saved. It was complete then, because it is renamed last."""
    sharded = any(checkpoint.glob("*fsdp*"))  # FSDP has its own files for weights and optimiser
    needed = ("trainer_state.json",) if sharded else _FILES
    random_states = [] if any(checkpoint.glob("rng_state*.pth")) else ["rng_state.pth"]
    return [name for name in needed if not (checkpoint / name).is_file()] + random_states


def read_state(checkpoint: Path) -> TrainerState:
    """The Trainer's state in a checkpoint; `ValueError` if its file holds something else."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    for name, least in _STEPS.items():
        given = getattr(state, name)
        if type(given) is not int or given < least:
            raise ValueError(f"{name}: got {given!r:.80}, expected a number of at least {least}")
    kinds: dict[str, type] = {"log_history": list, "stateful_callbacks": dict, "best_model_checkpoint": type(None)}
    for name, kind in kinds.items():
        if not isinstance(getattr(state, name), kind):
            raise ValueError(f"{name}: got {getattr(state, name)!r:.80}, expected {kind.__name__}")
    has_control = "TrainerControl" in state.stateful_callbacks
    if not (has_control and all(isinstance(line, dict) for line in state.log_history)):
        raise ValueError(
            "log_history, stateful_callbacks: got values that are not the Trainer's, expected the Trainer's"
        )
    return state


def read_all(checkpoint: Path, model: PreTrainedModel) -> None:
    """Read every file of a checkpoint of `model`, and raise an error for any fault. No file can run code."""
    for sharded in (".metadata", "global_step*"):  # FSDP and DeepSpeed unpickle these
        if found := sorted(checkpoint.rglob(sharded)):
            raise ValueError(f"it holds {found[0].name}, a sharded state, expected a full one (FULL_STATE_DICT)")
    check_digests(checkpoint)
    read_state(checkpoint)
    weights = checkpoint / "model.safetensors"
    if weights.is_file():
        with safe_open(weights, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = set(model.all_tied_weights_keys)
        if wrong := sorted(name for name in saved.keys() | wanted.keys() - tied if saved.get(name) != wanted.get(name)):
            raise ValueError(f"model.safetensors does not fit the model: {wrong[0]} is missing or has another shape")
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
    """The content of a file of PyTorch: tensors and numbers, random states included, but no other objects."""
    try:
        with safe_globals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of a pickle that it would not have written
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its own text would tell the user how to run the code in the file
        raise ValueError(f"{file.name} holds other things than tensors and numbers, or is damaged") from error
