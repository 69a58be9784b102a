"""How tokenizers are fed: long texts in fragments, cut where cutting cannot change the tokens, on all cores."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from .documents import Document

_VARIABLE = "TOKENIZERS_PARALLELISM"
_USERS_CHOICE = os.environ.get(_VARIABLE)


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Let `tokenizers` use all cores inside, and be safe and silent in processes forked afterwards.

    The pool does not survive a fork: the child would warn and go on without, unless `TOKENIZERS_PARALLELISM`
    says what is wanted. It is `true` inside and `false` from then on, or what the user chose at the start.
    """
    os.environ[_VARIABLE] = _USERS_CHOICE or "true"
    try:
        yield
    finally:
        os.environ[_VARIABLE] = _USERS_CHOICE or "false"


SLICE = 1 << 16  # characters that are looked at together
LONGEST = 1 << 20  # characters without a place to cut: as one word, its tokens take a hundred times their bytes

# The last place that is followed by a space or a newline and preceded by something else than white space.
# GPT-2's pre-tokenisation has a boundary there, whatever stands around it:
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# No alternative matches white space after something else, so none matches across the cut. What is left
# of it ends in no white space, so the look-ahead of `\s+(?!\S)` never sees the end of the fragment; what is right
# of it begins a new match, and no alternative looks back.
_LAST_BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)

# By the same reasons it has one between two of letters, digits and signs, unless an apostrophe stands there: only
# after one do letters follow in the same match. By these a text is cut that has no spaces, a Chinese one say.
_KINDS = {"L": "letter", "N": "digit", "P": "sign", "S": "sign"}  # of Unicode's categories, by their first letter


def text_fragments(document: Document, anywhere: bool = False) -> Iterator[tuple[str, bool]]:
    """Cut a document into fragments of about 64 KiB whose byte-level tokens, joined, are the whole text's.

    Args:
        document: the text.
        anywhere: its tokens are its bytes, whose order is all that counts.

    Yields:
        Each fragment, and whether it is the document's last.

    Raises:
        ValueError: a byte that is not UTF-8, or more than 2^20 characters without a safe place to cut.
    """
    rest, before = "", 0
    for text in _slices(document):
        searched = max(len(rest) - 1, 0)
        rest += text
        cut = len(rest) if anywhere else _last_cut(rest, searched)
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


def _last_cut(text: str, start: int) -> int:
    """The last place after `start` where a text may be cut, 0 where there is none."""
    if match := _LAST_BOUNDARY.match(text, start):
        return match.end()
    right = None
    for place in range(len(text) - 1, start - 1, -1):
        left = _KINDS.get(unicodedata.category(text[place])[0])
        if left and right and left != right and text[place] != "'":
            return place + 1
        right = left
    return 0
