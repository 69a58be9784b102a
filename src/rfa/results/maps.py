"""Attention maps beside result files: one `.npz` a run, read and checked."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_ROUNDING = 1e-2  # of maps in float16, and of values turned there and back


def write_maps(maps: Mapping[str, np.ndarray], path: Path) -> None:
    """Write the maps as an `.npz` file of exactly this name."""
    with path.open("wb") as file:
        arrays: dict[str, Any] = dict(maps)
        np.savez_compressed(file, **arrays)


def read_maps(path: str | Path, name: str = "weights") -> np.ndarray:
    """The maps of a run's last layer: weight by head, query and key.

    Args:
        path: of the file.
        name: "weights", by block of queries and block of keys, as many of both; or "near", of single tokens.

    Raises:
        ValueError: where the file is missing, damaged, or holds no such maps.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            maps = held[name].astype(np.float32)
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
    check_maps(maps, str(path), square=name == "weights")
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
    if not -_ROUNDING <= low <= high <= 1 + _ROUNDING:  # false for NaN, too
        raise ValueError(f"maps: got weights from {low:g} to {high:g} of {of}, expected shares from 0 to 1")
