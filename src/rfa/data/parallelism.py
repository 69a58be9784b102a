"""The thread pool of `tokenizers`: all cores while it works, no trouble for processes forked later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
