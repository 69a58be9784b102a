"""The Python code on this machine: the standard library and the installed packages, split by package.

Nothing of it is in the repository. The text depends on what is installed. Its fingerprint is in each result, so a run
is not compared with one on another text by mistake.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .documents import Document, file_document
from .splits import SPLITS, Splits

CODE = "code:python"
_HELD_OUT = {  # whole packages, which come with rfa and its tests
    **dict.fromkeys(("networkx", "pygments", "mpmath", "rich"), "test"),
    **dict.fromkeys(("mypy", "tensorboard", "fsspec", "anyio"), "valid"),
}
_NO_PACKAGES = {"pip", "beartype", "mypyc", "fontTools", "rfa", "rfa_lab"}  # copies, tables, and what this belongs to
_NOT_STDLIB = {"site-packages", "dist-packages", "test"}
_NO_FOLDERS = {"_vendor", "site-packages", "__pycache__", "idlelib", "lib2to3", "encodings"}
_LEAST, _MOST = 500, 150_000  # bytes of a file: shorter ones only import, longer ones are generated
_DIGITS = 0.15  # the largest share of digits; a file with more is a table of data


@lru_cache(maxsize=1)  # ten seconds; a run asks several times
def code_splits(packages: Path | None = None, stdlib: Path | None = None) -> Splits:
    """The documents of `code:python`, in the order of packages and files; the standard library comes last, in `train`.

    Left out are files that are copies of others (up to spaces), tables of data, and files with other characters than
    ASCII, which are mostly tables too.

    Args:
        packages: the folder of installed packages; that of the running Python by default.
        stdlib: the folder of the standard library; that of the running Python by default.

    Raises:
        OSError: if a folder cannot be read.
    """
    packages = packages or Path(sysconfig.get_paths()["purelib"])
    stdlib = stdlib or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[Document]] = {split: [] for split in SPLITS}
    seen: set[bytes] = set()
    for package in sorted(path for path in packages.iterdir() if path.is_dir()):
        if package.name.isidentifier() and package.name not in _NO_PACKAGES:
            found[_HELD_OUT.get(package.name, "train")] += _documents(package, packages, "", seen)
    for part in sorted(stdlib.iterdir()):
        if part.name not in _NOT_STDLIB:
            found["train"] += _documents(part, stdlib, "stdlib/", seen)
    return {split: tuple(documents) for split, documents in found.items()}


def _documents(root: Path, base: Path, prefix: str, seen: set[bytes]) -> Iterator[Document]:
    """The files of a package, or the one module, that are text to learn from and were not seen before."""
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        parts = path.relative_to(base)
        if path.suffix != ".py" or not path.is_file() or not _NO_FOLDERS.isdisjoint(parts.parts):
            continue
        if not _LEAST <= path.stat().st_size <= _MOST:
            continue
        raw = path.read_bytes()
        if not raw.isascii() or sum(map(raw.count, b"0123456789")) > _DIGITS * len(raw):
            continue
        digest = hashlib.sha256(re.sub(rb"\s+", b" ", raw)).digest()
        if digest not in seen:
            seen.add(digest)
            yield file_document(path, prefix + parts.as_posix())
