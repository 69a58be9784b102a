"""What kernels read of the folds of a call: the numbers of its rows, keys and edges, and which blocks fold."""

from typing import Any, NamedTuple

from torch import Tensor

from .fold_constants import FOLD, TERMS

MOST_POWER = 24.0  # a larger c multiplies the rounding of the gradients of the prior
LEAST_GAIN = 2.0**-14  # of G over |q|^2: a residual may be negative by rounding, but never as far as -G
LEAST_RESIDUAL = 2.0**-5  # of |q|^2 over G(0): gradients of nu_s and c are small differences where r is far below G


class Folds(NamedTuple):
    """What the kernels read of a call's folds.

    Fields, at uniform times and at others:
        key, value: `F k` and `F v` in the common frame, rounded once; F is E_j of `kernels/path_folds.py`.
        rows: `1 / G` and `-2 E / G` of each lag, `(heads, 2, keys)` float32. Else of each query E_i, V_i and, with the
            Riccati prior, `C_i - C_a`, `(b, heads, 2 or 3, queries)`.
        columns: `-(|k'|^2 + C) / 2`, `(batch, heads, keys)` float32. Else `-(|k'|^2 + V_j / W) / 2`.
        bits: the coefficients u of T, high and low parts, `(heads, keys - FOLD + 1, 2 TERMS)` float16. Else of each
            key V_j and, with the Riccati prior, `C_b - C_j + key_bias`, `(b, heads, 1 or 2, keys)` float32.
        terms: the functions of a key's place in its block, `(2 TERMS, FOLD)` float16. Else None.
        nearest: the shortest lag from a row to the edge of a block that folds, `(batch, heads)` int32. Else how many
            blocks of keys fold for each block of queries, `(batch, heads, blocks)` int32; more for later ones.
        blocks: how many blocks may fold, `(batch,)` int32: those of present keys where padding stands at the end. None
            without groups. Packed sequences, and padding elsewhere, do not fold. Else, for the kernel of keys, the
            first block of queries for which each block of keys folds, `(batch, heads, blocks)` int32.
        factors: F of a key's state, `(heads, FOLD)` float32 by its place. Else `(b, heads, keys)`.
        least_gain: the least `Sigma + gamma^2` over W of lags that fold, `(heads,)` float32.
    """

    key: Tensor
    value: Tensor
    rows: Tensor
    columns: Tensor
    bits: Tensor
    terms: Tensor | None
    nearest: Tensor
    blocks: Tensor | None
    factors: Tensor
    least_gain: Tensor


def fold_arguments(folds: Folds | None) -> tuple[Tensor | None, ...]:
    """The arguments of the kernels that hold a block of rows; that of keys takes `factors` too."""
    return (None,) * (len(Folds._fields) - 2) if folds is None else folds[:-2]


def fold_choices(folds: Folds | None) -> dict[str, Any]:
    """The compile-time choices of the kernels."""
    return {"FOLD": 0 if folds is None else FOLD, "PARTS": 2 * TERMS}
