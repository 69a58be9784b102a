"""A model and a tokenizer from the files of a run, and the digests that tell whether one of them changed.

Only numbers and JSON are read, nothing that could run code. transformers' own loaders read more: code that a folder
names, pickles, other formats. The digests find damage, not malice: whoever changes a file can change its digest.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rfa.files import sha256, write_text_whole
from rfa.models import RFAConfig, RFAForCausalLM
from rfa.models.flat import FLAT_NAMES

DIGESTS = "digests.json"


def write_digests(folder: Path) -> None:
    """Write the sha256 of every file of a folder into its `digests.json`, whole; the last thing to write there."""
    digests = {name: sha256(path) for name, path in _files(folder).items()}
    write_text_whole(folder / DIGESTS, json.dumps(digests, indent=2) + "\n")


def check_digests(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise `ValueError` where a file is gone or not as it was saved.

    Args:
        folder: of the files. One that an older version saved has no digests, and nothing is looked at.
        names: look at these files only, each of which must have been there when the digests were written.
    """
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{DIGESTS} is damaged ({error})") from error
    if not isinstance(digests, dict):
        raise ValueError(f"{DIGESTS} is damaged: got {digests!r:.40}, expected the sha256 of each file")
    found = _files(folder)  # no other path that the file may name is opened
    for name in sorted(digests if names is None else set(names)):
        if name not in found:
            raise ValueError(f"{name} is gone")
        if name not in digests:
            raise ValueError(f"{name} has no sha256 in {DIGESTS}: it came after the others were saved")
        if sha256(found[name]) != digests[name]:
            raise ValueError(f"{name} is not as it was saved, by its sha256 in {DIGESTS}")


def _files(folder: Path) -> dict[str, Path]:
    """Each file by its name, but for the digests themselves."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS)
    return {path.relative_to(folder).as_posix(): path for path in paths}


PRECISIONS = ("float16", "bfloat16", "float32", "float64")


def read_model(folder: Path) -> RFAForCausalLM:
    """The model of `config.json` and `model*.safetensors`, in evaluation mode; no other file is read.

    Raises:
        ValueError: for a file that changed since it was saved, weights that are not the configuration's, or code.
        Exception: from safetensors or transformers, for files that are damaged.
    """
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise ValueError("it lacks model.safetensors")
    check_digests(folder, ("config.json", *(file.name for file in weights)))
    config = read_config(folder)
    state = {name: tensor for file in weights for name, tensor in load_file(file).items()}
    reader = cast(Any, RFAForCausalLM)
    model, info = reader.from_pretrained(None, config=config, state_dict=state, output_loading_info=True)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[fault]:
            raise ValueError(f"{fault.replace('_', ' ')}: {', '.join(map(str, sorted(info[fault])))}")
    return cast(RFAForCausalLM, model.eval())


def read_config(folder: Path) -> RFAConfig:
    """The configuration of `config.json`: the fields of `RFAConfig` and the precision of the weights, no others.

    Files of older versions have attention's fields beside the others.

    Raises:
        ValueError: for values that are none of its, or code.
    """
    given = _read_json(folder / "config.json")
    known = RFAConfig.__annotations__.keys() | FLAT_NAMES
    fields = {name: value for name, value in given.items() if name in known}
    dtype = given.get("dtype", given.get("torch_dtype"))  # the latter from older versions of transformers
    if dtype is not None and dtype not in PRECISIONS:
        raise ValueError(f"dtype: got {dtype!r:.80}, expected one of {', '.join(PRECISIONS)}")
    return cast(RFAConfig, RFAConfig.from_dict({**fields, "dtype": dtype}))


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `tokenizer.json` and `tokenizer_config.json`; no other file is read.

    Raises:
        ValueError: for a file that changed since it was saved, or code.
        Exception: from tokenizers, for files that are damaged.
    """
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
    if "auto_map" in given:  # how a folder names code of its own to transformers
        raise ValueError(f"{file.name}: got auto_map, which names code to run, expected none")
    return given
