"""Attention maps beside result files: one `.npz` a run, read and checked."""

import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .runs import Run

_ROUNDING = 1e-2  # of maps in float16, and of values turned there and back


def read_maps(path: str | Path) -> np.ndarray:
    """The maps of a run's last layer, `(heads, blocks, blocks)`: weight by block of queries and block of keys.

    Raises:
        ValueError: where the file is missing, damaged, or holds no maps.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            maps = held["weights"].astype(np.float32)
    except FileNotFoundError:
        raise ValueError(f"maps: got no file {path}, expected one beside the results") from None
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"maps: {path} is damaged ({error}), expected maps of attention") from error
    check_maps(maps, str(path))
    return maps


def check_maps(maps: np.ndarray, of: str) -> None:
    """Raise `ValueError` where these are no maps."""
    if maps.ndim != 3 or maps.shape[1] != maps.shape[2] or not maps.size:
        raise ValueError(f"maps: got shape {maps.shape} of {of}, expected (heads, blocks, blocks)")
    low, high = float(maps.min()), float(maps.max())
    if not -_ROUNDING <= low <= high <= 1 + _ROUNDING:  # false for what is no number, too
        raise ValueError(f"maps: got weights from {low:g} to {high:g} of {of}, expected shares from 0 to 1")


def maps_of(runs: Iterable[Run], folder: str | Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """The maps of each label's first seed that has them, and what must be said of those that cannot be read.

    Args:
        runs: result files; `attention` names the file of those that were mapped.
        folder: where the result files stand.

    Returns:
        Maps by label, in the order of the runs; and notes, one a file that is missing or damaged.
    """
    maps: dict[str, np.ndarray] = {}
    notes = []
    for run in sorted(runs, key=lambda run: run["seed"]):
        if run.get("attention") and run["label"] not in maps:
            try:
                maps[run["label"]] = read_maps(Path(folder) / run["attention"])
            except ValueError as error:
                notes.append(f"{run['label']}, seed {run['seed']}: no attention map ({error}).")
    order = list(dict.fromkeys(run["label"] for run in runs))
    return {label: maps[label] for label in order if label in maps}, notes
