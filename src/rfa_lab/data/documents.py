"""Documents: named texts that are read in chunks when needed, cut where a cut cannot change their tokens, and split."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Document:
    """A UTF-8 text that can be read any number of times.

    Args:
        name: path relative to the corpus, or another name that is unique and stable in it.
        size: number of bytes.
        chunks: opens the text and yields its bytes in order, in chunks of about 64 KiB.
        offset: of its beginning in the file, in bytes; only error messages use it.
    """

    name: str
    size: int
    chunks: Callable[[], Iterator[bytes]] = field(repr=False)
    offset: int = 0

    def texts(self) -> Iterator[str]:
        """Yield the text, chunk by chunk. Raises `ValueError`, with document and byte, where it is not UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = self.offset
        try:
            for chunk in self.chunks():
                position += len(chunk)
                yield decoder.decode(chunk)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            # The decoder's buffer ends at `position`; it can start with bytes of the chunk before.
            byte = position - len(error.object) + error.start
            raise ValueError(
                f"text: got {self.name!r} with byte 0x{error.object[error.start]:02x} at offset {byte}, expected UTF-8"
            ) from error

    def read(self) -> str:
        """Return the whole text. Raises as `texts`."""
        return "".join(self.texts())


def check_text(documents: Iterable[Document]) -> None:
    """Read all documents, and raise `ValueError` for a byte that is not UTF-8."""
    for document in documents:
        for _ in document.texts():
            pass


def file_document(path: Path, name: str) -> Document:
    """Return a file as a document."""

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    return Document(name, path.stat().st_size, chunks)


def part_of(document: Document, start: int, stop: int) -> Document:
    """Return bytes `start` to `stop` of a document as a document of its own."""

    def chunks() -> Iterator[bytes]:
        position = 0
        for chunk in document.chunks():
            if part := chunk[max(start - position, 0) : max(stop - position, 0)]:
                yield part
            position += len(chunk)
            if position >= stop:
                return

    return Document(f"{document.name}[{start}:{stop}]", stop - start, chunks, document.offset + start)


def text_document(name: str, text: str) -> Document:
    """Return a text held in memory as a document."""
    data = text.encode()
    return Document(name, len(data), lambda: iter([data]))


def fingerprint(documents: Iterable[Document]) -> str:
    """Return the sha256 (hexadecimal) of the documents' raw bytes, in order.

    Each document's size is hashed before its bytes. So the same bytes in other documents have another fingerprint.
    Their token streams differ too, in the positions of the end-of-text tokens.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.size.to_bytes(8, "little"))
        for chunk in document.chunks():
            digest.update(chunk)
    return digest.hexdigest()


# The input of tokenizers

SLICE = 1 << 16  # characters that are searched together
LONGEST = 1 << 20  # characters without a possible cut; tokenising one such word needs a hundred times its bytes

# The last position after a character that is no white space and before a space or a newline.
# GPT-2's pre-tokenisation always has a boundary there:
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# No alternative matches white space after another character, so none matches across the cut. The text before the cut
# does not end in white space, so the look-ahead of `\s+(?!\S)` never sees the end of the fragment. The text after the
# cut begins a new match, and no alternative looks back.
_LAST_BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)


def text_fragments(document: Document, anywhere: bool = False) -> Iterator[tuple[str, bool]]:
    """Cut a document into fragments of about 64 KiB whose byte-level tokens, joined, are those of the whole text.

    Each comes with whether it is the last. With `anywhere` any cut is allowed, because the tokens are single bytes.
    Raises `ValueError` for a byte that is not UTF-8, or more than 2^20 characters without a safe cut.
    """
    rest, before = "", 0
    for text in _slices(document):
        searched = max(len(rest) - 1, 0)
        rest += text
        cut = len(rest) if anywhere else match.end() if (match := _LAST_BOUNDARY.match(rest, searched)) else 0
        if cut:
            yield rest[:cut], False
            rest, before = rest[cut:], before + cut
        if len(rest) > LONGEST:
            raise ValueError(
                f"text: got {document.name!r} with one word of more than {LONGEST:,} characters from character "
                f"{before:,} on, expected spaces or line breaks (or the tokenizer bytes, which needs none)"
            )
    yield rest, True


def _slices(document: Document) -> Iterator[str]:
    for text in document.texts():
        yield from (text[start : start + SLICE] for start in range(0, len(text), SLICE))


# Splits: the documents for training, validation and test, each time the same

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
