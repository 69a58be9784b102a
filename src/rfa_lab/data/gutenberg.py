"""Lists of Project Gutenberg's books: fetched once, kept in the cache, or read from a folder."""

from __future__ import annotations

import os
import re
import time
import unicodedata
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from rfa.checks import require
from rfa.files import cache_folder, cached_file
from rfa.progress import Progress

from .documents import Document, file_document, text_document
from .hub import Unreachable, download
from .splits import SPLITS, Splits

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
