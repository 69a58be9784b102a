"""A tile on folds, of either kind of times, for the kernels that hold a block of rows."""

from typing import no_type_check

import triton
import triton.language as tl

from .folds import fold_evidence, fold_rows
from .pairs import UNIT, product
from .path_folds import load_edge, load_path_columns, load_path_rows, path_fold_bits, path_fold_rows


@triton.jit
@no_type_check
def folded_blocks(
    nearest, fold_blocks, pair, batch, block, row_blocks, offset,
    FOLD: tl.constexpr, GROUPS: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """How many blocks of keys fold for a block of rows."""
    if UNIFORM:
        folded = tl.maximum(offset + block * FOLD + 1 - tl.load(nearest + pair), 0) // FOLD
        if GROUPS:
            folded = tl.minimum(folded, tl.load(fold_blocks + batch))
    else:
        folded = tl.load(nearest + pair * row_blocks + block)
    return folded


@triton.jit
@no_type_check
def of_fold_rows(
    rows, in_rows, q_norms, block, offset, queries, fold_rows_of_lags, fold_terms, query_path, path_pair, scalars,
    FOLD: tl.constexpr, PARTS: tl.constexpr, UNIFORM: tl.constexpr, RICCATI: tl.constexpr,
):  # fmt: skip
    """What `fold_tile` reads of the rows: lags to the edge of block 0 and functions of places; else numbers of rows, of
    their edge, and what they add to g.
    """
    if UNIFORM:
        lags = offset + tl.minimum(rows, queries - 1) - (FOLD - 1)
        return lags, tl.load(fold_terms + tl.arange(0, PARTS)[:, None] * FOLD + tl.arange(0, FOLD)[None, :]), q_norms
    else:
        numbers = load_path_rows(fold_rows_of_lags, path_pair, queries, rows, in_rows, scalars[3], RICCATI=RICCATI)
        at_edge = load_edge(query_path, path_pair, queries, block * FOLD, RICCATI=RICCATI)
        return numbers, at_edge, scalars[4] + q_norms * (UNIT * scalars[1])


@triton.jit
@no_type_check
def fold_tile(
    of_rows, tile, tables, key_path, fold_rows_of_lags, fold_bits, head, heads, lags, keys, path_pair, scalars,
    FOLD: tl.constexpr, PARTS: tl.constexpr, UNIFORM: tl.constexpr, RICCATI: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """Of rows E, the constant of g, `dg / d(q.k')` and `dg / d|q|^2`, the constant of T; and more of T.

    More is the coefficients of T. Else it is the row's part of Sigma, Sigma, the key's part of T, V_ab, `M_a - M_b`.
    """
    if UNIFORM:
        decay, bias, inverse_gain, of_dot, bits = fold_rows(
            tables, fold_rows_of_lags, fold_bits, head, heads, lags, keys, of_rows[0] - tile * FOLD,
            FOLD=FOLD, PARTS=PARTS,
        )  # fmt: skip
        return decay, 1.0 + of_rows[2] * inverse_gain, of_dot, inverse_gain, bias, (bits,)
    else:
        decay, variance, bias, apart, edge_variance = path_fold_rows(
            of_rows[0], of_rows[1], key_path, path_pair, keys, tile * FOLD + FOLD - 1,
            RICCATI=RICCATI, FAST_LOG=FAST_LOG,
        )  # fmt: skip
        of_keys, column_bias = load_path_columns(
            fold_bits, path_pair, keys, tile * FOLD + tl.arange(0, FOLD), True, RICCATI=RICCATI
        )
        variances = variance[:, None] + (decay * decay)[:, None] * of_keys[None, :]
        inverse_gain = UNIT * scalars[1]
        more = (variance, variances, column_bias, edge_variance, apart)
        return decay, variance + of_rows[2], decay * (-2.0 * inverse_gain), inverse_gain, bias, more


@triton.jit
@no_type_check
def fold_scores(
    dot, column, of_rows, numbers, start, scalars,
    UNIFORM: tl.constexpr, RICCATI: tl.constexpr, PRECISION: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """z, with `start` in place of the row's constant of T; the logarithms of g, `Sigma + gamma^2` and Sigma."""
    decay, of_row, of_dot, _, _, more = numbers
    evidence = fold_evidence(dot, of_row[:, None], column[None, :], decay[:, None], of_dot[:, None], FAST_LOG=FAST_LOG)
    if UNIFORM:
        z = start[:, None] - scalars[0] * evidence
        return z + product(more[0], of_rows[1], PRECISION=PRECISION), evidence, evidence, evidence
    else:
        z, of_effective, of_variance = path_fold_bits(
            more[1], start[:, None], more[2][None, :], scalars[4], scalars[0], scalars[5],
            RICCATI=RICCATI, FAST_LOG=FAST_LOG,
        )  # fmt: skip
        return z - scalars[0] * evidence, evidence, of_effective, of_variance
