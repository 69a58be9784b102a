"""Corpora that have a name: data sets of the Hugging Face hub, and the Python code on this machine."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub

from rfa.checks import needs

from .documents import SPLITS, Document, Splits, file_document

if TYPE_CHECKING:
    import datasets

SCAN_ROWS = 10_000
ROWS_PER_DOCUMENT = 1_000
_ARTICLE_TITLE = re.compile(r" = [^=].* = \n?")


@dataclass(frozen=True)
class HubDataset:
    """A text data set on the hub. With `articles` a title (` = Title = `) begins a document, else each 1,000th row."""

    repository: str
    configuration: str | None = None
    articles: bool = False


HUB_DATASETS = {
    "wikitext-103": HubDataset("Salesforce/wikitext", "wikitext-103-raw-v1", articles=True),
    "babylm-2025": HubDataset("BabyLM-community/BabyLM-2025-Strict"),
}
_SPLIT_NAMES = {"train": "train", "validation": "valid", "valid": "valid", "dev": "valid", "test": "test"}


def hub_files(repository: str, names: tuple[str, ...], alternatives: str) -> list[Path]:
    """Local paths of files of a hub repository. Raises `ValueError`, with alternatives, where they cannot be had."""
    try:
        return [Path(huggingface_hub.hf_hub_download(repository, name)) for name in names]
    except Exception as error:  # the hub's and the network's errors have no common class
        raise _no_access(repository, error, alternatives) from error


def hub_splits(dataset: HubDataset, alternatives: str) -> dict[str, tuple[Document, ...]]:
    """The documents of the splits of a data set on the hub. Raises `ValueError`, with alternatives, as `hub_files`."""
    needs("datasets")
    import datasets

    try:
        loaded = datasets.load_dataset(dataset.repository, dataset.configuration)
    except Exception as error:  # of any type, see `hub_files`
        raise _no_access(dataset.repository, error, alternatives) from error
    return {
        split: tuple(_row_documents(loaded[name], name, dataset.articles))
        for name, split in _SPLIT_NAMES.items()
        if name in loaded
    }


def _no_access(repository: str, error: Exception, alternatives: str) -> ValueError:
    reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
    return ValueError(
        f"hub: tried {repository!r} at {huggingface_hub.constants.ENDPOINT} and in the local hub cache, "
        f"got {reason}; without the hub, use {alternatives}"
    )


def _row_documents(rows: datasets.Dataset, split: str, articles: bool) -> Iterator[Document]:
    """Yield the documents of a split's rows. Each row ends in a newline."""
    starts, sizes, before = list[int](), list[int](), ""
    for first in range(0, len(rows), SCAN_ROWS):
        for index, text in enumerate(rows[first : first + SCAN_ROWS]["text"], start=first):
            is_title = not before.strip() and _ARTICLE_TITLE.fullmatch(text)
            if index == 0 or (is_title if articles else index % ROWS_PER_DOCUMENT == 0):
                starts.append(index)
                sizes.append(0)
            sizes[-1] += len(_line(text))
            before = text
    for start, stop, size in zip(starts, [*starts[1:], len(rows)], sizes, strict=True):

        def chunks(start: int = start, stop: int = stop) -> Iterator[bytes]:
            yield b"".join(map(_line, rows[start:stop]["text"]))

        yield Document(f"{split}/{start}", size, chunks)


def _line(text: str) -> bytes:
    return (text if text.endswith("\n") else text + "\n").encode()


# The Python code on this machine: the standard library and the installed packages, split by package. What is installed
# decides the text. Its fingerprint is in each result, so a run is not compared with one on another text by mistake.

CODE = "code:python"
_HELD_OUT = {  # whole packages, which come with rfa and its tests
    **dict.fromkeys(("networkx", "pygments", "mpmath", "rich"), "test"),
    **dict.fromkeys(("mypy", "tensorboard", "fsspec", "anyio"), "valid"),
}
_NO_PACKAGES = {"pip", "beartype", "mypyc", "fontTools", "rfa", "rfa_lab"}  # copies, tables, and what this belongs to
_NOT_STDLIB = {"site-packages", "dist-packages", "test"}
_NO_FOLDERS = {"_vendor", "site-packages", "__pycache__", "idlelib", "lib2to3", "encodings"}
_MIN_BYTES, _MAX_BYTES = 500, 150_000  # bytes of a file: shorter ones only import, longer ones are generated
_MAX_DIGIT_SHARE = 0.15  # the largest share of digits; a file with more is a table of data


@lru_cache(maxsize=1)  # ten seconds; a run asks several times
def code_splits(packages: Path | None = None, stdlib: Path | None = None) -> Splits:
    """The documents of `code:python`, in the order of packages and files; the standard library comes last, in `train`.

    Left out are files that are copies of others (up to spaces), tables of data, and files with other characters than
    ASCII, which are mostly tables too.

    Args:
        packages: the folder of installed packages; that of the running Python by default.
        stdlib: the folder of the standard library; that of the running Python by default.

    Raises:
        OSError: if a folder cannot be read.
    """
    packages = packages or Path(sysconfig.get_paths()["purelib"])
    stdlib = stdlib or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[Document]] = {split: [] for split in SPLITS}
    seen: set[bytes] = set()
    for package in sorted(path for path in packages.iterdir() if path.is_dir()):
        if package.name.isidentifier() and package.name not in _NO_PACKAGES:
            found[_HELD_OUT.get(package.name, "train")] += _documents(package, packages, "", seen)
    for part in sorted(stdlib.iterdir()):
        if part.name not in _NOT_STDLIB:
            found["train"] += _documents(part, stdlib, "stdlib/", seen)
    return {split: tuple(documents) for split, documents in found.items()}


def _documents(root: Path, base: Path, prefix: str, seen: set[bytes]) -> Iterator[Document]:
    """The files of a package, or the one module, that are text to learn from and were not seen before."""
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        parts = path.relative_to(base)
        if path.suffix != ".py" or not path.is_file() or not _NO_FOLDERS.isdisjoint(parts.parts):
            continue
        if not _MIN_BYTES <= path.stat().st_size <= _MAX_BYTES:
            continue
        raw = path.read_bytes()
        if not raw.isascii() or sum(map(raw.count, b"0123456789")) > _MAX_DIGIT_SHARE * len(raw):
            continue
        digest = hashlib.sha256(re.sub(rb"\s+", b" ", raw)).digest()
        if digest not in seen:
            seen.add(digest)
            yield file_document(path, prefix + parts.as_posix())
