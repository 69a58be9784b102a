"""The cache folder: files that are whole or not there, whoever else is writing and whenever it stops."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import platformdirs
from filelock import FileLock

from rfa.files import sha256, write_whole


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Return the cache folder: `cache_dir`, else `$RFA_CACHE`, else the user's cache folder for `rfa`."""
    return Path(cache_dir or os.environ.get("RFA_CACHE") or platformdirs.user_cache_dir("rfa"))


def cached_file(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Return `path`, written by `write` unless an intact file is there already.

    A file is intact if its sha256 is the one in `<name>.sha256` beside it, so a damaged file is written
    anew. Of several processes one writes and the others wait for it. Where the file system has no locks, each
    writes a file of its own and the last to finish stays; `write` must therefore be deterministic.

    Args:
        path: where the file is wanted. Its folder is made.
        write: writes the content to a binary file.

    Returns:
        `path`.

    Raises:
        OSError: the file cannot be written (a full disk, say). Nothing partial is left.
    """
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{path}.lock"))
        if not _is_intact(path):
            digest = _replace(path, write)
            _replace(_checksum(path), lambda file: file.write(digest.encode()))
    return path


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> str:
    """Write a file aside, move it to `path` in one step, and return its sha256."""
    digests = []

    def write_and_hash(aside: Path) -> None:
        with aside.open("xb") as file:
            write(file)
        digests.append(sha256(aside))

    write_whole(path, write_and_hash)
    return digests[0]


def _is_intact(path: Path) -> bool:
    try:
        return _checksum(path).read_bytes() == sha256(path).encode()
    except FileNotFoundError:
        return False


def _checksum(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
