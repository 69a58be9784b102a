"""Files and folders that are whole or absent, locks that one process holds, and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import platformdirs
from filelock import FileLock, Timeout

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what stops a write half-way


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raise what stops the writing of a file or a folder as `OSError` that names it.

    The system's error for a full disk names nothing, and torch, safetensors and tokenizers raise types of their own.
    """
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None or whole_name(Path(str(error.filename))) == path.name
        if unnamed and error.errno is not None:  # not where a library raises it with a text of its own
            error.filename = str(path)
        raise
    except Exception as error:  # tokenizers raises plain `Exception`
        if not any(sign in str(error) for sign in ("PytorchStreamWriter", "inline_container", "(os error")):
            raise
        number = errno.ENOSPC if shutil.disk_usage(path.parent).free < 2**20 else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or folder under a temporary name beside `path`, then rename it to `path`.

    A file replaces a file, and a folder replaces a folder.

    Raises:
        OSError: if it cannot be written, or if one would replace the other. The old content stays then, and nothing
            else is left; the message says so where the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with named_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            if temporary.is_dir() and path.is_dir():
                old = path.with_name(f"{temporary.name}.old")
                os.replace(path, old)
                os.replace(temporary, path)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, path)
    except OSError as error:
        if error.errno in FULL and path.exists():
            error.strerror = f"{error.strerror}; what was there before is kept"
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def check_writable(name: str, path: Path) -> None:
    """Raise `ValueError` unless a file or a folder can be made at a path, with its parents. Nothing is left there.

    A nameless file is tried in the nearest folder that exists, because permission bits do not tell of mounts.

    Args:
        name: of the argument, for the message.
        path: of the file or the folder. It may exist.
    """
    place = Path(os.path.abspath(path))
    try:
        place = place if place.is_dir() else place.parent
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = f"in {place}: {error.strerror or error}"
        raise ValueError(f"{name}: got {path}, expected a place that can be written ({reason})") from None


OUTPUT = ".rfa-output"  # in a folder of a report: its text is nothing to learn from


def whole_name(path: Path) -> str:
    """The final name of a file or folder that a killed `write_whole` left under its temporary name."""
    unfinished = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}(\.old)?", path.name)
    return unfinished[1] if unfinished else path.name


def write_text_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole. Raises as `write_whole`."""
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
    """Yield whether this process alone holds the lock file. It holds it until the block or the process ends.

    On a file system without locks the answer is always True.
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


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Return the cache folder: `cache_dir`, else `$RFA_CACHE`, else the user's cache folder for `rfa`."""
    return Path(cache_dir or os.environ.get("RFA_CACHE") or platformdirs.user_cache_dir("rfa"))


def cached_file(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Return `path`, written by `write` unless an intact file is there already.

    A file is intact if its sha256 is the one in `<name>.sha256` beside it. A damaged file is written again. Of several
    processes one writes, and the others wait for it. On a file system without locks each process writes its own file,
    and the last one stays. Therefore `write` must be deterministic.

    Args:
        path: of the file. Its folder is made.
        write: writes the content to a binary file.

    Returns:
        `path`.

    Raises:
        OSError: if the file cannot be written, for example because the disk is full. No part of it is left.
    """
    checksum = path.with_name(f"{path.name}.sha256")

    def write_and_hash(temporary: Path) -> None:
        with temporary.open("xb") as file:
            write(file)
        write_text_whole(checksum, sha256(temporary))

    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{path}.lock"))
        intact = path.exists() and checksum.exists() and checksum.read_bytes() == sha256(path).encode()
        if not intact:
            write_whole(path, write_and_hash)
    return path
