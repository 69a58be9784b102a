"""Result files of JSON lines, to which lines are only ever added."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line in one write, so that neither a crash nor another process leaves half of it among the others.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, allow_nan=False) + "\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # what was there stays a line of its own
                text = "\n" + text
        data = text.encode()
        if file.write(data) != len(data):
            raise OSError(f"{path}: the disk took only a part of the last line")


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a file.

    Raises:
        ValueError: for a line that is no JSON object, by its number.
        OSError: if the file cannot be read.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict):
            raise ValueError(f"{path}: line {number} is no JSON object")
        if line:
            lines.append(line)
    return lines
