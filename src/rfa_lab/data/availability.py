"""Whether a text and a tokenizer are on this machine, found in a moment: nothing is read, built or fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import huggingface_hub

from rfa.files import cache_folder

from .gutenberg import PREFIX, books
from .hub import HUB_DATASETS
from .python_code import CODE, CODE_FOLDER
from .splits import SPLITS
from .tokenization import GPT2_FILES, GPT2_FOLDER_FILES, GPT2_REPOSITORY


class Found(NamedTuple):
    """What was found.

    Args:
        there: whether a run can begin: all is here, is built here, or can be fetched.
        said: what was found, in words.
    """

    there: bool
    said: str


_FETCHED = "not here yet, it is fetched when the first run begins (this needs the network)"


def find_text(spec: str) -> Found:
    """Whether the text of `rfa_lab.data.load_corpus` is here.

    Args:
        spec: as there.
    """
    if spec == "stdlib":
        return Found(True, "that of the running Python")
    if spec == CODE:
        folder = os.environ.get(CODE_FOLDER)
        return _folder(Path(folder)) if folder else Found(True, "that of the running Python and its packages")
    if spec.startswith(PREFIX):
        return _gutenberg(spec)
    if spec in HUB_DATASETS:
        cache = Path(os.environ.get("HF_DATASETS_CACHE", Path(huggingface_hub.constants.HF_HOME, "datasets")))
        wanted = _letters(HUB_DATASETS[spec].repository)
        cached = cache.is_dir() and any(_letters(path.name) == wanted for path in cache.iterdir() if path.is_dir())
        return Found(True, f"in {cache}" if cached else _FETCHED)
    if (Path(spec) / "train").is_dir():
        return _folder(Path(spec))
    return Found(Path(spec).exists(), spec if Path(spec).exists() else f"{spec} does not exist")


def _folder(folder: Path) -> Found:
    """A folder that holds the three splits."""
    missing = [f"{split}/" for split in SPLITS if not (folder / split).is_dir()]
    return Found(not missing, f"{folder} lacks {', '.join(missing)}" if missing else str(folder))


def _gutenberg(spec: str) -> Found:
    listed, folder = books(spec), os.environ.get("RFA_GUTENBERG")
    if folder:
        there = [any(Path(folder, n).is_file() for n in (f"{b.name}.txt", f"pg{b.number}.txt")) for b in listed]
        return Found(all(there), f"{sum(there)} of {len(listed)} books in {folder}")
    numbers = [book.number for book in listed if book.number]
    cached = sum((cache_folder() / "gutenberg" / f"{number}.txt").is_file() for number in numbers)
    rest = "" if cached == len(numbers) else f"; the others: {_FETCHED}"
    return Found(True, f"{cached} of {len(numbers)} books in the cache{rest}")


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_tokenizer(spec: str) -> Found:
    """Whether the tokenizer of `rfa_lab.data.load_tokenizer` is here.

    Args:
        spec: as there.
    """
    kind, _, folder = spec.partition(":")
    if kind != "gpt2":
        return Found(True, "needs no file" if kind == "bytes" else "trained on the text")
    if folder:
        missing = [name for name in GPT2_FOLDER_FILES if not Path(folder, name).is_file()]
        return Found(not missing, f"{folder} lacks {', '.join(missing)}" if missing else folder)
    found = [huggingface_hub.try_to_load_from_cache(GPT2_REPOSITORY, name) for name in GPT2_FILES]
    return Found(True, "in the cache" if all(isinstance(path, str) for path in found) else _FETCHED)
