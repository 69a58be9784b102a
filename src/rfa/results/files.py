"""A result file, and the list of the runs of a recipe, on disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

import rfa.version
from rfa.files import write_text_whole
from rfa.models.flat import flat_record

from .schema import RESULT_FORMAT, check_result

PLANNED = "recipe.json"


def read_result(path: str | Path) -> dict[str, Any]:
    """The contents of a result file.

    Raises:
        ValueError: if it was cut off, is no result or was written by another version.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        written = result["format"]
        if written == RESULT_FORMAT:
            if "config" in result:  # in the form of older files, which the report reads
                result["config"] = flat_record(result["config"])
            check_result(result)
            # refuses half a character, which JSON can name and no page can hold
            json.dumps(result, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"result: {path} is damaged ({error}), expected a whole result; delete it to make it anew"
        ) from error
    if written != RESULT_FORMAT:
        expected = f"{RESULT_FORMAT}, that of rfa {rfa.version.__version__}"
        raise ValueError(f"result: {path} has format {written!r}, expected {expected}")
    return result


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result whole, a line for each of its parts."""
    parts = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in result.items())
    write_text_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")


class Planned(TypedDict):
    """The recipe of a folder: its name and title, and the names of its runs."""

    name: str
    title: str
    runs: list[str]


_PLANNED = TypeAdapter(Planned)


def write_planned(folder: Path, planned: Planned) -> None:
    """Write which runs a folder is to hold in the end, so that a report can say which are missing."""
    write_text_whole(folder / PLANNED, json.dumps(planned, indent=1) + "\n")


def read_planned(folder: Path) -> Planned | None:
    """Which runs `rfa experiment` is to make in a folder; None where it holds no such list.

    Raises:
        ValueError: if the file that says it is damaged.
    """
    path = folder / PLANNED
    if not path.exists():
        return None
    try:
        return _PLANNED.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, expected what `rfa experiment` wrote; delete it to make it anew"
        ) from error
