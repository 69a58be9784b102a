"""Files and data sets of the Hugging Face hub, with one clear error if it cannot be reached."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub

from rfa.checks import needs

from .documents import Document

# Files fetched from the network once and kept in the cache

TIMEOUT_SECONDS = 30.0


class Unreachable(Exception):
    """An address that gives nothing, and why."""


def download(address: str, largest: int) -> bytes:
    """Return the first `largest` bytes at an address. Raises `Unreachable` with the address and the reason."""
    request = urllib.request.Request(address, headers={"User-Agent": "rfa (robust-filter-attention)"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read(largest)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not an address
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
        raise Unreachable(f"{address}, got {reason}") from error


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
    sizes: list[int] = []
    starts: list[int] = []
    before = ""
    for first in range(0, len(rows), SCAN_ROWS):
        for index, text in enumerate(rows[first : first + SCAN_ROWS]["text"], start=first):
            begins = (
                not before.strip() and _ARTICLE_TITLE.fullmatch(text) if articles else index % ROWS_PER_DOCUMENT == 0
            )
            if begins or index == 0:
                starts.append(index)
                sizes.append(0)
            sizes[-1] += len(_line(text))
            before = text
    for start, stop, size in zip(starts, [*starts[1:], len(rows)], sizes, strict=True):
        yield _row_document(rows, f"{split}/{start}", start, stop, size)


def _row_document(rows: datasets.Dataset, name: str, start: int, stop: int, size: int) -> Document:
    return Document(name, size, lambda: iter([b"".join(map(_line, rows[start:stop]["text"]))]))


def _line(text: str) -> bytes:
    return (text if text.endswith("\n") else text + "\n").encode()
