"""Read and write one result file, the list of a recipe's runs, and the attention maps of a run."""

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

import rfa.version
from rfa.checks import check_fields
from rfa.files import write_text_whole
from rfa.models.flat import flat_record

from .schema import RESULT_FORMAT, SCHEMAS

PLANNED = "recipe.json"
TRIGRAM = "trigram.json"  # beside the results; no run has this name, because runs are named by their seed


def read_result(path: str | Path, kind: str = "text") -> dict[str, Any]:
    """The contents of a result file.

    Args:
        path: of the file.
        kind: one of `SCHEMAS`.

    Raises:
        ValueError: if the file is not complete, is no such result, or was written by an incompatible version.
    """
    of_recipe = kind in ("series", "recall")  # the runner knows their formats
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        written = RESULT_FORMAT if of_recipe else result["format"]
        if written == RESULT_FORMAT:
            if "config" in result:  # the report reads the flat form of older files
                result["config"] = flat_record(result["config"])
            check_fields(SCHEMAS[kind], result)
            # raises for half of a surrogate pair, which JSON can contain but UTF-8 cannot
            json.dumps(result, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = f"that of a recipe of {kind}" if of_recipe else "a whole result"
        raise ValueError(
            f"result: {path} is damaged ({error}), expected {expected}; delete it, and it is made again"
        ) from error
    if written != RESULT_FORMAT:
        expected = f"{RESULT_FORMAT}, that of rfa {rfa.version.__version__}"
        raise ValueError(f"result: {path} has format {written!r}, expected {expected}")
    return dict(result)


def read_evaluation(path: str | Path) -> dict[str, Any]:
    """The contents of a file that `rfa evaluate --json` wrote. Raises as `read_result`."""
    return read_result(path, "evaluation")


def read_trigram(folder: Path) -> dict[str, Any] | None:
    """The contents of the trigram's file in a folder of result files; None without one. Raises as `read_result`."""
    path = folder / TRIGRAM
    return read_result(path, "trigram") if path.exists() else None


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, whole, with one line for each of its entries."""
    parts = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in result.items())
    write_text_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")


class Planned(TypedDict):
    """The content of a folder's recipe.json: name and title of the recipe, and the names of its runs.

    kind: "series" or "recall"; left out by recipes of language models.
    """

    name: str
    title: str
    runs: list[str]
    kind: NotRequired[str]


_PLANNED = TypeAdapter(Planned)


def write_planned(folder: Path, planned: Planned) -> None:
    """Write the list of all runs of a folder's recipe, so that a report can name those without a result."""
    write_text_whole(folder / PLANNED, json.dumps(planned, indent=1) + "\n")


def read_planned(folder: Path) -> Planned | None:
    """The list of all runs that `rfa experiment` makes in a folder; None if the folder has no such list.

    Raises:
        ValueError: if the file is damaged.
    """
    path = folder / PLANNED
    if not path.exists():
        return None
    try:
        return _PLANNED.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, expected what `rfa experiment` wrote; delete it, and it is made again"
        ) from error


_DAMAGED = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
_ROUNDING = 1e-2  # error of maps in float16, and of values that are rotated and rotated back


def write_maps(maps: Mapping[str, np.ndarray], path: Path) -> None:
    """Write the maps as an `.npz` file of exactly this name."""
    with path.open("wb") as file:
        arrays: dict[str, Any] = dict(maps)
        np.savez_compressed(file, **arrays)


def has_maps(path: str | Path, name: str) -> bool:
    """Whether a readable file holds maps of this name. Files of older versions hold none before decay."""
    try:
        with zipfile.ZipFile(path) as file:
            return f"{name}.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def read_maps(path: str | Path, name: str = "weights") -> np.ndarray:
    """The attention maps of a run's last layer, `(heads, queries, keys)`.

    Args:
        path: of the file.
        name: "weights" for blocks of queries and of keys, the same number of both; "near" for single tokens;
            "undecayed" and "undecayed_near" for the same before decay.

    Raises:
        ValueError: if the file is missing, is damaged, or holds no such maps.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            maps = arrays[name].astype(np.float32)
    except FileNotFoundError:
        raise ValueError(f"maps: got no file {path}, expected one beside the results") from None
    except _DAMAGED as error:
        raise ValueError(f"maps: {path} is damaged ({error}), expected maps of attention") from error
    check_maps(maps, str(path), square=name in ("weights", "undecayed"))
    return maps


def check_maps(maps: np.ndarray, of: str, square: bool = True) -> None:
    """Raise `ValueError` for an array that does not hold attention maps."""
    fits = (
        maps.ndim == 3 and maps.size and (maps.shape[1] == maps.shape[2] if square else maps.shape[1] <= maps.shape[2])
    )
    if not fits:
        expected = "(heads, blocks, blocks)" if square else "(heads, queries, keys), no fewer keys than queries"
        raise ValueError(f"maps: got shape {maps.shape} of {of}, expected {expected}")
    low, high = float(maps.min()), float(maps.max())
    if not -_ROUNDING <= low <= high <= 1 + _ROUNDING:  # the comparison is false for NaN too
        raise ValueError(f"maps: got weights from {low:g} to {high:g} of {of}, expected shares from 0 to 1")
