"""Corpora that have a name: on the Hugging Face hub, lists of Project Gutenberg's books, this machine's Python code.

All are fetched once and kept in a cache, or read where they are. An error says what was tried, and what else there is.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import sysconfig
import time
import unicodedata
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import huggingface_hub

from rfa.checks import needs, require
from rfa.files import cache_folder, cached_file
from rfa.progress import Progress

from .documents import SPLITS, Document, Splits, file_document, text_document

if TYPE_CHECKING:
    import datasets

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


# Project Gutenberg

PREFIX = "gutenberg:"
LISTS = ("novels",)
SITE = "https://www.gutenberg.org/cache/epub"
PAUSE_SECONDS = 2.0  # between two books: Project Gutenberg asks robots to wait
LARGEST_BYTES = 1 << 25  # the longest novel of the list has 2 MB
_START = re.compile(r"^\*\*\* ?START OF TH[^*]*\*\*\*.*\n", re.MULTILINE)
_END = re.compile(r"^\*\*\* ?END OF TH", re.MULTILINE)
_TITLE = re.compile(r"^Title:\s*(.+(?:\n[ \t]+\S.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Book:
    """A line of a list: the name of its file without `.txt`, Project Gutenberg's number where it is known, and more."""

    name: str
    number: int | None
    author: str
    title: str
    split: str


def books(spec: str) -> tuple[Book, ...]:
    """The books of the list that `gutenberg:LIST` names, by name. Raises `ValueError` for another list."""
    name = spec.removeprefix(PREFIX)
    require(name in LISTS, "data", spec, ", ".join(PREFIX + known for known in LISTS))
    text = resources.files("rfa_lab.data").joinpath("lists", f"{name}.tsv").read_text("utf-8")
    lines = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return tuple(
        Book(name, int(number.rstrip("?")) or None, author, title, split)
        for name, number, author, title, split in lines
    )


def gutenberg_splits(spec: str, progress: Progress | None = None) -> Splits:
    """Return the documents of `gutenberg:LIST` in the list's own splits. A document is named as the book's file.

    Where the environment variable `RFA_GUTENBERG` names a folder, nothing is fetched: `Author_Title_Year.txt` is read
    as it is, or else `pgNUMBER.txt` without Project Gutenberg's header and footer.

    Otherwise each book is fetched from `SITE`, or from the mirror that `RFA_GUTENBERG_MIRROR` names, and kept in the
    cache. A call that was stopped goes on where it was. Books without a number are left out.

    Args:
        spec: `gutenberg:LIST`.
        progress: called with the books that are there, and the books in all.

    Raises:
        ValueError: no such list, no network, another text than the list says, or a book that the folder lacks.
        OSError: the cache cannot be written.
    """
    listed = books(spec)
    folder = os.environ.get("RFA_GUTENBERG")
    if folder:
        documents = _from_folder(Path(folder), listed)
    else:
        listed = tuple(book for book in listed if book.number)
        documents = _fetched(listed, progress)
    return {
        split: tuple(
            document for book, document in zip(listed, documents, strict=True) if book.split == split and document.size
        )
        for split in SPLITS
    }


def _from_folder(folder: Path, listed: tuple[Book, ...]) -> list[Document]:
    documents, missing = [], []
    for book in listed:
        name = f"{book.name}.txt"
        plain, downloaded = folder / name, folder / f"pg{book.number}.txt"
        if plain.is_file():
            documents.append(file_document(plain, name))
        elif downloaded.is_file():
            documents.append(text_document(name, body(downloaded.read_bytes(), book)))
        else:
            missing.append(name if book.number is None else f"{name} or {downloaded.name}")
    if missing:
        raise ValueError(
            f"RFA_GUTENBERG: got {str(folder)!r} with {len(documents)} of {len(listed)} books, expected all; "
            f"{missing[0]} is missing"
        )
    return documents


def _fetched(listed: tuple[Book, ...], progress: Progress | None) -> list[Document]:
    """Return the books' documents, from the cache where they are in it."""
    folder = cache_folder() / "gutenberg"
    site = os.environ.get("RFA_GUTENBERG_MIRROR", SITE).rstrip("/")
    asked = False

    def write(book: Book, file: BinaryIO) -> None:
        nonlocal asked
        if asked:
            time.sleep(PAUSE_SECONDS)
        asked = True
        file.write(body(download(f"{site}/{book.number}/pg{book.number}.txt", LARGEST_BYTES), book).encode())

    documents = []
    for index, book in enumerate(listed):
        try:
            path = cached_file(folder / f"{book.number}.txt", partial(write, book))
        except Unreachable as error:
            raise ValueError(
                f"gutenberg: tried {error}; {index} of {len(listed)} books are in {folder}. Try again, name a mirror "
                "by RFA_GUTENBERG_MIRROR, or a folder with the books by RFA_GUTENBERG"
            ) from error
        documents.append(file_document(path, f"{book.name}.txt"))
        if progress is not None:
            progress(index + 1, len(listed))
    return documents


def body(data: bytes, book: Book) -> str:
    """A book's text between header and footer, lines ending in `\\n`. Raises `ValueError` for another text."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"gutenberg: got ebook {book.number} in another encoding, expected UTF-8 ({error})") from error
    start, end = _START.search(text), _END.search(text)
    if not start or not end or end.start() < start.end():
        raise ValueError(f"gutenberg: got ebook {book.number} without its START and END lines, expected the plain text")
    found = _TITLE.search(text[: start.start()])
    title = " ".join(found[1].split()) if found else ""
    if _letters(book.title) not in _letters(title):
        raise ValueError(f"gutenberg: got ebook {book.number} with the title {title!r}, expected {book.title!r}")
    return text[start.end() : end.start()].strip("\n") + "\n"


def _letters(title: str) -> str:
    """Return a title's words in lower case, without accents and punctuation, between spaces."""
    plain = unicodedata.normalize("NFKD", title).casefold().replace("'", "").replace("\u2019", "")
    return f" {' '.join(re.findall('[a-z0-9]+', ''.join(c for c in plain if not unicodedata.combining(c))))} "


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
_LEAST, _MOST = 500, 150_000  # bytes of a file: shorter ones only import, longer ones are generated
_DIGITS = 0.15  # the largest share of digits; a file with more is a table of data


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
        if not _LEAST <= path.stat().st_size <= _MOST:
            continue
        raw = path.read_bytes()
        if not raw.isascii() or sum(map(raw.count, b"0123456789")) > _DIGITS * len(raw):
            continue
        digest = hashlib.sha256(re.sub(rb"\s+", b" ", raw)).digest()
        if digest not in seen:
            seen.add(digest)
            yield file_document(path, prefix + parts.as_posix())
