"""Pieces: a long text cut where cutting cannot change its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .documents import Document

# The last place that is followed by a space or a newline and preceded by something else than white space.
# GPT-2's pre-tokenisation has a boundary there, whatever stands around it:
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# No alternative matches white space after something else, so none matches across the cut. What is left
# of it ends in no white space, so the look-ahead of `\s+(?!\S)` never sees the end of the piece; what is right
# of it begins a new match, and no alternative looks back.
_LAST_BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)


def pieces(document: Document) -> Iterator[tuple[str, bool]]:
    """Cut a document into pieces of about 64 KiB whose byte-level tokens, joined, are the whole text's.

    A stretch without a safe place to cut stays in one piece, however long.

    Yields:
        Each piece, and whether it is the document's last.

    Raises:
        ValueError: a byte that is not UTF-8.
    """
    rest = ""
    for text in document.texts():
        searched = max(len(rest) - 1, 0)
        rest += text
        if match := _LAST_BOUNDARY.match(rest, searched):
            yield rest[: match.end()], False
            rest = rest[match.end() :]
    yield rest, True
