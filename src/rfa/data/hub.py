"""The Hugging Face hub: files and data sets, with one clear error where it cannot be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub

from .documents import Document

if TYPE_CHECKING:
    import datasets

PROBE_SECONDS = 5.0
SCAN_ROWS = 10_000
ROWS_PER_DOCUMENT = 1_000
_ARTICLE_TITLE = re.compile(r" = [^=].* = \n?")


@dataclass(frozen=True)
class HubDataset:
    """A text data set on the hub.

    Args:
        repository: its name there.
        configuration: the data set's configuration, if it has several.
        articles: whether titles in the text (` = Title = `) begin the documents. Otherwise 1,000 rows make
            a document.
    """

    repository: str
    configuration: str | None = None
    articles: bool = False


HUB_DATASETS = {
    "wikitext-103": HubDataset("Salesforce/wikitext", "wikitext-103-raw-v1", articles=True),
    "babylm-2025": HubDataset("BabyLM-community/BabyLM-2025-Strict"),
}
_SPLIT_NAMES = {"train": "train", "validation": "valid", "valid": "valid", "dev": "valid", "test": "test"}


def hub_files(repository: str, names: tuple[str, ...], alternatives: str) -> list[Path]:
    """Return the local paths of a hub repository's files, downloaded where they are not yet cached.

    Raises:
        ValueError: they are neither cached nor can be had; says what was tried and what else there is.
    """
    unreachable = _unreachable()
    try:
        return [
            Path(huggingface_hub.hf_hub_download(repository, name, local_files_only=unreachable is not None))
            for name in names
        ]
    except Exception as error:  # the hub's and the network's errors have no common class
        raise _no_access(repository, unreachable or error, alternatives) from error


def hub_splits(dataset: HubDataset, alternatives: str) -> dict[str, tuple[Document, ...]]:
    """Return the documents of those splits (`train`, `valid`, `test`) that a data set on the hub has.

    Raises:
        ValueError: it is neither cached nor can be had; says what was tried and what else there is.
    """
    import datasets

    unreachable = _unreachable()
    try:
        with _offline(unreachable is not None):
            loaded = datasets.load_dataset(dataset.repository, dataset.configuration)
    except Exception as error:  # as above
        raise _no_access(dataset.repository, unreachable or error, alternatives) from error
    return {
        split: tuple(_row_documents(loaded[name], name, dataset.articles))
        for name, split in _SPLIT_NAMES.items()
        if name in loaded
    }


def _unreachable() -> Exception | None:
    """Return why the hub cannot be reached, or None; the hub's own calls would try for half a minute."""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:  # as above
        return error
    return None


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Let `datasets` look into its cache only, if `offline`."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _no_access(repository: str, error: Exception, alternatives: str) -> ValueError:
    reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
    return ValueError(
        f"hub: tried {repository!r} at {huggingface_hub.constants.ENDPOINT} and in the local hub cache, "
        f"got {reason}; without the hub, use {alternatives}"
    )


def _row_documents(rows: datasets.Dataset, split: str, articles: bool) -> Iterator[Document]:
    """Yield a split's rows as documents, each row ending in a newline."""
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
