"""The input of tokenizers: long texts are cut into fragments where a cut cannot change the tokens."""

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
    """Let `tokenizers` use all cores inside the block, and no pool of threads in processes that are forked later.

    The pool does not survive a fork. Without the variable `TOKENIZERS_PARALLELISM` the child would print a warning.
    The variable is `true` inside the block and `false` afterwards; a value set by the user is kept.
    """
    os.environ[_VARIABLE] = _USERS_CHOICE or "true"
    try:
        yield
    finally:
        os.environ[_VARIABLE] = _USERS_CHOICE or "false"


SLICE = 1 << 16  # characters that are searched together
LONGEST = 1 << 20  # characters without a possible cut; tokenising one such word needs a hundred times its bytes

# The last position after a character that is no white space and before a space or a newline.
# GPT-2's pre-tokenisation always has a boundary there:
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# No alternative matches white space after another character, so none matches across the cut. The text before the cut
# does not end in white space, so the look-ahead of `\s+(?!\S)` never sees the end of the fragment. The text after the
# cut begins a new match, and no alternative looks back.
_LAST_BOUNDARY = re.compile(r".*\S(?=[ \n])", re.DOTALL)

# For the same reasons there is a boundary between a letter, a digit and a sign, except after an apostrophe, which can
# be in one match with letters that follow. A text without spaces, for example in Chinese, is cut at such boundaries.
_KINDS = {"L": "letter", "N": "digit", "P": "sign", "S": "sign"}  # by the first letter of Unicode's category


def text_fragments(document: Document, anywhere: bool = False) -> Iterator[tuple[str, bool]]:
    """Cut a document into fragments of about 64 KiB whose byte-level tokens, joined, are those of the whole text.

    Args:
        document: the text.
        anywhere: allow a cut at any position, because the tokens are single bytes.

    Yields:
        Each fragment, and whether it is the document's last.

    Raises:
        ValueError: for a byte that is not UTF-8, or more than 2^20 characters without a safe cut.
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
    """The last position after `start` at which a text may be cut; 0 if there is none."""
    if match := _LAST_BOUNDARY.match(text, start):
        return match.end()
    right = None
    for position in range(len(text) - 1, start - 1, -1):
        left = _KINDS.get(unicodedata.category(text[position])[0])
        if left and right and left != right and text[position] != "'":
            return position + 1
        right = left
    return 0
