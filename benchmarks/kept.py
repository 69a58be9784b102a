"""What a long command has done, in a JSON file that is whole at any time, so that it can be stopped and go on."""

import json
from pathlib import Path
from typing import Any

import rfa.version
from rfa.files import write_text_whole
from rfa.version import source_commit


class Kept(dict):
    """The fields of the file. What another commit left, or one with changes, or other options, is begun anew.

    Args:
        path: of the file; None to keep nothing.
        options: what the command was asked for.
        again: begin anew.
        **fields: those of a file that is begun.
    """

    def __init__(self, path: Path | None, options: dict[str, Any], again: bool = False, **fields: Any):
        commit = source_commit(Path(rfa.version.__file__).parent)
        self.path = path
        before = _read(path)
        same = before.get("options") == options and before.get("commit") == commit and is_known(commit)
        super().__init__(before if same and not again else {"commit": commit, "options": options, **fields})

    def write(self) -> None:
        """Write the file, whole."""
        if self.path is not None:
            write_text_whole(self.path, json.dumps(self, indent=1) + "\n")


def is_known(commit: str | None) -> bool:
    """Whether a commit says what ran: one with changes does not."""
    return commit is not None and not commit.endswith("-dirty")


def _read(path: Path | None) -> dict[str, Any]:
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
