"""Files and folders that are whole or absent, and locks that one process holds."""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or folder under a temporary name beside `path`, then rename it to `path`.

    A file replaces a file and a folder a folder.

    Raises:
        OSError: if it cannot be written, or `path` is of the other kind; what was there stays, and nothing else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        write(temporary)
        if temporary.is_dir() and path.is_dir():
            old = path.with_name(f"{temporary.name}.old")
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def whole_name(path: Path) -> str:
    """The name under which `write_whole` would have left this file or folder, had it not been killed."""
    unfinished = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}(\.old)?", path.name)
    return unfinished[1] if unfinished else path.name


def write_text_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole; raises as `write_whole`."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sha256(path: Path) -> str:
    """The sha256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Whether this process alone holds the lock file, until the block ends, or the process.

    A file system without locks serves one process: it always holds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except NotImplementedError:
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
