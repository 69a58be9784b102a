"""Digests of the files of a folder, so that one that changed since it was saved is found before it is used.

They find damage, not malice: whoever changes a file can change its digest.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from rfa.files import sha256, write_text_whole

DIGESTS = "digests.json"


def write_digests(folder: Path) -> None:
    """Write the sha256 of every file of a folder into its `digests.json`, whole; the last thing to write there."""
    digests = {name: sha256(path) for name, path in _files(folder).items()}
    write_text_whole(folder / DIGESTS, json.dumps(digests, indent=2) + "\n")


def check_digests(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise `ValueError` where a file is gone or not as it was saved.

    Args:
        folder: of the files. One that an older version saved has no digests, and nothing is looked at.
        names: look at these files only, each of which must have been there when the digests were written.
    """
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{DIGESTS} is damaged ({error})") from error
    if not isinstance(digests, dict):
        raise ValueError(f"{DIGESTS} is damaged: got {digests!r:.40}, expected the sha256 of each file")
    found = _files(folder)  # no other path that the file may name is opened
    for name in sorted(digests if names is None else set(names)):
        if name not in found:
            raise ValueError(f"{name} is gone")
        if name not in digests:
            raise ValueError(f"{name} has no sha256 in {DIGESTS}: it came after the others were saved")
        if sha256(found[name]) != digests[name]:
            raise ValueError(f"{name} is not as it was saved, by its sha256 in {DIGESTS}")


def _files(folder: Path) -> dict[str, Path]:
    """Each file by its name, but for the digests themselves."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS)
    return {path.relative_to(folder).as_posix(): path for path in paths}
