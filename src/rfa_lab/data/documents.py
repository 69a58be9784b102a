"""Documents: named texts that are read in chunks when needed, and cut where a cut cannot change their tokens."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
