"""The functions by which folded tiles expand T, and the matrices that fit and differentiate them, once a device."""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

FOLD = 64  # keys of a block
TERMS = 8  # of the expansion of T within a block

_made: dict[tuple[str, int, torch.device], Tensor] = {}


@cache
def _functions() -> tuple[Array, Array, Array]:
    """The functions `(TERMS, FOLD)` of a key's distance n to the edge, which are 0 at 0, as float16 holds them; the
    matrix that fits them; Legendre's polynomials `(TERMS, FOLD)` of a row's place in its block.
    """
    distance = np.arange(FOLD)
    polynomials = np.polynomial.legendre.legvander(2.0 * distance / (FOLD - 1) - 1.0, TERMS - 1).T
    functions = (distance / FOLD * polynomials).astype(np.float16).astype(np.float64)
    return functions, np.linalg.pinv(functions.T), polynomials


def _spread(rows: int) -> Array:
    """What a moment of a tile of so many rows adds to T at its lags, `(TERMS^2, 2 FOLD - 1)`, the nearest row first."""
    _, fit, polynomials = _functions()
    fit_rows = np.linalg.pinv(polynomials[:, :rows].T, rcond=1e-6)
    spread = np.zeros((TERMS, TERMS, 2 * FOLD - 1))
    for row in range(rows):
        spread[:, :, row : row + FOLD] += fit_rows[:, row, None, None] * fit
        spread[:, :, row] -= fit_rows[:, row, None] * fit.sum(-1)
    return spread.reshape(TERMS * TERMS, -1)


def _make(name: str, rows: int) -> Array:
    functions, fit, polynomials = _functions()
    if name == "functions":
        return np.pad(functions, ((0, TERMS), (0, 0))).astype(np.float32)
    if name == "fit":
        return np.pad(fit, ((0, TERMS), (0, 0))).astype(np.float32)
    if name == "terms":  # a key's place counts from the start of its block
        return np.tile(functions[:, ::-1], (2, 1)).astype(np.float16)
    return polynomials.astype(np.float32) if name == "rows" else _spread(rows)


def constant(name: str, device: torch.device, rows: int = 0) -> Tensor:
    """A constant on a device.

    Args:
        name: "functions" and "fit": `(2 TERMS, FOLD)` float32, zeros from TERMS on. "terms": the functions by place,
            twice, float16. "rows": polynomials of a row's place, `(TERMS, FOLD)` float32, by which gradients of u are
            summed over rows. "spread": see `_spread`, in float64.
        rows: of a spread.
    """
    if (name, rows, device) not in _made:
        made = torch.from_numpy(_make(name, rows)).to(device)
        if type(made) is not Tensor:  # of a tracer
            return made
        _made[name, rows, device] = made
    return _made[name, rows, device]


def make_constants(device: torch.device, queries: int) -> None:
    """Copy all constants of a call and of its backward pass to the device: a CUDA graph cannot copy from the host."""
    for name in ("functions", "fit", "terms", "rows"):
        constant(name, device)
    for rows in (FOLD, queries % FOLD or FOLD):
        constant("spread", device, rows)
