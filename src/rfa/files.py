"""Files and folders that are whole or absent."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path


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


def write_text_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole; raises as `write_whole`."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
