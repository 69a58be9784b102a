"""Splits: the documents for training, validation and test. All functions are deterministic."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath

from .documents import Document, part_of

SPLITS = ("train", "valid", "test")
HELD_OUT_SHARE = 0.05

Splits = Mapping[str, tuple[Document, ...]]


def by_file(documents: Sequence[Document], held_out: Sequence[str] = ("valid", "test")) -> Splits:
    """Split by document: 5 % of them (at least one) for each held-out split, chosen by the hash of the name."""
    split_of = _assign_by_hash((document.name for document in documents), held_out)
    return _gather(documents, lambda document: split_of[document.name], ("train", *held_out))


def check_split(split_by: str) -> None:
    """Raise `ValueError` for an unknown way to split a text. Nothing is read, and names of authors are not checked."""
    kind, _, assignment = split_by.partition(":")
    if kind not in ("file", "author") or (kind == "file" and assignment):
        raise ValueError(f"split_by: got {split_by!r}, expected file, author or author:test=Name,...;valid=Name,...")
    if assignment:
        _parse_assignment(assignment)


def by_author(documents: Sequence[Document], assignment: str = "") -> Splits:
    """Split by author, the file name up to the first `_`. All texts of an author are in one split.

    The assignment, `test=Name,Name;valid=Name`, names the authors that are held out. Without it each held-out split has
    5 % of the authors (at least one), chosen by the hash of the name. Raises `ValueError` for fewer than three authors,
    an invalid assignment, an unknown author, or one assigned twice.
    """
    authors = sorted({_author(document) for document in documents})
    if len(authors) < len(SPLITS):
        raise ValueError(
            f"split_by: got 'author' for a text by {', '.join(authors)}, expected at least {len(SPLITS)} "
            "authors (file names such as Author_Title.txt)"
        )
    split_of = _parse_assignment(assignment) if assignment else _assign_by_hash(authors)
    if unknown := sorted(split_of.keys() - set(authors)):
        raise ValueError(f"split_by: got unknown author {unknown[0]!r}, expected some of {', '.join(authors)}")
    return _gather(documents, lambda document: split_of.get(_author(document), "train"))


def by_position(documents: Sequence[Document]) -> Splits:
    """Split each document at 90 % and 95 % of its bytes, at the next end of a line.

    If there is no end of a line, the text is cut at the next space, or else between two characters.
    """
    splits: dict[str, tuple[Document, ...]] = dict.fromkeys(SPLITS, ())
    for document in documents:
        size = document.size
        first, second = int(size * (1 - 2 * HELD_OUT_SHARE)), int(size * (1 - HELD_OUT_SHARE))
        cuts = [0, _cut(document, first, second), _cut(document, second, size - 1), size]
        for split, start, stop in zip(SPLITS, cuts[:-1], cuts[1:], strict=True):
            if start < stop:
                splits[split] += (part_of(document, start, stop),)
    return splits


def _cut(document: Document, start: int, limit: int) -> int:
    """Return the first good position for a cut between `start` and `limit`, in bytes."""
    for separator in (b"\n", b" "):
        position = start
        for chunk in part_of(document, start, limit).chunks():
            if (found := chunk.find(separator)) >= 0:
                return position + found + 1
            position += len(chunk)
    for byte in b"".join(part_of(document, start, start + 3).chunks()):
        if byte & 0xC0 != 0x80:
            break
        start += 1  # this byte is inside a UTF-8 character
    return start


def _author(document: Document) -> str:
    return PurePath(document.name).stem.split("_", 1)[0]


def _assign_by_hash(names: Iterable[str], held_out: Sequence[str] = ("valid", "test")) -> dict[str, str]:
    """Return the split of each name."""
    order = sorted(set(names), key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    count = max(1, round(HELD_OUT_SHARE * len(order)))
    split_of = dict.fromkeys(order, "train")
    for index, split in enumerate(held_out):
        split_of |= dict.fromkeys(order[index * count : (index + 1) * count], split)
    return split_of


def _parse_assignment(assignment: str) -> dict[str, str]:
    """Return the split of each author named in `test=Name,Name;valid=Name`."""
    split_of: dict[str, str] = {}
    for part in assignment.split(";"):
        split, equals, names = part.partition("=")
        if not equals or split.strip() not in SPLITS:
            raise ValueError(f"split_by: got {part!r}, expected test=Name,Name or valid=Name,Name")
        for author in (name.strip() for name in names.split(",")):
            if not author:
                raise ValueError(f"split_by: got {part!r} without a name, expected test=Name,Name or valid=Name,Name")
            if author in split_of:
                raise ValueError(f"split_by: got author {author!r} twice, expected once")
            split_of[author] = split.strip()
    return split_of


def _gather(
    documents: Sequence[Document], split_of: Callable[[Document], str], splits: Sequence[str] = SPLITS
) -> Splits:
    return {split: tuple(d for d in documents if split_of(d) == split) for split in splits}
