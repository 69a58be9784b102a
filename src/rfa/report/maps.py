"""Attention maps beside result files: one `.npz` a run, read and checked."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

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
